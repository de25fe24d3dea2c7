"""Adapters beside the layers of a stage, against PEFT's own model: logits, rows of several, and what is refused."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from neurogrid.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from neurogrid.model.adapters import (
    Adapter,
    AdapterSource,
    LayerAdapter,
    PeftAdapter,
    cut_adapter,
    read_peft,
)
from neurogrid.model.adapters.layer_adapter import Matrices
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.config import build_config, model_config_message
from neurogrid.model.kernels import LowRank
from neurogrid.model.stages.stage import Ends, Row
from neurogrid.worker.held_model import HeldModel, proving
from tests.adapters import add_adapter, save_adapters
from tests.families import FAMILIES, save_checkpoint
from tests.unit.vectors import in_turn

CPU = torch.device("cpu")
FAMILY = {family.name: family for family in FAMILIES}
PROMPT = [3, 17, 200, 33, 41, 5, 9, 120, 77, 64, 12, 250, 8, 91, 30, 2, 6, 44, 19, 101]
NAMES = ("one", "other")
# Where experts are parameters of three dimensions, PEFT takes all linear layers to be those, too.
TARGETS = {
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "deepseek-v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def hold(path: Path, dtype: torch.dtype, quantize: str | None = None) -> tuple[HeldModel, Ends]:
    files = Checkpoint.open(path)
    config = _config(files)
    ends = Ends(config, dtype=dtype, device=CPU)
    ends.load(files.end_tensors(dtype))
    quantization = files.quantization(quantize, ends)
    message = model_config_message(
        config,
        files.config,
        model_name="m",
        max_seq_len=128,
        dtype=dtype,
        quantization=quantization,
    )
    model = HeldModel(message, proving(message).result(seconds=60), device=CPU)
    for layer_id in range(model.num_layers):
        blob = b"".join(bytes(chunk) for chunk in files.layer_blob(layer_id, quantization).chunks())
        model.load(layer_id, memoryview(bytearray(blob)), b"")
    return model, ends


def _config(files: Checkpoint) -> Any:
    return build_config(files.config)


def taken(model: HeldModel, ends: Ends, directory: Path) -> Adapter:
    """An adapter from files, as a stage has it that was sent its blobs."""
    source = cut_adapter(
        read_peft(directory), model.num_layers, ends.layer_name, ends.linear_layers
    )
    adapter = Adapter({layer_id: part(model, source, layer_id) for layer_id in source.blobs})
    model.stage.take_adapter(adapter)
    return adapter


def part(model: HeldModel, source: AdapterSource, layer_id: int) -> LayerAdapter:
    blob = bytearray(b"".join(bytes(chunk) for chunk in source.blobs[layer_id].chunks()))
    return LayerAdapter.read(memoryview(blob), model.stage.linear_layers(layer_id), device=CPU)


@dataclass
class Session:
    """A session with one of the adapters, through all layers."""

    model: HeldModel
    ends: Ends
    adapter: Adapter | None

    def __post_init__(self) -> None:
        self.cache = self.model.stage.new_cache()
        self.position = 0

    def prefill(self, token_ids: list[int]) -> torch.Tensor:
        hidden = self.ends.embed(token_ids, position=self.position)
        hidden = self.model.stage.forward(
            hidden,
            start=0,
            stop=self.model.num_layers,
            position=self.position,
            cache=self.cache,
            adapter=self.adapter,
        )
        logits = self.ends.logits(hidden, position=self.position)
        self.position += len(token_ids)
        return logits

    def row(self, token_id: int) -> Row:
        hidden = self.ends.embed([token_id], position=self.position)
        return Row(hidden, self.position, self.cache, self.adapter)


def expected(model: Any, name: str | None, token_ids: list[int]) -> torch.Tensor:
    """Logits of PEFT's model at the last token."""
    with torch.inference_mode():
        given = torch.tensor([token_ids])
        if name is None:
            with model.disable_adapter():
                return model(given).logits[0, -1].float()
        model.set_adapter(name)
        return model(given).logits[0, -1].float()


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("family", sorted(FAMILY))
def test_logits_are_those_of_peft(tmp_path: Path, family: str) -> None:
    model = save_checkpoint(FAMILY[family], tmp_path / "base")
    held, ends = hold(tmp_path / "base", torch.float32)
    # PEFT wraps the layers of the model that it is given.
    for seed, name in enumerate(NAMES):
        targets = TARGETS.get(family, "all-linear")
        model = add_adapter(model, name, seed=seed, r=4 + seed, target_modules=targets)
    places = save_adapters(model, tmp_path)
    adapters = {name: taken(held, ends, place) for name, place in places.items()}
    sessions = {
        name: Session(held, ends, adapters.get(name) if name else None) for name in (*NAMES, None)
    }
    for name, session in sessions.items():
        got = session.prefill(PROMPT)
        assert off(got, expected(model, name, PROMPT)) < 1e-5, name
    assert off(expected(model, "one", PROMPT), expected(model, None, PROMPT)) > 1e-2
    # Rows of both, and one of none, in one pass.
    if held.traits.row_bounds is None:
        return
    rows = [session.row(50) for session in sessions.values()]
    groups = held.stage.group_rows(
        rows, start=0, stop=held.num_layers, bounds=held.traits.row_bounds
    )
    assert len(groups) == 1
    hidden = held.stage.forward_rows(rows, start=0, stop=held.num_layers)
    for (name, session), its in zip(sessions.items(), hidden, strict=True):
        got = ends.logits(its, position=session.position)
        assert off(got, expected(model, name, [*PROMPT, 50])) < 1e-5, name


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beside_codes_the_same_is_added(tmp_path: Path, dtype: torch.dtype, quantize: str) -> None:
    """PEFT's model has the weights that the codes are."""
    model = save_checkpoint(FAMILY["llama-tied"], tmp_path / "base")
    held, ends = hold(tmp_path / "base", dtype, quantize)
    names = dict(model.named_modules())
    with torch.no_grad():
        for layer_id in range(held.num_layers):
            for path in held.stage.linear_layers(layer_id):
                weight = held.stage.layer(layer_id).get_submodule(path).weight
                names[f"model.layers.{layer_id}.{path}"].weight.copy_(weight.float())
    for seed, name in enumerate(NAMES):
        model = add_adapter(model, name, seed=seed)
    places = save_adapters(model, tmp_path)
    for name, place in places.items():
        got = Session(held, ends, taken(held, ends, place)).prefill(PROMPT)
        # Activations are rounded to 8 bits for some of the products.
        assert off(got, expected(model, name, PROMPT)) < (0.05 if dtype == torch.float32 else 0.1)


