"""Decisions of a run's leader on which peers may take part, as a pure machine. No clock, no socket, no torch.

    machine = JoinMachine(rules, run, leader)
    outcomes = machine.applied(peer, invitation, now=now)
    outcomes = machine.decided(round_number, found_right, now=now)      # after each round
    machine.state.counts(peer)

Times are seconds of the Unix epoch, since invitations and bans have them. A clock that goes back prolongs what it
ends, and admits nobody. Whether a claim was right is asked of who computes claims again.

Source: protocol_spec/training/joining.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from neurogrid.training.joining.bans import MAX_BANS
from neurogrid.training.joining.records import Ban, Invitation
from neurogrid.training.joining.state import (
    Banned,
    Became,
    BeganTrial,
    JoinRules,
    JoinState,
    Member,
    Outcome,
    Refused,
    RefusedFor,
    Spent,
    Trial,
    Waiter,
    Waits,
    without,
)

__all__ = ["FoundRight", "JoinMachine"]

FoundRight = Callable[[str, int], bool | None]
"""Whether the claim of a peer in a round was found right, by who computed it again; None where nobody has looked."""

_MAX_REFUSED: Final = 4096
_MAX_SERIALS: Final = 1024


class JoinMachine:
    """Decides who takes part, and who counts.

    What its methods give is what came of it, in order: to be told to peers, and bans and what is spent to be written
    down first.

    Args:
        rules: of the run.
        run: its id, 16 bytes.
        leader: the peer id of its leader, who takes no part.
        bans: of before, as they were written down.
        spent: uses of before, the same.
        admitted: peers that counted before the leader came back: they do as soon as they come, if there is room.
        round_number: the last that was decided.

    Attributes:
        state: where all stand.
    """

    def __init__(
        self,
        rules: JoinRules,
        run: bytes,
        leader: str,
        *,
        bans: Iterable[Ban] = (),
        spent: Iterable[Spent] = (),
        admitted: Iterable[str] = (),
        round_number: int = 0,
    ) -> None:
        self.rules, self._run, self._leader = rules, run, leader
        known: dict[str, Ban] = {}
        for ban in sorted(bans, key=lambda ban: ban.number):
            known[ban.peer] = ban
        uses: dict[int, frozenset[str]] = {}
        for use in spent:
            uses[use.serial] = uses.get(use.serial, frozenset()) | {use.peer}
        self.state = JoinState(
            round=round_number,
            admitted=frozenset(peer for peer in admitted if peer not in known),
            bans=known,
            uses=uses,
            num_bans=max((ban.number for ban in known.values()), default=0),
        )

    # What happens

    def applied(self, peer: str, invitation: Invitation, *, now: float) -> list[Outcome]:
        """A peer shows an invitation, whose signature is good. Repeating that changes nothing.

        Args:
            peer: whose id the connection has proven.
        """
        outcomes = self.passed(now=now)
        return outcomes + self._apply(peer, invitation, now)

    def left(self, peer: str, *, now: float) -> list[Outcome]:
        """A peer is gone. Who leaves its trial is refused for a while, or it would have another time for nothing."""
        outcomes = self.passed(now=now)
        if peer in self.state.trials:
            outcomes.append(self._refuse(peer, RefusedFor.LEFT, now))
        self._forget(peer)
        return outcomes + self._begin_trials(now)

    def ejected(self, peer: str, *, now: float, evidence: bytes = b"") -> list[Outcome]:
        """A peer is banned for what it did: a claim of its was found wrong, or it did other than it was told.

        Args:
            evidence: SHA-256 of what shows that; empty where the leader saw it.
        """
        outcomes = self.passed(now=now)
        if peer != self._leader and not self._is_banned(peer, now):
            outcomes.append(self._ban(peer, evidence, now))
        return outcomes + self._begin_trials(now)

    def decided(self, round_number: int, found_right: FoundRight, *, now: float) -> list[Outcome]:
        """A round was decided, or something was found about one that was.

        Args:
            round_number: the last that was decided.
            found_right: is asked of each peer that is inside, for this round.
        """
        outcomes = self.passed(now=now)
        self.state = replace(self.state, round=max(self.state.round, round_number))
        for peer in [*self.state.trials, *self.state.members]:
            verdict = found_right(peer, round_number)
            if verdict is False:
                outcomes.append(self._ban(peer, b"", now))
            elif verdict is True and peer in self.state.trials:
                outcomes += self._found_right(peer, round_number)
        return outcomes + self._begin_trials(now)

    def passed(self, *, now: float) -> list[Outcome]:
        """Time has passed: what is over ends."""
        state, outcomes = self.state, list[Outcome]()
        over = [
            (peer, RefusedFor.NOT_FOUND_RIGHT) for peer, t in state.trials.items() if t.until <= now
        ]
        over += [(peer, RefusedFor.FULL) for peer, w in state.waiting.items() if w.until <= now]
        self.state = replace(
            state,
            refused={peer: until for peer, until in state.refused.items() if until > now},
            starts=tuple(at for at in state.starts if at > now - self.rules.window_seconds),
        )
        outcomes += [self._refuse(peer, reason, now) for peer, reason in over]
        return outcomes + self._begin_trials(now)

    @property
    def next_at(self) -> float | None:
        """The time at which `passed` is due next; None for not before something happens."""
        state = self.state
        moments = [each.until for each in state.trials.values()]
        moments += [each.until for each in state.waiting.values()]
        if state.waiting and state.starts:
            moments.append(min(state.starts) + self.rules.window_seconds)
        return min(moments, default=None)

    # What follows

    def _apply(self, peer: str, invitation: Invitation, now: float) -> list[Outcome]:
        state, rules = self.state, self.rules
        if peer == self._leader or state.takes_part(peer) or peer in state.waiting:
            return []
        ban = state.bans.get(peer)
        if ban is not None and ban.is_in_force(now):
            return [Refused(peer, RefusedFor.BANNED, ban.until - now if ban.until else None)]
        if (until := state.refused.get(peer, now)) > now:
            return [Refused(peer, RefusedFor.TOO_SOON, until - now)]
        if peer in state.admitted:
            if state.num_inside >= rules.max_members:
                return [Refused(peer, RefusedFor.FULL, rules.retry_seconds)]
            self._let_in(peer)
            return [Became(peer, is_back=True)]
        if (reason := self._fault(peer, invitation, now)) is not None:
            # It may have another one by then.
            is_early = reason is RefusedFor.NOT_YET
            retry = invitation.not_before - now if is_early else rules.retry_seconds
            return [Refused(peer, reason, retry)]
        if not invitation.is_open:
            if state.num_inside >= rules.max_members:
                return [Refused(peer, RefusedFor.FULL, rules.retry_seconds)]
            spent = self._use(peer, invitation.serial, invitation.max_uses)
            self._let_in(peer)
            return [*spent, Became(peer)]
        if len(state.waiting) >= rules.max_waiting or len(state.bans) >= MAX_BANS:
            return [Refused(peer, RefusedFor.FULL, rules.retry_seconds)]
        waiter = Waiter(now + rules.wait_seconds, invitation.serial, invitation.max_uses)
        self.state = replace(state, waiting={**state.waiting, peer: waiter})
        begun = self._begin_trials(now)
        if peer in self.state.waiting:
            begun.append(Waits(peer, self.state.waiting[peer].until))
        return begun

    def _fault(self, peer: str, invitation: Invitation, now: float) -> RefusedFor | None:
        """The reason to refuse an invitation; None if it is good."""
        if (invitation.run, invitation.leader) != (self._run, self._leader):
            return RefusedFor.WRONG_RUN
        if now < invitation.not_before:
            return RefusedFor.NOT_YET
        if now >= invitation.not_after:
            return RefusedFor.EXPIRED
        is_used_up = self._is_used_up(peer, invitation.serial, invitation.max_uses)
        return RefusedFor.USED_UP if is_used_up else None

    def _is_used_up(self, peer: str, serial: int, max_uses: int) -> bool:
        """Whether nobody else may come by an invitation, this peer among them."""
        used = self.state.uses.get(serial, frozenset())
        if not max_uses or peer in used:
            return False
        is_new = serial not in self.state.uses
        return len(used) >= max_uses or (is_new and len(self.state.uses) >= _MAX_SERIALS)

    def _use(self, peer: str, serial: int, max_uses: int) -> list[Outcome]:
        """A peer comes by an invitation: that counts, also once it has left, and once for each peer."""
        used = self.state.uses.get(serial, frozenset())
        if not max_uses or peer in used:
            return []
        self.state = replace(self.state, uses={**self.state.uses, serial: used | {peer}})
        return [Spent(peer, serial)]

    def _begin_trials(self, now: float) -> list[Outcome]:
        """Begin trials of those that wait, in the order in which they came, as far as there is room."""
        outcomes, rules = list[Outcome](), self.rules
        for peer, waiter in list(self.state.waiting.items()):
            state = self.state
            if (
                state.num_inside >= rules.max_members
                or len(state.trials) >= rules.max_trials
                or len(state.starts) >= rules.max_starts
            ):
                break
            if self._is_used_up(peer, waiter.serial, waiter.max_uses):
                outcomes.append(self._refuse(peer, RefusedFor.USED_UP, now))
                continue
            outcomes += self._use(peer, waiter.serial, waiter.max_uses)
            state = self.state
            trial = Trial(now + rules.trial_seconds, state.round)
            self.state = replace(
                state,
                waiting=without(state.waiting, peer),
                trials={**state.trials, peer: trial},
                starts=(*state.starts, now),
            )
            outcomes.append(BeganTrial(peer, trial.until))
        return outcomes

    def _found_right(self, peer: str, round_number: int) -> list[Outcome]:
        trial = self.state.trials[peer]
        if round_number <= max(trial.after_round, trial.last_right):
            return []
        trial = replace(trial, num_right=trial.num_right + 1, last_right=round_number)
        if trial.num_right < self.rules.trial_rounds:
            self.state = replace(self.state, trials={**self.state.trials, peer: trial})
            return []
        self._let_in(peer)
        return [Became(peer)]

    def _let_in(self, peer: str) -> None:
        self._forget(peer)
        members = {**self.state.members, peer: Member(self.state.round)}
        self.state = replace(self.state, members=members)

    def _refuse(self, peer: str, reason: RefusedFor, now: float) -> Refused:
        """A peer that was waiting or on trial is nobody any more, and may not come back at once."""
        self._forget(peer)
        refused = {**self.state.refused, peer: now + self.rules.retry_seconds}
        while len(refused) > _MAX_REFUSED:
            del refused[min(refused, key=lambda each: refused[each])]
        self.state = replace(self.state, refused=refused)
        return Refused(peer, reason, self.rules.retry_seconds)

    def _is_banned(self, peer: str, now: float) -> bool:
        ban = self.state.bans.get(peer)
        return ban is not None and ban.is_in_force(now)

    def _ban(self, peer: str, evidence: bytes, now: float) -> Banned:
        self._forget(peer)
        seconds = self.rules.ban_seconds
        at = max(int(now), 0)
        until = 0 if seconds is None else at + max(1, int(seconds))
        ban = Ban(self._run, self._leader, peer, self.state.num_bans + 1, at, until, evidence)
        self.state = replace(self.state, bans={**self.state.bans, peer: ban}, num_bans=ban.number)
        return Banned(ban)

    def _forget(self, peer: str) -> None:
        state = self.state
        self.state = replace(
            state,
            waiting=without(state.waiting, peer),
            trials=without(state.trials, peer),
            members=without(state.members, peer),
            admitted=state.admitted - {peer},
        )
