"""Rounds as a member keeps them for audits: what was claimed in each, from which weights, and who looks at it. Pure.

Of each round that was agreed on the weights before it are kept on the disk, and the momenta of this member where its
claim was drawn, as long as somebody may ask for them or have the claim judged: a number of rounds.

Source: protocol_spec/training/witnessed.md, "Audits".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from torch import Tensor

from neurogrid.training.checks import Audit, Claim, RoundClaims, audits_of, measures_of
from neurogrid.training.optimizers.distro import Coefficients
from neurogrid.training.wire.runs import Epoch, EpochSeat, RoundWork

__all__ = ["NUM_KEPT_ROUNDS", "AuditedRound", "AuditedRounds"]

NUM_KEPT_ROUNDS: Final = 16
"""Rounds that are kept. Momenta come within some of them to who looks, and within some more to those that judge."""

_ROUND_PHASES: Final = ("round_train", "round_witness")


@dataclass(eq=False)
class AuditedRound:
    """A round.

    Attributes:
        told: what the leader said of it last.
        claims: that count, with their signed forms, by seat.
        agreed: the results that were agreed on, by seat; None while nothing was.
        tried: those of members on trial, by seat.
        audits: that were drawn; None before.
        measures: of what results are worth, that were drawn with these.
        weights: a file with those before the round, float32 [n]; None before it is applied.
        coefficients: results that were agreed on, by seat.
        gone: seats whose results have left the weights since.
        momenta: this member's own: before, kept, sent.
        findings: of this member, signed, by seat; empty bytes where it was given nothing.
        judging: seats whose claims it computes, or has computed.
        files: vectors that others may fetch.
    """

    told: Epoch
    claims: dict[int, tuple[Claim, bytes]] = field(default_factory=dict)
    agreed: dict[int, bytes] | None = None
    tried: dict[int, bytes] = field(default_factory=dict)
    audits: tuple[Audit, ...] | None = None
    measures: tuple[Audit, ...] = ()
    weights: Path | None = None
    coefficients: dict[int, Coefficients] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    momenta: tuple[Tensor, Tensor, Tensor] | None = None
    findings: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    judging: set[int] = field(default_factory=set)
    files: list[Path] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int]:
        """Epoch and round."""
        return self.told.epoch, self.told.round

    def member(self, seat: int) -> EpochSeat | None:
        """Member that sat on a seat; None for a seat that nobody had."""
        return next((each for each in self.told.members if each.seat == seat), None)

    def work(self, seat: int) -> RoundWork | None:
        """Work of a seat; None where it had none."""
        return next((each for each in self.told.works if each.seat == seat), None)

    def seat_beside(self, seat: int, about: int) -> int | None:
        """Seat on whose work a seat measures another's result: itself, or the next that had any; None for none."""
        others = sorted(each.seat for each in self.told.works if each.seat != about)
        return next((each for each in others if each >= seat), others[0] if others else None)


class AuditedRounds:
    """The last rounds of one member.

    Args:
        share, copies: of the run file.
        worth: share of the rounds in which is measured what results are worth.

    Attributes:
        claims: in turn.
        dropped: rounds that are kept no more: whoever looks takes them out, and removes their files.
    """

    def __init__(self, share: float, copies: int, worth: float = 0.0) -> None:
        self._share, self._copies, self._worth = share, copies, worth
        self._rounds: dict[int, AuditedRound] = {}
        self._agreed_step = 0
        self.claims = RoundClaims()
        self.dropped: list[AuditedRound] = []

    def begin(self, seat: int) -> None:
        """This member has taken another seat, and knows all claims of those that come after it."""
        self.claims = RoundClaims(all_from=seat)
        self.dropped.extend(self._rounds.values())
        self._rounds, self._agreed_step = {}, 0

    def at(self, step: int) -> AuditedRound | None:
        """The round that began with so many rounds in the weights."""
        return self._rounds.get(step)

    def of(self, epoch: int, round_number: int) -> AuditedRound | None:
        """A round by its epoch and number."""
        key = epoch, round_number
        return next((each for each in self._rounds.values() if each.key == key), None)

    def take_back(
        self, pairs: Sequence[tuple[int, int]], step: int
    ) -> list[tuple[list[Coefficients], list[Coefficients], int]]:
        """Take results of some seats out of their rounds, as they leave the weights.

        Args:
            pairs: seats, and the first round whose result of the seat leaves.
            step: rounds that are in the weights which they leave.

        Returns:
            For each result that leaves: the results of its round that were applied, those of them that stay, and the
            number of rounds before that one.

        Raises:
            KeyError: of a round it is not known here what was applied.
        """
        found = []
        for seat, since in pairs:
            for before in range(max(since, 1) - 1, step):
                round_ = self._rounds.get(before)
                if round_ is None or round_.agreed is None or round_.weights is None:
                    raise KeyError(before + 1)
                if seat not in round_.agreed or seat in round_.gone:
                    continue
                applied = [each for each in round_.agreed if each not in round_.gone]
                round_.gone.add(seat)
                left = [each for each in applied if each != seat]
                coefficients = round_.coefficients
                found.append(
                    (
                        [coefficients[each] for each in applied],
                        [coefficients[each] for each in left],
                        before,
                    )
                )
        return found

    def hear(self, told: Epoch) -> AuditedRound | None:
        """The leader says where the run is.

        Returns:
            The round whose claims are drawn by this, once; None where nothing is drawn.
        """
        if told.agreed:
            self._note_agreed(told)
        if told.phase == "cooldown" and told.seed:
            return self._draw(told)
        if told.phase not in _ROUND_PHASES:
            return None
        known = self._rounds.get(told.step)
        if known is not None and known.key == (told.epoch, told.round):
            known.told = told
            return None
        if known is not None:
            self.dropped.append(known)
        self._rounds[told.step] = AuditedRound(told)
        self.claims.keep([(each.seat, each.incarnation) for each in told.members])
        for step in sorted(self._rounds)[:-NUM_KEPT_ROUNDS]:
            self.dropped.append(self._rounds.pop(step))
        return self._draw(told)

    def _draw(self, told: Epoch) -> AuditedRound | None:
        before = self._rounds.get(told.step - 1)
        if before is None or before.agreed is None or before.audits is not None:
            return None
        before.audits = audits_of(
            told.seed,
            before.agreed,
            before.told.seats,
            told.seats,
            self._share,
            self._copies,
            before.tried,
            told.watched,
        )
        before.measures = measures_of(
            told.seed, before.agreed, before.told.seats, told.seats, self._worth
        )
        return before

    def _note_agreed(self, told: Epoch) -> None:
        if told.step <= self._agreed_step:
            return
        before = self._rounds.get(told.step - 1)
        if before is None or told.step > self._agreed_step + 1 > 1:
            # Rounds went by of which this member has not heard.
            self.claims.lose_track()
        self._agreed_step = told.step
        if before is None:
            return
        before.agreed = {each.seat: each.result for each in told.agreed}
        before.tried = {each.seat: each.result for each in told.tried}
        members = {each.seat: each.incarnation for each in before.told.members}
        self.claims.agree(
            {
                (seat, members[seat]): result
                for seat, result in before.agreed.items()
                if seat in members
            }
        )
