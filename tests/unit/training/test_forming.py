"""Replicas that are about to be: how free members are cut, and what is said of it."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

from neurogrid.training.leading.chains.forming import Forming
from neurogrid.training.leading.chains.members import ChainWorker
from neurogrid.training.runs.run_file import LayoutSection
from neurogrid.training.stages.cutting import StageSizes

MIB = 2**20
# A stage of two layers has room in what each member lends, beside Python and torch, and one of three has not.
SIZES = StageSizes((100 * MIB,) * 4, 0, 0, 0)
LENT = 750 * MIB


def test_two_that_are_put_apart_are_told_of_once() -> None:
    lost: set[frozenset[str]] = set()
    numbers, said = count(1), list[str]()
    members: Any = SimpleNamespace(
        usable=lambda: ["a", "b", "c", "d"],
        get=lambda peer: ChainWorker(memory=LENT),
        are_apart=lambda peer, other: frozenset((peer, other)) in lost,
        called=lambda peer: f"worker {peer}",
    )
    orders: Any = SimpleNamespace(draw_number=lambda: next(numbers))

    def peers() -> list[tuple[str, ...]]:
        forming = Forming(
            members,
            orders,
            SIZES,
            LayoutSection(stages=2, replicas=2),
            set,
            lambda: 0,
            is_tied=False,
            say=said.append,
        )
        found = [chain.peers for chain in forming._cut({"a", "b", "c", "d"})]
        forming._chains.clear()
        assert [chain.peers for chain in forming._cut({"a", "b", "c", "d"})] == found
        return found

    assert peers() == [("a", "b"), ("c", "d")]
    assert said == []
    lost.add(frozenset("ab"))
    assert peers() == [("a", "c"), ("b", "d")]
    assert said == [
        "worker a and worker b cannot reach each other: they are put where they need not"
    ]
    said.clear()
    # There is no other way: they are tried again.
    lost.update(map(frozenset, ("ac", "ad", "bc", "bd", "cd")))
    assert peers() == [("a", "b"), ("c", "d")]
    assert said == []
