"""The commands behind NATs, in network namespaces: through a relay of ours, then directly where the NATs let them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from tests.e2e.namespaces.nat import home, why_no_nat
from tests.e2e.namespaces.netns import Machine, network
from tests.e2e.support import DEADLINE, ENVIRONMENT, WorkerProcess, start_worker

COORDINATOR = (sys.executable, "-m", "neurogrid.cli.coordinator")
WORKER = (sys.executable, "-m", "neurogrid.cli.worker")
PROMPT = ("--prompt", "A function definition", "--max-tokens", "40")
ALIKE = ("--insecure", "--disable-mdns")


@dataclass
class Scene:
    """A coordinator's machine at home, a worker that relays on the internet, and two workers at other homes."""

    coordinator: Machine
    relay: WorkerProcess
    relay_address: str
    friendly: WorkerProcess
    symmetric: WorkerProcess

    def through_relay(self, worker: WorkerProcess) -> str:
        return f"{self.relay_address}/p2p-circuit/p2p/{worker.peer_id}"

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.coordinator.command([*COORDINATOR, *args]),
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            env=ENVIRONMENT,
            check=False,
        )


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    if reason := why_no_nat():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("reach")
    with network() as net, ExitStack() as stack:
        internet = net.lan(1)
        (public,) = internet.machines
        homes = [home(net, internet, n, is_symmetric=n == 2) for n in range(3)]

        def start(machine: Machine, *args: str) -> WorkerProcess:
            command = machine.command(WORKER)
            return stack.enter_context(
                start_worker(directory, "--port", "4001", *ALIKE, *args, command=command)
            )

        relay = start(public, "--relay-service")
        address = f"/ip4/{public.address}/tcp/4001/p2p/{relay.peer_id}"
        at_home = [start(machine, "--relay", address) for machine in homes[1:]]
        yield Scene(homes[0], relay, address, *at_home)


def test_workers_behind_nats_generate_over_whatever_way_there_is(scene: Scene) -> None:
    peers = [scene.through_relay(worker) for worker in (scene.friendly, scene.symmetric)]
    flags = [*ALIKE, "--p2p-port", "4001", "--relay", scene.relay_address, "--min-peers", "3"]
    flags += [part for peer in peers for part in ("--peer", peer)]

    ended = scene.run(*PROMPT, "--stages", "3", *flags)
    assert ended.returncode == 0, ended.stderr
    alone = scene.run(*PROMPT, "--local-workers", "1")
    assert ended.stdout == alone.stdout

    told = scene.run("--diagnose", *flags, "--wait", "10")
    assert told.returncode == 0, told.stdout + told.stderr
    rows = told.stdout.splitlines()

    def row(source: str, text: str = "") -> str:
        (found,) = [line for line in rows if line.startswith(source) and text in line]
        return found

    assert "reserved: 1 address" in row("relay ")
    assert "private: " in row("nat ")
    assert "+  direct: " in row("hole punch", scene.friendly.peer_id)
    relayed = row("hole punch", scene.symmetric.peer_id)
    assert "-  relayed: " in relayed
    assert "the NAT on one side gives each peer another port" in relayed
    assert scene.symmetric.peer_id in told.stdout.rpartition("workers found")[2]
