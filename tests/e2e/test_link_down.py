"""The link of a worker goes down in the middle of an answer: it is suspected, and the text goes on elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.e2e.namespaces.netns import Lan, needs_namespaces, network
from tests.e2e.namespaces.peer_process import PeerProcess
from tests.e2e.support import WorkerProcess, start_worker
from tests.e2e.test_ticket_namespaces import WORKER

__all__ = ["needs_namespaces"]  # a fixture


def start_workers(stack: ExitStack, directory: Path, lan: Lan) -> list[WorkerProcess]:
    return [
        stack.enter_context(
            start_worker(
                directory,
                *("--listen", f"/ip4/{machine.address}/tcp/0", "--insecure", "--disable-mdns"),
                command=machine.command(WORKER),
            )
        )
        for machine in lan.machines[1:]
    ]


def start_coordinator(lan: Lan, workers: Sequence[WorkerProcess]) -> PeerProcess:
    here = lan.machines[0]
    options = {
        "listen": [f"/ip4/{here.address}/tcp/0"],
        "peers": [worker.address for worker in workers],
    }
    module = "tests.e2e.namespaces.generating_peer"
    return PeerProcess(here, [sys.executable, "-m", module, json.dumps(options)])


def test_the_text_goes_on_when_the_link_of_either_stage_goes_down(
    tmp_path: Path, needs_namespaces: None
) -> None:
    """Nobody is told of it: the worker of the stage says nothing any more, and its connections stay open."""
    with network() as net, ExitStack() as stack:
        lan = net.lan(4)
        workers = start_workers(stack, tmp_path, lan)
        machines = {
            worker.peer_id: machine
            for worker, machine in zip(workers, lan.machines[1:], strict=True)
        }
        coordinator = start_coordinator(lan, workers)
        undisturbed = coordinator.ask("undisturbed")
        for stage in (0, 1):
            worker = coordinator.ask(f"disturbed {stage}")["worker"]
            lan.unplug_cable(machines[worker])
            assert coordinator.ask("go on") == {
                "suspected": worker,
                "health": "suspected",
                "why": "does not answer",
            }
            _, answer = coordinator.next_line()
            assert answer == undisturbed
            # And it is used again, with what it holds.
            lan.plug_cable(machines[worker])
            assert coordinator.ask("settled") == {"settled": True}
        coordinator.leave()
