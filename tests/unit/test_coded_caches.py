"""Coded caches: codes that depend on nothing but their numbers, and layers that compute with them what they compute
with others, but for rounding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_families import FAMILIES, SMALL, shared
from test_fused_layers import NUM_LAYERS, PLAIN, Twins, config_of
from transformers import Lfm2Config

from neurogrid.errors import UnsupportedModelError
from neurogrid.model.caches import cache as cache_module
from neurogrid.model.caches.cache import StageCache
from neurogrid.model.caches.row_groups import group_rows
from neurogrid.model.kernels import CODED_DTYPE, coded_size, decode_states, encode_states
from neurogrid.model.proof.miniature_caches import TOLERANCE, check_coded_caches
from neurogrid.model.stages.cost import layer_cost
from neurogrid.model.stages.stage import Row, Stage
from tests.unit.vectors import in_turn

HEAD_SIZES = (7, 16, 64, 80)


@in_turn("cache_codes")
def test_codes_are_those_of_the_vectors(name: str, case: Any) -> None:
    """Written from the specification, with numbers of Python."""
    states = torch.frombuffer(bytearray.fromhex(case["states"]), dtype=torch.float32)
    coded = encode_states(states)
    assert bytes(coded.view(torch.uint8).tolist()).hex() == case["coded"]
    assert len(coded) == coded_size(len(states))


@settings(max_examples=30, deadline=None)
@given(
    size=st.sampled_from(HEAD_SIZES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    scale=st.integers(-12, 12),
    seed=st.integers(0, 1000),
)
def test_a_number_is_off_by_half_a_code_at_most(
    size: int, dtype: torch.dtype, scale: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    states = (torch.randn(1, 2, 5, size, generator=generator) * 2.0**scale).to(dtype)
    coded = encode_states(states)
    assert coded.dtype == CODED_DTYPE
    assert coded.shape == (1, 2, 5, coded_size(size))
    decoded = decode_states(coded, dtype)
    assert decoded.dtype == dtype
    assert decoded.shape == states.shape
    for (
        got,
        given_,
    ) in zip(decoded.split(32, -1), states.split(32, -1), strict=True):
        most = given_.float().abs().amax(-1, keepdim=True)
        # Half a code, and what the decoded number is rounded by.
        allowed = most * (0.5 / 127 * 1.01 + torch.finfo(dtype).eps) + 2.0**-24
        assert ((got.float() - given_.float()).abs() <= allowed).all()


@settings(max_examples=20, deadline=None)
@given(size=st.sampled_from(HEAD_SIZES), cuts=st.sets(st.integers(1, 11)))
def test_codes_are_the_same_whatever_a_token_comes_with(size: int, cuts: set[int]) -> None:
    states = torch.randn(1, 2, 12, size, generator=torch.Generator().manual_seed(size))
    edges = [0, *sorted(cuts), 12]
    parts = [encode_states(states[:, :, start:stop]) for start, stop in pairwise(edges)]
    assert torch.equal(torch.cat(parts, dim=2), encode_states(states))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_made_finite(bad: float) -> None:
    states = torch.ones(1, 1, 1, 64)
    states[..., 40] = bad
    decoded = decode_states(encode_states(states), torch.float32)[0, 0, 0]
    assert not decoded[40].isfinite()
    assert torch.allclose(decoded[:32], torch.ones(32), rtol=5e-3)


@pytest.mark.parametrize("name", ["llama", "phi3", "qwen3", "gemma2, capped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_layers_make_and_read_the_same_codes(name: str, dtype: torch.dtype) -> None:
    twins = Twins(config_of(*PLAIN[name]), dtype)
    hidden_BTD = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    caches = []
    for stage in (twins.modules, twins.compiled):
        stage.codes_caches = True
        caches.append((stage.new_cache(), stage))
    results = [feed(stage, cache, hidden_BTD, [5, 3, 1]) for cache, stage in caches]
    states = [cache.layers[0].keys for cache, _ in caches]
    assert all(each.dtype == CODED_DTYPE for each in states)
    plain = [decode_states(each, torch.float32) for each in states]
    most = plain[0].abs().amax()
    rounding = 1 / 127 if dtype == torch.float32 else 0.02
    assert (plain[0] - plain[1]).abs().max() <= rounding * most
    if dtype == torch.float32:
        assert (states[0] == states[1]).float().mean() > 0.99
    off = (results[0] - results[1]).float().abs().max() / results[0].float().abs().max()
    assert off < (0.01 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("name", ["llama", "mistral, a window", "qwen3"])
def test_compiled_layers_give_a_token_the_same_bits_in_any_company(name: str) -> None:
    """In pieces of a prompt, token by token, and with sessions of other lengths."""
    twins = Twins(config_of(*PLAIN[name]), torch.float32)
    stage = twins.compiled
    stage.codes_caches = True
    hidden_BTD = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(2))
    whole = feed(stage, stage.new_cache(), hidden_BTD, [40])
    for sizes in ([20, 20], [1] * 40, [7, 1, 30, 2]):
        assert torch.equal(feed(stage, stage.new_cache(), hidden_BTD, sizes), whole)
    lengths = (3, 17, 31)
    sessions = []
    for length in lengths:
        cache = stage.new_cache()
        feed(stage, cache, hidden_BTD[:, :length], [length])
        sessions.append(cache)
    for step in range(5):
        rows = [
            Row(hidden_BTD[:, length + step : length + step + 1], length + step, cache)
            for length, cache in zip(lengths, sessions, strict=True)
        ]
        for length, got in zip(
            lengths, stage.forward_rows(rows, start=0, stop=NUM_LAYERS), strict=True
        ):
            expected = whole[0, length + step]
            if name == "mistral, a window":  # whose keys lie in a ring, in another order
                assert torch.allclose(got[0, 0], expected, atol=1e-4)
            else:
                assert torch.equal(got[0, 0], expected)


@pytest.mark.parametrize(
    "family", ["llama", "mistral-window", "gemma3", "lfm2", "deepseek-v3", "gpt2", "jamba"]
)
def test_families_compute_with_codes_what_they_compute_with_numbers(family: str) -> None:
    check_coded_caches(FAMILIES[family](), rows=family != "jamba", fuses=family == "llama")


def test_what_takes_codes_for_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cache_module, "decode_states", lambda coded, dtype: coded[..., :12].to(dtype)
    )
    with pytest.raises(UnsupportedModelError, match=r"int8 \(--kv-cache-dtype auto.*off by"):
        check_coded_caches(FAMILIES["llama"](), rows=False, fuses=False)
    assert TOLERANCE < 0.5


def test_what_keeps_no_keys_and_values_is_refused() -> None:
    config = Lfm2Config(**SMALL, layer_types=["conv"] * 4)
    with pytest.raises(UnsupportedModelError, match="its layers keep none"):
        check_coded_caches(config, rows=False, fuses=False)


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3", "lfm2", "deepseek-v3"])
def test_a_cache_takes_what_the_costs_say(family: str) -> None:
    checkpoint = shared(family)
    stage = checkpoint.stage(0, checkpoint.num_layers)
    costs = layer_cost(checkpoint.config, torch.float32)
    hidden_BTD = torch.randn(1, 30, stage.hidden_size)
    for is_coded in (False, True):
        stage.codes_caches = is_coded
        cache = stage.new_cache()
        feed(stage, cache, hidden_BTD, [30])
        for layer_id, cost in enumerate(costs):
            its = cost.coded if is_coded else cost
            assert cache.state_bytes(layer_id) == its.cache_bytes(30)


def test_a_coded_cache_is_a_quarter_of_one_in_float32() -> None:
    (cost, *_) = layer_cost(config_of("llama", {"head_dim": 64}), torch.float32)
    assert cost.coded.cache_bytes(1000) == cost.cache_bytes(1000) * 68 // 256


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_a_coded_cache_is_cut_copied_and_goes_back(family: str) -> None:
    checkpoint = shared(family)
    stage = checkpoint.stage(0, checkpoint.num_layers)
    stage.codes_caches = True
    hidden_BTD = torch.randn(1, 30, stage.hidden_size, generator=torch.Generator().manual_seed(4))
    expected = feed(stage, stage.new_cache(), hidden_BTD, [6, 1, 1, 1, 1])[:, -1]
    cache = stage.new_cache()
    feed(stage, cache, hidden_BTD[:, :6], [6])
    twin = cache.copy(6)
    assert twin.is_coded
    # Tokens that turn out to be others.
    stage.forward(hidden_BTD[:, 20:24], start=0, stop=stage.num_layers, position=6, cache=cache)
    cache.go_back(7)
    assert cache.length == 7
    if family == "llama":  # the window has dropped what a cut would need
        cache.cut(6)
        assert_goes_on(stage, cache, hidden_BTD, expected)
    assert_goes_on(stage, twin, hidden_BTD, expected)


def assert_goes_on(
    stage: Stage, cache: StageCache, hidden_BTD: torch.Tensor, expected: torch.Tensor
) -> None:
    got = feed(stage, cache, hidden_BTD[:, 6:10], [1, 1, 1, 1], position=6)[:, -1]
    assert torch.allclose(got, expected, atol=1e-4 * float(expected.abs().max()))


def test_rows_of_coded_caches_and_of_others_are_not_mixed() -> None:
    checkpoint = shared("llama")
    stage = checkpoint.stage(0, checkpoint.num_layers)
    rows = []
    for is_coded in (False, True):
        stage.codes_caches = is_coded
        cache = stage.new_cache()
        feed(stage, cache, torch.randn(1, 3, stage.hidden_size), [3])
        rows.append(Row(torch.randn(1, 1, stage.hidden_size), 3, cache))
    with pytest.raises(ValueError, match="coded caches and of others"):
        stage.forward_rows(rows, start=0, stop=stage.num_layers)


def test_layers_that_know_of_no_codes_get_few_rows_at_once() -> None:
    twins = Twins(config_of("llama", {}), torch.float32)
    for stage, expected in (
        (twins.modules, [[1, 0], [2, 3]]),
        (twins.compiled, [[1, 0, 2, 3]]),
    ):
        stage.codes_caches, stage.max_decoded = True, 20
        rows = []
        for length in (9, 10, 4, 3):
            cache = stage.new_cache(max_length=20)
            feed(stage, cache, torch.randn(1, length, 64), [length])
            rows.append(Row(torch.randn(1, 1, 64), length, cache))
        assert stage.group_rows(rows, start=0, stop=NUM_LAYERS, bounds=()) == expected


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=12),
    max_places=st.integers(1, 200),
)
def test_groups_have_so_many_places_at_most(lengths: list[int], max_places: int) -> None:
    groups = group_rows(
        lengths, weight_bytes=1000, token_bytes=1, max_rows=8, max_places=max_places
    )
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[i] for i in group)
        assert len(group) == 1 or len(group) * longest <= max_places


def feed(
    stage: Stage,
    cache: StageCache,
    hidden_BTD: torch.Tensor,
    sizes: Sequence[int],
    *,
    position: int = 0,
) -> torch.Tensor:
    """What leaves the layers for tokens fed in pieces of these sizes, the first of them at `position`."""
    pieces = []
    for piece in hidden_BTD[:, : sum(sizes)].split(list(sizes), dim=1):
        pieces.append(
            stage.forward(piece, start=0, stop=stage.num_layers, position=position, cache=cache)
        )
        position += piece.shape[1]
    return torch.cat(pieces, dim=1)
