"""Storage of sessions that decode together follows those that do: it is left, shrinks, and is given back."""

from __future__ import annotations

import mmap
import random

import pytest
import torch
from stage_families import shared

from neurogrid.model.caches.cache import StageCache
from neurogrid.model.caches.row_store import RowStore
from neurogrid.model.stages.stage import IDLE_ROUNDS, Row, Stage

NUM_LAYERS = 2
# Keys and values of a token: 2 heads of 12 in float32.
TOKEN_BYTES = NUM_LAYERS * 2 * 2 * 12 * 4


@pytest.fixture
def stage() -> Stage:
    return shared("llama").stage(0, NUM_LAYERS)


def begin(stage: Stage, num_tokens: int) -> StageCache:
    cache = stage.new_cache()
    hidden_BTD = torch.randn(1, num_tokens, stage.hidden_size)
    stage.forward(hidden_BTD, start=0, stop=NUM_LAYERS, position=0, cache=cache)
    return cache


def decode(stage: Stage, caches: list[StageCache]) -> None:
    rows = [Row(torch.randn(1, 1, stage.hidden_size), each.length, each) for each in caches]
    stage.forward_rows(rows, start=0, stop=NUM_LAYERS)


def pooled_bytes(stage: Stage) -> int:
    return sum(pool.num_bytes for pool in stage.pools)


def states(cache: StageCache, layer_id: int) -> torch.Tensor:
    layer = cache.layers[layer_id]
    return torch.stack([layer.keys, layer.values])


def test_who_decodes_no_more_leaves_with_what_it_has(stage: Stage) -> None:
    caches = [begin(stage, num_tokens) for num_tokens in (3, 60, 9, 20, 4, 5)]
    decode(stage, caches)
    idle, active = caches[:4], caches[4:]
    before = pooled_bytes(stage)
    twins = [cache.copy(cache.length) for cache in (idle[1], idle[2])]
    decode(stage, [idle[1], idle[2], *active])  # back from where a copy was made of them
    for _ in range(4 * IDLE_ROUNDS):
        decode(stage, active)
    assert all(cache.home is None for cache in idle)
    assert [cache.num_bytes for cache in idle] == [n * TOKEN_BYTES for n in (4, 62, 11, 21)]
    for cache, twin in zip((idle[1], idle[2]), twins, strict=True):
        for layer_id in range(NUM_LAYERS):
            mine, its = states(cache, layer_id), states(twin, layer_id)
            assert torch.equal(mine[..., : its.shape[-2], :], its)
    (pool,) = stage.pools
    assert pool.num_rows == 2
    decode(stage, active)
    assert pooled_bytes(stage) <= before // 2


@pytest.mark.parametrize("num_active", [1, 0], ids=["one that decodes", "prompts"])
def test_they_leave_though_nobody_decodes_with_others(stage: Stage, num_active: int) -> None:
    caches = [begin(stage, 5) for _ in range(4)]
    decode(stage, caches)
    for _ in range(4 * IDLE_ROUNDS):
        if num_active:
            decode(stage, caches[:1])
        else:
            begin(stage, 2)
    assert not stage.pools
    assert all(cache.home is None for cache in caches)


def test_who_decodes_in_every_third_round_stays(stage: Stage) -> None:
    batches = [[begin(stage, 5) for _ in range(2)] for _ in range(3)]
    decode(stage, [cache for batch in batches for cache in batch])
    (pool,) = stage.pools
    for number in range(6 * IDLE_ROUNDS):
        decode(stage, batches[number % 3])
        begin(stage, 2)
        assert all(cache.home is pool for batch in batches for cache in batch)


def test_storage_is_bounded_by_who_decodes_however_many_are_kept(stage: Stage) -> None:
    numbers = random.Random(7)
    active: list[StageCache] = []
    kept: list[StageCache] = []
    for _ in range(20):
        active += [begin(stage, numbers.randrange(2, 100)) for _ in range(numbers.randrange(3))]
        while len(active) > 6:
            kept.append(active.pop(numbers.randrange(len(active))))
        for _ in range(3 * IDLE_ROUNDS if len(active) > 1 else 0):
            decode(stage, active)
        if len(active) > 1:
            assert sum(pool.num_rows for pool in stage.pools) == len(active)
            places = max(each.length for each in active) + 64
            assert pooled_bytes(stage) <= 2 * len(active) * places * TOKEN_BYTES
    resting = [cache for cache in kept if cache.home is None]
    assert len(resting) >= len(kept) - 4
    assert sum(cache.num_bytes for cache in resting) == TOKEN_BYTES * sum(
        cache.length for cache in resting
    )
    del kept, resting
    active.clear()
    assert pooled_bytes(stage) == 0


def test_a_store_keeps_what_is_in_it_as_it_grows_and_shrinks() -> None:
    keys = torch.randn(1, 2, 5, 4)
    store = RowStore(keys, -keys)
    store.grow(3, 8)
    store.fill(2, slice(0, 5), keys, -keys)
    store.grow(4, 70)
    smaller = store.reordered([2, 0], 6)
    assert (smaller.num_slots, smaller.capacity) == (2, 6)
    assert smaller.num_bytes == smaller.bytes_for(2, 6) == 2 * 2 * 2 * 6 * 4 * 4
    read_keys, read_values = smaller.read(0, slice(0, 5))
    assert torch.equal(read_keys, keys)
    assert torch.equal(read_values, -keys)
    assert not smaller.read(1, slice(0, 6))[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_storage_on_the_cpu_is_mapped_by_itself(dtype: torch.dtype) -> None:
    states = torch.zeros(1, 2, 3, 4, dtype=dtype)
    store = RowStore(states, states)
    store.grow(2, 8)
    for each in (store.keys, store.values, store.reordered([1], 4).keys):
        assert each.dtype == dtype
        assert each.data_ptr() % mmap.PAGESIZE == 0
        assert each.is_contiguous()


def test_a_store_that_finds_no_memory_says_so_and_stays_as_it_was() -> None:
    states = torch.zeros(1, 2, 3, 4)
    store = RowStore(states, states)
    store.grow(2, 8)
    with pytest.raises(MemoryError, match="no room"):
        store.grow(1 << 30, 1 << 20)  # 32 PiB
    assert (store.num_slots, store.capacity) == (2, 8)