def test_in_bfloat16_rows_have_the_bits_that_they_have_alone(tmp_path: Path) -> None:
    model = save_checkpoint(FAMILY["llama-tied"], tmp_path / "base", dtype=torch.bfloat16)
    held, ends = hold(tmp_path / "base", torch.bfloat16)
    for seed, name in enumerate(NAMES):
        model = add_adapter(model, name, seed=seed)
    places = save_adapters(model, tmp_path)
    adapters = [*(taken(held, ends, place) for place in places.values()), None]

    def sessions() -> list[Session]:
        made = [Session(held, ends, adapter) for adapter in adapters]
        for session in made:
            session.prefill(PROMPT)
        return made

    layers = {"start": 0, "stop": held.num_layers}
    alone = [held.stage.forward_rows([session.row(7)], **layers)[0] for session in sessions()]
    together = held.stage.forward_rows([session.row(7) for session in sessions()], **layers)
    same = [torch.equal(one, other) for one, other in zip(alone, together, strict=True)]
    assert all(same) or not held.has_same_bits(0, held.num_layers)
    for name, session in zip((*NAMES, None), sessions(), strict=True):
        hidden = held.stage.forward_rows([session.row(7)], **layers)[0]
        got = ends.logits(hidden, position=session.position)
        assert off(got, expected(model, name, [*PROMPT, 7])) < 0.05


@in_turn("adapter_blob")
def test_vectors(name: str, case: Any) -> None:
    blob = memoryview(bytearray(bytes.fromhex(case["hex"])))
    linears = {path: (shape[0], shape[1]) for path, shape in case["linears"].items()}
    if case["result"] == "invalid":
        with pytest.raises(CheckpointError):
            LayerAdapter.read(blob, linears, device=CPU)
        return
    beside = LayerAdapter.read(blob, linears, device=CPU).beside[case["path"]]
    given = torch.frombuffer(bytearray(bytes.fromhex(case["given"])), dtype=torch.float32)
    added = torch.frombuffer(bytearray(bytes.fromhex(case["added"])), dtype=torch.float32)
    assert torch.equal(beside.added(given, torch.zeros(beside.num_outputs)), added)


