"""A run without processes: its leader's machine, and members as far as the group's decisions go."""

from __future__ import annotations

import json
from collections.abc import Iterable

from hypothesis import strategies as st

from neurogrid.training.runs.entries import Entry, RunEntry, entry_of
from neurogrid.training.runs.machine import Outcome, Rules, RunMachine
from neurogrid.training.runs.state import Occupant, Phase, RunState

__all__ = ["RUN", "SIZES", "Cluster", "drive", "rules"]

SIZES = (7, 5, 9, 3)
RUN = RunEntry(bytes(16), "leader", bytes(32), bytes(32), SIZES, 1)


class Cluster:
    """A leader and its members, as far as decisions go: who is there, and which of their works are trained."""

    def __init__(self, rules: Rules, *, num_epochs: int | None = None) -> None:
        self.rules, self.num_epochs = rules, num_epochs
        self.state = RunState(SIZES, seed=1, num_epochs=num_epochs)
        self.machine = RunMachine(rules, self.state)
        self.journal: list[Entry] = []
        self.members: dict[str, Occupant] = {}
        self.trained: dict[Occupant, int] = {}
        self.index = self.round = 0
        self.num_peers = 0

    def note(self) -> None:
        self.journal += self.machine.drain()

    def join(self, peer: str = "", holds: Iterable[int] = ()) -> str:
        self.num_peers += 1
        peer = peer or f"peer{self.num_peers}"
        occupant = Occupant(peer, self.num_peers)
        seat = self.machine.reserve(peer)
        self.members[peer] = occupant
        self.trained[occupant] = 0
        self.machine.joined(seat, occupant, "", holds)
        self.note()
        return peer

    def ban(self, peer: str) -> None:
        """As a leader does where a peer did other than it was told; the group loses it a moment later."""
        self.machine.ban(peer, "it took what was not its own", now=1_800_000_000)
        if (seat := self.state.seat_of(peer)) is not None:
            self.machine.left(seat.number, "banned")
        self.note()
        self.lose(peer)

    def lose(self, peer: str) -> None:
        del self.members[peer]
        self.index += 1
        self.decide({}, is_round=False)

    def train(self, peer: str, num_works: int = 1) -> None:
        occupant = self.members[peer]
        self.trained[occupant] = max(self.trained[occupant], num_works)

    def decide(self, weights: dict[str, float], *, is_round: bool = True) -> list[str]:
        wrong = self.machine.decided(
            Outcome(
                self.index,
                self.round if is_round else 0,
                bytes(32),
                weights,
                frozenset(self.members.values()),
            )
        )
        self.note()
        return wrong

    def average(self, *, without: str | None = None) -> None:
        """A round of all that have trained what they have at hand."""
        weights = {}
        for peer, occupant in self.members.items():
            seat = self.state.seat_of(peer)
            if seat is None or peer == without or not seat.works:
                continue
            num_works = max(1, min(self.trained[occupant], len(seat.works)))
            weights[peer] = float(sum(work.share for work in seat.works[:num_works]))
            self.trained[occupant] = 0
        if weights:
            self.index += 1
            self.round += 1
            assert self.decide(weights) == []

    def restarted(self) -> None:
        """The leader is killed, and begins again with its journal."""
        self.state = RunState(SIZES, seed=1, num_epochs=self.num_epochs)
        for entry in self.journal:
            again = entry_of(json.loads(json.dumps(entry.json())))
            assert again == entry
            self.state.apply(again)
        self.machine = RunMachine(self.rules, self.state)


def rules(**changes: object) -> Rules:
    """Rules of a small run, of one epoch if nothing else is said."""
    values: dict[str, object] = {
        "min_members": 1,
        "max_members": 8,
        "batch_samples": 2,
        "steps": 3,
        "max_samples": sum(SIZES),
    }
    return Rules(**{**values, **changes})  # type: ignore[arg-type]


def drive(cluster: Cluster, data: st.DataObject) -> None:
    """Let anything happen to a run, and then bring it to its end."""
    events = ("join", "lose", "average", "late", "ahead", "restart", "resume", "speed", "again")
    events = (*events, "change", "ban")
    for event in data.draw(st.lists(st.sampled_from(events), max_size=40)):
        peers = sorted(cluster.members)
        if event == "join" and cluster.machine.num_free:
            holds = data.draw(st.sets(st.integers(0, len(SIZES))))
            cluster.join(holds=sorted(holds))
        elif event == "ban" and peers:
            cluster.ban(data.draw(st.sampled_from(peers)))
        elif event == "average":
            cluster.average()
        elif event == "restart":
            cluster.restarted()
        elif event == "change" and cluster.state.phase is not Phase.ENDED:
            key = data.draw(st.sampled_from(("eval.every", "eval.samples")))
            cluster.machine.change([(key, str(data.draw(st.integers(1, 9))))])
            cluster.note()
        elif event == "resume" and cluster.state.phase is not Phase.ENDED:
            cluster.machine.resume(data.draw(st.integers(0, cluster.state.round)))
            cluster.members.clear()
            cluster.round, cluster.index = cluster.state.round, 0
            for seat in cluster.state.vacant():
                if data.draw(st.booleans()):
                    cluster.join()
                else:
                    cluster.machine.left(seat.number, "nobody came")
            cluster.note()
        elif peers:
            peer = data.draw(st.sampled_from(peers))
            if event == "lose":
                cluster.lose(peer)
            elif event == "late":
                cluster.average(without=peer)
            elif event == "ahead":
                cluster.train(peer, 2)
            elif event == "again":
                cluster.join(peer)
            elif seat := cluster.state.seat_of(peer):
                cluster.machine.measured(seat.number, data.draw(st.floats(0.01, 1.0)))
    if not cluster.members and cluster.state.phase is not Phase.ENDED:
        cluster.join()
    for seat in cluster.state.vacant():
        cluster.machine.left(seat.number, "nobody came")
    cluster.note()
    for _ in range(400):
        if cluster.state.phase is Phase.ENDED:
            break
        cluster.average()
