"""A process that makes network namespaces, and forwards what they send to one another over lines with rate and delay.

    python -m neurogrid.training.testnet.forwarder \
        '{"names": ["a", "b"], "addresses": ["10.77.0.1", "10.77.0.2"], "rates": [null, 2e7], "delay": 0.05}'

Each namespace has one interface, `eth0`: a TUN device, whose other end is here. A line on stdout says when all are
there. A line on standard input, as `[[0, 1], [2]]`, cuts the network into sides of these namespaces, `[]` heals it; a
line answers each. They are removed when standard input ends. Needs root, `ip` of iproute2, and /dev/net/tun.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from neurogrid.training.testnet.links import Star

__all__ = ["main"]

_NAMESPACES: Final = Path("/run/netns")
_TUN: Final = "/dev/net/tun"
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN_NO_PI: Final = 0x0001 | 0x1000
_CLONE_NEWNET: Final = 0x40000000
_MTU: Final = 1500
_MAX_PACKET: Final = 65_536
_COMMAND_TIMEOUT: Final = 30.0  # seconds
# So many packets of one peer are taken before it is another's turn.
_BURST: Final = 32
# Of an IPv4 packet: its version, and where it goes.
_VERSION: Final = 4
_HEADER_BYTES: Final = 20
_DESTINATION: Final = slice(16, 20)


@contextmanager
def _namespaces(names: Sequence[str]) -> Iterator[None]:
    """Network namespaces, for as long as the block runs."""
    with ExitStack() as stack:
        for name in names:
            stack.callback(_remove, name)
            _ip("netns", "add", name)
        yield


def _remove(name: str) -> None:
    with suppress(subprocess.SubprocessError, OSError):  # it may not have come to be
        _ip("netns", "delete", name)


def _open_device(name: str, address: str) -> int:
    """Make the interface of a namespace; returns the descriptor of its end here, which does not block."""
    namespace = os.open(_NAMESPACES / name, os.O_RDONLY)
    try:
        _enter(namespace)
    finally:
        os.close(namespace)
    device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TUN_NO_PI))
    _ip("-n", name, "link", "set", "lo", "up")
    _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
    _ip("-n", name, "link", "set", "eth0", "mtu", str(_MTU), "up")
    return device


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _ip(*args: str) -> None:
    subprocess.run(
        ["ip", *args], check=True, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT
    )


def _forward(devices: Sequence[int], addresses: Sequence[str], star: Star) -> None:
    """Forward packets until standard input ends."""
    numbers = {device: number for number, device in enumerate(devices)}
    places = {socket.inet_aton(address): number for number, address in enumerate(addresses)}
    stdin, told = sys.stdin.fileno(), b""
    while True:
        due = star.next_time
        wait = None if due is None else max(0.0, due - time.monotonic())
        readable = select.select([stdin, *devices], [], [], wait)[0]
        for device in readable:
            if device == stdin:
                if not (data := os.read(stdin, 4096)):
                    return
                *lines, told = (told + data).split(b"\n")
                for line in lines:
                    star.cut(*json.loads(line))
                    print("cut", flush=True)
                continue
            for packet in _packets(device):
                to = places.get(packet[_DESTINATION])
                if to is not None and packet[0] >> 4 == _VERSION:
                    star.send(time.monotonic(), numbers[device], to, packet)
        for number, packet in star.arrived(time.monotonic()):
            # Its queue is full, or it is going down: packets get lost.
            with suppress(OSError):
                os.write(devices[number], packet)


def _packets(device: int) -> Iterator[bytes]:
    for _ in range(_BURST):
        try:
            packet = os.read(device, _MAX_PACKET)
        except BlockingIOError:
            return
        if len(packet) >= _HEADER_BYTES:
            yield packet


def main() -> int:
    """Make, forward and remove; returns the exit status."""
    told = json.loads(sys.argv[1])
    names, addresses = told["names"], told["addresses"]
    # Ends by its standard input, when all that runs in the namespaces has ended.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    try:
        with _namespaces(names), ExitStack() as stack:
            devices = []
            for name, address in zip(names, addresses, strict=True):
                devices.append(_open_device(name, address))
                stack.callback(os.close, devices[-1])
            print("ready", flush=True)
            _forward(devices, addresses, Star(tuple(told["rates"]), told["delay"]))
    except subprocess.CalledProcessError as exc:
        print(str(exc.stderr).strip() or str(exc), file=sys.stderr)
        return 1
    except OSError as exc:
        print(f"there can be no network: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
