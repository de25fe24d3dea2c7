"""Which sessions go together: in as many batches as there are stages, of equal sizes, whole, none needlessly small."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from neurogrid.inference.generation.micro_batches import (
    FEW_ROWS,
    MAX_PAUSE,
    MIN_PAUSE,
    MIN_ROWS,
    PATIENCE,
    MicroBatches,
)
from neurogrid.model.stages.stage import MAX_ROWS

NEAR, FAR = ("near",), ("near", "middle", "far")


def sizes(batches: MicroBatches, sessions: range) -> list[int]:
    counts: dict[object, int] = defaultdict(int)
    for session in sessions:
        counts[id(batches.companions(session))] += 1
    return sorted(counts.values())


def test_there_are_as_many_as_stages_when_there_are_sessions_enough() -> None:
    batches = MicroBatches()
    seen = []
    for session in range(14):
        batches.arrived(session, FAR, 0.0)
        seen.append(sizes(batches, range(session + 1)))
    assert seen[:8] == [[1], [2], [3], [4], [5], [6], [7], [4, 4]]
    assert seen[11:] == [[4, 4, 4], [4, 4, 5], [4, 5, 5]]


def test_one_stage_has_one_batch_and_a_forward_pass_so_many_rows() -> None:
    batches = MicroBatches()
    for session in range(MAX_ROWS + 1):
        batches.arrived(session, NEAR, 0.0)
    assert sizes(batches, range(MAX_ROWS + 1)) == [MAX_ROWS // 2, MAX_ROWS // 2 + 1]


def test_sessions_on_other_peers_go_apart_and_one_may_change() -> None:
    batches = MicroBatches()
    for session in (1, 2, 3):
        batches.arrived(session, FAR, 0.0)
    batches.arrived(4, NEAR, 0.0)
    assert batches.companions(4) is not batches.companions(1)
    batches.arrived(4, FAR, 0.0)
    assert batches.companions(4) is batches.companions(1)
    assert batches.leave(0.0) == [1, 2, 3, 4]
    assert [batches.batch(session) for session in (1, 2, 3, 4)] == [(1, 4)] * 4


def test_one_alone_leaves_at_once_and_has_no_number() -> None:
    batches = MicroBatches()
    batches.arrived(1, NEAR, 5.0)
    assert batches.batch(1) is None
    assert batches.leave(5.0) == [1]
    assert batches.batch(1) == ()


def test_one_that_joins_waits_for_those_that_are_away() -> None:
    batches = MicroBatches()
    batches.arrived(1, FAR, 0.0)
    batches.leave(0.0)
    batches.arrived(2, FAR, 1.0)
    assert (batches.leave(100.0), batches.leaves_at) == ([], math.inf)
    batches.came_back(1)
    assert batches.is_back(1)
    assert batches.leave(100.0) == []  # its next token is being chosen
    batches.chosen(1, 100.0)
    assert (batches.leave(100.0), batches.leaves_at) == ([], 100.0 + PATIENCE)
    batches.arrived(1, FAR, 100.001)
    assert batches.leave(100.001) == [1, 2]


def test_a_reader_that_is_slow_is_waited_for_ever_more_rarely() -> None:
    batches, now = MicroBatches(), 0.0
    batches.arrived(2, NEAR, now)
    batches.leave(now)
    batches.came_back(2)
    batches.chosen(2, now)  # and its reader is away for long
    waits = []
    for step in range(12 * MAX_PAUSE):
        now += 1.0
        batches.arrived(1, NEAR, now)
        if not batches.leave(now):
            waits.append(step)
            assert batches.leaves_at == now + PATIENCE
            assert batches.leave(now + PATIENCE) == [1]
        batches.came_back(1)
        batches.chosen(1, now + PATIENCE)
    pauses = [after - before - 1 for before, after in itertools.pairwise(waits)]
    assert pauses[:3] == [MIN_PAUSE, 2 * MIN_PAUSE, 4 * MIN_PAUSE]
    assert max(pauses) == MAX_PAUSE


class EveryCourse(RuleBasedStateMachine):
    """Sessions that come, go around, are slow and end, in any order, over some workers."""

    def __init__(self) -> None:
        super().__init__()
        self.batches, self.now = MicroBatches(), 0.0
        self.place: dict[int, str] = {}
        self.left_with: dict[int, tuple[int, ...]] = {}
        self.peers: dict[int, tuple[str, ...]] = {}

    def leave(self) -> None:
        left = self.batches.leave(self.now)
        by_number: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for session in left:
            assert isinstance(session, int)
            assert self.place[session] == "here"
            self.place[session] = "away"
            batch = self.batches.batch(session)
            assert batch is not None
            by_number[batch].append(session)
            self.left_with[session] = batch
        for batch, sessions in by_number.items():
            if batch:
                number, size = batch
                assert size == len(sessions) > 1
                assert len({self.peers[session] for session in sessions}) == 1
                older = {b[0] for s, b in self.left_with.items() if b and s not in sessions}
                assert number not in older

    @rule(session=st.integers(0, 40), num_stages=st.integers(1, 3))
    def arrive(self, session: int, num_stages: int) -> None:
        if self.place.get(session, "out") == "out":
            self.peers[session] = tuple(f"peer {i}" for i in range(num_stages))
            self.batches.arrived(session, self.peers[session], self.now)
            self.place[session] = "here"
            self.leave()

    @precondition(lambda self: "away" in self.place.values())
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        session = data.draw(self.those("away"))
        self.batches.came_back(session)
        self.place[session] = "back"

    @precondition(lambda self: "back" in self.place.values())
    @rule(data=st.data())
    def choose(self, data: st.DataObject) -> None:
        """Have the tokens of all chosen that go together, once they are back."""
        session = data.draw(self.those("back"))
        if self.batches.is_back(session):
            its = self.batches.companions(session)
            chosen = [
                s
                for s, place in self.place.items()
                if place == "back" and self.batches.companions(s) is its
            ]
            for each in chosen:
                self.batches.chosen(each, self.now)
                self.place[each] = "out"
            self.leave()

    @precondition(lambda self: self.place)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.place)))
        self.batches.ended(session)
        del self.place[session], self.peers[session]
        self.left_with.pop(session, None)
        assert session not in self.batches
        self.leave()

    @rule(seconds=st.sampled_from([PATIENCE / 3, PATIENCE, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.leave()

    def those(self, place: str) -> st.SearchStrategy[int]:
        return st.sampled_from(sorted(s for s, where in self.place.items() if where == place))

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        """Whoever is here waits for one that is away, being chosen, or out for no longer than the patience."""
        groups: dict[object, list[int]] = defaultdict(list)
        for session in self.place:
            groups[id(self.batches.companions(session))].append(session)
        for sessions in groups.values():
            places = {self.place[session] for session in sessions}
            if "here" in places and not places & {"away", "back"}:
                assert "out" in places
                assert self.batches.leaves_at <= self.now + PATIENCE

    @invariant()
    def they_are_of_equal_sizes(self) -> None:
        for peers in set(self.peers.values()):
            counts: dict[object, int] = defaultdict(int)
            for session, its in self.peers.items():
                if its == peers:
                    counts[id(self.batches.companions(session))] += 1
            num_sessions = sum(counts.values())
            assert max(counts.values()) - min(counts.values()) <= 1
            assert max(counts.values()) <= MAX_ROWS
            assert min(len(peers), num_sessions // MIN_ROWS) <= len(counts) <= len(peers)
            assert len(counts) <= 1 or min(counts.values()) >= FEW_ROWS


TestEveryCourse = EveryCourse.TestCase
