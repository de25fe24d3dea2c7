"""A member of a run whose sync is cut off: what it has learned counts once, and no round is missed."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
import trio
from torch import Tensor

from neurogrid.training.averaging.groups import Group, Outcome, State
from neurogrid.training.loops.outer_loop import OuterLoop, Rules
from neurogrid.training.loops.run import RunMember


class Rounds:
    """A group that gives these outcomes one after the other; each is what a function of the vector makes."""

    def __init__(self, *outcomes: Callable[[Tensor], Outcome]) -> None:
        self.outcomes = list(outcomes)
        self.shown: State | None = None
        self.scope = trio.CancelScope()

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
    return RunMember(cast(Group, group), loop, "", timeout=1.0), weights


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
