"""Waiting for members: what is said, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import trio
import trio.testing

from neurogrid.errors import NoRouteError
from neurogrid.training.leading.waiting import watch_members
from neurogrid.training.runs.machine import Rules, RunMachine
from neurogrid.training.runs.state import Occupant, RunState

WAIT = 60.0


class Said:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def listening(self, peer_id: str, addresses: object) -> None: ...

    def at_end(self, farewell: object) -> None: ...

    def say(self, text: str) -> None:
        self.lines.append(text)


def watched(
    events: dict[float, Callable[[RunMachine], None]], refusals: Sequence[str] = ()
) -> tuple[list[str], float, str]:
    """What is said while these happen, for how long it waits, and with what it ends."""
    machine = RunMachine(
        Rules(min_members=2, max_members=4, batch_samples=1, steps=1), RunState((8, 8), seed=0)
    )
    said = Said()

    async def main() -> tuple[float, str]:
        async with trio.open_nursery() as nursery:

            async def happen() -> None:
                for at, event in events.items():
                    await trio.sleep_until(began + at)
                    event(machine)

            began = trio.current_time()
            nursery.start_soon(happen)
            with trio.fail_after(10 * WAIT):
                try:
                    await watch_members(machine, said, lambda: refusals, wait=WAIT)
                except NoRouteError as exc:
                    return trio.current_time() - began, str(exc)
                return trio.current_time() - began, ""

    seconds, error = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return said.lines, seconds, error


def joins(name: str) -> Callable[[RunMachine], None]:
    return lambda machine: machine.joined(machine.reserve(name), Occupant(name, 1), name)


def loses(seat: int) -> Callable[[RunMachine], None]:
    return lambda machine: machine.left(seat, "lost")


def test_it_is_said_how_many_are_missing_until_they_have_come() -> None:
    lines, seconds, error = watched({5.5: joins("a"), 9.5: joins("b"), 70.5: lambda m: m.stop("")})
    assert lines == ["waiting for members: 0 of 2 are here", "waiting for members: 1 of 2 are here"]
    assert error == ""
    assert 70 < seconds < 73


def test_it_ends_where_too_few_come() -> None:
    _, seconds, error = watched({5.5: joins("a")})
    assert seconds == pytest.approx(WAIT, abs=2)
    assert error.startswith("the run has 1 of 2 members after 60 s")
    assert error.endswith("how many there have to be")


def test_it_ends_with_why_those_that_are_here_take_no_part() -> None:
    _, _, error = watched({5.5: joins("a")}, ["b: too small", "c: has failed"])
    assert error.endswith(". These are here and take no part: b: too small; c: has failed")


def test_each_time_counts_by_itself() -> None:
    lines, seconds, error = watched(
        {30.5: joins("a"), 31.5: joins("b"), 50.5: loses(0), 100.5: joins("c"), 101.5: loses(1)}
    )
    assert lines == [
        "waiting for members: 0 of 2 are here",
        "waiting for members: 1 of 2 are here",
        "waiting for members: 1 of 2 are here",
        "waiting for members: 1 of 2 are here",
    ]
    assert seconds == pytest.approx(101.5 + WAIT, abs=3)
    assert error
