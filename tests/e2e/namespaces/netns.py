"""Networks of namespaces: machines, switches and routers that exist for one test and touch no real interface.

A machine is a network namespace; so is a switch, with a bridge in it, and a router, which has an interface in each
of several LANs. Cables are veth pairs whose two ends are born inside the namespaces, so that nothing ever appears
on the machine that runs the test. Leaving `network()` kills what runs there and removes all of it; what a run
left that was itself killed is removed by the next one, which knows it by its name: `ngt-PID-NUMBER`.

    with network() as net:
        lan = net.lan(4)
        first = lan.machines[0]
        first.run(["ip", "address"])
        with first.popen([sys.executable, "-m", "..."]) as process: ...

Needs root and `ip` of iproute2; `needs_namespaces` skips a test that cannot have them, and says why.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.preloaded import Popen

__all__ = ["Lan", "Machine", "Network", "needs_namespaces", "network", "why_no_namespaces"]

PREFIX = "ngt"
COMMAND_TIMEOUT = 30.0  # seconds, for a command that takes some milliseconds on an idle machine
EXIT_TIMEOUT = 10.0  # seconds

_numbers = itertools.count()


@functools.cache
def why_no_namespaces() -> str:
    """Why this process cannot make namespaces; empty where it can."""
    if shutil.which("ip") is None:
        return "network namespaces need `ip`: install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with network() as net:
            net.lan(1)
    except subprocess.CalledProcessError as exc:
        return f"this system allows no network namespaces: {str(exc.stderr).strip()}"
    return ""


@pytest.fixture
def needs_namespaces() -> None:
    """Skip the test where there can be no namespaces: import it, and use it as a fixture."""
    if reason := why_no_namespaces():
        pytest.skip(reason)


class Machine:
    """A namespace. Its interfaces are `eth0`, `eth1` and so on, in the order in which it was plugged in.

    Attributes:
        name: of the namespace, for `ip netns`.
        addresses: its IPv4 address on each of its interfaces.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.addresses: list[str] = []
        self._processes: list[Popen] = []
        _ip("netns", "add", name)
        self.ip("link", "set", "lo", "up")

    @property
    def address(self) -> str:
        """Its IPv4 address on its first interface."""
        return self.addresses[0]

    def ip(self, *args: str) -> str:
        """Run `ip` with these arguments in here; returns what it prints."""
        return _ip("-n", self.name, *args)

    def command(self, args: Sequence[str]) -> list[str]:
        """The command line that runs `args` in here, for whoever starts processes otherwise."""
        return ["ip", "netns", "exec", self.name, *args]

    def run(
        self, args: Sequence[str], *, check: bool = True, timeout: float = COMMAND_TIMEOUT
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in here to its end, and return what it printed."""
        return _run(self.command(args), check=check, timeout=timeout)

    def popen(self, args: Sequence[str], **options: Any) -> Popen:
        """Start a process in here, with text pipes; it is killed when the network is removed, if not before.

        Its `pid` is that of the command itself, so that signals reach it.
        """
        process = Popen(self.command(args), **options)
        self._processes.append(process)
        return process

    def set_system_control(self, key: str, value: str) -> None:
        """Set one of the namespace's own kernel parameters, such as `net.ipv4.ip_forward`."""
        path = "/proc/sys/" + key.replace(".", "/")
        self.run(["sh", "-c", 'echo "$1" > "$2"', "sh", value, path])

    def end_processes(self) -> None:
        """Kill what was started in here and still runs, and close its pipes."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait(EXIT_TIMEOUT)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        self._processes.clear()


class Lan:
    """One bridge, and the machines on it: `10.NUMBER.0.1` and so on, in a network of 24 bits.

    Attributes:
        number: the second byte of its addresses.
        machines: those that `Network.lan` made; `plug` adds others.
    """

    def __init__(self, number: int, switch: Machine) -> None:
        self.number = number
        self.machines: list[Machine] = []
        self._switch = switch
        self._ports: dict[tuple[str, str], str] = {}
        switch.ip("link", "add", "bridge", "type", "bridge", "mcast_snooping", "0")
        switch.ip("link", "set", "bridge", "up")

    def address(self, host: int) -> str:
        """The address of the machine with this number here."""
        return f"10.{self.number}.0.{host}"

    def plug(self, machine: Machine, host: int) -> str:
        """Give a machine one more interface, on this LAN, with the address `address(host)`; returns its name."""
        interface = f"eth{len(machine.addresses)}"
        port = f"port{len(self._ports)}"
        _ip(
            *("link", "add", interface, "netns", machine.name, "type", "veth"),
            *("peer", "name", port, "netns", self._switch.name),
        )
        self._switch.ip("link", "set", port, "master", "bridge", "up")
        machine.ip("address", "add", f"{self.address(host)}/24", "dev", interface)
        machine.ip("link", "set", interface, "up")
        if not machine.addresses:
            # What a default route does elsewhere: programs that name no interface can multicast.
            machine.ip("route", "add", "224.0.0.0/4", "dev", interface)
        machine.addresses.append(self.address(host))
        self._ports[machine.name, interface] = port
        return interface

    def unplug_cable(self, machine: Machine, interface: str = "eth0") -> None:
        """Pull a machine's cable out of the switch: the machine keeps its address and hears nobody."""
        self._switch.ip("link", "set", self._ports[machine.name, interface], "down")

    def plug_cable(self, machine: Machine, interface: str = "eth0") -> None:
        """Put the cable back."""
        self._switch.ip("link", "set", self._ports[machine.name, interface], "up")


class Network:
    """What a test has made; see `network`."""

    def __init__(self) -> None:
        self._machines: list[Machine] = []
        self._num_lans = 0

    def machine(self) -> Machine:
        """A machine that is plugged in nowhere yet."""
        # The name comes first: `ip netns add` may fail half-way.
        name = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
        try:
            machine = Machine(name)
        except BaseException:
            _remove(name)
            raise
        self._machines.append(machine)
        return machine

    def lan(self, num_machines: int) -> Lan:
        """A LAN of its own, with `num_machines` on it."""
        self._num_lans += 1
        lan = Lan(self._num_lans, self.machine())
        for host in range(1, num_machines + 1):
            machine = self.machine()
            lan.plug(machine, host)
            lan.machines.append(machine)
        return lan

    def router(self, *lans: Lan) -> Machine:
        """A machine that joins LANs, `eth0` on the first, for unicast alone: multicast stays where it is.

        It is `10.NUMBER.0.254` everywhere, and the default route of the machines that are on those LANs now.
        """
        router = self.machine()
        for lan in lans:
            lan.plug(router, 254)
            for machine in lan.machines:
                machine.ip("route", "add", "default", "via", lan.address(254))
        router.set_system_control("net.ipv4.ip_forward", "1")
        return router

    def remove(self) -> None:
        """End all processes and remove all namespaces, and with them their interfaces."""
        for machine in self._machines:
            machine.end_processes()
        for machine in self._machines:
            _remove(machine.name)
        self._machines.clear()


@contextmanager
def network() -> Iterator[Network]:
    """Make networks until the block is left; then nothing of them is there any more."""
    _remove_leftovers()
    net = Network()
    try:
        yield net
    finally:
        net.remove()


def _remove_leftovers() -> None:
    for name in _names():
        maker = name.split("-")[1]
        if not Path(f"/proc/{maker}").exists():
            _remove(name)


def _names() -> list[str]:
    lines = _ip("netns", "list").splitlines()
    return [line.split()[0] for line in lines if line.startswith(f"{PREFIX}-")]


def _remove(name: str) -> None:
    """Remove a namespace and kill what still runs in it; no matter if it is not there."""
    pids = _run(["ip", "netns", "pids", name], check=False).stdout.split()
    for pid in pids:
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue  # it ended by itself
    _run(["ip", "netns", "delete", name], check=False)


def _ip(*args: str) -> str:
    return _run(["ip", *args]).stdout


def _run(
    args: Sequence[str], *, check: bool = True, timeout: float = COMMAND_TIMEOUT
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(args, capture_output=True, text=True, check=check, timeout=timeout)
