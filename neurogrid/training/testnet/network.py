"""The network of a testnet: a namespace for each process, with lines between them that have a rate and a delay.

The kernel's own means for that (netem) are not everywhere; so packets go through a process of ours, the forwarder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from neurogrid.errors import ConfigurationError, TransportError

__all__ = ["Lines", "Network", "check_namespaces", "open_network"]

_NAMESPACES: Final = Path("/run/netns")
_PREFIX: Final = "ngtestnet"
_READY_TIMEOUT: Final = 60.0  # seconds
_END_TIMEOUT: Final = 30.0
_POLL: Final = 0.05


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines between the processes of a testnet.

    Attributes:
        delay: seconds from one process to another, one way.
        rate: bits per second of each worker's line, in each direction; None for no limit. The leader's has none.
    """

    delay: float = 0.0
    rate: float | None = None


class Network:
    """Namespaces for processes, by their names.

    Args:
        names: of the processes, the leader first.
    """

    def __init__(self, names: Sequence[str], forwarder: subprocess.Popen[bytes]) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}
        self._forwarder = forwarder

    async def cut(self, *sides: Collection[str]) -> None:
        """Let nothing get from one of these sides to another until the next cut; without sides all is healed.

        Args:
            sides: names of processes; those that are on none are one side more.

        Raises:
            TransportError: the forwarder has ended.
        """
        told = [[self._numbers[name] for name in side] for side in sides]
        stdin, stdout = self._forwarder.stdin, self._forwarder.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(told).encode() + b"\n")
            stdin.flush()
        except OSError as exc:
            raise TransportError(f"the forwarder has ended: {exc.strerror}") from exc
        with trio.fail_after(_READY_TIMEOUT):
            await trio.lowlevel.wait_readable(stdout.fileno())
        if not os.read(stdout.fileno(), 64):
            raise TransportError("the forwarder has ended: see its log")

    @property
    def status(self) -> int | None:
        """The exit status of the forwarder; None while it forwards."""
        return self._forwarder.poll()

    def address(self, name: str) -> str:
        """The IPv4 address of a process."""
        return _address(self._numbers[name])

    def command(self, name: str) -> list[str]:
        """Words to put before the command line of a process, so that it runs in its namespace."""
        return ["ip", "netns", "exec", _namespace(os.getpid(), self._numbers[name])]


def check_namespaces() -> None:
    """Refuse where there can be none.

    Raises:
        ConfigurationError: says what is missing.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigurationError("--delay and --rate need network namespaces: Linux has them")
    if os.geteuid() != 0:
        raise ConfigurationError(
            "--delay and --rate need root, for network namespaces: use sudo, or leave them out"
        )
    if shutil.which("ip") is None:
        raise ConfigurationError("--delay and --rate need `ip`: install iproute2")
    if not Path("/dev/net/tun").exists():
        raise ConfigurationError("--delay and --rate need /dev/net/tun: load the module tun")


@asynccontextmanager
async def open_network(names: Sequence[str], lines: Lines, log: Path) -> AsyncIterator[Network]:
    """A network for processes with these names, the leader first, until the block is left.

    Args:
        log: gets what the forwarder says.

    Raises:
        ConfigurationError: there can be none here.
        TransportError: it did not come to be.
    """
    check_namespaces()
    await _remove_leftovers()
    told = {
        "names": [_namespace(os.getpid(), number) for number in range(len(names))],
        "addresses": [_address(number) for number in range(len(names))],
        "rates": [None, *([lines.rate] * (len(names) - 1))],
        "delay": lines.delay,
    }
    with log.open("ab") as stderr:
        forwarder = subprocess.Popen(
            [sys.executable, "-m", "neurogrid.training.testnet.forwarder", json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
    assert forwarder.stdin is not None
    assert forwarder.stdout is not None
    try:
        with trio.move_on_after(_READY_TIMEOUT) as scope:
            await trio.lowlevel.wait_readable(forwarder.stdout.fileno())
            if not os.read(forwarder.stdout.fileno(), 64):
                words = log.read_text(errors="replace").splitlines()
                raise TransportError(
                    f"no network for the testnet: {words[-1] if words else 'see ' + str(log)}"
                )
        if scope.cancelled_caught:
            raise TransportError(
                f"no network for the testnet within {_READY_TIMEOUT:g} s: see {log}"
            )
        yield Network(names, forwarder)
    finally:
        forwarder.stdin.close()
        forwarder.stdout.close()
        with trio.CancelScope(shield=True), trio.move_on_after(_END_TIMEOUT):
            while forwarder.poll() is None:
                await trio.sleep(_POLL)
        if forwarder.poll() is None:
            forwarder.kill()
            forwarder.wait()


def _address(number: int) -> str:
    return f"10.77.0.{number + 1}"


def _namespace(pid: int, number: int) -> str:
    return f"{_PREFIX}-{pid}-{number}"


async def _remove_leftovers() -> None:
    """Remove namespaces whose forwarder was killed, and whose testnet is gone."""
    for path in _NAMESPACES.glob(f"{_PREFIX}-*-*"):
        maker = path.name.split("-")[1]
        if not Path("/proc", maker).exists():
            await trio.run_process(
                ["ip", "netns", "delete", path.name], check=False, capture_stderr=True
            )
