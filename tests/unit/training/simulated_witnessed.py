"""A witnessed run without leader and members: what happens to it is called up by a test, and goes into a journal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from neurogrid.training.witnessed import (
    Checkpointed,
    Commitment,
    Committed,
    EpochPhase,
    EpochRules,
    EpochState,
    Event,
    Health,
    Joined,
    Parts,
    Warm,
    Witnessed,
    WitnessProof,
    due,
    event_json,
    event_of,
    parts_of,
    tick,
)

__all__ = ["RULES", "WitnessedRun", "fold"]

RULES = EpochRules(
    min_members=2,
    max_members=8,
    rounds=3,
    batches=8,
    warmup=30.0,
    train=20.0,
    witness=5.0,
    cooldown=10.0,
)


class WitnessedRun:
    """A run that is told what happens.

    Attributes:
        rules: of the run.
        state: now.
        now: seconds.
        journal: a line of JSON for each tick that changed something.
        phases: that there were, each once as long as it lasted.
    """

    def __init__(self, rules: EpochRules = RULES) -> None:
        self.rules, self.state, self.now = rules, EpochState(), 0.0
        self.journal: list[str] = []
        self.phases = [self.state.phase]
        self._draws = 0

    def tick(self, *events: Event) -> EpochState:
        """One tick with these events."""
        self._draws += 1
        draw = hashlib.sha256(b"draw %d" % self._draws).digest()
        after = tick(self.rules, self.state, self.now, events, draw=draw)
        if after is not self.state:
            line = {
                "time": self.now,
                "events": [event_json(event) for event in events],
                "draw": draw.hex(),
                "state": after.digest().hex(),
            }
            self.journal.append(json.dumps(line))
        if after.phase is not self.state.phase:
            self.phases.append(after.phase)
        self.state = after
        return after

    def go(self, *events: Event) -> EpochState:
        """These events, and as many ticks as change something without time."""
        self.tick(*events)
        while (then := due(self.rules, self.state)) is not None and then <= self.now:
            self.tick()
        return self.state

    def wait(self, seconds: float) -> EpochState:
        """Time goes on."""
        self.now += seconds
        return self.go()

    @property
    def parts(self) -> Parts:
        """Who does what in the round."""
        return parts_of(self.rules, self.state)

    @property
    def health(self) -> dict[int, Health]:
        """Of all members of the epoch, by seat."""
        return {each.seat: each.health for each in self.state.members}

    @property
    def agreed_seats(self) -> set[int]:
        """Whose results were agreed in the round before."""
        return {each.seat for each in self.state.agreed}

    def seat_of(self, peer: str) -> int:
        """The seat that a peer has in this epoch, the last one of several."""
        return [each.seat for each in self.state.members if each.peer == peer][-1]

    # What honest members do

    def join(self, *peers: str) -> EpochState:
        """Peers want to be members, in their first process."""
        return self.go(*(Joined(peer, 1) for peer in peers))

    def warm(self, seats: Iterable[int] | None = None) -> EpochState:
        """Members are warm: these, or all."""
        found = self.state.healthy if seats is None else seats
        return self.go(*(Warm(seat, self.state.epoch) for seat in found))

    def commitment(self, seat: int, what: str = "result") -> Commitment:
        """What a member commits to in this round."""
        first, number = self.parts.works.get(seat, (0, 0))
        result = hashlib.sha256(f"{what} {seat} {self.state.round}".encode()).digest()
        return Commitment(seat, self.state.epoch, self.state.round, first, number, result)

    def proof(self, seat: int, seats: Iterable[int]) -> WitnessProof:
        """The proof of a witness that has what members on these seats committed to."""
        had = [self.commitment(each) for each in sorted({*seats, seat})]
        return WitnessProof.of(seat, self.state.seed, self.state.epoch, self.state.round, had)

    def commit(self, seats: Iterable[int] | None = None) -> EpochState:
        """Members commit: these, or all."""
        found = self.state.healthy if seats is None else seats
        return self.go(*(Committed(self.commitment(seat)) for seat in found))

    def witness(
        self, seats: Iterable[int] | None = None, having: Iterable[int] | None = None
    ) -> EpochState:
        """Witnesses send proofs: these, or all that are healthy; of what these seats committed to, or all healthy."""
        healthy = set(self.state.healthy)
        found = healthy & set(self.parts.witnesses) if seats is None else seats
        had = healthy if having is None else set(having)
        proofs = [self.proof(seat, had) for seat in sorted(found)]
        return self.go(*map(Witnessed, proofs))

    def round(self) -> EpochState:
        """All healthy members do what they are to, in a round."""
        self.commit()
        return self.witness()

    def checkpoint(self) -> EpochState:
        """All healthy members have kept the weights."""
        epoch = self.state.epoch
        return self.go(*(Checkpointed(seat, epoch) for seat in self.state.healthy))

    def train(self, *peers: str) -> EpochState:
        """These peers join and are warm, and the first round is under way."""
        self.join(*peers)
        self.warm()
        assert self.state.phase is EpochPhase.ROUND_TRAIN
        return self.state


def fold(rules: EpochRules, journal: Iterable[str], state: EpochState | None = None) -> EpochState:
    """The state that a journal ends with, each digest in it checked."""
    found = EpochState() if state is None else state
    for text in journal:
        line: Any = json.loads(text)
        events = [event_of(event) for event in line["events"]]
        found = tick(rules, found, line["time"], events, draw=bytes.fromhex(line["draw"]))
        assert found.digest().hex() == line["state"]
    return found
