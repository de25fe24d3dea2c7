"""Leaders that are killed, stand still, or are cut off, one after the other in one run: who goes on, and how soon?

    python benchmarks/takeover.py [--kills 20] [--cuts 20] [--seed 1] [--no-file]

Three programs that may lead and four members, each in a network namespace of its own, whose packets go through the
forwarder of `neurogrid.training.testnet`; needs Linux and root. At a random point of a round the leader gets SIGKILL,
each fourth time SIGSTOP until the others have gone on; or the network is cut in two for some seconds, with the leader,
the deputy and members on either side. What was killed is started again, as a deputy, and the next comes when all
members and a deputy are there again. Seconds are by the journals, from the signal or the cut to the first round that
was decided after it.

At the end all journals that any of the three wrote, those that were laid aside too, are looked through: no round was
decided in two ways, nobody decided a round after another one led in a greater term, each sample was dealt out as it
should, and members had the same weights.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trio
from report import spread, table, write_report

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the processes of the tests

from neurogrid.p2p.hosts.identity import Identity
from neurogrid.training.runs.entries import LedEntry, RoundEntry
from neurogrid.training.runs.journal import Recorded, read_journal
from neurogrid.training.runs.run_directory import RunDirectory
from neurogrid.training.runs.terms import Sitting
from neurogrid.training.runs.verdict import verify_journal
from neurogrid.training.testnet.network import Lines, Network, open_network
from tests.e2e.preloaded import TRAIN, WORKER, Popen
from tests.e2e.training.run_processes import RUN_FILE, make_inputs

LEADERS = ("x", "y", "z")
MEMBERS = ("a", "b", "c", "d")
FILE = (
    RUN_FILE
    + 'schedule = "constant"\n[stop]\nrounds = 1_000_000\n[outer]\nevery = 8\nfragments = 2\ngrace = 2.0\n'
    + "[members]\nmin = 2\n[checkpoints]\nevery = 200\n[eval]\nevery = 1000\n"
)
# Seconds: until all are there again, and that the network stays cut after the others have gone on.
READY = 180.0
HELD = (1.0, 5.0)
# For the majority to go on; what takes longer is told.
PATIENCE = 60.0
LIMIT = 5.0


@dataclass(frozen=True)
class Cut:
    """Cut of the network: L leads, D is its deputy, W waits to be one; digits are members on the side of the first."""

    name: str
    first: str
    num_members: int
    goes_on: str


CUTS = (
    Cut("the leader alone", "L", 0, "D"),
    Cut("the leader and a member", "L", 1, "D"),
    Cut("the leader, the one that waits, and a member", "LW", 1, "D"),
    Cut("the deputy alone", "D", 0, "L"),
    Cut("the deputy and a member", "D", 1, "L"),
    Cut("the one that waits and a member", "W", 1, "L"),
    Cut("a member alone", "", 1, "L"),
    Cut("leader, deputy and one member", "LD", 1, ""),
)


@dataclass
class Fleet:
    """The processes, by name."""

    directory: Path
    network: Network
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    peers: dict[str, str] = field(default_factory=dict)
    was_led: bool = False

    def address(self, name: str) -> str:
        return f"/ip4/{self.network.address(name)}/tcp/9000"

    def prepare(self) -> None:
        make_inputs(self.directory)
        (self.directory / "run.toml").write_text(FILE)
        for name in LEADERS[1:]:
            cluster = self.directory / name / "cluster"
            cluster.mkdir(parents=True, mode=0o700)
            cluster.chmod(0o700)
            self.peers[Identity.load(cluster / "identity.key").peer_id] = name

    def run(self, name: str, *command: str) -> None:
        with (self.directory / f"{name}.log").open("a") as log:
            self.processes[name] = Popen(
                [*self.network.command(name), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
            )

    def lead(self) -> None:
        listen = ("--listen", self.address("x"), "--name", "x", "--threads", "1", "--wait", "60")
        self.run("x", *TRAIN, "run.toml", "--dir", "x", "--no-http", *listen)
        self.wait(lambda: (self.directory / "x" / "cluster" / "ticket").exists(), "no ticket")
        identity = Identity.load(self.directory / "x" / "cluster" / "identity.key")
        self.peers[identity.peer_id] = "x"

    def stand_by(self, name: str) -> None:
        joins: tuple[str, ...] = ()
        if name != "x" and not (self.directory / name / "journal").exists():
            ticket = self.directory / f"ticket-{name}"
            made = [*TRAIN[:-1], "ticket", "x/cluster", "--deputy", "--ticket-file", str(ticket)]
            subprocess.run(made, cwd=self.directory, check=True, capture_output=True)
            joins = ("--join", f"@{ticket}")
        others = [peer for peer, other in self.peers.items() if other not in (name, "x")]
        beside = [
            part
            for peer in others
            for part in ("--bootstrap", f"{self.address(self.peers[peer])}/p2p/{peer}")
        ]
        self.run(
            name,
            *(*TRAIN, "deputy", name, *joins, *beside, "--listen", self.address(name)),
            *("--name", name, "--threads", "1", "--wait", "60"),
        )

    def join(self, name: str) -> None:
        listen = f"/ip4/{self.network.address(name)}/tcp/0"
        self.run(
            name,
            *(*WORKER, "--train", "--join", "@x/cluster/ticket", "--cluster", f"cluster-{name}"),
            *("--listen", listen, "--no-cache", "--disable-mdns", "--threads", "1"),
            *("--name", name),
        )

    def journal(self, name: str) -> tuple[Recorded, ...]:
        path = self.directory / name / "journal"
        return read_journal(path) if path.exists() else ()

    def sitting(self, name: str) -> Sitting:
        sitting = Sitting()
        for each in self.journal(name):
            sitting.take(each.entry)
        return sitting

    def leader(self) -> str:
        """Name of the leader in the greatest term of any journal."""
        found = [self.sitting(name) for name in LEADERS]
        return self.peers[max(found, key=lambda each: each.term).leader]

    def ready(self) -> tuple[str, str] | None:
        """Leader and deputy, where all members sit and the deputy has the line that names it."""
        leader = self.leader()
        sitting = self.sitting(leader)
        if sitting.leader not in self.peers or self.peers[sitting.leader] != leader:
            return None
        if len({each.peer for each in sitting.members}) < len(MEMBERS) or not sitting.deputy:
            return None
        deputy = self.peers[sitting.deputy]
        has_it = self.sitting(deputy).number == sitting.number
        return (leader, deputy) if has_it else None

    def wait(self, is_so: Callable[[], object], otherwise: str, seconds: float = READY) -> bool:
        until = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > until:
                raise AssertionError(f"{otherwise}\n{self.words()}")
            time.sleep(0.05)
        return True

    def words(self) -> str:
        logs = [self.directory / f"{name}.log" for name in (*LEADERS, *MEMBERS)]
        return "\n".join(f"{p.name}: {p.read_text()[-1500:]}" for p in logs if p.exists())

    def wait_ready(self) -> tuple[str, str]:
        """Wait until all are there and a round was decided since, with nobody away."""
        for name in LEADERS:
            if self.processes[name].poll() is not None:
                self.stand_by(name)
        found: list[tuple[str, str]] = []

        def is_so() -> bool:
            for name in LEADERS:  # one that was deposed as it was begun first has ended
                if self.processes[name].poll() is not None:
                    self.stand_by(name)
            if (pair := self.ready()) is None:
                return False
            found[:] = [pair]
            return True

        self.wait(is_so, "they are not all there again")
        at = time.time()
        # A deputy that was cut off may ask for a term as soon as it is back, and lead then.
        self.wait(lambda: self.next_round(self.leader(), at), "no round with all")
        self.wait(is_so, "they are not all there any more")
        return found[0]

    def next_round(self, name: str, at: float) -> float | None:
        return next(
            (
                each.time
                for each in self.journal(name)
                if isinstance(each.entry, RoundEntry) and each.time > at
            ),
            None,
        )

    def wait_next(self, names: Sequence[str], at: float) -> float | None:
        """Seconds from then to the first round that any of these has; None for none within the patience."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            for name in names:
                if (found := self.next_round(name, at)) is not None:
                    return found - at
            time.sleep(0.05)
        return None

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
        for process in self.processes.values():
            process.wait(30)


