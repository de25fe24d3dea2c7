"""A replica of a run: what it counts in a round, and what the figures of the round have of it."""

from __future__ import annotations

from neurogrid.training.leading.chains.chain import Chain
from neurogrid.training.leading.chains.replica import Replica, figures_of
from neurogrid.training.runs.entries import Assignment
from neurogrid.training.stages.holdings import holdings_of
from neurogrid.training.wire.runs import SampleRange, StepDone


def replica_of(*peers: str, bounds: tuple[int, ...]) -> Replica:
    number = len(peers)
    return Replica(Chain(number, tuple((peer,) for peer in peers), bounds, 0), number, peers[0])


def test_one_that_has_no_work_takes_over_what_the_others_have_learned() -> None:
    """It is in each of the reductions, with weight zero, and says nothing of a loss."""
    whole, chain = replica_of("a", bounds=(0, 4)), replica_of("b", "c", bounds=(0, 2, 4))
    work = Assignment(1, 0.0, 1.0, 8, (SampleRange(0, 0, 8),))
    whole.begin(work)
    chain.begin(None)
    assert (whole.weight, chain.weight) == (work.share, 0.0)
    for holding in holdings_of([whole.cut, chain.cut]):
        assert dict(zip(holding.members, holding.weights, strict=True))["a"] == work.share
        assert sum(holding.weights) == work.share
        assert {"b", "c"} & set(holding.members)
    whole.note(2.0, 16, 1.0, [StepDone(bytes(16), 1, 0, 1.0, seconds=3.0, waited=1.0)])
    assert (whole.num_steps, chain.num_steps) == (1, 0)
    figures = figures_of([whole, chain])
    assert (figures["loss"], figures["replicas"], figures["members"]) == (2.0, 2, 3)
    # Of the next round it has its part again.
    chain.begin(work)
    assert chain.weight == work.share
