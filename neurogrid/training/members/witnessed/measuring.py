"""Measurement of the worth of results, by a member that was drawn for it: losses before and after each of them.

    drawn by the next seed -> weights before the round, and those that the result alone makes -> four losses -> leader

Nobody waits for it. A measure that cannot be made, as a slice is not to be had, is left out.

Source: protocol_spec/training/witnessed.md, "Worth".
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
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

__all__ = ["Losses", "Measuring", "Wanted", "read_vector"]

logger = logging.getLogger(__name__)

Losses: TypeAlias = Callable[[Epoch, Sequence[int], Tensor], Awaitable[list[float]]]
"""The losses on the works of seats in a round, at these weights."""

# Results that wait to be measured: of a round one or two.
_MAX_WAITING: Final = 16


@dataclass(eq=False)
class Wanted:
    """A result that is to be measured.

    Attributes:
        seat: whose it is.
        seats: on whose works.
        is_here: whether the samples of these are on the disk.
    """

    round: AuditedRound
    seat: int
    seats: tuple[int, int]
    is_here: bool = False


class Measuring:
    """The results that one member measures.

    Args:
        rules: what all know of claims.
        tell: tells the leader.
    """

    def __init__(self, rules: ClaimRules, tell: Callable[[RoundMeasure], None]) -> None:
        self._rules, self._tell = rules, tell
        self._waiting: list[Wanted] = []

    def forget(self) -> None:
        """The member has another seat by now."""
        self._waiting.clear()

    def take(self, round_: AuditedRound, own_seat: int) -> list[Wanted]:
        """A round was drawn; what is to be measured of it, as soon as the samples are here."""
        found = []
        for each in round_.measures:
            other = round_.seat_beside(own_seat, each.seat)
            is_room = len(self._waiting) < _MAX_WAITING
            if each.auditor == own_seat and other is not None and is_room:
                found.append(Wanted(round_, each.seat, (each.seat, other)))
                self._waiting.append(found[-1])
        return found

    def drop(self, wanted: Wanted) -> None:
        """The samples are not to be had."""
        if wanted in self._waiting:
            self._waiting.remove(wanted)

    def has_work(self, can_start: Callable[[AuditedRound], bool]) -> bool:
        """Whether there is a result whose round can be looked at."""
        return any(each.is_here and can_start(each.round) for each in self._waiting)

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
        for each in [e for e in self._waiting if e.is_here and can_start(e.round)]:
            self._waiting.remove(each)
            round_, seat = each.round, each.seat
            if not is_kept(round_) or seat not in round_.coefficients:
                continue  # this member was behind then
            try:
                found = await self._measure(round_, each.seats, losses)
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
