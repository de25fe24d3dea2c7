"""Which sessions go together: in as many batches as there are stages, of equal sizes, and none needlessly small."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.inference.generation.micro_batches import (
    FEW_ROWS,
    MAX_PAUSE,
    MIN_PAUSE,
    MIN_ROWS,
    SPACING,
    MicroBatch,
    MicroBatches,
)
from neurogrid.model.stages.stage import MAX_ROWS

NEAR, FAR = ("near",), ("near", "middle", "far")


def sizes(batches: MicroBatches, sessions: range) -> list[int]:
    found = {id(batch): batch for batch in map(batches.of, sessions)}
    return sorted(len(batch.sessions) for batch in found.values())


def test_there_are_as_many_as_stages_when_there_are_sessions_enough() -> None:
    batches = MicroBatches()
    seen = []
    for session in range(14):
        batches.join(session, FAR)
        seen.append(sizes(batches, range(session + 1)))
    assert seen[:8] == [[1], [2], [3], [4], [5], [6], [7], [4, 4]]
    assert seen[11:] == [[4, 4, 4], [4, 4, 5], [4, 5, 5]]


def test_one_stage_has_one_batch_and_a_forward_pass_so_many_rows() -> None:
    batches = MicroBatches()
    for session in range(MAX_ROWS + 1):
        batches.join(session, NEAR)
    assert sizes(batches, range(MAX_ROWS + 1)) == [MAX_ROWS // 2, MAX_ROWS // 2 + 1]


def test_sessions_on_other_peers_go_apart_and_one_may_change() -> None:
    batches = MicroBatches()
    for session in (1, 2, 3):
        batches.join(session, FAR)
    batches.join(4, NEAR)
    assert batches.of(4) is not batches.of(1)
    batches.join(4, FAR)
    assert batches.of(4) is batches.of(1)
    assert batches.of(1).sessions == [1, 2, 3, 4]


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.booleans(), st.integers(0, 200)), max_size=300),
)
def test_all_are_in_one_and_they_are_of_equal_sizes(
    num_stages: int, events: list[tuple[bool, int]]
) -> None:
    batches, there = MicroBatches(), set[int]()
    peers = [f"peer {i}" for i in range(num_stages)]
    for joins, session in events:
        if joins:
            batches.join(session, peers)
            there.add(session)
        else:
            batches.leave(session)
            there.discard(session)
        found = {id(batch): batch for batch in map(batches.of, there)}
        assert sorted(each for batch in found.values() for each in batch.sessions) == sorted(there)
        counts = [len(batch.sessions) for batch in found.values()]
        assert max(counts, default=0) - min(counts, default=0) <= 1
        assert max(counts, default=0) <= MAX_ROWS
        if len(there) <= MAX_ROWS:
            assert min(num_stages, len(there) // MIN_ROWS) <= len(counts) <= num_stages
            assert len(counts) <= 1 or min(counts) >= FEW_ROWS


def test_they_start_one_after_the_other() -> None:
    batches = MicroBatches()
    for session in range(3 * MIN_ROWS):
        batches.join(session, FAR)
    first, second = (
        batches.of(0),
        next(batch for batch in map(batches.of, range(12)) if batch is not batches.of(0)),
    )
    assert first.others_started == -math.inf
    first.starts(50.0, is_whole=True)
    assert first.others_started == -math.inf
    assert second.others_started == 50.0
    assert second.spacing(0.3) == pytest.approx(SPACING * 0.1)
    second.starts(51.0, is_whole=True)
    assert first.others_started == 51.0


def test_who_does_not_come_around_is_waited_for_ever_more_rarely() -> None:
    batch = MicroBatch(NEAR, [])
    waits = []
    for step in range(12 * MAX_PAUSE):
        if batch.is_gathering:
            waits.append(step)
        batch.starts(0.0, is_whole=False)
    pauses = [after - before - 1 for before, after in itertools.pairwise(waits)]
    assert pauses[:3] == [MIN_PAUSE, 2 * MIN_PAUSE, 4 * MIN_PAUSE]
    assert max(pauses) == MAX_PAUSE
    batch.starts(0.0, is_whole=True)
    assert batch.is_gathering
    batch.starts(0.0, is_whole=False)
    assert not batch.is_gathering
    batch.changed()
    assert batch.is_gathering
