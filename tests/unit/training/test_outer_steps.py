"""Replicas that are cut otherwise, and make outer steps together: as torch's SGD would of their mean differences."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from neurogrid.errors import CheckpointError
from neurogrid.training.optimizers.vectors import check_finite
from neurogrid.training.stages.holdings import Cut, holdings_of
from neurogrid.training.stages.stage_learner import StageLearner
from tests.unit.training.test_stage_learner import Chain, same, same_pieces, tensors_of

LR, MOMENTUM, NUM_STEPS, NUM_ROUNDS = 0.7, 0.9, 2, 3
WEIGHTS = (8.0, 24.0)
CUTS = ((), (1,), (2, 3))


def replica(family: str, *cuts: int, momentum: float = MOMENTUM) -> Chain:
    return Chain(family, *cuts, outer_lr=LR, outer_momentum=momentum)


def average(
    chains: Sequence[Chain], cuts: Sequence[Sequence[int]], weights: Sequence[float]
) -> None:
    """What members do with an Average, in this process; the sums are in the order of the replicas."""
    learners: dict[str, StageLearner] = {}
    told = []
    for number, (chain, cut, weight) in enumerate(zip(chains, cuts, weights, strict=True)):
        peers = tuple(f"{number}.{stage}" for stage in range(len(chain.stages)))
        learners |= dict(zip(peers, chain.stages, strict=True))
        told.append(Cut(peers, (0, *cut, 4), weight))
    holdings = holdings_of(told)
    means = {}
    for peer, learner in learners.items():
        assert learner.outer is not None
        groups = [each.pieces for each in holdings if peer in each.members]
        means[peer] = learner.outer.differences(groups)
    for each in holdings:
        # A member's reductions are in the order of their numbers.
        own = [torch.as_tensor(next_of(means[peer])) for peer in each.members]
        total = sum(each.weights)
        mean = sum(
            (vector * (weight / total) for vector, weight in zip(own, each.weights, strict=True)),
            start=torch.zeros_like(own[0]),
        )
        for peer in each.members:
            pending[id(means[peer])] = mean
    for peer, learner in learners.items():
        with pytest.raises(StopIteration):
            next_of(means[peer])
        assert learner.outer is not None
        learner.outer.commit()
    pending.clear()


pending: dict[int, Tensor] = {}


def next_of(means: object) -> Tensor:
    """The next vector of a generator, which is sent the mean of the one before."""
    mean = pending.pop(id(means), None)
    return next(means) if mean is None else means.send(mean)  # type: ignore[call-overload, attr-defined, no-any-return]


@pytest.mark.parametrize("family", ["untied", "tied", "dropout"])
@pytest.mark.parametrize("momentum", [MOMENTUM, 0.0])
def test_rounds_are_those_of_torch(family: str, momentum: float) -> None:
    cuts = CUTS[:2]
    chains = [replica(family, *cut, momentum=momentum) for cut in cuts]
    common = {name: each.clone() for name, each in chains[0].weights().items()}
    parameters = {name: torch.nn.Parameter(each) for name, each in common.items()}
    oracle = torch.optim.SGD(parameters.values(), lr=LR, momentum=momentum, nesterov=momentum > 0)
    total = sum(WEIGHTS)
    for round_number in range(NUM_ROUNDS):
        for number, chain in enumerate(chains):
            for step in range(NUM_STEPS):
                chain.step(10 * number + round_number * NUM_STEPS + step)
        learned = [chain.weights() for chain in chains]
        assert not same(*learned)
        for name, parameter in parameters.items():
            parameter.grad = -sum(
                (
                    weight / total * (each[name] - parameter.detach())
                    for weight, each in zip(WEIGHTS, learned, strict=True)
                ),
                start=torch.zeros_like(parameter),
            )
        oracle.step()
        average(chains, cuts, WEIGHTS)
        one, other = (chain.weights() for chain in chains)
        assert same(one, other)
        for name, parameter in parameters.items():
            assert torch.allclose(one[name], parameter.detach(), atol=1e-6), name


def test_the_copy_of_what_is_tied_follows() -> None:
    chains = [replica("tied", *cut) for cut in CUTS]
    for number, chain in enumerate(chains):
        chain.step(number)
    average(chains, CUTS, (1.0, 2.0, 0.0))
    whole = chains[0].stages[0]._parameters
    for chain in chains[1:]:
        for learner in chain.stages:
            for name, parameter in learner._parameters.items():
                assert torch.equal(parameter, whole[name]), name


def test_a_state_is_gone_on_from_in_another_cut() -> None:
    cuts = CUTS[:2]
    chains = [replica("tied", *cut) for cut in cuts]

    def make_round(chains: Sequence[Chain], first: int) -> None:
        for number, chain in enumerate(chains):
            for step in range(NUM_STEPS):
                chain.step(10 * number + first + step)
        average(chains, [() if len(c.stages) == 1 else (1,) for c in chains], WEIGHTS)

    make_round(chains, 0)
    kept = [chain.pieces() for chain in chains]
    assert any(name.startswith("outer/") for name in kept[0]["first"])
    make_round(chains, NUM_STEPS)
    # What each kept goes on in the place of the other: state is of layers, not of cuts.
    again = [replica("tied", *cut) for cut in cuts]
    for chain, state in zip(again, kept, strict=True):
        chain.load(state)
    make_round(again, NUM_STEPS)
    for one, other in zip(chains, again, strict=True):
        assert same_pieces(one.pieces(), other.pieces())
    swapped = replica("tied")
    swapped.load(kept[1])
    assert same_pieces(swapped.pieces(), kept[1])


def test_nothing_changes_before_a_round_is_made() -> None:
    chain = replica("untied")
    chain.step(0)
    before = chain.weights()
    outer = chain.stages[0].outer
    assert outer is not None
    vectors = outer.differences([["layer.0"], ["first", "last"]])
    outer_first = next(vectors)
    vectors.send(torch.full_like(outer_first, 1.0))
    assert same(chain.weights(), before)
    with pytest.raises(ValueError, match="nothing was averaged"):
        outer.commit()
    check_finite("a difference", outer_first)


def test_a_state_of_a_chain_alone_is_refused() -> None:
    alone = Chain("untied")
    alone.step(0)
    chain = replica("untied")
    with pytest.raises(CheckpointError, match="lacks outer/"):
        chain.load(alone.pieces())
    chain.step(0)
    with pytest.raises(CheckpointError, match="belongs to another model or optimiser"):
        alone.load(chain.pieces())


def test_what_is_not_finite_is_said() -> None:
    chain = replica("untied")
    learner = chain.stages[0]
    with torch.no_grad():
        next(iter(learner._parameters.values())).fill_(float("nan"))
    assert learner.outer is not None
    groups = [["layer.0", "layer.1", "layer.2", "layer.3", "first", "last"]]
    with pytest.raises(ValueError, match="not finite"):
        next(learner.outer.differences(groups))


def test_tensors_of_the_model_are_the_first_common_weights() -> None:
    chain = replica("tied")
    weights = chain.weights()
    assert all(torch.equal(weights[name], each) for name, each in tensors_of("tied").items())
