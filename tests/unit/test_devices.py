"""What a worker does on an accelerator, done on a simulated one: chosen, filled, computed with, and given back."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from stage_families import FAMILIES, Checkpoint, Pipeline, held_model, shared
from torch import nn

import neurogrid
from neurogrid import fork_server
from neurogrid.errors import ConfigurationError, LocalProtocolError, RequestRefusedError
from neurogrid.inference.sessions.passes import forward, forward_rows
from neurogrid.model.kernels import CodesLinear, quantize
from neurogrid.model.stages import device as devices
from neurogrid.model.stages.device import (
    DeviceMemory,
    allocated_bytes,
    device_memory,
    device_name,
    select_device,
)
from neurogrid.model.stages.device_copies import DeviceCopies
from neurogrid.model.stages.device_speed import measure_speed
from neurogrid.model.stages.stage import Row, Stage
from neurogrid.model.stages.training_stage import TrainingStage
from neurogrid.model.stages.weight_loading import place_module
from neurogrid.p2p.streams.buffers import tensor_buffer
from neurogrid.p2p.wire import ErrorCode
from neurogrid.telemetry.gpu_metrics import Gpu, read_gpu
from tests.simulated_device import FIRST, MIB, SECOND, simulated_devices, used_bytes

CPU = torch.device("cpu")
# Prompts in one go and in pieces, and tokens past the window of 8.
SIZES = [9, 6, 1, 1, 1]
NUM_TOKENS = sum(SIZES)
# A window, experts, a state of constant size.
KINDS = ["llama", "mistral-window", "mixtral", "lfm2"]
ALL = [
    *KINDS,
    *(pytest.param(name, marks=pytest.mark.long) for name in FAMILIES if name not in KINDS),
]
# Its products of several rows are summed in another order on the CPU than elsewhere.
IN_OTHER_ORDER = {"jamba"}


@pytest.fixture
def _devices() -> Iterator[None]:
    with simulated_devices():
        yield


on_devices = pytest.mark.usefixtures("_devices")


# Which device


@on_devices
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (None, FIRST),
        ("sim", FIRST),
        ("sim:1", SECOND),
        ("gpu", FIRST),
        ("gpu:1", SECOND),
        ("cpu", CPU),
    ],
)
def test_a_device_is_found_by_its_name(name: str | None, expected: torch.device) -> None:
    assert select_device(name) == expected


@on_devices
@pytest.mark.parametrize(
    "name", ["sim:2", "gpu:2", "cuda:0", "xpu", "mps", "a GPU", "gpu:x", "", ":"]
)
def test_of_a_device_that_is_not_there_it_is_said_which_are(name: str) -> None:
    says = f"there is no {name} here: torch sees cpu, sim:0 and sim:1"
    with pytest.raises(ConfigurationError, match=f"^{says}$"):
        select_device(name)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
@pytest.mark.parametrize("name", ["gpu:0", "cuda:0", "sim"])
def test_without_an_accelerator_there_is_the_cpu(name: str) -> None:
    assert select_device(None) == CPU
    with pytest.raises(
        ConfigurationError, match=f"^there is no {name} here: torch sees cpu alone$"
    ):
        select_device(name)


def test_nothing_names_one_kind_of_accelerator() -> None:
    """But the products that are there for CUDA alone, and the account of use that makes one wait."""
    package = Path(neurogrid.__file__).parent
    named = {
        path.name
        for path in package.rglob("*.py")
        if re.search(r"torch\.(cuda|xpu|mps)\b|type [!=]= \"(cuda|xpu|mps)", path.read_text())
    }
    assert named == {"int4.py", "gpu_codes.py", "gpu_metrics.py"}


@on_devices
def test_a_device_has_a_name() -> None:
    assert device_name(SECOND) == "simulated device"
    assert device_name(CPU).startswith("CPU (")


def test_attention_that_is_planned_for_each_length_is_avoided_where_there_is_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", told.append)
    for name in ("cpu", "xpu", "mps", "sim"):
        devices.avoid_planned_attention(SimpleNamespace(type=name))
    assert told == []
    devices.avoid_planned_attention(torch.device("cuda", 0))
    assert told == [False]


# Memory


@on_devices
def test_memory_is_that_of_the_device() -> None:
    gc.collect()
    before = used_bytes(1)
    kept = torch.empty(MIB, dtype=torch.uint8, device=SECOND)
    assert device_memory(SECOND) == DeviceMemory(256 * MIB, MIB + before)
    assert allocated_bytes(SECOND) == MIB + before
    assert read_gpu(SECOND) == Gpu(1, 256 * MIB, MIB + before, MIB + before, None)
    assert read_gpu(CPU) is None
    del kept


@pytest.mark.parametrize(
    ("module", "reserved", "expected"),
    [
        # As MPS tells it.
        (
            {"recommended_max_memory": lambda: 80, "driver_allocated_memory": lambda: 30},
            0,
            DeviceMemory(80, 30),
        ),
        # As an XPU whose driver does not say what is free.
        (
            {"get_device_properties": lambda _: SimpleNamespace(total_memory=90)},
            20,
            DeviceMemory(90, 20),
        ),
    ],
    ids=["mps", "xpu"],
)
def test_memory_is_told_otherwise_where_torch_cannot(
    monkeypatch: pytest.MonkeyPatch,
    module: dict[str, object],
    reserved: int,
    expected: DeviceMemory,
) -> None:
    def refuse(device: torch.device) -> None:
        raise NotImplementedError("getMemoryInfo is not implemented for this allocator yet.")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", refuse)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(**module))
    assert device_memory(torch.device("mps", 0)) == expected


def test_a_machine_without_proc_has_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    known = device_memory(CPU)
    nowhere = tmp_path_factory.mktemp("nothing")
    monkeypatch.setattr(devices, "_MEMINFO", nowhere / "meminfo")
    monkeypatch.setattr(devices, "_CGROUP", nowhere)
    assert device_memory(CPU).total_bytes >= known.total_bytes > 0


# Copies


@on_devices
def test_copies_are_there_when_the_block_is_left() -> None:
    sources = [torch.randn(3, 5), torch.arange(7), torch.randn(4, 6).t(), torch.tensor(True)]
    with DeviceCopies(SECOND) as copies:
        there = [copies.copy(source) for source in sources]
        early = [copy.cpu() for copy in there]
    assert not torch.equal(early[0], sources[0])  # the device is as late as one may be
    for copy, source in zip(there, sources, strict=True):
        assert copy.device == SECOND
        assert torch.equal(copy.cpu(), source)


@on_devices
def test_copies_are_waited_for_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neurogrid.model.stages.device_copies._MAX_PINNED_BYTES", 1000)
    with DeviceCopies(FIRST) as copies:
        first = copies.copy(torch.ones(200))
        assert first.count_nonzero() == 200
        assert not torch.equal(first.cpu(), torch.ones(200))
        copies.copy(torch.ones(200))
        assert torch.equal(first.cpu(), torch.ones(200))


@on_devices
def test_a_module_is_moved_and_shares_what_it_shared() -> None:
    module = nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Linear(4, 4, bias=False)})
    module["two"].weight = module["one"].weight
    module["one"].bias.requires_grad_(False)
    module.register_buffer("kept", torch.arange(3), persistent=False)
    expected = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert place_module(module, FIRST) is module
    assert module["two"].weight is module["one"].weight
    assert [p.requires_grad for p in module.parameters()] == [True, False]
    assert module.get_buffer("kept").device == FIRST
    assert expected.keys() == module.state_dict().keys()
    for name, tensor in module.state_dict().items():
        assert tensor.device == FIRST
        assert torch.equal(tensor.cpu(), expected[name])
    weight = module["one"].weight
    place_module(module, FIRST)
    assert module["one"].weight is weight


@on_devices
def test_a_tensor_of_a_device_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match="a tensor on sim:1 cannot be sent"):
        tensor_buffer(torch.ones(3, device=SECOND))


# Layers


def stages_on(checkpoint: Checkpoint, cut: int) -> list[Stage]:
    """The whole model in two stages of one process, on two devices."""
    stages = []
    for device, (start, stop) in zip(
        (FIRST, SECOND), pairwise((0, cut, checkpoint.num_layers)), strict=True
    ):
        stage = Stage(checkpoint.config, dtype=checkpoint.dtype, device=device)
        for layer_id in range(start, stop):
            stage.load_layer(layer_id, checkpoint.layer(layer_id))
            stage.speed_up_layer(layer_id)
        stages.append(stage)
    return stages


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ALL)
def test_stages_on_two_devices_give_the_bits_of_the_cpu(family: str, dtype: torch.dtype) -> None:
    checkpoint = shared(family, dtype)
    pipeline = Pipeline(checkpoint, (2,))
    token_ids = checkpoint.tokens(NUM_TOKENS)
    expected = pipeline.logits(token_ids, SIZES)
    pipeline.stages = stages_on(checkpoint, 2)
    pipeline.restart()
    for mine, its in zip(pipeline.logits(token_ids, SIZES), expected, strict=True):
        assert torch.equal(mine, its)
    for cache, device in zip(pipeline.caches, (FIRST, SECOND), strict=True):
        states = [each for each in cache.layers if getattr(each, "keys", None) is not None]
        assert {state.keys.device for state in states} <= {device}
        assert cache.num_bytes > 0


@on_devices
@pytest.mark.parametrize("family", ALL)
def test_rows_of_several_sessions_and_a_copy_of_one_have_the_bits_of_the_cpu(family: str) -> None:
    checkpoint = shared(family)
    cpu = Pipeline(checkpoint, (2,)).stages
    on_cpu, on_device = (
        _decode_together(checkpoint, stages) for stages in (cpu, stages_on(checkpoint, 2))
    )
    for mine, its in zip(on_device, on_cpu, strict=True):
        if family in IN_OTHER_ORDER:
            assert torch.allclose(mine, its, atol=1e-5)
        else:
            assert torch.equal(mine, its)


def _decode_together(checkpoint: Checkpoint, stages: list[Stage]) -> list[torch.Tensor]:
    """Three sessions that decode together, one leaves, and one goes on from a copy of another."""
    pipeline = Pipeline(checkpoint, (2,))
    pipeline.stages = stages
    token_ids = checkpoint.tokens(40)
    sessions, positions = [], []
    for number in range(3):
        pipeline.restart()
        pipeline.logits(token_ids[number:], [5 + number])
        sessions.append(pipeline.caches)
        positions.append(pipeline.position)
    results = []

    def decode(chosen: list[int]) -> None:
        embedded = pipeline.ends.embed_rows(
            [token_ids[positions[i]] for i in chosen], positions=[positions[i] for i in chosen]
        )
        hidden = list(embedded.chunk(len(chosen)))
        for at, (stage, (start, stop)) in enumerate(zip(stages, pipeline.ranges, strict=True)):
            rows = [
                Row(each, positions[i], sessions[i][at])
                for each, i in zip(hidden, chosen, strict=True)
            ]
            hidden = stage.forward_rows(rows, start=start, stop=stop)
        results.extend(each.cpu() for each in hidden)
        for i in chosen:
            positions[i] += 1

    decode([0, 1, 2])
    decode([0, 1, 2])
    decode([0, 2])
    sessions.append([cache.copy(cache.length) for cache in sessions[0]])
    positions.append(positions[0])
    decode([0, 1, 3])
    decode([3])
    return results


@on_devices
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_lie_on_the_device_and_are_made_dense_there(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    weight, given = (torch.randn(n, 96, generator=generator) for n in (40, 5))
    codes, bias = quantize(weight, bits), nn.Parameter(torch.randn(40, generator=generator))
    linear = CodesLinear(codes.to(FIRST), bias, torch.float32, by_int8=True)
    place_module(linear, FIRST)
    assert {part.device for part in linear.parameters()} == {FIRST}
    assert sum(part.nbytes for part in linear.parameters()) < 40 * 96 * (bits + 1) / 8 + 40 * 4
    expected = nn.functional.linear(given, codes.dense(torch.float32), bias)
    assert torch.equal(linear(given.to(FIRST)).cpu(), expected)
    assert torch.equal(linear.weight.cpu(), codes.dense(torch.float32))


@on_devices
def test_tied_embeddings_are_one_parameter_on_a_device() -> None:
    """Else it would take its memory twice, and each of two copies learn from half of its gradient."""
    checkpoint = shared("llama-tied")
    stage = TrainingStage(checkpoint.config, 0, 4, checkpoint.tensors, device=FIRST)
    assert "model.embed_tokens.weight" in stage.parameters
    assert "lm_head.weight" not in stage.parameters
    alone = TrainingStage(checkpoint.config, 0, 4, checkpoint.tensors)
    assert stage.parameters.keys() == alone.parameters.keys()


# A worker's model


@on_devices
def test_hidden_states_come_back_to_the_cpu() -> None:
    there, here = held_model("llama", 2, FIRST), held_model("llama", 2)
    generator = torch.Generator().manual_seed(0)
    caches = {model: [model.stage.new_cache() for _ in range(2)] for model in (there, here)}
    results = {}
    hidden = torch.randn(2, 1, 6, there.hidden_size, generator=generator)
    for model, own in caches.items():
        first = [
            forward(model, each, start=0, stop=2, position=0, cache=cache)
            for each, cache in zip(hidden, own, strict=True)
        ]
        rows = [Row(each[:, -1:], 6, cache) for each, cache in zip(hidden, own, strict=True)]
        results[model] = [*first, *forward_rows(model, rows, start=0, stop=2)]
    for mine, its in zip(results[there], results[here], strict=True):
        assert isinstance(mine, torch.Tensor)
        assert isinstance(its, torch.Tensor)
        assert mine.device == CPU
        # On the CPU products of few rows may go another way.
        assert torch.allclose(mine, its, atol=1e-5)


def test_layers_that_do_not_fit_are_refused() -> None:
    with simulated_devices(100_000), pytest.raises(RequestRefusedError) as caught:
        held_model("llama", 4, FIRST)
    assert caught.value.code == ErrorCode.OUT_OF_MEMORY


def test_a_layer_that_is_dropped_gives_its_memory_back_and_a_step_that_does_not_fit_is_refused() -> (
    None
):
    with simulated_devices():
        model = held_model("llama", 2, FIRST)
        gc.collect()
        held = used_bytes(0)
        model.drop(1)
        gc.collect()
        assert used_bytes(0) < 0.7 * held
        cache = model.stage.new_cache()
        hidden = torch.randn(1, 4, model.hidden_size)
        forward(model, hidden, start=0, stop=1, position=0, cache=cache)
        gc.collect()
    with simulated_devices(used_bytes(0) + 100), pytest.raises(RequestRefusedError) as caught:
        forward(model, hidden, start=0, stop=1, position=4, cache=cache)
    assert caught.value.code == ErrorCode.OUT_OF_MEMORY


@on_devices
def test_a_device_with_little_memory_is_not_measured() -> None:
    assert measure_speed(FIRST, torch.float32, free_bytes=256 * MIB) is None


def test_a_device_is_measured_when_all_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the sizes of a CPU, which the CPU behind it is quick with."""
    monkeypatch.setattr("neurogrid.model.stages.device_speed.ACCELERATOR_SQUARE", 64)
    waited = []
    with simulated_devices(1024 * MIB):
        monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
        speed = measure_speed(SECOND, torch.float32, free_bytes=512 * MIB)
    assert speed is not None
    assert min(speed.bytes_per_second, speed.flops, speed.layer_seconds) > 0
    assert set(waited) == {SECOND}


@pytest.mark.parametrize("is_used", [True, False])
def test_no_process_is_forked_from_one_that_uses_a_gpu(
    monkeypatch: pytest.MonkeyPatch, is_used: bool
) -> None:
    module = SimpleNamespace(is_initialized=lambda: is_used)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert fork_server._may_fork(in_any_thread=True) is not is_used
