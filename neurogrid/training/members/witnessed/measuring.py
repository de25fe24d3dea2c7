"""Measurement of the worth of results, by a member that was drawn for it: losses before and after each of them.

    drawn by the next seed -> weights before the round, and those that the result alone makes -> four losses -> leader

Nobody waits for it. A measure that cannot be made, as a slice is not to be had, is left out.

Source: protocol_spec/training/witnessed.md, "Worth".
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import torch
import trio
from torch import Tensor

from neurogrid.errors import NeuroGridError
from neurogrid.training.checks import ClaimRules, step_alone
from neurogrid.training.members.witnessed.audited_rounds import AuditedRound
from neurogrid.training.trainer import TrainerDiedError
from neurogrid.training.wire.runs import MAX_MEASURED_LOSS, Epoch, RoundMeasure

__all__ = ["Losses", "Measuring", "read_vector"]

logger = logging.getLogger(__name__)

Losses: TypeAlias = Callable[[Epoch, Sequence[int], Tensor], Awaitable[list[float]]]
"""The losses on the works of seats in a round, at these weights."""

# Results that wait to be measured: of a round one or two.
_MAX_WAITING: Final = 16


class Measuring:
    """The results that one member measures.

    Args:
        rules: what all know of claims.
        tell: tells the leader.
    """

    def __init__(self, rules: ClaimRules, tell: Callable[[RoundMeasure], None]) -> None:
        self._rules, self._tell = rules, tell
        self._waiting: list[tuple[AuditedRound, int]] = []

    def forget(self) -> None:
        """The member has another seat by now."""
        self._waiting.clear()

    def take(self, round_: AuditedRound, own_seat: int) -> None:
        """A round was drawn."""
        for each in round_.measures:
            if each.auditor == own_seat and len(self._waiting) < _MAX_WAITING:
                self._waiting.append((round_, each.seat))

    def has_work(self, can_start: Callable[[AuditedRound], bool]) -> bool:
        """Whether there is a result whose round can be looked at."""
        return any(can_start(round_) for round_, _ in self._waiting)

    async def work(
        self,
        own_seat: int,
        can_start: Callable[[AuditedRound], bool],
        is_kept: Callable[[AuditedRound], bool],
        losses: Losses,
    ) -> None:
        """Measure what waits.

        Args:
            can_start: whether a round is in this member's weights, or will not be.
            is_kept: whether what is needed of a round is still here.

        Raises:
            TrainerDiedError: the trainer has ended.
        """
        for each in [each for each in self._waiting if can_start(each[0])]:
            self._waiting.remove(each)
            round_, seat = each
            other = round_.seat_beside(own_seat, seat)
            if other is None or not is_kept(round_) or seat not in round_.coefficients:
                continue  # this member was behind then
            try:
                found = await self._measure(round_, (seat, other), losses)
            except TrainerDiedError:
                raise
            except (NeuroGridError, ValueError, OSError) as exc:
                logger.warning("what the result of seat %d is worth is not known: %s", seat, exc)
                continue
            self._tell(RoundMeasure(self._rules.run, own_seat, *round_.key, seat, found))

    async def _measure(
        self, round_: AuditedRound, seats: tuple[int, int], losses: Losses
    ) -> tuple[float, ...]:
        assert round_.weights is not None  # it is kept
        told, coefficients = round_.told, round_.coefficients[seats[0]]
        before = await trio.to_thread.run_sync(read_vector, round_.weights)
        rate = self._rules.rate(told.step)
        after = await trio.to_thread.run_sync(
            step_alone, before, coefficients, self._rules.settings, rate
        )
        first = await losses(told, seats, before)
        then = await losses(told, seats, after)
        return tuple(map(_bounded, (first[0], then[0], first[1], then[1])))


def read_vector(path: Path) -> Tensor:
    """A vector that lies on the disk as float32 in little endian. Blocks."""
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32)


def _bounded(loss: float) -> float:
    """A loss as it is told: what is no number is as large as can be."""
    return min(max(loss, 0.0), MAX_MEASURED_LOSS) if math.isfinite(loss) else MAX_MEASURED_LOSS
