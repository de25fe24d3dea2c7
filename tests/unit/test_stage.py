"""Stages give the bits that transformers' own whole model gives, wherever it is cut."""

from __future__ import annotations

import logging
from mmap import mmap
from pathlib import Path

import pytest
import torch
import transformers as tf
from blake3 import blake3
from stage_families import FAMILIES, MAIN_FAMILIES, Checkpoint, Pipeline, shared
from transformers.utils import logging as transformers_logging

from neurogrid.errors import CheckpointError, ModelError, UnsupportedModelError
from neurogrid.model.files.blob import parse_blob
from neurogrid.model.files.checkpoint import Checkpoint as CheckpointFiles
from neurogrid.model.files.tensor_names import is_end_tensor
from neurogrid.model.stages.stage import Ends, Stage

# Prompts of one token and of many, in one go and in chunks; each decodes past the window of 8 and
# past the original length of 16.
PLANS = {
    "one-token": [1] * 20,
    "many-tokens": [19, 1, 1],
    "chunks": [5, 9, 4, 1, 1],
}

# What comes first or last in a stage may be of either kind, so these are cut at other places too.
LAYERS_OF_TWO_KINDS = {"gemma3", "deepseek-v3", "lfm2"}


def _assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for step, (mine, its) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(mine, its), f"step {step}: off by {(mine - its).abs().max():.2g}"


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_are_those_of_the_whole_model(family: str) -> None:
    checkpoint = shared(family)
    cuts = ((1, 3), (2,)) if family in LAYERS_OF_TWO_KINDS else ((1, 3),)
    pipelines = [Pipeline(checkpoint, each) for each in cuts]
    for sizes in PLANS.values():
        tokens = checkpoint.tokens(sum(sizes))
        expected = checkpoint.whole_logits(tokens, sizes)
        for pipeline in pipelines:
            pipeline.restart()
            _assert_same(pipeline.logits(tokens, sizes), expected)


@pytest.mark.parametrize("family", MAIN_FAMILIES)
def test_bfloat16_logits_are_those_of_the_whole_model(family: str) -> None:
    checkpoint = shared(family, torch.bfloat16)
    pipeline = Pipeline(checkpoint, (2,))
    tokens = checkpoint.tokens(14)
    sizes = [9, 1, 1, 1, 1, 1]
    _assert_same(pipeline.logits(tokens, sizes), checkpoint.whole_logits(tokens, sizes))


def test_a_token_leaves_the_cache_where_it_is_within_what_is_allowed() -> None:
    stage = shared("llama").shared_stage(0, 2)
    cache = stage.new_cache(max_length=20)

    def extend(num_tokens: int) -> torch.Tensor:
        hidden = torch.randn(1, num_tokens, stage.hidden_size)
        stage.forward(hidden, start=0, stop=2, position=cache.length, cache=cache)
        keys = cache.layers[1].keys
        assert keys is not None
        assert keys.shape[-2] == cache.length
        return keys

    def room(keys: torch.Tensor) -> int:
        return keys.untyped_storage().nbytes() * keys.shape[-2] // keys.nbytes

    extend(5)
    first, second = extend(1), extend(1)
    assert first.data_ptr() == second.data_ptr()
    assert room(second) == 20
    cache.allow(10)
    assert room(extend(1)) == 10
    # A copy has memory of its own.
    twin = cache.copy(cache.length)
    kept = extend(1).clone()
    stage.forward(
        torch.randn(1, 1, stage.hidden_size), start=0, stop=2, position=twin.length, cache=twin
    )
    assert torch.equal(cache.layers[1].keys, kept)


def test_one_stage_may_hold_all_layers_and_run_them_one_by_one() -> None:
    checkpoint = shared("gemma3")
    stage, ends = checkpoint.shared_stage(0, 4), checkpoint.shared_ends
    cache = stage.new_cache()
    tokens, sizes = checkpoint.tokens(13), [10, 1, 1, 1]
    position, got = 0, []
    for size in sizes:
        hidden = ends.embed(tokens[position : position + size], position=position)
        for layer_id in range(4):
            hidden = stage.forward(
                hidden, start=layer_id, stop=layer_id + 1, position=position, cache=cache
            )
        got.append(ends.logits(hidden, position=position))
        position += size
    _assert_same(got, checkpoint.whole_logits(tokens, sizes))


