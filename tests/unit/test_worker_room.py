"""A worker's memory among its tenants: never more promised than there is, and nobody loses what it uses."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from neurogrid.errors import CapacityError
from neurogrid.worker.room import PLACING_SECONDS, UNUSED_SECONDS, Promise, Room

CAPACITY, IDLE_AFTER = 100, 60.0
OWNERS = st.sampled_from(("ann", "bob", "eve"))


class RoomMachine(RuleBasedStateMachine):
    """Assignments, steps, time that goes on; a model of when each tenant last had something to do."""

    def __init__(self) -> None:
        super().__init__()
        self.room = Room(IDLE_AFTER)
        self.now = 0.0
        self.safe_until: dict[str, float] = {}
        self.steps: dict[str, list[Promise | None]] = {}
        self.promised: dict[str, int] = {}

    def is_safe(self, owner: str) -> bool:
        return bool(self.steps.get(owner)) or self.now < self.safe_until[owner]

    @rule(owner=OWNERS, num_bytes=st.integers(0, 120))
    def ask(self, owner: str, num_bytes: int) -> None:
        others = {other: size for other, size in self.promised.items() if other != owner}
        kept = sum(size for other, size in others.items() if self.is_safe(other))
        free = self.room.free(owner, CAPACITY, self.now)
        assert free == CAPACITY - kept
        if num_bytes > free:
            with pytest.raises(CapacityError) as refused:
                self.room.ask(owner, num_bytes, CAPACITY, self.now)
            assert refused.value.available == free
            num_safe = sum(map(self.is_safe, others))
            assert (f"other coordinators hold {kept}" in str(refused.value)) == (num_safe > 1)
            return
        going = self.room.ask(owner, num_bytes, CAPACITY, self.now)
        for other in going:
            assert not self.is_safe(other)
            # Not for nothing: without it there was no room.
            left = sum(size for rest, size in others.items() if rest not in going)
            assert num_bytes + left + others[other] > CAPACITY
            del self.promised[other], self.safe_until[other]
            self.steps.pop(other, None)
        self.promised[owner] = num_bytes
        self.safe_until[owner] = self.now + PLACING_SECONDS

    @rule(owner=OWNERS)
    def get_ready(self, owner: str) -> None:
        self.room.ready(owner, self.now)
        if owner in self.promised:
            self.safe_until[owner] = self.now + UNUSED_SECONDS

    @rule(owner=OWNERS)
    def open_session(self, owner: str) -> None:
        self.room.used(owner, self.now)
        if owner in self.promised:
            self.safe_until[owner] = self.now + IDLE_AFTER

    @rule(owner=OWNERS)
    def begin(self, owner: str) -> None:
        step = self.room.begin(owner)
        assert (step is None) == (owner not in self.promised)
        if step is not None:
            self.steps.setdefault(owner, []).append(step)

    @rule(owner=OWNERS)
    def end(self, owner: str) -> None:
        if self.steps.get(owner):
            self.room.end(self.steps[owner].pop(), self.now)
            self.safe_until[owner] = max(self.safe_until[owner], self.now + IDLE_AFTER)

    @rule(seconds=st.sampled_from((1.0, 31.0, 61.0, 1801.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(owner=OWNERS)
    def leave(self, owner: str) -> None:
        self.room.leave(owner)
        for known in (self.promised, self.safe_until, self.steps):
            known.pop(owner, None)

    @invariant()
    def nothing_is_promised_twice(self) -> None:
        assert {owner: promise.num_bytes for owner, promise in self.room} == self.promised
        assert self.room.promised_bytes == sum(self.promised.values()) <= CAPACITY


TestRoom = RoomMachine.TestCase
TestRoom.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_longest_unused_gives_way_and_only_as_many_as_it_takes() -> None:
    room = Room(IDLE_AFTER)
    for number, (owner, size) in enumerate((("ann", 20), ("bob", 30), ("eve", 40))):
        room.ask(owner, size, CAPACITY, 0.0)
        room.used(owner, float(number))
    assert room.ask("dan", 10, CAPACITY, 1000.0) == ()
    assert room.ask("fay", 15, CAPACITY, 1000.0) == ("ann",)
    # Ann's part, which is free by now, and Bob's are too small; with Eve's, Bob's is not needed.
    room.leave("fay")
    assert room.ask("fay", 55, CAPACITY, 1000.0) == ("eve",)


def test_two_do_not_take_the_memory_from_each_other_in_turns() -> None:
    """Who waits gets it once the other one is idle, and who had it does not get it back before that one is."""
    room = Room(IDLE_AFTER)
    now, turns = 0.0, []
    for _ in range(2000):
        for owner in ("ann", "bob"):  # both want all of it, all the time
            if owner in room:
                continue
            try:
                room.ask(owner, CAPACITY, CAPACITY, now)
            except CapacityError:
                continue
            room.used(owner, now)
            turns.append((owner, now))
        now += 1.0
    assert [owner for owner, _ in turns] == ["ann", "bob"] * (len(turns) // 2) + ["ann"] * (
        len(turns) % 2
    )
    assert {after - before for (_, before), (_, after) in pairwise(turns)} == {IDLE_AFTER}


def test_a_refusal_says_who_has_it() -> None:
    room = Room(IDLE_AFTER)
    room.ask("ann", 70, CAPACITY, 0.0)
    room.used("ann", 0.0)
    with pytest.raises(CapacityError) as refused:
        room.ask("bob", 40, CAPACITY, 20.0, purpose="for layers 0 to 3")
    assert str(refused.value) == (
        "40 B are needed for layers 0 to 3, and this worker has 30 B: 1 other coordinator holds 70 B of its 100 B, and "
        "the first of them gives way in 40 s if it stays idle"
    )
    room.begin("ann")
    with pytest.raises(CapacityError, match=r"70 B of its 100 B$"):
        room.ask("bob", 40, CAPACITY, 500.0)
    with pytest.raises(CapacityError, match=r"and this worker has 100 B$"):
        Room(IDLE_AFTER).ask("bob", 101, CAPACITY, 0.0)
