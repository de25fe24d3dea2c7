"""Whatever can happen to a witnessed run, in any order: members that come, die, lie and are late, and a leader too.

What a schedule does comes of a `Random`. Members are as honest as their seat says; all that they say goes through a
network that delays, doubles and loses it. Each tick is held to what must always be so, and the machine that is written
from the specification alone goes beside.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

from neurogrid.training.witnessed import (
    Admitted,
    Checkpointed,
    Commitment,
    Committed,
    Eject,
    EpochPhase,
    EpochRules,
    EpochState,
    Event,
    Gone,
    Health,
    Joined,
    Left,
    Pause,
    Refused,
    Resume,
    Stop,
    Trial,
    Unhealthy,
    Warm,
    Witnessed,
    WitnessProof,
    due,
    event_json,
    event_of,
    parts_of,
    tick,
)
from tests.unit.training.witnessed_by_the_book import Book, json_of, state_digest

__all__ = ["Schedule", "rules_of"]

P = EpochPhase
ARROWS = {
    P.WAITING_FOR_MEMBERS: {P.WARMUP, P.FINISHED, P.PAUSED},
    P.WARMUP: {P.WAITING_FOR_MEMBERS, P.ROUND_TRAIN, P.FINISHED, P.PAUSED},
    P.ROUND_TRAIN: {P.ROUND_WITNESS, P.PAUSED},
    P.ROUND_WITNESS: {P.ROUND_TRAIN, P.COOLDOWN, P.PAUSED},
    P.COOLDOWN: {P.WAITING_FOR_MEMBERS, P.FINISHED, P.PAUSED},
    P.PAUSED: {P.WAITING_FOR_MEMBERS, P.WARMUP, P.ROUND_TRAIN, P.ROUND_WITNESS, P.COOLDOWN},
    P.FINISHED: set(),
}
_PEERS = 7


def rules_of(random: Random) -> EpochRules:
    """Rules of a small run."""
    least = random.randint(1, 3)
    return EpochRules(
        min_members=least,
        max_members=random.randint(least, 6),
        rounds=random.randint(1, 3),
        batches=random.choice([0, 1, 3, 8]),
        warmup=8.0,
        train=6.0,
        witness=3.0,
        cooldown=5.0,
        witnesses=random.choice([0, 0, 1, 2, 3]),
        auditors=random.choice([0, 0, 1, 2]),
        max_rounds=random.choice([None, None, 2, 6]),
    )


@dataclass
class Peer:
    """A process that wants to be a member.

    Attributes:
        name: its peer id.
        incarnation: of its process.
        alive: whether it does anything.
        seen: the state of the run as it knows it, which may be an old one.
        has: seats whose results it has, in the round that it knows.
    """

    name: str
    incarnation: int
    alive: bool
    seen: EpochState
    has: set[int]


class Schedule:
    """A run to which things happen.

    Args:
        random: of which all comes.
        beside: whether the other machine goes beside, tick by tick.
    """

    def __init__(self, random: Random, *, beside: bool = True) -> None:
        self.random, self.rules = random, rules_of(random)
        self.state, self.now = EpochState(), 0.0
        self.peers = {
            f"p{number}": Peer(f"p{number}", 1, False, self.state, set())
            for number in range(_PEERS)
        }
        self.network: list[Event] = []
        self.old: list[Event] = []
        self.journal: list[tuple[float, str, bytes, bytes]] = []
        self.used: dict[int, tuple[int, int]] = {}
        self.seats: dict[int, str] = {}
        self.agreed: dict[int, tuple[Commitment, ...]] = {}
        rules = {each.name: getattr(self.rules, each.name) for each in fields(self.rules)}
        self.book = Book(rules) if beside else None
        # Some schedules have hardly any of these.
        self.weights = {
            act: random.choice([0, 1, 3]) * weight for act, weight in self.acts().items()
        }
        self.weights.update({self.join: 3, self.work: 8, self.deliver: 8, self.wait: 3})
        self.weights[self.resume] += self.weights[self.pause]

    def acts(self) -> dict[Callable[[], None], float]:
        """What may happen, and how often."""
        return {
            self.join: 3,
            self.work: 12,
            self.deliver: 10,
            self.wait: 3,
            self.succeed: 6,
            self.die: 0.4,
            self.leave: 0.2,
            self.lie: 1.0,
            self.complain: 0.5,
            self.repeat: 1.0,
            self.pause: 0.2,
            self.resume: 0.4,
            self.stop: 0.03,
            self.eject: 0.1,
            self.begin_trial: 1.0,
            self.end_trial: 0.5,
            self.restart: 0.3,
        }

    def run(self, num_acts: int) -> None:
        """So many things happen."""
        acts, weights = list(self.weights), list(self.weights.values())
        for _ in range(self.random.choice([0, 5])):
            self.join()
        for act in self.random.choices(acts, weights, k=num_acts):
            act()

    # What must always be so

    def tick(self, *events: Event) -> None:
        """One tick, with all that holds before and after it."""
        before = self.state
        draw = self.random.randbytes(32)
        after = tick(self.rules, before, self.now, events, draw=draw)
        if self.book is not None:
            self.book.tick(self.now, [event_json(event) for event in events], draw)
            assert after.json() == json_of(self.book.state)
            assert after.digest() == state_digest(self.book.state)
        if after is not before:
            text = json.dumps([event_json(event) for event in events])
            self.journal.append((self.now, text, draw, after.digest()))
        self.state = after
        self.check(before, after)

    def check(self, before: EpochState, after: EpochState) -> None:
        """What is so after each tick."""
        assert after.phase is before.phase or after.phase in ARROWS[before.phase]
        assert (after.phase is P.PAUSED) == (after.paused is not None)
        assert after.epoch - before.epoch in (0, 1)
        assert after.made - before.made in (0, 1)
        assert after.next_seat >= before.next_seat
        assert set(before.barred) <= set(after.barred)
        seats = [each.seat for each in after.members]
        assert seats == sorted(set(seats))
        for each in after.members:
            assert self.seats.setdefault(each.seat, each.peer) == each.peer
            assert each.health is not Health.HEALTHY or each.peer not in after.barred
            assert each.health is not Health.EJECTED or each.peer in after.barred
        peers = [each.peer for each in after.members if each.health is Health.HEALTHY]
        assert len(peers) == len(set(peers)) <= self.rules.max_members
        waiting = [peer for peer, _ in after.pending]
        assert len(waiting) == len(set(waiting))
        assert not set(waiting) & set(peers)
        assert {each.seat for each in after.commitments} <= {*after.seats, *after.trial_seats}
        assert not set(after.seats) & set(after.trial_seats)
        assert {each.seat for each in after.proofs} <= set(after.seats)
        assert {each.seat for each in after.tried} <= set(self.seats)
        assert len(after.trials) == len(set(after.trials))
        assert not set(after.trials) & set(after.barred)
        assert not after.taken_back or after.agreed
        assert {seat for seat, _ in (*after.leaving, *after.taken_back)} <= set(self.seats)
        if after.made > before.made:
            self.check_agreed(before, after)
        else:
            assert after.next_batch == before.next_batch
            assert after.agreed in (before.agreed, ())
        if before.agreed and not after.agreed:
            assert before.phase in (P.ROUND_WITNESS, P.COOLDOWN)

    def check_agreed(self, before: EpochState, after: EpochState) -> None:
        """What is so when a round was made."""
        assert after.agreed
        assert after.made not in self.agreed
        self.agreed[after.made] = after.agreed
        parts = parts_of(self.rules, before)
        ends = 0
        for each in after.agreed:
            assert (
                (each.epoch, each.round)
                == (before.epoch, before.round)
                == (
                    before.epoch,
                    after.made,
                )
            )
            assert (each.first_batch, each.num_batches) == parts.works[each.seat]
            assert each.num_batches
            assert each.first_batch >= ends
            ends = each.first_batch + each.num_batches
            for batch in range(each.first_batch, ends):
                assert batch not in self.used, "a batch is agreed twice"
                self.used[batch] = each.round, each.seat
            assert each.seat in before.seats, "what somebody on trial gave is agreed"
            member = after.member(each.seat)
            assert member is None or member.health is not Health.EJECTED
        assert before.next_batch <= after.agreed[0].first_batch
        assert ends <= after.next_batch

    # What happens

    def any_peer(self) -> Peer:
        return self.random.choice(list(self.peers.values()))

    def seat_of(self, peer: Peer, state: EpochState) -> int | None:
        """The seat that a peer believes that it has."""
        found = [
            each.seat
            for each in state.members
            if (each.peer, each.incarnation) == (peer.name, peer.incarnation)
        ]
        return found[-1] if found else None

    def send(self, event: Event) -> None:
        self.network.append(event)
        self.old.append(event)

    def join(self) -> None:
        asleep = [peer for peer in self.peers.values() if not peer.alive]
        peer = self.random.choice(asleep) if asleep else self.any_peer()
        if not peer.alive or self.random.random() < 0.1:
            peer.alive = True
            peer.incarnation += self.random.choice([0, 1])
        self.send(Joined(peer.name, peer.incarnation))

    def begin_trial(self) -> None:
        self.send(Trial(self.any_peer().name))

    def end_trial(self) -> None:
        peer = self.any_peer().name
        self.send(self.random.choice([Admitted(peer), Refused(peer, "not right")]))

    def look(self, peer: Peer) -> None:
        """A peer hears how the run stands."""
        if (peer.seen.epoch, peer.seen.round) != (self.state.epoch, self.state.round):
            peer.has = set()
        peer.seen = self.state

    def work(self) -> None:
        """Members do what they are to do, as far as they know."""
        for peer in self.random.sample(list(self.peers.values()), _PEERS):
            if peer.alive and self.random.random() < 0.7:
                if self.random.random() < 0.8:
                    self.look(peer)
                self.act(peer, self.random.choice([0.0, 0.5, 1.0]))

    def act(self, peer: Peer, share: float) -> None:
        """A member does what is to be done, and gets so much of what others have."""
        state = peer.seen
        seat = self.seat_of(peer, state)
        if seat is None:
            return
        going = state.going
        if going is P.WARMUP:
            self.send(Warm(seat, state.epoch))
        elif going is P.COOLDOWN:
            self.send(Checkpointed(seat, state.epoch))
        elif state.has_round and seat in (*state.seats, *state.trial_seats):
            self.send(Committed(self.commitment(state, seat)))
            there = {each.seat for each in self.state.commitments} | {seat}
            if (self.state.epoch, self.state.round) == (state.epoch, state.round):
                peer.has |= {each for each in there if self.random.random() < share}
            parts = parts_of(self.rules, state)
            is_whole = set(parts.works) & set(state.healthy) <= peer.has | {seat}
            if seat in parts.witnesses and (is_whole or going is P.ROUND_WITNESS):
                self.send(Witnessed(self.proof(state, seat, peer.has)))

    def commitment(self, state: EpochState, seat: int, what: str = "") -> Commitment:
        first, number = parts_of(self.rules, state).works.get(seat, (0, 0))
        text = f"{what} {seat} {state.epoch} {state.round}"
        result = hashlib.sha256(text.encode()).digest()
        return Commitment(seat, state.epoch, state.round, first, number, result)

    def proof(self, state: EpochState, seat: int, has: set[int]) -> WitnessProof:
        had = [self.commitment(state, each) for each in sorted(has | {seat})]
        return WitnessProof.of(seat, state.seed, state.epoch, state.round, had)

    def deliver(self) -> None:
        """Some of what is under way comes, in some order, and some of that twice; some is lost."""
        random = self.random
        random.shuffle(self.network)
        number = random.randint(0, len(self.network))
        events = self.network[:number]
        self.network = self.network[number:]
        if random.random() < 0.2:
            events = [event for event in events for _ in range(random.randint(0, 2))]
        self.tick(*events)

    def wait(self) -> None:
        """Time goes on, once in a while a little back."""
        self.now += self.random.choice([0.0, 0.5, 2.0, 2.0, 9.0, -0.5])
        self.tick()

    def succeed(self) -> None:
        """All that are alive do what they are to do, and it comes at once."""
        others, self.network = self.network, []
        for peer in self.peers.values():
            if peer.alive:
                self.look(peer)
                self.act(peer, 1.0)
        # Who commits comes before who witnesses.
        self.network.sort(key=lambda event: isinstance(event, Witnessed))
        self.tick(*self.network)
        self.network = others

    def die(self) -> None:
        peer = self.any_peer()
        peer.alive = False
        if self.random.random() < 0.7:
            self.send(Gone(peer.name, peer.incarnation))

    def leave(self) -> None:
        seat = self.random.randint(0, self.state.next_seat)
        self.send(Left(seat, self.random.choice([Health.DROPPED, Health.WITHDRAWN])))

    def lie(self) -> None:
        """Something that no honest member says."""
        random, state = self.random, self.state
        seat = random.randint(0, max(1, state.next_seat))
        right = self.commitment(state, seat)
        proof = self.proof(state, seat, {random.randint(0, 6) for _ in range(4)})
        junk = bytes(random.choices([0, 0, 0, 1, 255], k=128))
        self.send(
            random.choice(
                [
                    Committed(self.commitment(state, seat, "another")),
                    Committed(replace(right, first_batch=random.randint(0, 99))),
                    Committed(replace(right, num_batches=random.randint(0, 9))),
                    Committed(replace(right, round=random.randint(0, 9))),
                    Committed(replace(right, epoch=random.randint(0, 9))),
                    Committed(replace(right, seat=random.randint(0, 9))),
                    Witnessed(proof),
                    Witnessed(replace(proof, seat=random.randint(0, 9))),
                    Witnessed(replace(proof, results=junk)),
                    Witnessed(replace(proof, participants=junk)),
                    Witnessed(replace(proof, results=bytes([255]) * 128)),
                    Witnessed(replace(proof, root=bytes(32))),
                    Witnessed(self.proof(state, seat, set(state.seats))),
                    Witnessed(replace(self.proof(state, seat, set(state.seats)), root=bytes(32))),
                    Warm(seat, random.randint(0, 3)),
                    Checkpointed(seat, random.randint(0, 3)),
                ]
            )
        )

    def complain(self) -> None:
        state, random = self.state, self.random
        seats = tuple(random.randint(0, 9) for _ in range(random.randint(0, 4)))
        by_seat = random.choice([*state.healthy, 99])
        number = state.round + random.choice([0, 0, 0, 1])
        self.send(Unhealthy(by_seat, seats, state.epoch, number))

    def repeat(self) -> None:
        """Something that was sent once comes again."""
        if self.old:
            self.network.append(self.random.choice(self.old))

    def pause(self) -> None:
        self.tick(Pause())

    def resume(self) -> None:
        self.tick(Resume())

    def stop(self) -> None:
        self.tick(Stop("that is enough"))

    def eject(self) -> None:
        seat = self.random.randint(0, self.state.next_seat)
        since = self.random.choice([0, 0, 1, max(1, self.state.made)])
        self.send(Eject(seat, b"", self.random.choice(["", "", "p1"]), since))

    def restart(self) -> None:
        """The leader is another process, which has the journal alone; some time is over."""
        self.state = self.folded()
        self.now += self.random.choice([0.0, 1.0, 20.0])
        if self.random.random() < 0.5:
            self.network = []

    def folded(self) -> EpochState:
        """What the journal comes to."""
        found = EpochState()
        for now, text, draw, digest in self.journal:
            events = [event_of(each) for each in json.loads(text)]
            found = tick(self.rules, found, now, events, draw=draw)
            assert found.digest() == digest
        assert found == self.state
        written: Any = json.loads(json.dumps(found.json()))
        assert EpochState.read(written) == found
        return found

    # How it ends

    def rest(self) -> None:
        """Nothing happens any more but time: the run comes to rest, soon."""
        for _ in range(12 * (2 + len(self.state.pending))):
            then = due(self.rules, self.state)
            if then is None:
                break
            self.now = max(self.now, then)
            before = self.state
            self.tick()
            assert self.state is not before
        assert due(self.rules, self.state) is None
        assert self.state.phase in (P.WAITING_FOR_MEMBERS, P.FINISHED, P.PAUSED)

    def heal(self) -> None:
        """All that can are members again, and honest: a run that is not over goes on."""
        self.network = []
        self.tick(Resume(), *map(Admitted, self.state.trials))
        able = [peer for peer in self.peers.values() if peer.name not in self.state.barred]
        can = len(able) >= self.rules.min_members and not self.state.reason
        before = self.state.made
        for _ in range(60):
            for peer in able:
                peer.alive = True
                if self.seat_of(peer, self.state) not in self.state.healthy:
                    self.send(Joined(peer.name, peer.incarnation))
            self.tick(*self.network)
            self.network = []
            self.succeed()
            self.now += 1.0
            if self.state.phase is P.FINISHED or self.state.made > before + 1:
                return
        assert not can, f"stuck in {self.state.phase} with {self.rules}"
