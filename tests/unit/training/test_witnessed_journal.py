"""Events and states of a witnessed run as a journal holds them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from neurogrid.training.witnessed import (
    Checkpointed,
    Commitment,
    Committed,
    Eject,
    EpochPhase,
    EpochRules,
    EpochState,
    Event,
    Gone,
    Health,
    Joined,
    Left,
    Pause,
    Resume,
    Stop,
    Unhealthy,
    Warm,
    Witnessed,
    WitnessProof,
    due,
    event_json,
    event_of,
)
from tests.unit.training.simulated_witnessed import RULES, WitnessedRun, fold

WAITING = EpochPhase.WAITING_FOR_MEMBERS
WARMUP = EpochPhase.WARMUP
DRAW = bytes(32)


SOME: list[Event] = [
    Joined("a", 2**64 - 1),
    Gone("ä", 0),
    Left(3),
    Left(3, Health.WITHDRAWN),
    Warm(1, 2),
    Committed(Commitment(1, 2, 3, 2**64 - 1, 5, bytes(range(32))), b"sig"),
    Witnessed(WitnessProof.of(1, DRAW, 2, 3, []), bytes(512)),
    Unhealthy(1, (3, 2), 4, 5),
    Checkpointed(1, 2),
    Pause(),
    Resume(),
    Eject(4, b"\0\1", "p"),
    Stop("why"),
]


@pytest.mark.parametrize("event", SOME, ids=lambda event: type(event).__name__)
def test_an_event_reads_as_it_was_written(event: Event) -> None:
    written = event_json(event)
    assert event_of(written) == event
    assert event_of(dict(written)) == event
    with pytest.raises(ValueError, match="not known"):
        event_of({**written, "more": 1})
    for key in written:
        with pytest.raises(ValueError, match=r"."):
            event_of({name: value for name, value in written.items() if name != key})
        for other in (None, [-1], {}, -1, "x" * 2000, 1.5, True, 2**64):
            with pytest.raises(ValueError, match=r"."):
                event_of({**written, key: other})


@pytest.mark.parametrize("value", [None, 3, "joined", [], {}, {"kind": "other"}, {"kind": 3}])
def test_what_is_no_event_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        event_of(value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Joined("", 1),
        lambda: Joined("p" * 129, 1),
        lambda: Joined("p", 2**64),
        lambda: Left(-1),
        lambda: Left(1, Health.EJECTED),
        lambda: Stop(""),
        lambda: Eject(1, bytes(65_537)),
        lambda: Unhealthy(1, tuple(range(129)), 0, 0),
        lambda: Committed(Commitment(0, 0, 0, 0, 0, bytes(32)), bytes(513)),
        lambda: Commitment(0, 0, 0, 0, 0, bytes(31)),
        lambda: Commitment(0, 0, 0, 2**64, 0, bytes(32)),
        lambda: Commitment(2**32, 0, 0, 0, 0, bytes(32)),
        lambda: WitnessProof(0, 0, 0, bytes(127), bytes(128), bytes(32)),
        lambda: WitnessProof(0, 0, 0, bytes(128), bytes(128), bytes(31)),
    ],
)
def test_events_out_of_bounds_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        make()  # type: ignore[operator]


def test_a_journal_folds_to_the_same_state_from_anywhere() -> None:
    run = WitnessedRun(replace(RULES, rounds=2, auditors=1))
    states = [(0, run.state)]

    def note() -> None:
        states.append((len(run.journal), run.state))

    run.train("a", "b", "c", "d")
    run.commit()
    note()
    run.go(Unhealthy(0, (1,), 0, 1), Pause())
    note()
    run.wait(3)
    run.go(Resume())
    run.join("e")
    run.witness()
    note()
    run.go(Committed(run.commitment(2)), Committed(run.commitment(2, "another")))
    note()
    run.wait(20)
    run.wait(5)
    note()
    run.wait(10)
    run.warm()
    note()
    run.go(Stop("ä reason"))
    for begin, state in states:
        again = EpochState.read(state.json())
        assert again == state
        assert again.digest() == state.digest()
        assert fold(run.rules, run.journal[begin:], again) == run.state
    assert len({state.digest() for _, state in states}) == len(states)


def test_a_state_that_is_none_is_refused() -> None:
    run = WitnessedRun()
    run.train("a", "b")
    run.round()
    written = run.state.json()
    for key in written:
        for other in (None, -1, {}, "?", [["?"]], [None], 2**64, "zz" * 32):
            if not (key == "reason" and isinstance(other, str)):
                with pytest.raises(ValueError, match=r"."):
                    EpochState.read({**written, key: other})
        with pytest.raises(ValueError, match=r"."):
            EpochState.read({name: each for name, each in written.items() if name != key})
    with pytest.raises(ValueError, match=r"."):
        EpochState.read({**written, "more": 0})
    with pytest.raises(ValueError, match="finite"):
        EpochState.read({**written, "began": "7ff0000000000000"})
    with pytest.raises(ValueError, match="16 hexadecimal digits"):
        EpochState.read({**written, "began": "40 00 0000000000"})


def test_time_alone_brings_a_run_to_rest() -> None:
    for rules in (RULES, replace(RULES, witnesses=1), replace(RULES, min_members=1)):
        run = WitnessedRun(rules)
        run.train("a", "b", "c")
        run.commit([0])
        run.join("d")
        for _ in range(20):
            if (then := due(run.rules, run.state)) is None:
                break
            run.now = max(run.now, then)
            run.go()
        assert (run.state.phase, due(run.rules, run.state)) == (WAITING, None)


def test_rules_are_the_same_for_all_uses_of_them() -> None:
    assert isinstance(RULES, EpochRules)
    assert RULES.limit(WAITING) is None
    assert RULES.limit(WARMUP) == 30.0
