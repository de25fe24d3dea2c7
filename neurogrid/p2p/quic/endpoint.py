"""A UDP socket with the connections on it: hands each datagram to its connection, and lets new peers in.

A datagram that cannot be told apart from noise is ignored without an answer. A stranger's first datagram costs us a
handshake, so only so many may be in progress; from a certain number on, a peer that begins one has to show first, by a
Retry, that it receives at the address that it claims. Of the handshakes of peers that did, each address has a share: a
peer that has shown nothing is not counted by an address that may be another's.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import groupby
from typing import Any, Final

import trio
from libp2p.peer.id import ID
from qh3._hazmat import pull_quic_header
from qh3.quic.packet import QuicPacketType, QuicProtocolVersion, encode_quic_retry

from neurogrid.p2p.quic.connection import QuicMuxedConn
from neurogrid.p2p.quic.core import CID_LENGTH, Configurations, Datagram
from neurogrid.p2p.quic.limits import WindowPool
from neurogrid.p2p.quic.retry import RetryTokens
from neurogrid.p2p.quic.udp import Address, UdpSocket
from neurogrid.p2p.shares import client_address

__all__ = ["Acceptor", "UdpEndpoint"]

logger = logging.getLogger(__name__)

_LONG_HEADER: Final = 0x80
# A first datagram below this is against the protocol: the answer must not be much larger than the question.
_MIN_INITIAL: Final = 1200
_MIN_ORIGINAL_CID: Final = 8
# Trains of datagrams that are taken before other tasks run.
_TRAINS_IN_A_ROW: Final = 8

Acceptor = Callable[[QuicMuxedConn], Awaitable[object]]


class UdpEndpoint:
    """One socket. `run` drives it.

    Args:
        accept: called in a task of its own for each connection of a peer that has shown who it is; it may stay
            until the connection is over, which ends it. None lets no peer in.
    """

    def __init__(
        self,
        socket: UdpSocket,
        configurations: Configurations,
        pool: WindowPool,
        accept: Acceptor | None = None,
    ) -> None:
        self.socket = socket
        self._configurations = configurations
        self._pool = pool
        self._accept = accept
        self._tokens = RetryTokens(pool.limits.handshake_timeout)
        self._by_cid: dict[bytes, QuicMuxedConn] = {}
        self._connections: set[QuicMuxedConn] = set()
        self._num_handshakes = 0
        # Handshakes in progress, by the address that was shown.
        self._proven: Counter[str] = Counter()
        self._waiting: set[QuicMuxedConn] = set()
        self._touched: set[QuicMuxedConn] = set()
        self._blocked = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._scope = trio.CancelScope()

    # ------------------------------------------------------------------ for the connections

    def send(self, datagrams: list[Datagram]) -> None:
        """Send, or keep until that is possible."""
        if datagrams:
            self.socket.send(datagrams)
            if self.socket.is_blocked:
                self._blocked.set()

    def wait_sendable(self, connection: QuicMuxedConn) -> bool:
        """Whether sending must wait; then the connection's `flush` is called when it need not any more."""
        if self.socket.is_blocked:
            self._waiting.add(connection)
            return True
        return False

    def call_by(self, cid: bytes, connection: QuicMuxedConn) -> None:
        """Datagrams to `cid` are for `connection`."""
        self._by_cid[cid] = connection

    def forget(self, cid: bytes) -> None:
        """Datagrams to `cid` are for no connection any more."""
        self._by_cid.pop(cid, None)

    # ------------------------------------------------------------------ running

    async def run(self, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Move datagrams until cancelled or closed; all connections end with it."""
        try:
            with self._scope:
                async with trio.open_nursery() as self._nursery:
                    self._nursery.start_soon(self._send_what_waits)
                    task_status.started()
                    await self._receive()
        finally:
            self.socket.close()

    def close(self) -> None:
        """End all connections, and the socket."""
        self._scope.cancel()

    async def _receive(self) -> None:
        while True:
            for _ in range(_TRAINS_IN_A_ROW):
                received = self.socket.receive()
                if received is None:
                    self._answer()
                    await self.socket.wait_readable()
                    break
                self._dispatch(*received)
                if self.socket.is_refused:
                    self._refuse()
            else:
                self._answer()
                await trio.lowlevel.checkpoint()

    def _answer(self) -> None:
        """Let those that datagrams came for look once at all that came."""
        while self._touched:
            self._touched.pop().flush()

    def _refuse(self) -> None:
        """The system at the other end says that nobody listens: to be believed until the handshake is over."""
        self.socket.is_refused = False
        for connection in list(self._connections):
            if connection.is_initiator and not connection.handshake_over.is_set():
                connection.abort("connection refused")

    async def _send_what_waits(self) -> None:
        while True:
            await self._blocked.wait()
            self._blocked = trio.Event()
            await self.socket.wait_sent()
            waiting, self._waiting = self._waiting, set()
            for connection in waiting:
                connection.flush()

    # ------------------------------------------------------------------ datagrams

    def _dispatch(self, datagrams: list[bytes], address: Address) -> None:
        """Hand a train over. It may hold datagrams for several connections, if one peer has several."""
        for cid, run in groupby(datagrams, key=_destination):
            connection = self._by_cid.get(cid) if cid is not None else None
            if connection is not None:
                self._give(connection, list(run), address)
            else:
                for datagram in run:
                    self._let_in(datagram, address)

    def _let_in(self, datagram: bytes, address: Address) -> None:
        """Take a datagram for no connection: perhaps a peer's first."""
        limits = self._pool.limits
        if (
            self._accept is None
            or not address[1]  # where nobody can be answered
            or len(datagram) < _MIN_INITIAL
            or not datagram[0] & _LONG_HEADER
            or len(self._connections) >= limits.max_connections
            or self._num_handshakes >= limits.max_handshakes
        ):
            return
        try:
            header = pull_quic_header(datagram, 0, CID_LENGTH)
        except ValueError:
            return
        version, kind, _, cid, source_cid, token = header[:6]
        if (
            version != QuicProtocolVersion.VERSION_1
            or kind != QuicPacketType.INITIAL
            or len(cid) < _MIN_ORIGINAL_CID
        ):
            return
        if cid in self._by_cid:
            self._give(self._by_cid[cid], [datagram], address)
            return
        original_cid, retry_cid, proven = cid, None, ""
        if token or self._num_handshakes >= limits.free_handshakes:
            cids = self._tokens.take(token, address, trio.current_time())
            if cids is None or cids[1] != cid:
                self._ask_for_token(address, cid, source_cid)
                return
            original_cid, retry_cid = cids
            proven = client_address(address[0])
            if self._proven[proven] >= limits.max_handshakes_per_address:
                return
        self._begin(datagram, address, cid, original_cid, retry_cid, proven)

    def _ask_for_token(self, address: Address, cid: bytes, source_cid: bytes) -> None:
        retry_cid = os.urandom(CID_LENGTH)
        token = self._tokens.make(address, cid, retry_cid, trio.current_time())
        retry = encode_quic_retry(
            version=QuicProtocolVersion.VERSION_1,
            source_cid=retry_cid,
            destination_cid=source_cid,
            original_destination_cid=cid,
            retry_token=token,
        )
        self.send([(retry, address)])

    def _begin(
        self,
        datagram: bytes,
        address: Address,
        cid: bytes,
        original_cid: bytes,
        retry_cid: bytes | None,
        proven: str,
    ) -> None:
        connection = QuicMuxedConn(
            self,
            self._configurations.get(is_client=False, address=address[0]),
            self._pool,
            address,
            original_cid=original_cid,
            retry_cid=retry_cid,
        )
        connection.be_called(cid)
        self._num_handshakes += (
            1  # here and not in its task: the next datagram of this train must see it
        )
        self._proven[proven] += bool(proven)
        self._start(connection, partial(self._serve, proven=proven))
        self._give(connection, [datagram], address)

    def _give(self, connection: QuicMuxedConn, datagrams: list[bytes], address: Address) -> None:
        connection.take(datagrams, address)
        self._touched.add(connection)

    # ------------------------------------------------------------------ connections

    def dial(self, address: Address, expected: ID) -> QuicMuxedConn:
        """Begin a connection; its `handshake_over` says when it is there, or failed."""
        connection = QuicMuxedConn(
            self,
            self._configurations.get(is_client=True, address=address[0]),
            self._pool,
            address,
            expected=expected,
        )
        self._start(connection, self._live)
        connection.dial()
        return connection

    def _start(
        self, connection: QuicMuxedConn, task: Callable[[QuicMuxedConn], Awaitable[None]]
    ) -> None:
        assert self._nursery is not None
        self._connections.add(connection)
        self._nursery.start_soon(task, connection)

    async def _live(self, connection: QuicMuxedConn) -> None:
        """A connection that we dialled: the socket is its own, and ends with it."""
        try:
            await connection.drive()
        finally:
            self._connections.discard(connection)
            self._scope.cancel()

    async def _serve(self, connection: QuicMuxedConn, *, proven: str) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._hand_over, connection, proven)
                await connection.drive()
                nursery.cancel_scope.cancel()
        finally:
            self._connections.discard(connection)

    async def _hand_over(self, connection: QuicMuxedConn, proven: str) -> None:
        try:
            await connection.handshake_over.wait()
        finally:
            self._num_handshakes -= 1
            self._proven[proven] -= bool(proven)
            if not self._proven[proven]:
                del self._proven[proven]
        if not connection.is_established:
            logger.debug(
                "no connection from %s: %s", connection.get_remote_address(), connection.end_reason
            )
            return
        assert self._accept is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._accept, connection)
            await connection.event_closed.wait()
            nursery.cancel_scope.cancel()


def _destination(datagram: bytes) -> bytes | None:
    """Return the connection id that a datagram is for; None if it is too short to say."""
    if not datagram:
        return None
    if datagram[0] & _LONG_HEADER:
        if len(datagram) < 6 or len(datagram) < 6 + datagram[5]:
            return None
        return datagram[6 : 6 + datagram[5]]
    return datagram[1 : 1 + CID_LENGTH] if len(datagram) > CID_LENGTH else None
