"""Commands that find each other: real processes, each in a network namespace of its own, with no address typed."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.commands import patiently
from tests.e2e.namespaces.commands import (
    COORDINATOR,
    PROMPT,
    WORKER,
    diagnose,
    run_in,
    workers_on,
)
from tests.e2e.namespaces.netns import Network, needs_namespaces

__all__ = ["needs_namespaces"]

pytestmark = pytest.mark.usefixtures("needs_namespaces")


def test_a_lan_of_four_generates_with_no_address_typed(net: Network, tmp_path: Path) -> None:
    first, *others = net.lan(4).machines
    with ExitStack() as stack:
        workers = workers_on(stack, others, tmp_path, "--insecure", "--name", "attic")
        ended = run_in(first, *COORDINATOR, *PROMPT, "--insecure", "--min-peers", "3")
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.strip()
        alone = run_in(first, *COORDINATOR, *PROMPT, "--local-workers", "1")
        assert ended.stdout == alone.stdout

        listed = diagnose(first, "--insecure", "--min-peers", "3")
        assert listed.returncode == 0, listed.stdout + listed.stderr
        assert "3 workers found" in listed.stdout
        found = listed.stdout.rpartition("workers found")[2].splitlines()
        for worker, machine in zip(workers, others, strict=True):
            assert f"  attic {worker.peer_id} ({machine.address})" in found


def test_too_few_are_there_and_why_is_said(net: Network, tmp_path: Path) -> None:
    first, second, third = net.lan(3).machines
    with ExitStack() as stack:
        workers_on(stack, [second], tmp_path, "--insecure")
        workers_on(stack, [third], tmp_path, "--insecure", "--disable-mdns")
        flags = (*PROMPT, "--insecure", "--min-peers", "2")
        ended = patiently(
            lambda wait: run_in(first, *COORDINATOR, *flags, "--wait", wait),
            lambda ended: "1 of 2 workers were there after " in ended.stderr,
        )
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert "1 of 2 workers were there after " in ended.stderr
    table = [line for line in ended.stderr.splitlines() if line.startswith(("mdns ", "dial "))]
    assert any(second.address in line for line in table), ended.stderr
    assert not any(third.address in line for line in table), ended.stderr


def test_one_interface_and_no_other(net: Network, tmp_path: Path) -> None:
    near, far = net.lan(2), net.lan(2)
    middle = net.machine()
    near.plug(middle, 9)
    far.plug(middle, 9)
    with ExitStack() as stack:
        workers_on(stack, [middle], tmp_path, "--insecure", "--mdns-interface", "eth1")
        there = diagnose(far.machines[0], "--insecure")
        here = run_in(near.machines[0], *COORDINATOR, "--diagnose", "--insecure", "--wait", "2")
    assert (here.returncode, there.returncode) == (1, 0), here.stdout + there.stdout
    assert "1 worker found" in there.stdout


def test_an_interface_that_is_not_there(net: Network) -> None:
    (machine,) = net.lan(1).machines
    ended = run_in(machine, *WORKER, "--insecure", "--mdns-interface", "eth7")
    assert ended.returncode == 2
    assert "eth7" in ended.stderr
