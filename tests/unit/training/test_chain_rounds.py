"""What a member of a replica takes of a leader: its own attempts, and the commit of one that it has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio

from neurogrid.errors import RemoteProtocolError
from neurogrid.training.members.chain_rounds import ChainRounds
from neurogrid.training.members.chain_stage import NeighbourLostError
from neurogrid.training.runs.run_file import OuterSection
from neurogrid.training.wire.runs import Average, Commit, StageOrder

RUN = bytes(16)
ORDER = StageOrder(RUN, 5, 20, 1, ("a", "b"), ("", ""), (0, 1, 4))


def rounds_of(**more: Any) -> ChainRounds:
    process = SimpleNamespace(is_tied=True)
    given: Any = {"process": process, "reductions": None, "reach": None, **more}
    return ChainRounds(ORDER, own="b", outer=OuterSection.of("diloco"), **given)


def average(**more: Any) -> Average:
    given = {
        "run": RUN,
        "chain": 5,
        "step": 24,
        "attempt": 7,
        "peers": ("whole", "a", "b"),
        "addresses": ("", "", ""),
        "stages": (1, 2),
        "bounds": (0, 4, 0, 1, 4),
        "weights": (8.0, 8.0),
    }
    return Average(**{**given, **more})


def test_an_attempt_is_due_until_it_is_made() -> None:
    rounds = rounds_of()
    assert not rounds.is_due
    rounds.take_average(average())
    assert rounds.is_due


@pytest.mark.parametrize(
    "wrong",
    [
        average(peers=("whole", "a", "c")),
        average(peers=("whole", "b", "a")),
        average(bounds=(0, 4, 0, 2, 4)),
        average(stages=(2, 1), bounds=(0, 1, 4, 0, 4)),
    ],
)
def test_an_attempt_of_another_chain_is_refused(wrong: Average) -> None:
    rounds = rounds_of()
    with pytest.raises(RemoteProtocolError, match="of other replicas"):
        rounds.take_average(wrong)
    assert not rounds.is_due


def test_a_commit_of_nothing_is_refused() -> None:
    rounds = rounds_of()
    for begin in (lambda: None, lambda: rounds.take_average(average())):
        begin()
        with pytest.raises(RemoteProtocolError, match="has come to nothing here"):
            rounds.take_commit(Commit(RUN, 5, 7, 24))


async def test_an_attempt_after_another_step_is_refused() -> None:
    rounds = rounds_of()
    rounds.take_average(average())
    with pytest.raises(RemoteProtocolError, match="a round after step 24, and 20 is next here"):
        await rounds.average(20)


async def test_a_fault_of_another_is_said_and_nothing_has_come_of_the_attempt() -> None:
    async def reach(told: Average, contacts: frozenset[str]) -> None:
        assert contacts == {"whole", "a", "b"}
        raise NeighbourLostError("it cannot be reached", "whole")

    rounds = rounds_of(reach=reach)
    rounds.take_average(average())
    told = await rounds.average(24)
    assert told is not None
    assert (told.digests, told.lost, told.reason) == ((), "whole", "it cannot be reached")
    with pytest.raises(RemoteProtocolError, match="has come to nothing here"):
        rounds.take_commit(Commit(RUN, 5, 7, 24))


async def test_ends_that_have_nothing_tied_are_not_reached_from_each_other() -> None:
    reached: list[frozenset[str]] = []

    async def reach(told: Average, contacts: frozenset[str]) -> None:
        reached.append(contacts)
        raise NeighbourLostError("it cannot be reached", "whole")

    for is_tied in (True, False):
        rounds = rounds_of(reach=reach, process=SimpleNamespace(is_tied=is_tied))
        rounds.take_average(average())
        await rounds.average(24)
    assert reached == [{"whole", "a", "b"}, {"whole", "b"}]


async def test_a_later_attempt_takes_the_place_of_one_under_way() -> None:
    begun = trio.Event()

    async def reach(told: Average, contacts: frozenset[str]) -> None:
        begun.set()
        await trio.sleep_forever()

    rounds = rounds_of(reach=reach)
    rounds.take_average(average())
    async with trio.open_nursery() as nursery:

        async def go() -> None:
            assert await rounds.average(24) is None

        nursery.start_soon(go)
        await begun.wait()
        rounds.take_average(average(attempt=8))
    assert rounds.is_due
