"""Compiled decoder layers: what the modules give, for the families that are plain blocks, and the same bits however
tokens are fed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from neurogrid.model.caches.cache import StageCache
from neurogrid.model.files.quantization import METHODS, Quantization
from neurogrid.model.files.tensor_names import layer_of
from neurogrid.model.kernels import library, quantize
from neurogrid.model.proof import miniature_fused
from neurogrid.model.proof.miniature import check_splittable
from neurogrid.model.stages import fused_layers
from neurogrid.model.stages.stage import Row, Stage

NUM_LAYERS = 3
HIDDEN = 64
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, scaled rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral, a window": ("mistral", {"sliding_window": 12}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "phi3": ("phi3", {}),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2, capped": (
        "gemma2",
        {"head_dim": 32, "sliding_window": 12, "attn_logit_softcapping": 0.7},
    ),
    "gemma3": ("gemma3_text", {"head_dim": 32, "sliding_window": 12}),
    "olmo2": ("olmo2", {}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 32, **EXPERTS}),
}
# Each does something that no plain block does.
OTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "granite, scaled residuals": ("granite", {"residual_multiplier": 0.22}),
    "olmo2, clipped": ("olmo2", {"clip_qkv": 8.0}),
    "gpt_oss": ("gpt_oss", {"head_dim": 32, "num_local_experts": 4}),
}


def config_of(model_type: str, extra: dict[str, Any]) -> PreTrainedConfig:
    return CONFIG_MAPPING[model_type](**{**SIZES, **extra})


@pytest.fixture(autouse=True)
def with_kernels() -> None:
    assert library() is not None, "kernels.so is not there: make kernels"


class Twins:
    """A model's layers twice, as modules and compiled."""

    def __init__(
        self, config: PreTrainedConfig, dtype: torch.dtype, method: str | None = None
    ) -> None:
        torch.manual_seed(0)
        from_config: Any = AutoModelForCausalLM.from_config
        model = from_config(config, dtype=torch.bfloat16)
        for parameter in model.parameters():
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
        tensors: dict[str, torch.Tensor] = model.state_dict()
        quantization = None
        if method is not None:
            quantization = Quantization(method)
            tensors = dict(_quantized(tensors, method))
        self.modules, self.compiled = (
            Stage(config, dtype=dtype, device="cpu", quantization=quantization) for _ in range(2)
        )
        for stage in (self.modules, self.compiled):
            for layer_id in range(NUM_LAYERS):
                stage.load_layer(
                    layer_id,
                    {
                        n: t.clone()
                        for n, t in tensors.items()
                        if layer_of(n, NUM_LAYERS) == layer_id
                    },
                )
                stage.speed_up_layer(layer_id, fuse=stage is self.compiled)
        assert self.compiled.has_fused
        assert not self.modules.has_fused


def _quantized(tensors: dict[str, torch.Tensor], method: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            codes = quantize(tensor, METHODS[method].bits)
            yield f"{name}.codes", codes.codes
            yield f"{name}.scales", codes.scales
        else:
            yield name, tensor


def run(
    stage: Stage, cache: StageCache, hidden_BTD: torch.Tensor, sizes: Sequence[int]
) -> torch.Tensor:
    """What leaves the layers for tokens fed in pieces of these sizes."""
    pieces = []
    for piece in hidden_BTD.split(list(sizes), dim=1):
        position = cache.length
        pieces.append(
            stage.forward(piece, start=0, stop=NUM_LAYERS, position=position, cache=cache)
        )
    return torch.cat(pieces, dim=1)


def some_hidden(num_tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, num_tokens, HIDDEN, generator=generator)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_blocks_are_proven_and_give_what_their_modules_give(name: str) -> None:
    config = config_of(*PLAIN[name])
    traits = check_splittable(config)
    assert traits.fuses
    # The scores of experts are torch's.
    assert traits.same_bits == (name != "qwen3_moe")
    twins = Twins(config, torch.float32)
    hidden = some_hidden(18)
    for sizes in ([1] * 18, [18], [7, 1, 10]):
        expected = run(twins.modules, twins.modules.new_cache(), hidden, sizes)
        result = run(twins.compiled, twins.compiled.new_cache(), hidden, sizes)
        assert (result - expected).norm() / expected.norm() < 2e-6


@pytest.mark.parametrize("name", OTHER)
def test_families_that_do_more_go_their_own_way(name: str) -> None:
    assert not check_splittable(config_of(*OTHER[name])).fuses


def test_a_block_that_is_computed_wrongly_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def capped(compiled: fused_layers.LayerParts, mlp: Any) -> Any:
        parts = with_mlp(compiled, mlp)
        assert parts is not None
        return fused_layers.replace(parts, softcap=50.0)

    with_mlp = fused_layers._with_mlp
    monkeypatch.setattr(fused_layers, "_with_mlp", capped)
    assert not check_splittable(config_of("llama", {})).fuses


def test_without_kernels_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fused_layers, miniature_fused):
        monkeypatch.setattr(module, "library", lambda: None)
    assert not check_splittable(config_of("llama", {})).fuses


@pytest.fixture(
    scope="module",
    params=[
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float32, "int8"),
        (torch.float32, "int4"),
        (torch.bfloat16, "int4"),
    ],
    ids=str,
)
def twins(request: pytest.FixtureRequest) -> Twins:
    dtype, method = request.param
    return Twins(config_of("llama", {}), dtype, method)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_token_gets_the_same_bits_in_every_piece_of_a_prompt(
    twins: Twins, data: st.DataObject
) -> None:
    stage = twins.compiled
    length = data.draw(st.integers(2, 70))
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=6)))
    sizes = [stop - start for start, stop in zip([0, *cuts], [*cuts, length], strict=True)]
    hidden = some_hidden(length)
    whole = run(stage, stage.new_cache(), hidden, [length])
    assert stage.has_same_bits(0, NUM_LAYERS)
    assert torch.equal(run(stage, stage.new_cache(), hidden, sizes), whole)


