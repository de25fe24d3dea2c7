"""The commands on bad networks, in network namespaces.

Behind NATs: through a relay of ours, then directly where the NATs let them. And apart for a while.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from neurogrid.p2p.hosts.identity import Identity
from tests.e2e.namespaces.nat import home, why_no_nat
from tests.e2e.namespaces.netns import Lan, Machine, network
from tests.e2e.preloaded import COORDINATOR, DEADLINE, ENVIRONMENT, WORKER, run
from tests.e2e.support import WorkerProcess, start_worker

PROMPT = ("--prompt", "A function definition", "--max-tokens", "40")
# Noise, which does not end by itself. Over a slow line it takes 15 s: an attempt to punch a hole takes six.
LONG_TEXT = ("--prompt", "Python is", "--max-tokens", "240", "--max-seq-len", "256")
LONG_TEXT += ("--dtype", "float32", "--temperature", "20", "--seed", "1")
SLOW = ("tbf", "rate", "128kbit", "burst", "4kb", "latency", "10s")
FRIENDLY_HOME = 1
ALIKE = ("--insecure", "--disable-mdns")
PATIENCE = ("--keep-alive", "6")


@dataclass
class Parted:
    """A coordinator that waits for two workers, and the first of them, whose cable was pulled out."""

    internet: Lan
    coordinator: subprocess.Popen[str]
    log_file: Path
    worker: WorkerProcess
    machine: Machine
    spare: Machine
    bootstrap: str

    def wait_log(self, *lines: str) -> None:
        """Until the coordinator has said these lines, in this order."""
        deadline = time.monotonic() + DEADLINE
        while True:
            text = log = self.log_file.read_text()
            for line in lines:
                _, found, text = text.partition(line)
                if not found:
                    break
            else:
                return
            assert time.monotonic() < deadline, log
            assert self.coordinator.poll() is None, log
            time.sleep(0.2)


@dataclass
class Scene:
    """A coordinator's machine at home, a worker that relays on the internet, and two workers at other homes.

    At a fourth home `--diagnose` runs: three holes are punched in vain before it ends.
    """

    internet: Lan
    coordinator: Machine
    relay: WorkerProcess
    relay_address: str
    friendly: WorkerProcess
    symmetric: WorkerProcess
    parted: Parted
    diagnose: subprocess.Popen[str] = field(init=False)

    @property
    def flags(self) -> list[str]:
        return [*ALIKE, "--p2p-port", "4001", "--relay", self.relay_address]

    @property
    def peers(self) -> list[str]:
        """Flags that name the workers at home."""
        workers = (self.friendly, self.symmetric)
        return [part for worker in workers for part in ("--peer", self.through_relay(worker))]

    def through_relay(self, worker: WorkerProcess) -> str:
        return f"{self.relay_address}/p2p-circuit/p2p/{worker.peer_id}"

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        return run(self.coordinator.command([*COORDINATOR, *args]))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    if reason := why_no_nat():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("reach")
    with network() as net, ExitStack() as stack:
        internet = net.lan(4)
        public = internet.machines[0]
        homes = [home(net, internet, n, is_symmetric=n == 2) for n in range(4)]

        def start(machine: Machine, *args: str) -> WorkerProcess:
            return start_on(stack, directory, machine, *args)

        parted = part(internet, directory, start)  # first: it takes its time while others work
        relay = start(public, "--relay-service")
        address = f"/ip4/{public.address}/tcp/4001/p2p/{relay.peer_id}"
        at_home = [start(machine, "--relay", address) for machine in homes[1:3]]
        scene = Scene(internet, homes[0], relay, address, *at_home, parted)
        scene.diagnose = homes[3].popen(
            [*COORDINATOR, "--diagnose", *scene.flags, *scene.peers, "--wait", "15"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        yield scene
        for worker in (relay, *at_home, parted.worker):
            worker.process.terminate()  # all at once: each takes its time


def start_on(stack: ExitStack, directory: Path, machine: Machine, *args: str) -> WorkerProcess:
    command = machine.command(WORKER)
    return stack.enter_context(
        start_worker(directory, "--port", "4001", *ALIKE, *args, command=command)
    )


def part(internet: Lan, directory: Path, start: Callable[..., WorkerProcess]) -> Parted:
    first, machine, spare = internet.machines[1:]
    key, log_file = directory / "coordinator.key", directory / "coordinator.log"
    address = f"/ip4/{first.address}/tcp/4002/p2p/{Identity.load(key).peer_id}"
    flags = [*ALIKE, *PATIENCE, "--p2p-port", "4002", "--identity", str(key), "--min-peers", "2"]
    with log_file.open("w") as log:
        coordinator = first.popen(
            [*COORDINATOR, *PROMPT, *flags, "--stages", "2", "--wait", str(DEADLINE)],
            stdout=subprocess.PIPE,
            stderr=log,
            env=ENVIRONMENT,
        )
    worker = start(machine, "--bootstrap", address, *PATIENCE)
    parted = Parted(internet, coordinator, log_file, worker, machine, spare, address)
    parted.wait_log("1 of 2 found")
    internet.unplug_cable(machine)
    return parted


def test_workers_behind_nats_generate_over_whatever_way_there_is(scene: Scene) -> None:
    ended = scene.run(*PROMPT, "--stages", "3", *scene.flags, *scene.peers, "--min-peers", "3")
    assert ended.returncode == 0, ended.stderr
    alone = scene.run(*PROMPT, "--local-workers", "1")
    assert ended.stdout == alone.stdout


def test_a_generation_goes_on_while_its_way_becomes_direct(scene: Scene, tmp_path: Path) -> None:
    """Holes are punched in vain until text comes over the relay; the rest of it comes over the direct connection."""
    friendly = scene.friendly
    # What the machine at home sends straight to the other home does not arrive there, at first.
    other_home = scene.internet.address(100 + FRIENDLY_HOME)
    scene.coordinator.run(["nft", "add", "table", "ip", "cut"])
    chain = "{ type filter hook output priority filter; }"
    scene.coordinator.run(["nft", "add", "chain", "ip", "cut", "output", chain])
    scene.coordinator.run(
        ["nft", "add", "rule", "ip", "cut", "output", "ip", "daddr", other_home, "drop"]
    )
    flags = [*scene.flags, "--peer", scene.through_relay(friendly), "--min-peers", "2"]
    written, said = tmp_path / "stdout", tmp_path / "stderr"
    with written.open("w") as stdout, said.open("w") as stderr:
        coordinator = scene.coordinator.popen(
            [*COORDINATOR, *LONG_TEXT, *flags, "--stages", "2"], stdout=stdout, stderr=stderr
        )
    direct = re.compile(rf"the connection to {friendly.peer_id}( \(.*\))? is direct now")
    with running(coordinator):
        wait_until(lambda: bool(written.read_text()), coordinator, said)
        assert not direct.search(said.read_text())
        scene.coordinator.run(["tc", "qdisc", "add", "dev", "eth0", "root", *SLOW])
        scene.coordinator.run(["nft", "delete", "table", "ip", "cut"])
        wait_until(lambda: bool(direct.search(said.read_text())), coordinator, said)
        before = written.read_text()
        scene.coordinator.run(["tc", "qdisc", "delete", "dev", "eth0", "root"])
        assert coordinator.wait(DEADLINE) == 0, said.read_text()
    alone = scene.run(*LONG_TEXT, "--local-workers", "1")
    assert written.read_text() == alone.stdout
    assert 0 < len(before) < len(alone.stdout)


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen[str], said: Path) -> None:
    """While the process runs."""
    deadline = time.monotonic() + DEADLINE
    while not is_so():
        assert time.monotonic() < deadline, said.read_text()
        assert process.poll() is None, said.read_text()
        time.sleep(0.02)


@contextmanager
def running(process: subprocess.Popen[str]) -> Iterator[None]:
    """It does not outlive the block."""
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_a_worker_comes_back_after_a_partition(scene: Scene, tmp_path: Path) -> None:
    come_back(scene.parted, tmp_path)


@pytest.mark.long
def test_a_worker_comes_back_after_a_partition_of_30_s(tmp_path: Path) -> None:
    if reason := why_no_nat():
        pytest.skip(reason)
    with network() as net, ExitStack() as stack:
        parted = part(net.lan(4), tmp_path, partial(start_on, stack, tmp_path))
        time.sleep(30)
        come_back(parted, tmp_path)


def come_back(parted: Parted, directory: Path) -> None:
    """Plug the cable in again; what was parted generates, with one worker more."""
    parted.wait_log("1 of 2 found", "0 of 2 found")
    parted.internet.plug_cable(parted.machine)
    parted.wait_log("1 of 2 found", "0 of 2 found", "1 of 2 found")
    # Neither was started again, and the one that was away computes a half of the model.
    command = parted.spare.command(WORKER)
    flags = (*ALIKE, *PATIENCE, "--bootstrap", parted.bootstrap)
    with start_worker(directory, *flags, command=command):
        text, _ = parted.coordinator.communicate(timeout=DEADLINE)
    assert parted.coordinator.returncode == 0, parted.log_file.read_text()
    assert text.strip()
    assert parted.worker.log.count("connected to the coordinator") == 2


def test_it_is_told_which_ways_there_are(scene: Scene) -> None:
    stdout, stderr = scene.diagnose.communicate(timeout=DEADLINE)
    assert scene.diagnose.returncode == 0, stdout + stderr
    rows = stdout.splitlines()

    def row(source: str, text: str = "") -> str:
        (found,) = [line for line in rows if line.startswith(source) and text in line]
        return found

    assert "+  reserved: " in row("relay ")
    assert "private: " in row("nat ")
    assert "+  direct: " in row("hole punch", scene.friendly.peer_id)
    relayed = row("hole punch", scene.symmetric.peer_id)
    assert "-  relayed: " in relayed
    assert "the NAT on one side gives each peer another port" in relayed
    assert scene.symmetric.peer_id in stdout.rpartition("3 workers found")[2]
