"""What a member has learned counts once, whichever of its contributions a round was decided with."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from neurogrid.errors import ConfigurationError, NotFiniteError
from neurogrid.training.averaging.groups import Outcome
from neurogrid.training.loops.outer_loop import OuterLoop, Rules


def outcome(values: Tensor, *, has_contributed: bool, is_of_withdrawn: bool = False) -> Outcome:
    return Outcome(1, values, ("a",), (2.0,), has_contributed, is_of_withdrawn)


@pytest.mark.parametrize(
    ("has_contributed", "is_of_withdrawn", "left", "samples"),
    [(True, False, 0.0, 0.0), (True, True, 4.0, 1.0), (False, False, 5.0, 3.0)],
    ids=["its vector", "one that was given up", "none of it"],
)
def test_what_is_not_in_a_round_stays_on_top(
    has_contributed: bool, is_of_withdrawn: bool, left: float, samples: float
) -> None:
    weights = torch.zeros(3)
    loop = OuterLoop({"w": weights}, Rules(every=1, outer_lr=1.0, outer_momentum=0.0))
    weights += 1
    loop.step(2)
    loop.give_up(loop.contribution())
    weights += 4
    loop.step(1)
    mean = torch.full((3,), 10.0)
    loop.apply(outcome(mean, has_contributed=has_contributed, is_of_withdrawn=is_of_withdrawn))
    assert torch.equal(weights, torch.full((3,), 10.0 + left))
    vector, kept = loop.contribution()
    assert torch.equal(vector, torch.full((3,), left))
    assert kept == samples


@pytest.mark.parametrize(("call", "left", "samples"), [(3, 6.0, 2.0), (7, 2.0, 1.0)])
def test_of_two_that_were_given_up_the_one_that_was_decided_on_counts(
    call: int, left: float, samples: float
) -> None:
    """What was learned between the two stays, too."""
    weights = torch.zeros(3)
    loop = OuterLoop({"w": weights}, Rules(every=1, outer_lr=1.0, outer_momentum=0.0))
    for learned, number in ((1.0, 3), (4.0, 7)):
        weights += learned
        loop.step(1)
        loop.give_up(loop.contribution(), call=number)
    weights += 2
    loop.step(1)
    told = outcome(torch.full((3,), 10.0), has_contributed=True, is_of_withdrawn=True)
    loop.apply(replace(told, call=call))
    vector, kept = loop.contribution()
    assert torch.equal(vector, torch.full((3,), left))
    assert kept == samples


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_a_number_of_samples_that_is_none_spoils_no_sync_after_it(wrong: float) -> None:
    loop = OuterLoop({"w": torch.zeros(3)}, Rules(every=1))
    loop.step(2)
    with pytest.raises(ConfigurationError, match="0 samples or more"):
        loop.step(wrong)
    assert loop.contribution()[1] == 2


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_an_error_by_name(wrong: float) -> None:
    """Others leave them out, and this member would keep them on top of the common weights for ever."""
    tensors = {"w": torch.zeros(3), "b": torch.zeros(2)}
    loop = OuterLoop(tensors, Rules(every=1))
    tensors["b"][0] = wrong
    loop.step(1)
    with pytest.raises(NotFiniteError, match=f"^b has {wrong}") as caught:
        loop.contribution()
    assert caught.value.index == 3


@pytest.mark.parametrize("has_contributed", [True, False])
def test_what_is_rounded_in_the_parameters_is_nothing_learned(has_contributed: bool) -> None:
    """Outer steps of half of a bfloat16 each: the second one shows."""
    step = 2**-7
    weights = torch.ones(3, dtype=torch.bfloat16)
    loop = OuterLoop({"w": weights}, Rules(every=1, outer_lr=0.5, outer_momentum=0.0))
    mean = torch.full((3,), step)
    loop.apply(outcome(mean, has_contributed=True))
    assert torch.equal(weights, torch.ones(3, dtype=torch.bfloat16))
    weights += step
    assert torch.equal(loop.contribution()[0], mean)
    loop.apply(outcome(mean, has_contributed=has_contributed))
    learned = 0.0 if has_contributed else step
    assert torch.equal(weights, torch.full((3,), 1 + step + learned, dtype=torch.bfloat16))
    assert torch.equal(loop.contribution()[0], torch.full((3,), learned))