@pytest.mark.parametrize("name", ["mistral, a window", "gemma2, capped"])
def test_a_full_window_gets_the_same_bits_in_company(name: str) -> None:
    """There it is a ring, and alone it is not."""
    stage = Twins(config_of(*PLAIN[name]), torch.float32).compiled
    lengths = (30, 9, 21)
    alone, together = ([stage.new_cache() for _ in lengths] for _ in range(2))
    for caches in (alone, together):
        for number, length in enumerate(lengths):
            run(stage, caches[number], some_hidden(length, seed=number), [length])
    for step in range(15):
        tokens = [some_hidden(1, seed=100 * step + number) for number in range(len(lengths))]
        rows = [
            Row(token, cache.length, cache) for token, cache in zip(tokens, together, strict=True)
        ]
        results = stage.forward_rows(rows, start=0, stop=NUM_LAYERS)
        for token, cache, result in zip(tokens, alone, results, strict=True):
            assert torch.equal(run(stage, cache, token, [1]), result)


@settings(max_examples=6, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=2, max_size=9), threads=st.integers(1, 2))
def test_a_session_gets_the_same_bits_in_company(
    twins: Twins, lengths: list[int], threads: int
) -> None:
    stage = twins.compiled
    alone, together = ([stage.new_cache() for _ in lengths] for _ in range(2))
    for caches in (alone, together):
        for number, length in enumerate(lengths):
            run(stage, caches[number], some_hidden(length, seed=number), [length])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for step in range(3):
            tokens = [some_hidden(1, seed=100 * step + number) for number in range(len(lengths))]
            rows = [
                Row(token, cache.length, cache)
                for token, cache in zip(tokens, together, strict=True)
            ]
            results = stage.forward_rows(rows, start=0, stop=NUM_LAYERS)
            for token, cache, result in zip(tokens, alone, results, strict=True):
                assert torch.equal(run(stage, cache, token, [1]), result)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("is_coded", [False, True], ids=["as they are", "coded"])
@pytest.mark.parametrize("name", ["llama", "mistral, a window", "gemma2, capped"])
def test_a_long_prompt_gets_the_same_bits_however_it_is_cut(name: str, is_coded: bool) -> None:
    """Over the borders of several blocks of keys, which windows reach at other places when tokens are dropped."""
    stage = Twins(config_of(*PLAIN[name]), torch.float32).compiled
    stage.codes_caches = is_coded
    length = 340
    hidden = some_hidden(length)
    whole = run(stage, stage.new_cache(), hidden, [length])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            # Tokens of a draft among them, and a last one alone.
            sizes = [1, 2, 7, 64, 120, 3, length - 198, 1]
            assert torch.equal(run(stage, stage.new_cache(), hidden, sizes), whole)
    finally:
        torch.set_num_threads(before)
    cache = stage.new_cache()
    run(stage, cache, hidden[:, :300], [300])
    alone = run(stage, cache, hidden[:, 300:], [1] * 40)
    assert torch.equal(alone, whole[:, 300:])


def test_the_same_bits_are_promised_of_layers_that_are_compiled_alone() -> None:
    twins = Twins(config_of("llama", {}), torch.bfloat16)
    assert not twins.modules.has_same_bits(0, 1)
    stage = twins.compiled
    assert stage.has_same_bits(0, NUM_LAYERS)
    with torch.inference_mode():
        # With something that is not known here it goes its own way.
        angles = (torch.ones(1, 1, 16), torch.zeros(1, 1, 16))
        layer = stage.layer(1)
        layer.__dict__["_fused"].run(
            layer, some_hidden(1), {"position_embeddings": angles, "more": 1}
        )
    assert stage.has_same_bits(0, 1)
    assert not stage.has_same_bits(0, NUM_LAYERS)
    stage.drop_layer(0)
    assert not stage.has_same_bits(0, 1)


def test_a_layer_that_is_dropped_is_freed_at_once() -> None:
    stage = Twins(config_of("llama", {}), torch.float32).compiled
    run(stage, stage.new_cache(), some_hidden(3), [2, 1])
    gc.collect()  # what loading left
    gone = weakref.ref(stage.layer(1))
    gc.disable()
    try:
        stage.drop_layer(1)
        assert gone() is None
    finally:
        gc.enable()


def test_a_number_that_is_none_stays_none() -> None:
    stage = Twins(config_of("llama", {}), torch.float32).compiled
    hidden = some_hidden(6)
    hidden[0, 3, 5] = torch.nan
    result = run(stage, stage.new_cache(), hidden, [6])
    assert torch.isnan(result[0, 3:]).all()


def test_hidden_states_of_another_shape_are_refused() -> None:
    layer = Twins(config_of("llama", {}), torch.float32).compiled.layer(0)
    compiled = layer.__dict__["_fused"]._compiled
    angles = torch.ones(1, 2, compiled._parts.rotary_size)
    with pytest.raises(ValueError, match="is due"):
        compiled.project(torch.ones(1, 2, HIDDEN + 1), angles, angles)
    with pytest.raises(ValueError, match="is due"):
        compiled.project(torch.ones(1, 2, HIDDEN, dtype=torch.bfloat16), angles, angles)
