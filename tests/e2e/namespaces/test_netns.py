"""The networks that other tests stand on: who reaches whom in them, and that nothing of them stays."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.namespaces.netns import Machine, needs_namespaces, network

__all__ = ["needs_namespaces"]

pytestmark = pytest.mark.usefixtures("needs_namespaces")

SERVE = """
import socket
with socket.create_server(("", 99)) as server:
    print("ready", flush=True)
    while True:
        connection, source = server.accept()
        connection.sendall(source[0].encode())
        connection.close()
"""
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], 99), timeout=10) as connection:
    print(connection.recv(99).decode())
"""


def serve(machine: Machine) -> None:
    process = machine.popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def ask(machine: Machine, address: str) -> str:
    return machine.run([sys.executable, "-c", ASK, address]).stdout.strip()


def names() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in listed.stdout.splitlines()]


def test_a_router_joins_two_lans():
    with network() as net:
        left, right = net.lan(1), net.lan(1)
        net.router(left, right)
        serve(left.machines[0])
        assert ask(right.machines[0], left.machines[0].address) == right.machines[0].address


def test_lans_without_a_router_are_apart():
    with network() as net:
        left, right = net.lan(2), net.lan(1)
        serve(left.machines[0])
        assert ask(left.machines[1], left.machines[0].address) == left.machines[1].address
        with pytest.raises(subprocess.CalledProcessError):
            ask(right.machines[0], left.machines[0].address)


def test_all_is_removed_when_the_test_fails():
    made = []

    def fail() -> None:
        with network() as net:
            made.append(net.lan(1).machines[0])
            serve(made[0])
            assert made[0].name in names()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert made[0].name not in names()


def test_what_a_killed_run_left_is_removed():
    # Nobody has a process id beyond the kernel's largest.
    left = f"ngt-{2**22 + 1}-0"
    subprocess.run(["ip", "netns", "add", left], check=True)
    with network() as net:
        assert net.machine().name in names()
        assert left not in names()
