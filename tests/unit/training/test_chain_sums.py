"""Numbers that members tell of steps: each may be as large as there are, and their sum is none then."""

from __future__ import annotations

import math
from typing import Any

import pytest

from neurogrid.training.leading.chains.chain import Chain
from neurogrid.training.leading.chains.leader import loss_of, norm_of
from neurogrid.training.leading.chains.replica import Replica, figures_of
from neurogrid.training.leading.chains.sums import sum_of
from neurogrid.training.wire.runs import StepDone

RUN, LARGE = bytes(16), 1.7e308


def chain_of(**told: dict[str, Any]) -> Chain:
    """A chain of two stages, the last of two members, and what these have told of its first step."""
    chain = Chain(3, (("a",), ("b", "c")), (0, 1, 2), 0, counts={"a": 2, "b": 1, "c": 1})
    for peer in chain.peers:
        given = {"squared_norm": 1.0, "loss": None if peer == "a" else 2.0, **told.get(peer, {})}
        chain.done[0, peer] = StepDone(RUN, 3, 0, **given)
    return chain


@pytest.mark.parametrize(
    ("values", "sums_up_to"),
    [
        ([], 0.0),
        ([0.1] * 10, 1.0),
        ([LARGE, 1.0, -LARGE], 1.0),
        ([LARGE, LARGE], math.inf),
        ([LARGE, LARGE, -LARGE], math.inf),
        ([1.0, math.inf], math.inf),
    ],
)
def test_a_sum_is_one_or_infinite(values: list[float], sums_up_to: float) -> None:
    assert sum_of(values) == sums_up_to


@pytest.mark.parametrize("values", [[math.inf, -math.inf], [1.0, math.nan]])
def test_a_sum_of_what_is_no_number_is_none(values: list[float]) -> None:
    assert math.isnan(sum_of(values))


def test_a_step_has_a_norm_and_a_loss() -> None:
    """Of gradients that two members have in common those of one count."""
    chain = chain_of(a={"squared_norm": 3.0})
    assert norm_of(chain, 0) == (2.0, [])
    assert loss_of(chain, 0) == 4.0


@pytest.mark.parametrize(
    ("told", "fault"),
    [
        ({"a": {"squared_norm": LARGE}, "b": {"squared_norm": LARGE}}, "the norm of all gradients"),
        ({"b": {"loss": LARGE}, "c": {"loss": LARGE}}, "the loss"),
        ({"b": {"loss": None}}, "the loss"),
        ({"c": {"squared_norm": 0.0, "not_finite": "a gradient", "loss": None}}, "a gradient"),
    ],
)
def test_of_a_step_without_a_norm_or_a_loss_nothing_is_made(
    told: dict[str, dict[str, Any]], fault: str
) -> None:
    norm, faults = norm_of(chain_of(**told), 0)
    assert faults == [fault]
    assert norm >= 0


@pytest.mark.parametrize("losses", [(LARGE,), (LARGE, -LARGE), (LARGE / 8, LARGE / 8), (math.nan,)])
def test_a_round_has_figures_that_are_numbers(losses: tuple[float, ...]) -> None:
    replica = Replica(chain_of(), 1, "one")
    for loss in losses:
        replica.note(loss, 8, math.inf, [])
    replica.note(2.0, 8, 3.0, [])
    figures = figures_of([replica])
    assert figures["gradient_norm"] == 3.0
    assert all(map(math.isfinite, figures.values()))
    assert replica.num_steps == len(losses) + 1
