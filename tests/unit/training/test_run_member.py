"""A member of a run whose sync is cut off: what it has learned counts once, and no round is missed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
import torch
import trio
from torch import Tensor, nn

from neurogrid.training.averaging.groups import Group, Outcome, State
from neurogrid.training.loops.outer_loop import OuterLoop, Rules
from neurogrid.training.loops.run import RunMember


class Rounds:
    """A group that gives these outcomes one after the other; each is what a function of the vector makes."""

    def __init__(self, *outcomes: Callable[[Tensor], Outcome]) -> None:
        self.outcomes = list(outcomes)
        self.shown: State | None = None
        self.scope = trio.CancelScope()
        self.num_calls = 0
        self.may_have_contributed = True

    async def average(self, vector: Tensor, *, weight: float, timeout: float) -> Outcome:
        await trio.lowlevel.checkpoint()
        return self.outcomes.pop(0)(vector)

    def take_state_back(self) -> None:
        self.shown = None

    def show_state(self, state: State) -> None:
        self.shown = state


def outcome(round_: int, values: Tensor, *, is_of_withdrawn: bool = False) -> Outcome:
    return Outcome(round_, values.clone(), ("a",), (1.0,), True, is_of_withdrawn)


def member_of(group: Rounds) -> tuple[RunMember, Tensor]:
    weights = torch.zeros(3)
    loop = OuterLoop({"w": weights}, Rules(every=1, outer_lr=1.0, outer_momentum=0.0))
    # Nothing of a module is trained: what is, the loop was given.
    return RunMember(cast(Group, group), loop, "", nn.Module(), timeout=1.0), weights


async def test_a_round_that_was_decided_is_applied_although_the_sync_is_cancelled() -> None:
    def decided_and_cancelled(vector: Tensor) -> Outcome:
        group.scope.cancel()
        return outcome(1, vector)

    group = Rounds(decided_and_cancelled)
    member, weights = member_of(group)
    weights += 1
    with group.scope:
        await member.step()
    assert member.loop.round == 1
    assert group.shown is not None
    assert group.shown.round == 1
    assert torch.equal(member.loop.contribution()[0], torch.zeros(3))


async def test_what_is_learned_after_a_sync_that_was_cancelled_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its vector is decided on later."""
    withdrawn: list[Tensor] = []

    def decided(vector: Tensor) -> Outcome:
        return outcome(1, withdrawn[0], is_of_withdrawn=True)

    group = Rounds(decided)
    member, weights = member_of(group)
    average = group.average

    async def hang(vector: Tensor, *, weight: float, timeout: float) -> Outcome:
        withdrawn.append(vector.clone())
        group.scope.cancel()
        await trio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(group, "average", hang)
    weights += 1
    with group.scope:
        await member.step()
    monkeypatch.setattr(group, "average", average)
    weights += 4
    await member.step()
    assert torch.equal(weights, torch.full((3,), 5.0))
    assert member.loop.contribution()[1] == 1.0


async def test_of_two_syncs_that_were_cancelled_the_one_that_was_decided_on_is_taken_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second one's vector went nowhere. What was learned between the two is kept."""
    given: list[Tensor] = []

    def decided(vector: Tensor) -> Outcome:
        return replace(outcome(1, given[0], is_of_withdrawn=True), call=1)

    group = Rounds(decided)
    member, weights = member_of(group)
    average = group.average

    async def hang(vector: Tensor, *, weight: float, timeout: float) -> Outcome:
        given.append(vector.clone())
        group.num_calls += 1
        group.may_have_contributed = group.num_calls == 1
        group.scope.cancel()
        await trio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(group, "average", hang)
    for learned in (1.0, 4.0):
        weights += learned
        group.scope = trio.CancelScope()
        with group.scope:
            await member.step()
    monkeypatch.setattr(group, "average", average)
    weights += 2
    await member.step()
    assert torch.equal(weights, torch.full((3,), 7.0))
    vector, samples = member.loop.contribution()
    assert torch.equal(vector, torch.full((3,), 6.0))
    assert samples == 2.0
