"""The cache of a stage answers for all layers and remembers for those that ran."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from stage_families import MIXED, SMALL

from neurogrid.errors import ModelError
from neurogrid.model.caches.cache import StageCache

WINDOW, FULL_LAYER, WINDOW_LAYER = 8, 1, 0


@pytest.fixture
def cache() -> StageCache:
    return StageCache(
        tf.Gemma3TextConfig(**SMALL, head_dim=4, sliding_window=WINDOW, layer_types=MIXED)
    )


def _write(cache: StageCache, layer_id: int, num_tokens: int) -> None:
    states = torch.randn(1, 2, num_tokens, 4)
    cache.update(states, states, layer_id)


def _feed(cache: StageCache, num_tokens: int, start: int = 0, stop: int = 2) -> None:
    cache.begin(start, stop, cache.length)
    for layer_id in range(start, stop):
        _write(cache, layer_id, num_tokens)
    cache.commit(start, stop, num_tokens)


@pytest.mark.parametrize("length", [0, 3, 7, 8, 9, 30])
@pytest.mark.parametrize("query", [1, 5, 20])
def test_it_answers_as_the_whole_models_cache_does(
    cache: StageCache, length: int, query: int
) -> None:
    whole = tf.DynamicCache(
        config=tf.Gemma3TextConfig(**SMALL, head_dim=4, sliding_window=WINDOW, layer_types=MIXED)
    )
    if length:
        for layer_id in range(4):
            states = torch.zeros(1, 2, length, 4)
            whole.update(states, states, layer_id)
    cache.pretend(length)
    for layer_id in range(4):
        assert cache.get_seq_length(layer_id) == whole.get_seq_length(layer_id)
        assert cache.get_mask_sizes(query, layer_id) == whole.get_mask_sizes(query, layer_id)
    assert cache.get_seq_length() == length


def test_a_window_keeps_what_it_needs_and_no_more(cache: StageCache) -> None:
    _feed(cache, 100)
    token = 2 * 2 * 4 * 4  # keys and values of two heads of four floats
    assert cache.length == 100
    assert cache.state_bytes(FULL_LAYER) == 100 * token
    kept = (WINDOW - 1) * token
    assert kept <= cache.state_bytes(WINDOW_LAYER) <= kept + 16
    # Nor does a view of it hold the storage of the whole prefill.
    assert cache.num_bytes <= 100 * token + kept + 100
    assert cache.window(WINDOW_LAYER) == WINDOW
    assert cache.window(FULL_LAYER) == 0


def test_layers_may_run_in_turn_but_not_out_of_step(cache: StageCache) -> None:
    _feed(cache, 4, 0, 1)
    with pytest.raises(ValueError, match=r"position 4 given, but layers 1\.\.1 have cached 0"):
        cache.begin(1, 2, 4)
    with pytest.raises(ValueError, match="have cached 0 or 4 tokens"):
        cache.begin(0, 2, 4)
    cache.begin(1, 2, 0)
    _write(cache, 1, 4)
    cache.commit(1, 2, 4)
    cache.begin(0, 2, 4)


def test_a_spoiled_cache_says_why(cache: StageCache) -> None:
    cache.spoil("out of memory")
    with pytest.raises(ModelError, match="out of memory"):
        cache.begin(0, 1, 0)


def test_an_empty_cache_holds_next_to_nothing(cache: StageCache) -> None:
    assert cache.length == 0
    assert cache.num_bytes < 100


def test_a_window_can_be_cut_back_until_it_drops_tokens(cache: StageCache) -> None:
    assert [cache.shortest_cut(n) for n in (3, WINDOW - 1, WINDOW, 30)] == [0, 0, WINDOW, 30]
    _feed(cache, WINDOW - 1)
    before = cache.layers[WINDOW_LAYER].keys
    twin = cache.copy(4)
    cache.cut(5)
    assert (cache.length, twin.length) == (5, 4)
    for layer_id in (FULL_LAYER, WINDOW_LAYER):
        assert torch.equal(cache.layers[layer_id].keys[:, :, :4], twin.layers[layer_id].keys)
    assert torch.equal(cache.layers[WINDOW_LAYER].keys, before[:, :, :5])
    _feed(cache, 9)
    assert (cache.length, twin.length) == (14, 4)
    with pytest.raises(ValueError, match="cannot be cut back to 5"):
        cache.cut(5)
    cache.cut(13)  # some of its last forward
    _feed(cache, 1)
    with pytest.raises(ValueError, match="cannot be cut back to 9"):
        cache.cut(9)
    with pytest.raises(ValueError, match="cannot be cut back to 5"):
        twin.copy(5)
    assert cache.copy(14).length == 14


def test_a_spoiled_cache_is_no_ones_beginning(cache: StageCache) -> None:
    _feed(cache, 4)
    cache.spoil("it failed")
    with pytest.raises(ModelError, match="it failed"):
        cache.copy(4)
    with pytest.raises(ModelError, match="it failed"):
        cache.cut(2)