def test_sessions_in_turn_do_not_touch_each_other() -> None:
    # Dynamic rope keeps the longest length seen in the model itself: a trap for whoever serves two.
    long, short = [20, 1, 1], [18, 1, 1]
    checkpoint = shared("llama-dynamic")
    tokens = checkpoint.tokens(22)
    expected = [checkpoint.whole_logits(tokens, sizes) for sizes in (long, short)]
    pipeline = Pipeline(checkpoint, (1, 3))
    got: list[list[torch.Tensor]] = [[], []]
    sessions: list[tuple[int, list[object]]] = [(0, pipeline.caches), (0, [])]
    pipeline.restart()
    sessions[1] = (0, pipeline.caches)
    for step in range(3):
        for i, sizes in enumerate((long, short)):
            pipeline.position, pipeline.caches = sessions[i]
            start = pipeline.position
            got[i].append(pipeline.step(tokens[start : start + sizes[step]]))
            sessions[i] = (pipeline.position, pipeline.caches)
    for mine, its in zip(got, expected, strict=True):
        _assert_same(mine, its)


def test_half_precision_hidden_states_are_cast() -> None:
    # Over the older protocol they arrive in FP16.
    stage = shared("llama").stage(1, 2)
    hidden = torch.randn(1, 3, 48).half()
    out = stage.forward(hidden, start=1, stop=2, position=0, cache=stage.new_cache())
    same = stage.forward(hidden.float(), start=1, stop=2, position=0, cache=stage.new_cache())
    assert out.dtype == torch.float32
    assert torch.equal(out, same)


@pytest.fixture
def llama() -> Checkpoint:
    return shared("llama")


def _hidden(num_tokens: int = 2) -> torch.Tensor:
    return torch.randn(1, num_tokens, 48, generator=torch.Generator().manual_seed(3))


def test_a_stage_has_no_memory_for_what_it_does_not_hold(llama: Checkpoint) -> None:
    stage = llama.stage(2, 3)
    held = {id(p) for p in stage.layer(2).parameters()}
    outside = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
        for p in stage.model.parameters()
        if id(p) not in held
    }
    assert sum(outside.values()) < 1000
    assert stage.held_layers == {2}


