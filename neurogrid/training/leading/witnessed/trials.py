"""Strangers at an open run: who may wait for a seat, on trial or by an invitation, and what comes of a trial.

    says that it waits -> JoinMachine -> Trial, and a seat at weight zero -> its claim, which is always looked at
        -> Admitted: it counts; or Refused, and banned for a while

Who shows an invitation of the leader's that is not open counts at once; who shows none comes as by an open one. What
comes of it are events of the machine, which stand in the journal.

Source: protocol_spec/training/joining.md, and witnessed.md, "Trials".
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.trust.limits import MAX_TIME
from neurogrid.training.joining import (
    Banned,
    Became,
    BeganTrial,
    Invitation,
    JoinMachine,
    JoinRules,
    Outcome,
    Refused,
    RefusedFor,
    Spent,
)
from neurogrid.training.leading.witnessed.audits import RoundAudits
from neurogrid.training.runs.entries import Entry, EpochEntry, InvitedEntry
from neurogrid.training.runs.witnessed_machine import WitnessedMachine
from neurogrid.training.witnessed import Admitted, Event, Joined, Trial
from neurogrid.training.witnessed import Refused as RefusedEvent

__all__ = ["INVITATION_SECONDS", "Trials", "write_invitation"]

INVITATION_SECONDS: Final = 7 * 24 * 3600
"""Seconds for which the invitation that a leader writes for members that it trusts is good."""

_BAN_SECONDS: Final = 3600.0
_LONGEST_REASON: Final = 500


def write_invitation(
    path: Path, run_id: bytes, identity: Identity, addresses: Iterable[str]
) -> None:
    """Write an invitation for members that the leader trusts: any number of them, for seven days."""
    now = int(time.time())
    invitation = Invitation(
        run_id,
        identity.peer_id,
        secrets.randbits(64),
        now - 60,
        now + INVITATION_SECONDS,
        addresses=tuple(addresses)[:16],
    )
    path.touch(mode=0o600)
    path.write_bytes(invitation.sign(identity))


class Trials:
    """Admission of peers to an open run: by invitation, or on trial.

    Args:
        run_id: 16 bytes.
        leader: its peer id.
        max_members: members and peers on trial, together.
        entries: of the journal so far: who was admitted, by which invitations members came, who is banned.
        machine: of the run.
        audits: what is found about claims.
        called: what people call the peer.
        say, warn: tell people something.
        refuse: a peer takes no part, for this reason, for so many seconds or for good.
        is_here: whether a peer is connected, and not silent.
    """

    def __init__(
        self,
        run_id: bytes,
        leader: str,
        max_members: int,
        entries: Iterable[Entry],
        machine: WitnessedMachine,
        audits: RoundAudits,
        called: Callable[[str], str],
        say: Callable[[str], None],
        warn: Callable[[str], None],
        refuse: Callable[[str, str, float | None], None],
        is_here: Callable[[str], bool],
    ) -> None:
        self._run_id, self._leader = run_id, leader
        self._machine, self._audits, self._called = machine, audits, called
        self._say, self._warn, self._refuse, self._is_here = say, warn, refuse, is_here
        admitted, spent = _known(entries)
        self._joining = JoinMachine(
            JoinRules(max_members, ban_seconds=_BAN_SECONDS),
            run_id,
            leader,
            spent=spent,
            admitted=admitted,
            round_number=machine.epoch.made,
        )
        # Who shows no invitation comes as if this had been published.
        self._open = Invitation(run_id, leader, 0, 0, MAX_TIME, is_open=True)
        self._seated: set[str] = set()

    # Who comes

    def takes(self, peer: str, incarnation: int, invitation: bytes) -> list[Event]:
        """A peer says that it waits: the events by which it does; none where it is to take no part.

        Args:
            invitation: what it shows; empty for none.
        """
        now = time.time()
        joining = self._joining
        if (ban := self._machine.state.ban_of(peer, now)) is not None:
            self._refuse(peer, f"banned: {ban.reason}", ban.until - now if ban.until else None)
            return []
        outcomes: list[Outcome] = []
        if not joining.state.takes_part(peer):
            try:
                shown = Invitation.open(invitation, self._leader) if invitation else self._open
            except RemoteProtocolError as exc:
                self._warn(f"{self._called(peer)} shows an invitation that is none: {exc}")
                self._refuse(peer, str(exc), joining.rules.retry_seconds)
                return []
            outcomes = joining.applied(peer, shown, now=now)
        events = self._follow(outcomes, now)
        if joining.state.takes_part(peer):
            events.append(Joined(peer, incarnation))
        return events

    # What comes of it

    def look(self) -> list[Event]:
        """Take the events that have come of trials since the last look."""
        now, joining, epoch = time.time(), self._joining, self._machine.epoch
        seated = {peer for peer, _ in epoch.pending}
        seated |= {each.peer for each in epoch.members if each.seat in epoch.healthy}
        outcomes: list[Outcome] = []
        # Whoever is gone before it has a seat takes no turn, and no place, of those that are here.
        for peer in [*joining.state.waiting, *joining.state.trials]:
            if peer not in seated | self._seated and not self._is_here(peer):
                outcomes += joining.left(peer, now=now)
        outcomes += joining.passed(now=now)
        for number in self._audits.tried_rounds():
            outcomes += joining.decided(number, self._found_right, now=now)
        events = self._follow(outcomes, now)
        for peer in list(self._audits.false_trials):
            reason, evidence = self._audits.false_trials.pop(peer)
            if self._machine.state.ban_of(peer, now) is None:  # or it was two claims of one trial
                events += self._end(peer, reason, evidence, now)
        for peer in (self._seated - seated) & joining.state.trials.keys():
            events += self._follow(joining.left(peer, now=now), now)
        for peer in (self._seated - seated) & joining.state.members.keys():
            # It shows its invitation again, or is on trial again.
            events += self._follow(joining.left(peer, now=now), now)
        for peer in joining.state.trials.keys() & set(epoch.barred):
            events += self._follow(self._ejected(peer, now), now)
        self._seated = seated
        return events

    def _found_right(self, peer: str, number: int) -> bool | None:
        # A claim that was found wrong comes with its evidence, by `false_trials`.
        return self._audits.found_right(peer, number) or None

    def _end(self, peer: str, reason: str, evidence: bytes, now: float) -> list[Event]:
        """A claim of a peer on trial was found wrong: it is banned for a while."""
        outcomes = self._ejected(peer, now)
        ban = self._machine.ban(peer, reason[:_LONGEST_REASON], now=now)
        lasts = f"for {(ban.until - ban.at) // 60} min" if ban.until else "for good"
        self._tell(
            "banned", peer, f"{self._called(peer)} fails its trial, and is banned {lasts}: {reason}"
        )
        self._refuse(peer, f"banned {lasts}: {reason}", ban.until - now if ban.until else None)
        refused = RefusedEvent(peer, reason[:_LONGEST_REASON], evidence)
        return [refused, *self._follow(outcomes, now)]

    def _ejected(self, peer: str, now: float) -> list[Outcome]:
        """A peer has no place any more: what comes of it for others, whose trials may begin."""
        outcomes = self._joining.ejected(peer, now=now)
        # How long it is banned is the run's to say.
        return [each for each in outcomes if not isinstance(each, Banned)]

    def _tell(self, kind: str, peer: str, text: str) -> None:
        self._warn(text)
        self._audits.note(kind, self._seat_of(peer), text)

    def _seat_of(self, peer: str) -> int:
        """The last seat that a peer had in the epoch; the next one that anybody gets, where it had none."""
        epoch = self._machine.epoch
        seats = [each.seat for each in epoch.members if each.peer == peer]
        return seats[-1] if seats else epoch.next_seat

    def _follow(self, outcomes: list[Outcome], now: float) -> list[Event]:
        events: list[Event] = []
        for outcome in outcomes:
            match outcome:
                case Spent(peer, serial):
                    self._machine.invited(peer, serial)
                case BeganTrial(peer):
                    self._say(f"{self._called(peer)} is on trial: what it gives does not count yet")
                    events.append(Trial(peer))
                case Became(peer, is_back=True):
                    self._say(f"{self._called(peer)} counts, as before this leader came back")
                case Became(peer) if peer in self._machine.epoch.trials:
                    numbers = [
                        number
                        for number in self._audits.tried_rounds()
                        if self._audits.found_right(peer, number)
                    ]
                    told = f"{self._called(peer)} counts from the next round: its claim holds"
                    self._say(told)
                    self._audits.note("admitted", self._seat_of(peer), told)
                    proof = self._audits.proof_of(peer, numbers[0])
                    events.append(Admitted(peer, proof))
                case Became(peer):
                    self._say(f"{self._called(peer)} is invited")
                case Refused(peer, reason, retry):
                    if reason is not RefusedFor.TOO_SOON:
                        self._tell("refused", peer, f"{self._called(peer)} takes no part: {reason}")
                    self._refuse(peer, str(reason), retry)
                    # The machine may have yet to hear of a trial that somebody has left.
                    if peer in self._machine.epoch.trials or reason is RefusedFor.LEFT:
                        events.append(RefusedEvent(peer, str(reason)))
                case Banned():
                    raise AssertionError("a claim that was found wrong comes with its evidence")
        return events


def _known(entries: Iterable[Entry]) -> tuple[list[str], list[Spent]]:
    """Peers that were admitted and are not on trial again or out since, and the spent uses of invitations."""
    admitted: dict[str, None] = {}
    spent = []
    for entry in entries:
        if isinstance(entry, InvitedEntry):
            spent.append(Spent(entry.peer, entry.serial))
        elif isinstance(entry, EpochEntry):
            for event in entry.events:
                if event["kind"] == "admitted":
                    admitted[str(event["peer"])] = None
                elif event["kind"] in ("trial", "refused", "eject"):
                    admitted.pop(str(event.get("peer", "")), None)
    return list(admitted), spent
