"""Commands that find each other: real processes, each in a network namespace of its own, with no address typed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.namespaces.netns import Machine, Network, needs_namespaces, network
from tests.e2e.support import DEADLINE, ENVIRONMENT, WorkerProcess, start_worker

__all__ = ["needs_namespaces"]

pytestmark = pytest.mark.usefixtures("needs_namespaces")

COORDINATOR = (sys.executable, "-m", "neurogrid.cli.coordinator")
WORKER = (sys.executable, "-m", "neurogrid.cli.worker")
PROMPT = ("--prompt", "A function definition", "--max-tokens", "8")


@pytest.fixture
def net() -> Iterator[Network]:
    with network() as made:
        yield made


def run_in(machine: Machine, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        machine.command(command),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env=ENVIRONMENT,
        check=False,
    )


def workers_on(
    stack: ExitStack, machines: Sequence[Machine], directory: Path, *args: str
) -> list[WorkerProcess]:
    return [
        stack.enter_context(
            start_worker(directory, "--insecure", *args, command=machine.command(WORKER))
        )
        for machine in machines
    ]


def test_a_lan_of_four_generates_with_no_address_typed(net: Network, tmp_path: Path) -> None:
    first, *others = net.lan(4).machines
    with ExitStack() as stack:
        workers = workers_on(stack, others, tmp_path)
        ended = run_in(first, *COORDINATOR, *PROMPT, "--insecure", "--min-peers", "3")
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.strip()
        alone = run_in(first, *COORDINATOR, *PROMPT, "--local-workers", "1")
        assert ended.stdout == alone.stdout

        diagnose = ("--diagnose", "--insecure", "--min-peers", "3", "--wait", "10")
        listed = run_in(first, *COORDINATOR, *diagnose)
        assert listed.returncode == 0, listed.stdout + listed.stderr
        assert "3 workers found" in listed.stdout
        assert all(worker.peer_id in listed.stdout for worker in workers)


def test_too_few_are_there_and_why_is_said(net: Network, tmp_path: Path) -> None:
    first, second, third = net.lan(3).machines
    with ExitStack() as stack:
        workers_on(stack, [second], tmp_path)
        workers_on(stack, [third], tmp_path, "--disable-mdns")
        ended = run_in(
            first, *COORDINATOR, *PROMPT, "--insecure", "--min-peers", "2", "--wait", "10"
        )
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert "1 of 2 workers were there after 10 s" in ended.stderr
    table = [line for line in ended.stderr.splitlines() if line.startswith(("mdns ", "dial "))]
    assert any(second.address in line for line in table), ended.stderr
    assert not any(third.address in line for line in table), ended.stderr


def test_one_interface_and_no_other(net: Network, tmp_path: Path) -> None:
    near, far = net.lan(2), net.lan(2)
    middle = net.machine()
    near.plug(middle, 9)
    far.plug(middle, 9)
    with ExitStack() as stack:
        workers_on(stack, [middle], tmp_path, "--mdns-interface", "eth1")
        here, there = (
            run_in(lan.machines[0], *COORDINATOR, "--diagnose", "--insecure", "--wait", wait)
            for lan, wait in ((near, "5"), (far, "10"))
        )
    assert (here.returncode, there.returncode) == (1, 0), here.stdout + there.stdout
    assert "1 worker found" in there.stdout


def test_an_interface_that_is_not_there(net: Network) -> None:
    (machine,) = net.lan(1).machines
    ended = run_in(machine, *WORKER, "--insecure", "--mdns-interface", "eth7")
    assert ended.returncode == 2
    assert "eth7" in ended.stderr
