"""A UDP socket for trio that moves many datagrams with one call where the system can.

Linux takes a train of datagrams of one size as one buffer (UDP_SEGMENT), and hands one over (UDP_GRO). Elsewhere each
goes alone.
"""

from __future__ import annotations

import errno
import socket
import struct
import sys
from collections import deque
from itertools import islice
from typing import Any, Final

import trio

__all__ = ["UdpSocket"]

# linux/udp.h; the socket module does not name them.
_SOL_UDP: Final = 17
_UDP_SEGMENT: Final = 103
_UDP_GRO: Final = 104

_MAX_TRAIN: Final = 64  # datagrams, the kernel's bound
_MAX_TRAIN_BYTES: Final = 64_000
_RECEIVE_BYTES: Final = 65_536
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(4) if hasattr(socket, "CMSG_SPACE") else 0
# What the kernel may hold while we compute; it grants as much as its administrator allows.
_BUFFER_BYTES: Final = 4 * 1024 * 1024
# Datagrams that wait for a network slower than we: beyond it datagrams are lost, as on any network.
_MAX_WAITING: Final = 1024

Address = tuple[Any, ...]

# Errors of the socket itself. Any other is a datagram's: nobody can be sent to at port 0, which a stranger may claim to
# be at, nor from an address that this machine had before its network changed. QUIC finds out by itself that a peer is
# not there.
_OURS: Final = frozenset({errno.EBADF, errno.ENOTSOCK})


class UdpSocket:
    """A bound or connected socket.

    Attributes:
        is_refused: whether the system at the other end said that nobody listens there.
    """

    def __init__(self, family: int) -> None:
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._waiting: deque[tuple[bytes, Address]] = deque()
        self._is_connected = False
        self.is_refused = False
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            self._socket.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        # A train may come from a network card that cannot send one.
        self._takes_trains = sys.platform == "linux" and self._try_trains()
        self._sends_trains = self._takes_trains

    def _try_trains(self) -> bool:
        try:
            self._socket.setsockopt(_SOL_UDP, _UDP_GRO, 1)
        except OSError:
            return False
        return True

    def bind(self, address: tuple[str, int]) -> None:
        """Bind, to listen.

        Raises:
            OSError: as the system says.
        """
        self._socket.bind(address)

    def connect(self, address: tuple[str, int]) -> None:
        """Send to and receive from one address alone.

        Raises:
            OSError: as the system says.
        """
        self._socket.connect(address)
        self._is_connected = True

    @property
    def address(self) -> Address:
        """Address that the socket is bound to."""
        return tuple(self._socket.getsockname())

    @property
    def peer_address(self) -> Address:
        """Address that the socket is connected to."""
        return tuple(self._socket.getpeername())

    def close(self) -> None:
        """Close."""
        self._socket.close()

    # ------------------------------------------------------------------ receiving

    async def wait_readable(self) -> None:
        """Wait for datagrams."""
        await trio.lowlevel.wait_readable(self._socket.fileno())

    def receive(self) -> tuple[list[bytes], Address] | None:
        """Datagrams of one sender that are there; None if there are none."""
        try:
            if not self._takes_trains:
                data, address = self._socket.recvfrom(_RECEIVE_BYTES)
                return [data], address
            data, ancillary, _, address = self._socket.recvmsg(_RECEIVE_BYTES, _ANCILLARY_BYTES)
        except BlockingIOError:
            return None
        except OSError as exc:
            self._note(exc)
            return [], ()
        size = len(data)
        for level, kind, value in ancillary:
            if level == _SOL_UDP and kind == _UDP_GRO:
                (size,) = struct.unpack("i", value[:4])
        if size >= len(data):
            return [data], address
        return [data[at : at + size] for at in range(0, len(data), size)], address

    # ------------------------------------------------------------------ sending

    @property
    def is_blocked(self) -> bool:
        """Whether datagrams wait for the system to take them."""
        return bool(self._waiting)

    async def wait_sent(self) -> None:
        """Wait until the system has taken all that waited."""
        while self._waiting:
            await trio.lowlevel.wait_writable(self._socket.fileno())
            self._send_waiting()

    def send(self, datagrams: list[tuple[bytes, Address]]) -> None:
        """Send; what the system does not take now waits."""
        self._waiting.extend(datagrams)
        self._send_waiting()
        while len(self._waiting) > _MAX_WAITING:
            self._waiting.pop()

    def _send_waiting(self) -> None:
        while self._waiting:
            length = self._train_length() if self._sends_trains else 1
            train = [datagram for datagram, _ in islice(self._waiting, length)]
            try:
                self._send_train(train, self._waiting[0][1])
            except BlockingIOError:
                return
            except OSError as exc:
                if length > 1 and exc.errno in (errno.EIO, errno.EINVAL):
                    self._sends_trains = False  # the network card cannot
                    continue
                self._note(exc)
            for _ in range(length):
                self._waiting.popleft()

    def _send_train(self, train: list[bytes], address: Address) -> None:
        ancillary = (
            [(_SOL_UDP, _UDP_SEGMENT, struct.pack("H", len(train[0])))] if len(train) > 1 else []
        )
        if self._is_connected:
            self._socket.sendmsg(train, ancillary)
        else:
            self._socket.sendmsg(train, ancillary, 0, address)

    def _train_length(self) -> int:
        """Number of waiting datagrams that can be sent as one: all of one size, the last one possibly smaller."""
        first, address = self._waiting[0]
        size, total, length = len(first), 0, 0
        for datagram, to in islice(self._waiting, _MAX_TRAIN):
            total += len(datagram)
            if to != address or len(datagram) > size or total > _MAX_TRAIN_BYTES:
                break
            length += 1
            if len(datagram) < size:
                break
        return max(1, length)

    def _note(self, exc: OSError) -> None:
        if exc.errno in _OURS:
            raise exc
        self.is_refused = self.is_refused or exc.errno == errno.ECONNREFUSED
