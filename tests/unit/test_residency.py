"""Which models are open: what gives way to whom, and that nothing takes turns all the time."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from neurogrid.inference.residency import (
    Close,
    ModelState,
    MovingCount,
    Open,
    Residency,
    ResidencyLimits,
)

LIMITS = ResidencyLimits(idle_after=60.0, min_ready=10.0, retry_after=30.0)


def opened(*names: str, limits: ResidencyLimits = LIMITS) -> Residency:
    """Models that were opened at 0."""
    residency = Residency(limits)
    for name in names:
        residency.add(name, 0.0, is_wanted=True)
    for name in names:
        assert residency.next(0.0) == [Open(name)]
        residency.opened(name, 0.0)
    assert residency.next(0.0) == []
    return residency


def standing_by(name: str, *others: str, limits: ResidencyLimits = LIMITS) -> Residency:
    """One that found no room beside the others."""
    residency = opened(*others, limits=limits)
    residency.add(name, 0.0, is_wanted=True)
    assert residency.next(0.0) == [Open(name)]
    residency.no_room(name, 0.0, "too large")
    return residency


def test_what_was_named_is_opened_one_after_the_other() -> None:
    residency = Residency(LIMITS)
    residency.add("a", 0.0, is_wanted=True)
    residency.add("b", 0.0, is_wanted=True)
    assert residency.next(0.0) == [Open("a")]
    assert residency.next(0.0) == []
    assert not residency.is_settled("b")
    residency.failed("a", 1.0, "broken")
    assert residency.next(1.0) == [Open("b")]
    residency.opened("b", 2.0)
    assert residency.state("a") is ModelState.FAILED
    assert residency.reason("a") == "broken"
    assert residency.is_settled("a")
    assert residency.is_settled("b")


def test_nothing_is_put_down_while_nobody_lacks_room() -> None:
    residency = opened("a", "b")
    assert residency.next(1e9) == []
    assert residency.wake_at(0.0) == math.inf


def test_the_one_that_was_used_the_longest_ago_gives_way() -> None:
    residency = standing_by("c", "a", "b")
    assert residency.next(200.0) == []  # nobody asks for it
    residency.began("a", 50.0)
    residency.ended("a", 55.0)
    residency.asked("c", 56.0)  # tried again: workers may have come
    assert residency.next(56.0) == [Open("c")]
    residency.no_room("c", 57.0, "too large")
    assert residency.next(57.0) == []
    assert residency.wake_at(57.0) == 60.0
    assert residency.next(60.0) == [Close("b")]
    assert residency.next(60.0) == []  # one at a time
    residency.closed("b", 61.0)
    assert residency.next(61.0) == [Open("c")]
    residency.opened("c", 63.0)
    assert [residency.state(name) for name in ("a", "b", "c")] == ["ready", "idle", "ready"]


def test_what_is_in_use_does_not_give_way() -> None:
    residency = standing_by("b", "a")
    residency.began("a", 1.0)
    residency.asked("b", 2.0)
    assert residency.next(1000.0) == []
    residency.ended("a", 1000.0)
    assert residency.next(1059.0) == []
    assert residency.wake_at(1059.0) == 1060.0
    assert residency.next(1060.0) == [Close("a")]


def test_what_was_just_opened_is_safe_for_as_long_as_that_took() -> None:
    limits = ResidencyLimits(idle_after=1.0, min_ready=10.0)
    residency = Residency(limits)
    residency.add("a", 0.0, is_wanted=True)
    residency.next(0.0)
    residency.opened("a", 40.0)
    residency.add("b", 40.0, is_wanted=True)
    residency.next(40.0)
    residency.no_room("b", 41.0, "too large")
    residency.asked("b", 41.0)
    assert residency.next(79.0) == []
    assert residency.wake_at(79.0) == 80.0
    assert residency.next(80.0) == [Close("a")]


def test_those_who_wait_for_it_when_it_closes_come_after_those_for_whom_it_did() -> None:
    residency = standing_by("b", "a")
    residency.asked("b", 60.0)
    residency.next(60.0)
    residency.no_room("b", 60.0, "too large")
    assert residency.next(60.0) == [Close("a")]
    residency.asked("a", 60.5)
    residency.closed("a", 61.0)
    assert residency.next(61.0) == [Open("b")]
    residency.opened("b", 62.0)
    residency.gave_up("b")
    assert residency.next(62.0) == [Open("a")]
    residency.no_room("a", 72.0, "too large")
    assert residency.next(100.0) == []
    assert residency.next(122.0) == [Close("b")]


def test_workers_may_need_a_moment_to_notice_that_they_are_free() -> None:
    residency = standing_by("b", "a")
    residency.asked("b", 60.0)
    residency.next(60.0)
    residency.no_room("b", 60.0, "too large")
    residency.next(60.0)
    residency.closed("a", 61.0)
    for at in (61.0, 62.0, 63.0):
        assert residency.next(at) == [Open("b")]
        residency.no_room("b", at, "busy")
        assert residency.next(at) == []
        assert residency.wake_at(at) == at + 1
    assert residency.next(72.0) == [Open("b")]
    residency.no_room("b", 72.0, "busy")
    assert residency.state("b") is ModelState.FAILED


def test_where_no_other_has_room_either_it_failed() -> None:
    residency = Residency(LIMITS)
    residency.add("a", 0.0, is_wanted=True)
    residency.next(0.0)
    residency.no_room("a", 1.0, "too large")
    assert residency.state("a") is ModelState.FAILED
    residency.asked("a", 2.0)
    assert residency.is_hopeless("a", 2.0)
    assert residency.next(2.0) == []
    assert residency.wake_at(2.0) == 31.0
    assert residency.next(31.0) == [Open("a")]


def test_nothing_is_put_down_for_one_that_would_not_fit_then() -> None:
    residency = opened("a")
    residency.add("b", 0.0, is_wanted=True)
    assert residency.next(0.0) == [Open("b")]
    residency.no_room("b", 1.0, "too large", others_may_do=False)
    assert residency.state("b") is ModelState.FAILED
    residency.asked("b", 100.0)
    assert residency.next(100.0) == [Open("b")]
    residency.no_room("b", 101.0, "too large", others_may_do=False)
    assert residency.next(101.0) == []


def test_one_that_is_removed_is_closed_and_forgotten() -> None:
    residency = opened("a", "b")
    residency.began("a", 1.0)
    residency.remove("a", 2.0)
    assert residency.names == ("b",)
    assert residency.next(2.0) == [Close("a")]  # whoever closes it waits for those that use it
    assert residency.is_known("a")
    residency.ended("a", 3.0)
    residency.closed("a", 3.0)
    assert not residency.is_known("a")
    residency.ended("a", 4.0)
    residency.remove("a", 4.0)


def test_one_that_is_removed_while_it_opens_is_closed_then() -> None:
    residency = Residency(LIMITS)
    residency.add("a", 0.0, is_wanted=True)
    residency.next(0.0)
    residency.remove("a", 1.0)
    assert residency.is_known("a")
    residency.opened("a", 2.0)
    assert residency.next(2.0) == [Close("a")]


def test_without_an_end_to_being_idle_nobody_gives_way() -> None:
    residency = standing_by("b", "a", limits=ResidencyLimits(idle_after=math.inf))
    assert not residency.may_get_room("b")
    residency.asked("b", 1.0)
    assert residency.next(1e9) == []


def test_what_was_asked_long_ago_counts_for_little() -> None:
    count = MovingCount(half_life=10.0)
    assert count.value(5.0) == 0
    count.add(0.0, 100)
    count.add(10.0, 10)
    assert count.value(10.0) == 60
    assert count.value(20.0) == 30


class Together(RuleBasedStateMachine):
    """Models of which two have room, asked for at random: the world answers as keepers do."""

    ROOM = 2
    NAMES = ("a", "b", "c", "d")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.residency = Residency(LIMITS)
        self.opening: set[str] = set()
        self.closing: set[str] = set()
        self.open: dict[str, float] = {}
        self.running = dict.fromkeys(self.NAMES, 0)
        self.waiting = dict.fromkeys(self.NAMES, 0)
        self.used = dict.fromkeys(self.NAMES, -math.inf)
        for name in self.NAMES:
            self.residency.add(name, 0.0, is_wanted=False)

    def look(self) -> None:
        for action in self.residency.next(self.now):
            if isinstance(action, Open):
                assert action.name not in (self.opening | self.closing | self.open.keys())
                assert self.waiting[action.name]
                self.opening.add(action.name)
            else:
                name = action.name
                assert not self.running[name]
                assert not self.waiting[name]
                assert self.now >= self.open[name] + LIMITS.min_ready
                assert self.now >= self.used[name] + LIMITS.idle_after
                assert len(self.open) + len(self.closing) >= self.ROOM  # somebody lacks room
                del self.open[name]
                self.closing.add(name)

    @rule(name=st.sampled_from(NAMES))
    def ask(self, name: str) -> None:
        if name in self.open:
            self.residency.began(name, self.now)
            self.running[name] += 1
        else:
            self.residency.asked(name, self.now)
            self.waiting[name] += 1
        self.used[name] = self.now
        self.look()

    @rule(name=st.sampled_from(NAMES))
    def end(self, name: str) -> None:
        if self.running[name]:
            self.running[name] -= 1
            self.used[name] = self.now
            self.residency.ended(name, self.now)
        self.look()

    @rule(name=st.sampled_from(NAMES))
    def give_up(self, name: str) -> None:
        if self.waiting[name]:
            self.waiting[name] -= 1
            self.residency.gave_up(name)
        self.look()

    @precondition(lambda self: self.opening)
    @rule(is_broken=st.booleans())
    def finish_opening(self, is_broken: bool) -> None:
        name = self.opening.pop()
        if is_broken:
            self.residency.failed(name, self.now, "broken")
        elif len(self.open) + len(self.closing) >= self.ROOM:
            self.residency.no_room(name, self.now, "too large")
        else:
            self.residency.opened(name, self.now)
            self.open[name] = self.now
            self.used[name] = self.now
            while self.waiting[name]:
                self.waiting[name] -= 1
                self.residency.gave_up(name)
                self.residency.began(name, self.now)
                self.running[name] += 1
        self.look()

    @precondition(lambda self: self.closing)
    @rule()
    def finish_closing(self) -> None:
        name = self.closing.pop()
        self.residency.closed(name, self.now)
        self.look()

    @rule(seconds=st.floats(0.1, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.look()

    @rule()
    def wait_as_it_says(self) -> None:
        at = self.residency.wake_at(self.now)
        if math.isfinite(at):
            assert at > self.now
            self.now = at
            self.look()

    @invariant()
    def agrees(self) -> None:
        assert len(self.opening) <= LIMITS.max_opening
        assert len(self.open) + len(self.closing) <= self.ROOM
        for name in self.NAMES:
            state = self.residency.state(name)
            assert (state is ModelState.READY) == (name in self.open)
            assert (state is ModelState.OPENING) == (name in self.opening)
            assert (state is ModelState.CLOSING) == (name in self.closing)


TestTogether = Together.TestCase
TestTogether.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