# ------------------------------------------------------------------ what PEFT's files may say


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "DoRA"),
    "bias": ({"bias": "lora_only"}, "bias"),
    "lora-bias": ({"lora_bias": True}, "lora_bias"),
    "modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "tokens": ({"trainable_token_indices": [0]}, "trainable_token_indices"),
    "parameters": ({"target_parameters": ["experts"]}, "target_parameters"),
    "replication": ({"layer_replication": [[0, 1]]}, "layer_replication"),
    "pissa": ({"init_lora_weights": "pissa"}, "began with other weights"),
    "transposed": ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    "other": ({"peft_type": "IA3"}, "an adapter of IA3"),
    "rank": ({"r": 5}, "says rank 5"),
    "alpha": ({"lora_alpha": "16"}, "is no number"),
    "alpha-huge": ({"lora_alpha": 10**400}, "is no number that float32 has"),
    "alpha-beyond": ({"lora_alpha": 1e39}, "is no number that float32 has"),
    "alpha-nan": ({"lora_alpha": float("nan")}, "is no number"),
    "pattern": ({"alpha_pattern": {"(": 3}}, "no pattern"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    model = save_checkpoint(FAMILY["llama-untied-sharded"], directory / "base")
    return save_adapters(add_adapter(model, "one", seed=0), directory)["one"]


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_plain_lora_is_refused_by_name(saved: Path, tmp_path: Path, what: str) -> None:
    changed, says = REFUSED[what]
    shutil.copytree(saved, tmp_path / "changed")
    file = tmp_path / "changed" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    with pytest.raises((CheckpointError, UnsupportedModelError), match=re.escape(says)):
        read_peft(tmp_path / "changed")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("base_model.model.lm_head.lora_A.weight", "lacks"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "no matrix of LoRA"),
        (
            "base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector.weight",
            "no matrix of LoRA",
        ),
    ],
)
def test_other_tensors_are_refused(saved: Path, tmp_path: Path, name: str, says: str) -> None:
    shutil.copytree(saved, tmp_path / "changed")
    file = tmp_path / "changed" / "adapter_model.safetensors"
    save_file({**load_file(file), name: torch.ones(4, 4)}, file)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=says):
        read_peft(tmp_path / "changed")


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda tensor: tensor.to(torch.float8_e4m3fn), "which are not read"),
        (lambda tensor: tensor.int(), "which are not read"),
        (lambda tensor: tensor.double() * 1e300, "no finite number"),  # in float32, as it travels
        (lambda tensor: tensor * float("inf"), "no finite number"),
        (lambda tensor: tensor[:0] if tensor.shape[0] == 4 else tensor[:, :0], "rank 0"),
    ],
    ids=["float8", "int", "beyond", "infinite", "empty"],
)
def test_matrices_that_cannot_be_added_are_refused(
    saved: Path, tmp_path: Path, made: Callable[[torch.Tensor], torch.Tensor], says: str
) -> None:
    shutil.copytree(saved, tmp_path / "changed")
    config, file = (
        tmp_path / "changed" / name for name in ("adapter_config.json", "adapter_model.safetensors")
    )
    tensors = {name: made(tensor).contiguous() for name, tensor in load_file(file).items()}
    rank = next(len(tensor) for name, tensor in tensors.items() if "lora_A" in name)
    config.write_text(json.dumps({**json.loads(config.read_text()), "r": rank}))
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=says):
        read_peft(tmp_path / "changed")


def test_head_and_embedding_take_none(saved: Path, tmp_path: Path) -> None:
    held, ends = hold(saved.parent / "base", torch.float32)
    its = Matrices(torch.ones(1, 64), torch.ones(320, 1), 1.0)
    with pytest.raises(UnsupportedModelError, match="Embedding and head take none"):
        cut_adapter(
            PeftAdapter(saved, {"lm_head": its}),
            held.num_layers,
            ends.layer_name,
            ends.linear_layers,
        )


def test_a_directory_without_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no adapter_config\.json"):
        read_peft(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells memory there")
@pytest.mark.parametrize("outputs", [2**10, 2**20], ids=["small", "large"])
def test_memory_of_matrices_that_are_gone_is_given_back(outputs: int) -> None:
    """Small ones share what is asked of the system at once."""

    def own_bytes() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))

    num_bytes, before = 64 * 2**20, own_bytes()
    each = num_bytes // (8 * outputs * 4)
    made = [LowRank(torch.ones(8, 1), torch.ones(outputs, 8), 1.0, device=CPU) for _ in range(each)]
    assert own_bytes() - before > num_bytes * 0.9
    given = torch.ones(1, 1)
    assert torch.equal(
        made[-1].added(given, torch.zeros(1, outputs)), torch.full((1, outputs), 8.0)
    )
    made.clear()
    assert own_bytes() - before < 16 * 2**20


def test_matrices_that_there_is_no_memory_for_are_told_as_such(monkeypatch: Any) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", refuse)
    with pytest.raises(MemoryError, match="of an adapter"):
        LowRank(torch.ones(8, 1), torch.ones(2**20, 8), 1.0, device=CPU)


def test_rows_of_numbered_modules_go_by_themselves() -> None:
    """Experts may get some of the rows in an order of their own."""
    low = LowRank(torch.ones(1, 4), torch.ones(4, 1), 1.0, device=CPU)
    assert Adapter({0: LayerAdapter({"self_attn.q_proj": low})}).mixes
    assert not Adapter({0: LayerAdapter({"mlp.experts.3.up_proj": low})}).mixes