def kill(fleet: Fleet, draw: random.Random, number: int) -> tuple[str, float | None]:
    leader, deputy = fleet.wait_ready()
    time.sleep(draw.uniform(0, 1.0))
    process, at = fleet.processes[leader], time.time()
    if number % 4 == 3:
        process.send_signal(signal.SIGSTOP)
        took = fleet.wait_next([deputy], at)
        process.send_signal(signal.SIGCONT)
        return "the leader stands still", took
    process.kill()
    process.wait(30)
    took = fleet.wait_next([deputy], at)
    fleet.stand_by(leader)
    return "the leader is killed", took


async def cut(fleet: Fleet, draw: random.Random, number: int) -> tuple[str, float | None]:
    kind = CUTS[number % len(CUTS)]
    leader, deputy = fleet.wait_ready()
    (waits,) = set(LEADERS) - {leader, deputy}
    roles = {"L": leader, "D": deputy, "W": waits}
    members = draw.sample(MEMBERS, kind.num_members)
    time.sleep(draw.uniform(0, 1.0))
    await fleet.network.cut([*(roles[each] for each in kind.first), *members])
    at = time.time()
    if kind.goes_on:
        took = fleet.wait_next([roles[kind.goes_on]], at)
        time.sleep(draw.uniform(*HELD))
    else:  # what was under way may be decided yet; after that nobody decides
        time.sleep(10.0)
        late = fleet.next_round(leader, at + 3.0) or fleet.next_round(deputy, at + 3.0)
        assert late is None, (
            f"{kind.name}: a round after {late and late - at:.1f} s\n{fleet.words()}"
        )
        took = None
    await fleet.network.cut()
    healed = time.time()
    if not kind.goes_on:
        after = fleet.wait_next([leader, deputy], healed)
        assert after is not None, fleet.words()
        return f"{kind.name}: once healed", after
    return f"{kind.name}", took