def test_weights_are_cast_to_the_dtype_of_the_stage(llama: Checkpoint) -> None:
    stage = Stage(llama.config, dtype=torch.bfloat16, device="cpu")
    stage.load_layer(0, llama.layer(0))
    out = stage.forward(_hidden(), start=0, stop=1, position=0, cache=stage.new_cache())
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("owns_memory", [False, True])
def test_a_layer_that_owns_its_memory_changes_and_its_blob_stays(
    llama: Checkpoint, owns_memory: bool, tmp_path: Path
) -> None:
    llama.whole.save_pretrained(tmp_path)
    content = b"".join(CheckpointFiles.open(tmp_path).layer_blob(1).chunks())
    # Of pages: only aligned memory is used where it is, and a bytearray's may be either.
    blob = mmap(-1, len(content))
    blob[:] = content
    blob_id = blake3(blob).digest()
    stage = Stage(llama.config, dtype=torch.float32, device="cpu")
    stage.load_layer(1, parse_blob(memoryview(blob)), owns_memory=owns_memory)
    parameters = list(stage.layer(1).parameters())
    before = [parameter.clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter += 1
    _assert_same(parameters, [parameter + 1 for parameter in before])
    assert (blake3(blob).digest() == blob_id) == owns_memory


def test_tensors_at_odd_addresses_give_the_same_bits(llama: Checkpoint) -> None:
    shifted = {}
    for name, tensor in llama.layer(0).items():
        room = torch.empty(tensor.numel() + 1)
        shifted[name] = room[1:].view(tensor.shape).copy_(tensor)
    stage = Stage(llama.config, dtype=torch.float32, device="cpu")
    stage.load_layer(0, shifted)
    got = stage.forward(_hidden(9), start=0, stop=1, position=0, cache=stage.new_cache())
    usual = llama.stage(0, 1)
    expected = usual.forward(_hidden(9), start=0, stop=1, position=0, cache=usual.new_cache())
    assert torch.equal(got, expected)


def test_names_without_the_prefix_of_the_model_are_known(tmp_path: Path) -> None:
    # As GPT-2 is on the hub, with buffers that nobody needs any more.
    checkpoint = Checkpoint(FAMILIES["gpt2"](), tmp_path)
    tokens, sizes = checkpoint.tokens(8), [7, 1]
    expected = Pipeline(shared("gpt2"), (1, 3)).logits(tokens, sizes)
    checkpoint.tensors = {
        name.removeprefix("transformer."): tensor for name, tensor in checkpoint.tensors.items()
    }
    checkpoint.tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    _assert_same(Pipeline(checkpoint, (2,)).logits(tokens, sizes), expected)


def _without(tensors: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    assert any(part in name for name in tensors)
    return {name: tensor for name, tensor in tensors.items() if part not in name}


@pytest.mark.parametrize(
    ("family", "part"), [("llama", "q_proj"), ("mixtral", "experts.2.w1"), ("gpt2", "ln_1.bias")]
)
def test_a_missing_tensor_is_named_and_nothing_is_loaded(family: str, part: str) -> None:
    checkpoint = shared(family)
    stage = Stage(checkpoint.config, dtype=torch.float32, device="cpu")
    with pytest.raises(CheckpointError, match="layer 1"):
        stage.load_layer(1, _without(checkpoint.layer(1), part))
    assert stage.held_layers == frozenset()


def test_an_unknown_tensor_is_refused(llama: Checkpoint) -> None:
    stage = Stage(llama.config, dtype=torch.float32, device="cpu")
    extra = {**llama.layer(1), "model.layers.1.self_attn.extra.weight": torch.ones(2)}
    with pytest.raises(CheckpointError, match=r"extra\.weight"):
        stage.load_layer(1, extra)


def test_a_tensor_of_a_wrong_shape_is_refused(llama: Checkpoint) -> None:
    stage = Stage(llama.config, dtype=torch.float32, device="cpu")
    tensors = llama.layer(1)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.ones(3, 3)
    with pytest.raises(CheckpointError, match="layer 1"):
        stage.load_layer(1, tensors)


def test_tensors_of_another_layer_are_refused(llama: Checkpoint) -> None:
    stage = Stage(llama.config, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match=r"layers\.2"):
        stage.load_layer(1, llama.layer(2))
    with pytest.raises(ValueError, match=r"layers 0\.\.3"):
        stage.load_layer(4, llama.layer(2))


def test_a_failed_load_keeps_what_was_there(llama: Checkpoint) -> None:
    stage = llama.stage(1, 2)
    before = stage.forward(_hidden(), start=1, stop=2, position=0, cache=stage.new_cache())
    with pytest.raises(CheckpointError):
        stage.load_layer(1, _without(llama.layer(1), "q_proj"))
    after = stage.forward(_hidden(), start=1, stop=2, position=0, cache=stage.new_cache())
    assert torch.equal(before, after)


def test_a_layer_can_be_replaced_and_dropped(llama: Checkpoint) -> None:
    stage = llama.stage(1, 2)
    before = stage.forward(_hidden(), start=1, stop=2, position=0, cache=stage.new_cache())
    stage.load_layer(1, {name: tensor * 2 for name, tensor in llama.layer(1).items()})
    other = stage.forward(_hidden(), start=1, stop=2, position=0, cache=stage.new_cache())
    assert not torch.equal(before, other)
    stage.drop_layer(1)
    assert stage.held_layers == frozenset()
    with pytest.raises(ValueError, match="layer 1 is not held"):
        stage.forward(_hidden(), start=1, stop=2, position=0, cache=stage.new_cache())


def test_bad_calls_leave_the_cache_as_it_was(llama: Checkpoint) -> None:
    stage = llama.stage(1, 3)
    cache = stage.new_cache()
    stage.forward(_hidden(), start=1, stop=3, position=0, cache=cache)
    bad = [
        {"position": 0},
        {"position": 3},
        {"start": 0},
        {"stop": 4},
        {"start": 2, "stop": 2},
        {"hidden": torch.zeros(1, 2, 47)},
        {"hidden": torch.zeros(2, 2, 48)},
        {"hidden": torch.zeros(1, 0, 48)},
        {"hidden": torch.zeros(2, 48)},
        {"hidden": torch.zeros(1, 2, 48, dtype=torch.int64)},
    ]
    for change in bad:
        call = {"hidden": _hidden(), "start": 1, "stop": 3, "position": 2, **change}
        with pytest.raises(ValueError, match=r"."):
            stage.forward(call.pop("hidden"), cache=cache, **call)
    assert cache.length == 2
    stage.forward(_hidden(), start=1, stop=3, position=2, cache=cache)
    assert cache.length == 4


def test_a_forward_that_fails_half_way_spoils_the_cache(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = llama.stage(0, 3)
    cache = stage.new_cache()
    stage.forward(_hidden(), start=0, stop=3, position=0, cache=cache)
    with monkeypatch.context() as patch:
        patch.setattr(stage.layer(2).mlp, "forward", _out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            stage.forward(_hidden(), start=0, stop=3, position=2, cache=cache)
    with pytest.raises(ModelError, match="out of memory"):
        stage.forward(_hidden(), start=0, stop=3, position=2, cache=cache)
    # The stage itself is well.
    stage.forward(_hidden(), start=0, stop=3, position=0, cache=stage.new_cache())


def _out_of_memory(*args: object) -> None:
    raise RuntimeError("out of memory")


def test_ends_refuse_bad_input(llama: Checkpoint) -> None:
    ends = llama.ends()
    for bad in ([], [96], [-1], [1, 96]):
        with pytest.raises(ValueError, match="token ids"):
            ends.embed(bad, position=0)
    with pytest.raises(ValueError, match="position"):
        ends.embed([1], position=-1)
    with pytest.raises(ValueError, match="hidden state"):
        ends.logits(torch.zeros(1, 1, 47), position=0)
    with pytest.raises(ValueError, match="not loaded"):
        Ends(llama.config, dtype=torch.float32, device="cpu").embed([1], position=0)


@pytest.mark.parametrize("part", ["embed_tokens", "model.norm", "lm_head"])
def test_a_missing_end_is_named(llama: Checkpoint, part: str) -> None:
    tensors = {name: t for name, t in llama.tensors.items() if is_end_tensor(name)}
    ends = Ends(llama.config, dtype=torch.float32, device="cpu")
    with pytest.raises(CheckpointError, match=part):
        ends.load(_without(tensors, part))
    with pytest.raises(CheckpointError):
        ends.load({})


def test_loading_leaves_the_noise_of_transformers_as_it_was(llama: Checkpoint) -> None:
    transformers_logging.set_verbosity_info()
    try:
        llama.stage(0, 1)
        assert transformers_logging.get_verbosity() == logging.INFO
        assert transformers_logging.is_progress_bar_enabled()
    finally:
        transformers_logging.set_verbosity_warning()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (tf.MambaConfig(num_hidden_layers=2, hidden_size=32), "cache"),
        (tf.T5Config(num_layers=2, d_model=32), "causal language model"),
        (tf.BertConfig(num_hidden_layers=2, hidden_size=24), "decoder layers"),
    ],
)
def test_what_has_no_decoder_layers_of_the_common_kind_is_refused(
    config: tf.PreTrainedConfig, reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        Stage(config, dtype=torch.float32, device="cpu")
