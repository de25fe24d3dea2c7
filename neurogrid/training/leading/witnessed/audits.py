"""Audits, as the leader sees them: whose claims count, who is to look at which, and what becomes of what is found.

    commitment -> claim -> drawn by the next seed -> findings -> a case -> findings of all others -> ejected, or nobody

The leader computes nothing itself and believes nobody: a finding counts of who was drawn, and names somebody only when
more than half of the others have found the same. Two claims in conflict show themselves.

More than 600 lines, since a claim goes one way through all of it, from its signature to what becomes of its member.

Source: protocol_spec/training/witnessed.md, "Audits".
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.wire import ErrorCode
from neurogrid.training.checks import (
    Audit,
    Case,
    Claim,
    ClaimConflictError,
    ClaimError,
    ClaimRules,
    Finding,
    RoundClaims,
    Verdict,
    Worth,
    audits_of,
    measures_of,
    open_claim,
    open_evidence,
    open_finding,
    pack_conflict,
    pack_evidence,
    pack_proof,
    pack_verdict,
    vote_of,
)
from neurogrid.training.checks.evidence import Kind
from neurogrid.training.checks.ledger import conflict_of
from neurogrid.training.leading.look import CheckLook, ChecksLook
from neurogrid.training.leading.witnessed.epoch_messages import round_works
from neurogrid.training.leading.witnessed.suspicion import Suspicion
from neurogrid.training.leading.witnessed.worths import Worths
from neurogrid.training.runs.run_file import ChecksSection
from neurogrid.training.runs.witnessed_machine import WitnessedMachine
from neurogrid.training.wire.runs import RoundCommitment, RoundEvidence, RoundFinding, RoundMeasure
from neurogrid.training.witnessed import (
    Eject,
    EpochMember,
    EpochPhase,
    EpochState,
    Event,
    Health,
    Left,
)

__all__ = ["RoundAudits"]

_NUM_KEPT: Final = 16
# Seats that are watched, by all figures together.
_MAX_WATCHED: Final = 4
# Of what came of claims, what is shown.
_NUM_TOLD: Final = 40
# Rounds whose results leave with who is ejected, at most: all members have as many, and some more.
_MAX_TAKEN_BACK: Final = 12
# Rounds after that of a claim, until which it is heard that its member gives nothing, and until which a case goes on.
_MAX_AGE_MISSING: Final = 8
_MAX_AGE_OPEN: Final = 14
# Members have as long for the vectors, and as long again to compute.
_NUM_TIMEOUTS: Final = 2.0


@dataclass(eq=False)
class _Round:
    """A round whose claims may be looked at.

    Attributes:
        step: rounds that were made before it.
        members: by seat.
        claims: that counted, with their signed forms, by seat.
        agreed: seats whose results were agreed on; None before.
        tried: seats on trial whose results enough witnesses had.
        audits: that were drawn; None before.
        measures: of what results are worth, that were drawn with these.
        findings: signed, by the seat that claimed and the one that has found; empty of who was given nothing.
        cases: by the seat that claimed.
        closed: what cases have come to that are over, by the seat that claimed; None where nobody could judge.
    """

    epoch: int
    round: int
    step: int
    seats: tuple[int, ...]
    members: dict[int, EpochMember]
    claims: dict[int, tuple[Claim, bytes]] = field(default_factory=dict)
    agreed: frozenset[int] | None = None
    tried: frozenset[int] = frozenset()
    audits: tuple[Audit, ...] | None = None
    measures: tuple[Audit, ...] = ()
    findings: dict[tuple[int, int], tuple[Finding | None, bytes]] = field(default_factory=dict)
    cases: dict[int, Case] = field(default_factory=dict)
    closed: dict[int, tuple[Case, Verdict] | None] = field(default_factory=dict)


class RoundAudits:
    """Claims, audits and cases of a run, as its leader has them.

    Args:
        rules: what all know of claims.
        section: of the run file.
        machine: of the run.
        timeout: seconds in which members give their momenta.
        weights_of: the digest of the weights that most have after so many rounds; empty while it is not known.
        called: what people call the peer.
        warn, say: tell people something.

    Attributes:
        num_made, num_held: audits that drawn members have told of, and those that held.
        reasons: why peers were ejected.
        suspicion: what members tell of each other's results.
        worths: what these were measured to be worth.
        watched: seats by whom the claims of the last agreed round were drawn.
        false_trials: why peers on trial would be ejected, and the evidence; whoever looks takes them out.
    """

    def __init__(
        self,
        rules: ClaimRules,
        section: ChecksSection,
        machine: WitnessedMachine,
        timeout: float,
        weights_of: Callable[[int], bytes],
        called: Callable[[str], str],
        warn: Callable[[str], None],
    ) -> None:
        self._rules, self._section, self._machine = rules, section, machine
        self._timeout, self._weights_of, self._called, self._warn = (
            timeout,
            weights_of,
            called,
            warn,
        )
        self._claims = RoundClaims()
        self._rounds: list[_Round] = []
        self._events: list[Event] = []
        self._said: set[tuple[str, str]] = set()
        self.num_made = self.num_held = 0
        self._told = (0, 0)
        self._last: deque[CheckLook] = deque(maxlen=_NUM_TOLD)
        self.reasons: dict[str, str] = {}
        self.false_trials: dict[str, tuple[str, bytes]] = {}
        self.suspicion, self.worths = Suspicion(), Worths()
        self.watched: tuple[int, ...] = ()

    def line(self) -> str:
        """Summary of the audits so far in one line, for people."""
        return f"{self.num_made} claims were computed again, {self.num_held} of them hold"

    def take_counts(self) -> dict[str, float]:
        """Take the figures of audits and of measured results since the last call; empty where there were none.

        Claims that drawn members told of, and how many of these held; results that were measured, and what these were
        worth in the mean.
        """
        now, before = (self.num_made, self.num_held), self._told
        self._told = now
        found: dict[str, float] = {}
        if now != before:
            found["checked"], found["checked_held"] = now[0] - before[0], now[1] - before[1]
        return found | self.worths.take_figures()

    def look_at(self) -> ChecksLook:
        """Counts and outcomes of audits so far, for display."""
        return ChecksLook(
            self.num_made,
            self.num_held,
            sum(len(each.cases) for each in self._rounds),
            len(self._machine.epoch.trials),
            tuple(self._last),
            self.worths.looks(self._machine.epoch.healthy),
        )

    def note(self, kind: str, seat: int, text: str, round_number: int | None = None) -> None:
        """Something has come of a claim, or of a trial.

        Args:
            kind: as of `CheckLook`.
            round_number: of the claim; None for the last one.
        """
        number = self._machine.epoch.made if round_number is None else round_number
        self._last.append(CheckLook(time.time(), number, seat, kind, text))

    # Rounds

    def ticked(self, before: EpochState) -> None:
        """The machine has gone on from this state."""
        after = self._machine.epoch
        if after.made > before.made and self._rounds:
            ended = self._rounds[-1]
            ended.agreed = frozenset(each.seat for each in after.agreed)
            ended.tried = frozenset(each.seat for each in after.tried)
            self._claims.agree(
                {
                    (each.seat, ended.members[each.seat].incarnation): each.result
                    for each in after.agreed
                }
            )
        if after.going is EpochPhase.COOLDOWN and before.going is not EpochPhase.COOLDOWN:
            self._draw(self._machine.cooldown_draw, after.seats)
        key = after.epoch, after.round
        if not after.has_round or (self._rounds and self._key(self._rounds[-1]) == key):
            return
        self._rounds = [each for each in self._rounds if each.agreed is not None][1 - _NUM_KEPT :]
        members = {each.seat: each for each in after.members}
        self._rounds.append(_Round(after.epoch, after.round, after.made, after.seats, members))
        self._claims.keep([(each.seat, each.incarnation) for each in after.members])
        self._draw(after.seed, after.seats)

    def _draw(self, seed: bytes, seats: Sequence[int]) -> None:
        """Draw who looks at claims of the last round in which something was agreed, once."""
        self.worths.look(self._machine.epoch.made)
        odd = dict.fromkeys((*self.suspicion.watched(seats), *self.worths.watched(seats)))
        self.watched = tuple(odd)[:_MAX_WATCHED]
        drawn = next((each for each in reversed(self._rounds) if each.agreed is not None), None)
        # Of a round that is made again nothing more is drawn.
        if drawn is None or drawn.agreed is None or drawn.audits is not None:
            return
        drawn.audits = audits_of(
            seed,
            drawn.agreed,
            drawn.seats,
            seats,
            self._section.audit,
            self._section.auditors,
            drawn.tried,
            self.watched,
        )
        drawn.measures = measures_of(seed, drawn.agreed, drawn.seats, seats, self._section.worth)
        self.worths.drawn(drawn.step, drawn.measures)

    def unfinished(self, is_here: Callable[[str], bool]) -> tuple[list[Audit], int]:
        """Audits that are still to come of the last round that was agreed on, and cases that are open.

        Args:
            is_here: whether a peer is connected: of others nothing is to be expected.

        Returns:
            Audits that were drawn and of which nothing was told, and the number of cases that are open, of any round.
        """
        num_open = sum(len(each.cases) for each in self._rounds)
        last = next((each for each in reversed(self._rounds) if each.agreed is not None), None)
        if last is None:
            return [], num_open
        waited = [
            each
            for each in last.audits or ()
            if (each.seat, each.auditor) not in last.findings
            and each.seat in last.claims
            and each.seat not in last.closed
            and self._is_healthy(last.members[each.seat])
            and self._is_healthy(last.members[each.auditor])
            and is_here(last.members[each.auditor].peer)
        ]
        return waited, num_open

    def take_claim(self, said: RoundCommitment, member: EpochMember) -> None:
        """A member commits itself to a result; its claim is of the round under way.

        Raises:
            RemoteProtocolError: it says nothing, or its claim does not count.
        """
        round_ = self._rounds[-1] if self._rounds else None
        if round_ is None or self._key(round_) != (said.epoch, said.round):
            return
        try:
            if not said.claim:
                raise ClaimError(f"seat {said.seat} commits to a result without a claim")
            claim = open_claim(said.claim, member.peer)
            work = next((w for w in round_works(self._machine) if w.seat == said.seat), None)
            if work is None:
                raise ClaimError(f"seat {said.seat} has nothing to claim")
            step = self._machine.epoch.made
            facts = self._rules.facts(
                (member.seat, member.incarnation),
                said.epoch,
                said.round,
                step,
                ((each.slice, each.start, each.stop) for each in work.ranges),
                # Members see it where it is not known here yet.
                self._weights_of(step) or claim.weights,
            )
            self._claims.take(said.claim, member.peer, facts, said.result)
        except ClaimConflictError as exc:
            self._eject(
                member, pack_verdict(exc.evidence), "it has signed two claims of which one is false"
            )
            raise self._refused(member.peer, str(exc)) from exc
        except ClaimError as exc:
            raise self._refused(member.peer, str(exc)) from exc
        round_.claims[said.seat] = claim, said.claim

    # What is found

    def take_finding(self, said: RoundFinding, peer: str, now: float) -> None:
        """A member has computed a claim again, or was given nothing for it.

        Raises:
            RemoteProtocolError: it was not to, or it is not what it must be.
        """
        round_ = self._round(said.epoch, said.round)
        if round_ is None or round_.agreed is None:
            return
        member, claimed = round_.members.get(said.seat), round_.claims.get(said.about)
        if member is None or member.peer != peer:
            raise self._refused(peer, f"a finding in the name of seat {said.seat}")
        if not self._is_healthy(member):
            return
        if (said.about, said.seat) in round_.findings:
            return
        over = round_.closed.get(said.about)
        if over is None and said.about in round_.closed:
            return
        case = round_.cases.get(said.about) if over is None else over[0]
        is_drawn = Audit(said.about, said.seat) in (round_.audits or ())
        if claimed is None or not (is_drawn or (case is not None and said.seat in case.judges)):
            raise self._refused(
                peer,
                f"a finding about seat {said.about}, at which seat {said.seat} was not to look",
            )
        claim, signed = claimed
        if said.claim and said.claim != signed:
            self._take_other_claim(round_, said, claim, signed)
            raise self._refused(peer, f"a finding about another claim of seat {said.about}")
        if not said.finding and self._age(round_) > _MAX_AGE_MISSING:
            return  # by now its member need not give anything
        finding = open_finding(said.finding, peer) if said.finding else None
        if finding is not None and finding.claim != claim.digest():
            raise self._refused(peer, f"a finding about another claim of seat {said.about}")
        round_.findings[said.about, said.seat] = finding, said.finding
        if is_drawn:
            self.num_made += 1
            self.num_held += finding is not None and finding.holds
        if over is not None:
            self._name_liars(round_, *over)
        elif case is not None:
            case.vote(said.seat, vote_of(finding))
        elif finding is None or finding.accuses:
            self._open(round_, said.about, said.seat, finding, now)

    def take_measure(self, said: RoundMeasure, peer: str) -> None:
        """A member has measured what a result is worth.

        Raises:
            RemoteProtocolError: it was not to.
        """
        round_ = self._round(said.epoch, said.round)
        if round_ is None or round_.audits is None:
            return
        member = round_.members.get(said.seat)
        if member is None or member.peer != peer:
            raise self._refused(peer, f"a measure in the name of seat {said.seat}")
        if Audit(said.about, said.seat) not in round_.measures:
            raise self._refused(
                peer, f"a measure of seat {said.about}, for which seat {said.seat} was not drawn"
            )
        self.worths.told(round_.step, said.seat, said.about, Worth(*said.losses))

    def take_conflict(self, said: RoundEvidence, peer: str) -> None:
        """A member has two claims of another that contradict each other.

        Raises:
            RemoteProtocolError: they do not, or are not signed by that one.
        """
        evidence = open_evidence(said.evidence)
        claim = evidence.claim
        member = self._machine.epoch.member(claim.seat)
        is_of_member = (
            member is not None
            and evidence.kind == Kind.CONFLICT
            and evidence.accused == member.peer
            and (claim.run, claim.incarnation) == (self._rules.run, member.incarnation)
        )
        if member is None or not is_of_member:
            raise self._refused(peer, "evidence that is about nobody of this run")
        self._eject(
            member, pack_verdict(said.evidence), "it has signed two claims of which one is false"
        )

    def _take_other_claim(
        self, round_: _Round, said: RoundFinding, claim: Claim, signed: bytes
    ) -> None:
        """Somebody was told another claim than the leader."""
        member = round_.members[said.about]
        other = open_claim(said.claim, member.peer)
        if conflict_of(claim, other) is not None and self._is_healthy(member):
            evidence = pack_conflict(member.peer, signed, said.claim)
            self._eject(
                member, pack_verdict(evidence), "it has signed two claims of which one is false"
            )

    # Cases

    def _open(
        self, round_: _Round, about: int, by_seat: int, finding: Finding | None, now: float
    ) -> None:
        accused, accuser = round_.members[about], round_.members[by_seat]
        if not self._is_healthy(accused):
            return
        judges = frozenset(
            seat
            for seat in round_.seats
            if seat != about and self._is_healthy(round_.members[seat])
        )
        case = Case(about, by_seat, judges, now + _NUM_TIMEOUTS * self._timeout)
        case.vote(by_seat, vote_of(finding))
        # Others that were drawn may have said something before.
        for (seat_about, seat), (other, _) in round_.findings.items():
            if seat_about == about:
                case.vote(seat, vote_of(other))
        what = (
            f"was given nothing by {self._called(accused.peer)}"
            if finding is None
            else f"finds the claim of {self._called(accused.peer)} {finding.excess:.3g} bands off"
        )
        text = f"{self._called(accuser.peer)} {what}, of round {round_.round}"
        if not case.can_be_judged:
            self._warn(f"{text}: nobody can judge, for there are fewer than three members")
            round_.closed[about] = None
            return
        self._warn(f"{text}: the others look at it, too")
        self.note("accused", about, f"{text}: the others look at it, too", round_.round)
        round_.cases[about] = case

    def look(self, now: float) -> list[Event]:
        """Close the cases that have a verdict by now, and take the events since the last look, for the machine."""
        for round_ in self._rounds:
            for about, case in list(round_.cases.items()):
                is_late = self._age(round_) > _MAX_AGE_OPEN
                verdict = case.verdict(math.inf if is_late else now)
                if verdict is not Verdict.OPEN:
                    del round_.cases[about]
                    round_.closed[about] = case, verdict
                    self._close(round_, case, verdict)
        events, self._events = self._events, []
        return events

    def _close(self, round_: _Round, case: Case, verdict: Verdict) -> None:
        accused, accuser = round_.members[case.accused], round_.members[case.accuser]
        evidence = self._evidence(round_, case)
        if verdict is Verdict.SILENT and self._is_healthy(accused):
            text = f"{self._called(accused.peer)} gives nobody what its claim of round {round_.round} was made of"
            self._warn(text)
            self.note("silent", accused.seat, text, round_.round)
            self._events.append(Left(accused.seat, Health.DROPPED))
        elif verdict is Verdict.ACCUSED and evidence and self._is_healthy(accused):
            self._eject(
                accused,
                evidence,
                f"it did not compute what it claimed in round {round_.round}: {self._counts(case)}",
            )
        elif verdict is Verdict.ACCUSER and evidence and self._is_healthy(accuser):
            self._eject(
                accuser,
                evidence,
                f"it accused {self._called(accused.peer)} of what is not so in round {round_.round}: "
                f"{self._counts(case)}",
            )
        elif self._is_healthy(accused) and self._is_healthy(accuser):
            text = (
                f"the claim of {self._called(accused.peer)} of round {round_.round} stays as it is: not enough members "
                f"have found the same ({self._counts(case)})"
            )
            self._warn(text)
            self.note("undecided", accused.seat, text, round_.round)
        self._name_liars(round_, case, verdict)

    def _name_liars(self, round_: _Round, case: Case, verdict: Verdict) -> None:
        """Put out judges that say what nobody honest can have found, beside what most have found."""
        evidence = self._evidence(round_, case)
        if verdict not in (Verdict.ACCUSED, Verdict.ACCUSER) or not evidence:
            return
        accuses = verdict is Verdict.ACCUSER  # and so do they, or the other way round
        found = {
            seat: finding
            for seat in sorted(case.judges)
            if (finding := round_.findings.get((case.accused, seat), (None, b""))[0]) is not None
        }
        most = sum(each.holds if accuses else each.accuses for each in found.values())
        if 2 * most <= len(case.judges):
            return  # between the two, honest members may have found either
        of_whom = self._called(round_.members[case.accused].peer)
        for seat, each in found.items():
            member = round_.members[seat]
            if (each.accuses if accuses else each.holds) and self._is_healthy(member):
                said = "is false" if accuses else "holds"
                self._eject(
                    member,
                    evidence,
                    f"it says that the claim of {of_whom} of round {round_.round} {said}, which is not so: "
                    f"{self._counts(case)}",
                )

    def _counts(self, case: Case) -> str:
        votes = [str(each) for each in case.votes.values()]
        kinds = ", ".join(f"{votes.count(each)} {each}" for each in sorted(set(votes)))
        return f"of {len(case.judges)} members {kinds}"

    def _evidence(self, round_: _Round, case: Case) -> bytes:
        """The accusation, and what each judge has signed; empty where nobody accuses."""
        accused, (_, claim) = round_.members[case.accused], round_.claims[case.accused]
        found = {
            seat: round_.findings[case.accused, seat]
            for seat in (case.accuser, *sorted(case.judges - {case.accuser}))
            if (case.accused, seat) in round_.findings
        }
        accusing = next(
            (seat for seat, (each, _) in found.items() if each is not None and each.accuses), None
        )
        if accusing is None:
            return b""
        accuser = round_.members[accusing].peer
        others = [
            (round_.members[seat].peer, signed)
            for seat, (finding, signed) in found.items()
            if seat != accusing and finding is not None
        ]
        shown = pack_evidence(accused.peer, accuser, claim, found[accusing][1])
        return pack_verdict(shown, others)

    def _eject(self, member: EpochMember, evidence: bytes, reason: str) -> None:
        if member.peer in self.reasons or member.peer in self.false_trials:
            return
        if member.peer in self._machine.epoch.trials:
            self.false_trials[member.peer] = reason, evidence
            return
        self.reasons[member.peer] = reason
        text = f"{self._called(member.peer)} is ejected: {reason}"
        self._warn(text)
        self.note("ejected", member.seat, text)
        self._events.append(Eject(member.seat, evidence, member.peer, self._since(member.seat)))

    def _since(self, seat: int) -> int:
        """The first round whose result of a seat leaves the weights, after the last one found right; 0 for none.

        Rounds of epochs before stay: not all members have their results.
        """
        epoch = self._machine.epoch
        if not epoch.has_round:
            return 0
        since = max(epoch.round - epoch.round_of_epoch + 1, epoch.made + 1 - _MAX_TAKEN_BACK, 1)
        for round_ in self._rounds:
            is_right = round_.epoch == epoch.epoch and seat not in (*round_.cases, *round_.closed)
            if is_right and any(
                about == seat and finding is not None and finding.holds
                for (about, _), (finding, _) in round_.findings.items()
            ):
                since = max(since, round_.round + 1)
        return since if since <= epoch.made else 0

    # Trials

    def found_right(self, peer: str, number: int) -> bool | None:
        """Whether a claim of a peer on trial, in a round of this number, was found right.

        True where each that was drawn and is still a member says that it holds, or most that judged it; None while
        that is not known, and where it will not be.
        """
        found = self._tried(peer, number)
        if found is None:
            return None
        round_, seat = found
        over = round_.closed.get(seat)
        if over is not None:
            return {Verdict.ACCUSER: True, Verdict.ACCUSED: False}.get(over[1])
        if seat in round_.cases or seat in round_.closed:
            return None
        drawn = [each.auditor for each in round_.audits or () if each.seat == seat]
        told = [round_.findings[seat, each][0] for each in drawn if (seat, each) in round_.findings]
        is_missing = any(
            (seat, each) not in round_.findings and self._is_healthy(round_.members[each])
            for each in drawn
        )
        holds = all(each is not None and each.holds for each in told)
        return True if told and holds and not is_missing else None

    def proof_of(self, peer: str, number: int) -> bytes:
        """The claim of a peer on trial, and the findings that it holds."""
        found = self._tried(peer, number)
        assert found is not None  # it was found right
        round_, seat = found
        return pack_proof(
            round_.claims[seat][1],
            [
                (round_.members[by].peer, signed)
                for (about, by), (finding, signed) in sorted(
                    round_.findings.items(), key=lambda each: each[0]
                )
                if about == seat and finding is not None and finding.holds
            ],
        )

    def tried_rounds(self) -> list[int]:
        """Rounds in which members on trial gave something, ascending."""
        return [each.round for each in self._rounds if each.tried]

    def _tried(self, peer: str, number: int) -> tuple[_Round, int] | None:
        for round_ in self._rounds:
            for seat in round_.tried if round_.round == number else ():
                if round_.members[seat].peer == peer and seat in round_.claims:
                    return round_, seat
        return None

    # What members are told

    def to_judge(self) -> Iterator[tuple[str, RoundEvidence]]:
        """Yield the evidence of open cases, each with the peer id of a member that has yet to judge it."""
        for round_ in self._rounds:
            for about, case in round_.cases.items():
                accused, (_, claim) = round_.members[about], round_.claims[about]
                finding, signed = round_.findings[about, case.accuser]
                accuser = round_.members[case.accuser].peer
                shown = b""
                if finding is not None:
                    shown = pack_evidence(accused.peer, accuser, claim, signed)
                said = RoundEvidence(
                    self._rules.run, round_.epoch, round_.round, about, case.accuser, shown
                )
                for seat in sorted(case.judges - case.votes.keys()):
                    if self._is_healthy(round_.members[seat]):
                        yield round_.members[seat].peer, said

    def _round(self, epoch: int, number: int) -> _Round | None:
        return next((each for each in self._rounds if self._key(each) == (epoch, number)), None)

    def _age(self, round_: _Round) -> int:
        return self._machine.epoch.made - round_.step

    @staticmethod
    def _key(round_: _Round) -> tuple[int, int]:
        return round_.epoch, round_.round

    def _is_healthy(self, member: EpochMember) -> bool:
        now = self._machine.epoch.member(member.seat)
        return (
            now is not None
            and now.health is Health.HEALTHY
            and (now.peer, now.incarnation) == (member.peer, member.incarnation)
            and member.peer not in self.reasons
        )

    def _refused(self, peer: str, what: str) -> RemoteProtocolError:
        """The error for what somebody sends; people are told once of each kind."""
        kind = " ".join(word for word in what.split() if not any(map(str.isdigit, word)))
        if (peer, kind) not in self._said and len(self._said) < 4096:
            self._said.add((peer, kind))
            self._warn(f"{self._called(peer)} sends what is refused: {what}")
        return RemoteProtocolError(what, code=ErrorCode.PROTOCOL_VIOLATION)
