"""Processes of `training_peer`, as tests hold them: started, killed and stopped, and what they said compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from tests.e2e.namespaces.netns import Machine
from tests.e2e.preloaded import Popen
from tests.e2e.training_peer import digest_of, mean_of, weight_of

__all__ = ["AveragingPeer", "Crowd", "crowd", "wait_for"]

ROOT = Path(__file__).parents[2]
PATIENCE = 30.0
# Of a machine that is shared, between the end of a wait and what is printed of it.
SLACK = 3.0

Said = dict[str, Any]


def wait_for(condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    """The first value that is true, of a condition that is looked at again and again."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.002)
    raise AssertionError(f"not within {patience:g} s: {what}")


class AveragingPeer:
    """A member as a process.

    Attributes:
        number: of it; see `training_peer`.
        said: what it has said, in order.
        is_killed: whether it was.
    """

    def __init__(
        self, number: int, directory: Path, *args: str, machine: Machine | None = None
    ) -> None:
        start = Popen if machine is None else machine.popen
        self.number = number
        self.said: list[Said] = []
        self.is_killed = False
        self.log = directory / f"member-{number}.log"
        with self.log.open("w") as stderr:
            self.process = start(
                [sys.executable, "-m", "tests.e2e.training_peer", "--number", str(number), *args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=ROOT,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # one that is killed may say half of one
                self.said.append(json.loads(line))

    def all_said(self, key: str) -> list[Said]:
        """What it said with this key."""
        return [said for said in list(self.said) if key in said]

    def hear(self, key: str) -> Said:
        """The first that it says with this key."""
        heard: list[Said] = wait_for(
            lambda: self.all_said(key) or self._require_alive(), f"member {self.number}: {key}"
        )
        return heard[0]

    def _require_alive(self) -> None:
        assert self.is_killed or self.process.poll() is None, (
            f"member {self.number} has ended:\n{self.log.read_text()[-5000:]}"
        )

    @property
    def peer_id(self) -> str:
        return str(self.hear("ready")["ready"])

    @property
    def addresses(self) -> list[str]:
        return list(self.hear("ready")["addresses"])

    @property
    def outcomes(self) -> list[Said]:
        """Of rounds, in order."""
        return self.all_said("round")

    def tell(self, line: str) -> float:
        """Give it a line to read; returns the time."""
        assert self.process.stdin is not None
        now = time.monotonic()
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return now

    def outcome_after(self, when: float, is_it: Callable[[Said], bool]) -> Said:
        """The first outcome after a moment of which a condition is true."""

        def found() -> Said | None:
            self._require_alive()
            return next((o for o in self.outcomes if o["at"] > when and is_it(o)), None)

        said: Said = wait_for(found, f"an outcome of member {self.number}")
        return said

    def kill(self) -> float:
        """`kill -9`; returns when."""
        self.is_killed = True
        now = time.monotonic()
        self.process.send_signal(signal.SIGKILL)
        return now

    def stop(self) -> float:
        """Let it stand still; returns when."""
        now = time.monotonic()
        self.process.send_signal(signal.SIGSTOP)
        return now

    def go_on(self) -> float:
        """Let it go on; returns when."""
        now = time.monotonic()
        self.process.send_signal(signal.SIGCONT)
        return now

    def end(self) -> None:
        self.is_killed = True
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Crowd:
    """Members that are there, and those that were.

    Args:
        args: of each process.
    """

    def __init__(self, directory: Path, num_elements: int, timeout: float, *args: str) -> None:
        self.members: list[AveragingPeer] = []
        self.all: list[AveragingPeer] = []
        self._directory = directory
        self._num_elements, self._timeout = num_elements, timeout
        self._args = ("--elements", str(num_elements), "--timeout", str(timeout), *args)
        self._told = cache(self._compute)
        self._num_checked: dict[int, int] = {}
        self._by_round: dict[int, tuple[object, ...]] = {}

    def start(self, *args: str, machine: Machine | None = None) -> AveragingPeer:
        """A process that has yet to be told to begin; in a namespace if one is given."""
        peer = AveragingPeer(len(self.all), self._directory, *self._args, *args, machine=machine)
        self.all.append(peer)
        return peer

    def begin(self, peer: AveragingPeer) -> float:
        """Have it found the group, or join it at all that are there; returns when."""
        addresses = [m.addresses[0] for m in self.members if m is not peer]
        if peer not in self.members:
            self.members.append(peer)
        return peer.tell(" ".join(["join", *addresses]) if addresses else "found")

    def assemble(self, number: int) -> None:
        """Start and join so many, and wait for a round of all."""
        peers = [self.start() for _ in range(number)]
        for peer in peers:
            peer.hear("ready")
            self.begin(peer)
        self.settle()

    def settle(self, after: float = 0.0) -> None:
        """Wait for a round that all contribute to, and until those that are lost are no members any more."""
        everybody = {member.peer_id for member in self.members}
        for member in self.members:
            member.outcome_after(
                after, lambda o: set(o["contributors"]) == everybody == set(o["members"])
            )

    def bring_back(self, peer: AveragingPeer, since: float) -> None:
        """Have one that went on at a moment join again if it is no member any more.

        What it is told first may be the outcome of a round that was decided when it was stopped; that it was dropped
        comes after that.
        """

        def is_known() -> bool:
            return has_dropped() or any(
                outcome["begun"] > since and outcome["has_contributed"] for outcome in peer.outcomes
            )

        def has_dropped() -> bool:
            return any(said["at"] > since for said in peer.all_said("dropped"))

        wait_for(is_known, f"whether member {peer.number} is still one")
        if has_dropped():
            self.begin(peer)

    @property
    def leader(self) -> AveragingPeer:
        """Who leads, by what was said last."""
        found: AveragingPeer = wait_for(
            lambda: next((m for m in self.members if m.outcomes and m.outcomes[-1]["leads"]), None),
            "a leader",
        )
        return found

    def check(self) -> int:
        """Compare what all have said since the last time, and what it must have been.

        Returns:
            Rounds that were looked at so far.
        """
        numbers = {peer.peer_id: peer.number for peer in self.all if peer.all_said("ready")}
        for peer in self.all:
            outcomes = peer.outcomes
            before = self._num_checked.get(peer.number, 0)
            self._num_checked[peer.number] = len(outcomes)
            for last, outcome in zip([None, *outcomes][before:], outcomes[before:], strict=False):
                self._check_outcome(peer, last, outcome, numbers)
            for waited in (*outcomes[before:], *peer.all_said("error")):
                assert waited["seconds"] < self._timeout + SLACK, (peer.number, waited)
        return len(self._by_round)

    def _check_outcome(
        self, peer: AveragingPeer, last: Said | None, outcome: Said, numbers: dict[str, int]
    ) -> None:
        round_ = outcome["round"]
        if last is not None:
            joined_between = [
                j for j in peer.all_said("joined") if last["at"] < j["at"] < outcome["at"]
            ]
            assert round_ == last["round"] + 1 or (joined_between and round_ > last["round"])
        contributors, weights = outcome["contributors"], outcome["weights"]
        what = (tuple(contributors), tuple(weights), outcome["digest"])
        first = self._by_round.setdefault(round_, what)
        assert what == first, f"round {round_} is another for member {peer.number}"
        assert outcome["has_contributed"] == (peer.peer_id in contributors)
        named = [numbers[peer_id] for peer_id in contributors]
        assert list(weights) == [weight_of(number) for number in named]
        assert outcome["digest"] == self._told(tuple(named), round_), (
            f"round {round_} is not the mean of its contributors, {named}"
        )

    def _compute(self, numbers: tuple[int, ...], round_: int) -> str:
        return digest_of(mean_of(list(numbers), round_, self._num_elements))


@contextmanager
def crowd(
    directory: Path, *args: str, num_elements: int = 1 << 20, timeout: float = 60.0
) -> Iterator[Crowd]:
    """Processes that are ended when the block is left."""
    made = Crowd(directory, num_elements, timeout, *args)
    try:
        yield made
    finally:
        for peer in made.all:
            peer.end()
