"""What a member has learned counts once, whichever of its contributions a round was decided with."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from neurogrid.errors import ConfigurationError, NotFiniteError
from neurogrid.training.averaging.codecs import parse_codec
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


@pytest.mark.parametrize("codec", ["int4", "topk:64"])
@pytest.mark.parametrize("feedback", [1.0, 0.0])
def test_what_a_codec_loses_is_sent_in_the_next_sync(codec: str, feedback: float) -> None:
    """Of weights that are never applied, so that each sync has the same to send: in all it is what was learned."""
    form, weights, told = parse_codec(codec), torch.zeros(1000), torch.zeros(1000)
    learned = torch.linspace(-1, 1, 1000) ** 3
    rules = Rules(every=1, outer_lr=1.0, outer_momentum=0.0, feedback=feedback)
    loop = OuterLoop({"w": weights}, rules, codec)
    for _ in range(50):
        with torch.no_grad():
            weights.copy_(learned)
        difference = loop.contribution()[0].clone()
        due = loop.due(difference)
        told += form.decode(form.encode(due), len(due))
        loop.apply(outcome(torch.zeros(1000), has_contributed=True))
    off = float((told / 50 - difference).abs().max())
    assert off < 0.1 if feedback else off > 0.01


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        pytest.param({"has_contributed": True}, 1, id="its vector"),
        pytest.param(
            {"has_contributed": True, "is_of_withdrawn": True, "call": 3}, 0, id="given up"
        ),
        pytest.param({"has_contributed": False}, None, id="none of it"),
    ],
)
def test_what_was_lost_is_that_of_the_contribution_that_was_decided_on(
    told: dict[str, Any], kept: int | None
) -> None:
    form, weights = parse_codec("int4"), torch.zeros(256)
    loop = OuterLoop({"w": weights}, Rules(every=1, feedback=1.0), "int4")
    given: list[Tensor] = []
    for number in (1, 2):
        weights.copy_(torch.linspace(-number, 0.3, 256))
        vector, samples = loop.contribution()
        given.append(loop.due(vector).clone())
        if number == 1:
            loop.give_up((vector, samples), call=3)
    loop.apply(replace(outcome(torch.zeros(256), has_contributed=True), **told))
    nothing = torch.zeros(256)
    due = nothing if kept is None else given[kept]
    lost = due - form.decode(form.encode(due), len(due))
    assert torch.equal(loop.due(nothing), lost)
    assert bool(lost.any()) == (kept is not None)


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
