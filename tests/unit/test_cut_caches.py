"""What goes on from a cut or copied cache is what goes on from the whole tokens, for every family that allows it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from stage_families import FAMILIES, shared

from neurogrid.model.caches.cache import StageCache
from neurogrid.model.stages.stage import Row

TOLERANCE = 1e-4
# Their windows of 8 have dropped tokens, or their states have one size: no way back.
CANNOT_GO_BACK = {"mistral-window", "gemma2", "gemma3", "gpt-oss", "cohere2", "lfm2"}
# Nor may several tokens go on from them: their code begins anew there, or lengths change what it computes.
# The proof that says so is tried in test_miniature.py.
TAKE_NO_CHUNKS = {"jamba", "llama-dynamic", "llama4"}
NUM_TOKENS, CUT, MORE = 30, 19, 5


class Run:
    """One stage of all layers, and random hidden states for it."""

    def __init__(self, family: str) -> None:
        checkpoint = shared(family)
        self.stage = checkpoint.shared_stage(0, checkpoint.num_layers)
        generator = torch.Generator().manual_seed(3)
        size = self.stage.hidden_size
        self.hidden_BTD = torch.randn(1, NUM_TOKENS + MORE, size, generator=generator)
        # What the last of so many tokens becomes where all go through at once.
        self.last = functools.cache(lambda length: self.feed(self.stage.new_cache(), [length]))

    def feed(self, cache: StageCache, sizes: Sequence[int]) -> torch.Tensor:
        for num_tokens in sizes:
            position = cache.length
            result_BTD = self.stage.forward(
                self.hidden_BTD[:, position : position + num_tokens],
                start=0,
                stop=self.stage.num_layers,
                position=position,
                cache=cache,
            )
        return result_BTD[:, -1]

    def cache(self, *sizes: int) -> StageCache:
        cache = self.stage.new_cache()
        self.feed(cache, sizes)
        return cache

    def expect(self, cache: StageCache) -> None:
        """Whatever comes next comes as if all had been computed in one go."""
        length = cache.length
        expected = self.last(length + MORE)
        for sizes in ((MORE,), (1, MORE - 1)):
            got = self.feed(cache.copy(length), sizes)
            assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in TAKE_NO_CHUNKS])
def test_going_on_from_a_prefix_is_going_on_from_its_tokens(family: str) -> None:
    run = Run(family)
    whole = run.cache(NUM_TOKENS - 2, 1, 1)
    run.expect(whole)
    copied = whole.copy(NUM_TOKENS)
    if family in CANNOT_GO_BACK:
        assert whole.shortest_cut(NUM_TOKENS) == NUM_TOKENS
        with pytest.raises(ValueError, match="cannot be cut"):
            whole.cut(CUT)
        short = run.cache(6)
        if family != "lfm2":  # the window holds all of them still
            short.cut(3)
            run.expect(short)
    else:
        assert whole.shortest_cut(NUM_TOKENS) == 0
        run.expect(whole.copy(CUT))
        whole.cut(CUT)
        run.expect(whole)
        whole.cut(1)
        run.expect(whole)
    assert copied.length == NUM_TOKENS
    run.expect(copied)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in TAKE_NO_CHUNKS])
def test_it_goes_back_within_its_last_forward(family: str) -> None:
    """However long it is, where no state has one size: windows keep what left them for that long."""
    run = Run(family)
    cache = run.cache(3, 1, 4)
    if not cache.can_go_back:
        assert family in CANNOT_GO_BACK
        with pytest.raises(ValueError, match="cannot be cut"):
            cache.go_back(6)
        return
    is_window = family in CANNOT_GO_BACK
    cache.go_back(6)
    run.expect(cache)
    for few in (9, 6):
        run.feed(cache, [few])
        assert cache.can_be_cut(cache.length - few + 1)
        if is_window and cache.length >= 8:
            with pytest.raises(ValueError, match="cannot be cut"):
                cache.go_back(cache.length - few)
        copied = cache.copy(cache.length - few + 2)
        cache.go_back(cache.length - few + 2)
        run.expect(copied)
        run.expect(cache)
        run.feed(cache, [1])
    if is_window:
        with pytest.raises(ValueError, match="cannot be cut"):
            cache.go_back(cache.length - 1)
    else:
        cache.go_back(4)
    run.expect(cache)


def test_what_goes_back_leaves_its_states_where_they_are() -> None:
    run = Run("llama")
    cache = run.cache(8, 1, 4)
    before = cache.layers[0].keys.data_ptr()  # type: ignore[union-attr]
    cache.go_back(10)
    run.feed(cache, [5])
    cache.go_back(12)
    run.feed(cache, [1])
    assert cache.layers[0].keys.data_ptr() == before  # type: ignore[union-attr]
    run.expect(cache)


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_it_leaves_a_running_batch_to_be_copied(family: str) -> None:
    """The session whose cache is copied goes on in its batch, and the others notice nothing."""
    run = Run(family)
    caches, twins = ([run.cache(n) for n in (9, 12, 7)] for _ in range(2))

    def step(rows: list[StageCache]) -> list[torch.Tensor]:
        hidden = [run.hidden_BTD[:, c.length : c.length + 1] for c in rows]
        batch = [Row(h, c.length, c) for h, c in zip(hidden, rows, strict=True)]
        return run.stage.forward_rows(batch, start=0, stop=run.stage.num_layers)

    step(caches)
    copied = caches[1].copy(13)
    step(caches)
    together = step(caches)
    for twin, got in zip(twins, together, strict=True):
        expected = run.feed(twin, [1, 1, 1])
        assert (got[:, -1] - expected).abs().max() <= TOLERANCE * expected.abs().max()
    run.expect(copied)
    if family == "llama":
        caches[0].cut(4)
        run.expect(caches[0])
    # What was cut and what was copied decode with those that stayed.
    lengths = [cache.length for cache in (copied, *caches)]
    together = step([copied, *caches])
    for length, got in zip(lengths, together, strict=True):
        expected = run.last(length + 1)
        assert (got[:, -1] - expected).abs().max() <= TOLERANCE * expected.abs().max()