def check(fleet: Fleet) -> str:
    """All journals, of which each line is as its leader signed it."""
    paths = [path for name in LEADERS for path in (fleet.directory / name).glob("journal*")]
    journals = {}
    for path in paths:
        if path.suffix != ".lock":
            journals[f"{path.parent.name}/{path.name}"] = read_journal(path)
    # The journal of the run is that of who led last.
    whole = journals[f"{fleet.leader()}/journal"]
    led = [(each.time, each.entry) for each in whole if isinstance(each.entry, LedEntry)]
    decided = {each.entry.round: each.entry for each in whole if isinstance(each.entry, RoundEntry)}
    num_beyond = 0
    for name, recorded in journals.items():
        same = 0
        while same < min(len(whole), len(recorded)) and whole[same] == recorded[same]:
            same += 1
        term = 0
        for each in recorded[:same]:
            term = each.entry.term if isinstance(each.entry, LedEntry) else term
        since = next((at for at, entry in led if entry.term > term), float("inf"))
        for each in recorded[same:]:
            num_beyond += 1
            if not isinstance(each.entry, RoundEntry):
                continue
            other = decided.get(each.entry.round)
            assert each.time < since, (name, each, since)
            if other is not None:
                assert (other.ranges, other.digest) == (each.entry.ranges, each.entry.digest), name
    verdict = verify_journal(fleet.directory / fleet.leader())
    assert verdict.is_whole, verdict.problem
    equal = other_weights = 0
    for name in LEADERS:
        for figures in RunDirectory(fleet.directory / name).figures():
            equal += int(figures.get("weights_equal", 0))
            other_weights += int(figures.get("weights_other", 0))
    assert not other_weights, f"{other_weights} digests of weights differ"
    assert equal
    laid = sum("of-term" in name for name in journals)
    return (
        f"{len(whole):,} lines and {len(decided):,} rounds in the journal of the run, which is whole, with "
        f"{len(led)} takeovers. {len(journals)} journals, {laid} of them laid aside, with {num_beyond} lines that the "
        "journal of the run has not: no round decided in two ways, and none by one of them after another led. "
        f"{equal:,} digests of weights told by members after a round, all those of their leader."
    )


async def measure(options: argparse.Namespace) -> None:
    draw = random.Random(options.seed)
    found: dict[str, list[float | None]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(options.directory or scratch)
        directory.mkdir(parents=True, exist_ok=True)
        names = (*LEADERS, *MEMBERS)
        async with open_network(names, Lines(), directory / "network.log") as network:
            fleet = Fleet(directory, network)
            try:
                fleet.prepare()
                fleet.lead()
                for name in MEMBERS:
                    fleet.join(name)
                fleet.wait(lambda: (directory / "x" / "journal").exists(), "no journal")
                for name in LEADERS[1:]:
                    fleet.stand_by(name)
                # The one that began the run gives certificates, and nobody else.
                for name in LEADERS[1:]:
                    log = directory / f"{name}.log"
                    fleet.wait(lambda log=log: "certificate as" in log.read_text(), str(log))
                for number in range(options.kills + options.cuts):
                    if number < options.kills:
                        what, took = kill(fleet, draw, number)
                    else:
                        what, took = await cut(fleet, draw, number - options.kills)
                    found.setdefault(what, []).append(took)
                    told = "never" if took is None else f"{took:.2f} s"
                    print(f"{number + 1}: {what}: {told}", flush=True)
                fleet.wait_ready()
                time.sleep(3)
                told = check(fleet)
            finally:
                fleet.close()
    rows = [_row(what, seconds) for what, seconds in found.items()]
    late = [each for what in found for each in found[what] if each is None or each > LIMIT]
    text = (
        f"{table(('what', 'times', 'least', 'median', 'most', f'over {LIMIT:g} s'), rows)}\n\n"
        "Seconds to the next round, from the signal or the cut; of the last kind, where no side has leader or deputy "
        "and half of the members, from when the network is whole again: before that nobody decided anything. "
        f"{len(late)} took longer than {LIMIT:g} s, or never came. Where the leader stays with most members the first "
        f"round may be one that was under way.\n\n{told}\n"
    )
    if options.no_file:
        print(text)
    else:
        write_report("takeover-in-a-row", (__doc__ or "").partition("\n")[0], text)


def _row(what: str, seconds: Sequence[float | None]) -> tuple[str, ...]:
    known = [each for each in seconds if each is not None]
    shown = [f"{each:.2f} s" for each in spread(known)] if known else ["", "", ""]
    late = sum(each is None or each > LIMIT for each in seconds)
    return what, str(len(seconds)), *shown, str(late)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--cuts", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", help="keep journals and logs here")
    parser.add_argument("--no-file", action="store_true")
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    trio.run(measure, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
