"""The state machine of a connection: qh3's, with TLS and flow control of ours in it.

No I/O and no clock: datagrams in, datagrams and events out, and a time to be woken at. It is the one module that
touches what qh3 does not offer as public; tests/unit/test_quic_qh3.py names each such attribute, and fails when one
moves. Another version than the pinned one may be quite another program: 2.x does this in Rust, out of reach.

An error that a peer's datagrams cause in it ends that connection and no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

from libp2p.crypto.keys import KeyPair
from libp2p.peer.id import ID
from qh3._hazmat import Buffer
from qh3.quic.configuration import QuicConfiguration
from qh3.quic.connection import (
    END_STATES,
    RESET_STREAM_FRAME_CAPACITY,
    STOP_SENDING_FRAME_CAPACITY,
    QuicConnection,
    QuicReceiveContext,
)
from qh3.quic.events import QuicEvent
from qh3.quic.packet import QuicErrorCode, QuicFrameType
from qh3.quic.packet_builder import MTU_PROBE_SIZES, QuicPacketBuilder
from qh3.quic.stream import QuicStream

from neurogrid.p2p.quic.certificate import make_certificate
from neurogrid.p2p.quic.credit import Allowance, FinishedStreams, PendingGrants, StreamGrant
from neurogrid.p2p.quic.limits import QuicLimits
from neurogrid.p2p.quic.sender import StreamSender
from neurogrid.p2p.quic.tls import ALPN, SIGNATURE_ALGORITHMS, MutualTLS, mutual_tls
from neurogrid.p2p.wire.maps import printable_line

__all__ = ["CID_LENGTH", "Configurations", "Core", "Datagram"]

logger = logging.getLogger(__name__)

CID_LENGTH: Final = 8
# Without a probe of the path: what every path carries, and what this machine's own carries.
_SAFE_DATAGRAM: Final = 1200
_LOCAL_DATAGRAM: Final = 1452
# Addresses that a peer may have been seen at; it moves seldom, and one is in use.
_MAX_PATHS: Final = 4
# Seconds until a new address of the peer is asked again whether the peer is there.
_CHALLENGE_AGAIN: Final = 1.0
# Characters of a peer's words for the end of a connection, which a user may be shown.
_MAX_REASON: Final = 200

Datagram = tuple[bytes, tuple[Any, ...]]


class Configurations:
    """The configurations of all connections of a host: a certificate, and the numbers that qh3 asks for."""

    def __init__(self, identity: KeyPair, limits: QuicLimits) -> None:
        certificate, key = make_certificate(identity)
        self._made: dict[tuple[bool, bool], QuicConfiguration] = {}
        for is_client in (False, True):
            for is_local in (False, True):
                configuration = QuicConfiguration(
                    is_client=is_client,
                    alpn_protocols=[ALPN],
                    connection_id_length=CID_LENGTH,
                    idle_timeout=limits.idle_timeout,
                    max_data=limits.first_window,
                    max_stream_data=limits.first_stream_window,
                    max_datagram_size=_LOCAL_DATAGRAM if is_local else _SAFE_DATAGRAM,
                    signature_algorithms=[int(number) for number in SIGNATURE_ALGORITHMS],
                    initial_rtt=0.1,
                )
                configuration.load_cert_chain(certificate, key)
                self._made[is_client, is_local] = configuration

    def get(self, *, is_client: bool, address: str) -> QuicConfiguration:
        """The configuration of a connection to a peer at an IP address."""
        return self._made[is_client, address.startswith("127.") or address == "::1"]


class Core(QuicConnection):
    """One connection.

    Args:
        expected: the peer that we dialled; None for a connection that was accepted.
        forget: called with the number of each stream that is over.
        original_destination_connection_id: of an accepted connection: what its first datagram was sent to.
        retry_source_connection_id: the same, if there was a Retry in between: what we asked it to be sent to.
    """

    def __init__(
        self,
        configuration: QuicConfiguration,
        limits: QuicLimits,
        *,
        forget: Callable[[int], None],
        expected: ID | None = None,
        original_destination_connection_id: bytes | None = None,
        retry_source_connection_id: bytes | None = None,
    ) -> None:
        super().__init__(
            configuration=configuration,
            original_destination_connection_id=original_destination_connection_id,
            retry_source_connection_id=retry_source_connection_id,
        )
        self._expected = expected
        self._failure: str | None = None
        self._challenged_at = 0.0
        self._mtu_probe_sizes = [
            size for size in MTU_PROBE_SIZES if size > configuration.max_datagram_size
        ]
        self.allowed_bytes = Allowance(QuicFrameType.MAX_DATA, "max_data", limits.first_window)
        self.allowed_streams = Allowance(
            QuicFrameType.MAX_STREAMS_BIDI, "max_streams_bidi", limits.max_streams
        )
        self._local_max_data: Any = self.allowed_bytes
        self._local_max_streams_bidi: Any = self.allowed_streams
        self._local_max_streams_uni: Any = Allowance(
            QuicFrameType.MAX_STREAMS_UNI, "max_streams_uni", 0
        )
        self.pending_grants = PendingGrants()
        self._streams_dirty_limits: Any = self.pending_grants
        self._streams_finished: Any = FinishedStreams(forget)

    # ------------------------------------------------------------------ what is known

    @property
    def peer_id(self) -> ID | None:
        """The peer id that the peer has shown; to be believed once the handshake is complete."""
        return self.tls.peer_id if isinstance(self.tls, MutualTLS) else None

    @property
    def is_confirmed(self) -> bool:
        """Whether the handshake is complete, and the peer has taken our part of it."""
        return bool(self._handshake_confirmed)

    @property
    def is_over(self) -> bool:
        """Whether nothing can be sent or received on streams any more."""
        return self._close_event is not None or self._state in END_STATES

    @property
    def reason(self) -> str:
        """Reason for which the connection is over."""
        if self._failure is not None:
            return self._failure
        event = self._close_event
        if event is not None and event.reason_phrase:
            return printable_line(str(event.reason_phrase)[:_MAX_REASON])
        code = event.error_code if event is not None else 0
        return "the connection was closed" + (f" with code {code}" if code else "")

    @property
    def is_drained(self) -> bool:
        """Whether all that was written has reached the peer."""
        return not self._loss.bytes_in_flight and all(
            stream.sender.buffer_is_empty for stream in self._streams.values()
        )

    @property
    def idle_timeout(self) -> float:
        """Seconds of silence that both sides have agreed on."""
        return float(self._effective_idle_timeout)

    @property
    def has_news(self) -> bool:
        """Whether there is credit that the peer does not know of."""
        return bool(self.pending_grants) or self.allowed_bytes.value != self.allowed_bytes.sent

    @property
    def cids(self) -> list[bytes]:
        """The numbers by which the peer may call this connection."""
        return [entry.cid for entry in self._host_cids]

    @property
    def can_open(self) -> bool:
        """Whether the peer allows another stream."""
        return self.get_next_available_stream_id() >> 2 < self._remote_max_streams_bidi

    def find(self, stream_id: int) -> Any:
        """qh3's stream, or None when it is over or was never there."""
        return self._streams.get(stream_id)

    def open(self) -> int:
        """Open a stream; the peer hears of it with the first bytes."""
        stream_id = self.get_next_available_stream_id()
        self._get_or_create_stream_for_send(stream_id)
        return stream_id

    def give_up(self, stream_id: int) -> None:
        """Reset what we send on a stream, and stop what we receive, as far as either is not over."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        if not stream.sender.is_finished:
            stream.sender.reset(0)
        self.stop(stream_id)

    def stop(self, stream_id: int) -> None:
        """Ask the peer to send no more on a stream, unless it has finished."""
        stream = self._streams.get(stream_id)
        if stream is not None and not stream.receiver.is_finished:
            stream.receiver.stop(0)

    def grant(self, stream_id: int) -> StreamGrant:
        """Return the peer's grant on a stream that is there: what it may send to us."""
        return StreamGrant(self._streams[stream_id])

    # ------------------------------------------------------------------ driving it

    def take(self, datagrams: list[bytes], address: tuple[Any, ...], now: float) -> None:
        """Take datagrams that came from `address`."""
        try:
            for datagram in datagrams:
                self.receive_datagram(datagram, address, now)
        # qh3 parses in Python and in Rust, whose panics are no Exception; only the peer's bytes are the cause.
        except BaseException as exc:
            if not isinstance(exc, Exception) and type(exc).__name__ != "PanicException":
                raise
            logger.debug("a datagram was malformed", exc_info=True)
            self.fail(QuicErrorCode.INTERNAL_ERROR, f"a datagram was malformed: {exc!r}")
        del self._network_paths[_MAX_PATHS:]

    def produce(self, now: float) -> list[Datagram]:
        """Return the datagrams that can be sent now."""
        self._challenge_again(now)
        try:
            return self.datagrams_to_send(now)
        # As above: what is sent depends on what the peer said.
        except Exception as exc:
            logger.debug("a connection cannot go on", exc_info=True)
            self.fail(QuicErrorCode.INTERNAL_ERROR, f"the connection cannot go on: {exc!r}")
            return []

    def fire(self, now: float) -> None:
        """The time of `get_timer` has come."""
        timer = self.get_timer()
        if timer is not None and timer <= now:
            self.handle_timer(now)

    def events(self) -> Iterator[QuicEvent]:
        """Yield the events since the last call."""
        while (event := self.next_event()) is not None:
            yield event

    def fail(self, code: int, reason: str) -> None:
        """Give the connection up; the peer is told the code, and not why."""
        if self._failure is None and self._close_event is None:
            self._failure = reason
        self.close(code)

    # ------------------------------------------------------------------ what is ours in it

    def _get_or_create_stream(self, frame_type: int, stream_id: int) -> QuicStream:
        return _with_sender(super()._get_or_create_stream(frame_type, stream_id))

    def _get_or_create_stream_for_send(self, stream_id: int) -> QuicStream:
        return _with_sender(super()._get_or_create_stream_for_send(stream_id))

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        self.tls = mutual_tls(self.tls, self._expected)

    def _handle_new_connection_id_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: Buffer
    ) -> None:
        """The peer has another number for us to call it by, perhaps in place of others.

        qh3 keeps in mind all that there ever were, a peer may change them as fast as it likes, and of those that are
        retired qh3 takes none again anyway.
        """
        super()._handle_new_connection_id_frame(context, frame_type, buf)
        oldest = self._peer_retire_prior_to
        self._peer_cid_sequence_numbers = {
            n for n in self._peer_cid_sequence_numbers if n >= oldest
        }

    def _challenge_again(self, now: float) -> None:
        """Repeat a challenge that may be lost: qh3 does not, and sends next to nothing to an address before its answer.

        There is no timer for it: until then, what may be sent depends on what comes from there.
        """
        for path in self._network_paths[:1]:
            if not path.local_challenge_sent:
                self._challenged_at = now
            elif not path.is_validated and now >= self._challenged_at + _CHALLENGE_AGAIN:
                path.local_challenge_sent = False
                self._challenged_at = now

    # qh3 forgets a stream in the middle of whose turn the packet is full: a task that waits for its reset would wait
    # for ever. So it is passed over, and has its turn in the next packet.

    def _write_stop_sending_frame(self, builder: QuicPacketBuilder, stream: QuicStream) -> None:
        if _has_room(builder, STOP_SENDING_FRAME_CAPACITY):
            super()._write_stop_sending_frame(builder, stream)

    def _write_reset_stream_frame(self, builder: QuicPacketBuilder, stream: QuicStream) -> None:
        if _has_room(builder, RESET_STREAM_FRAME_CAPACITY):
            super()._write_reset_stream_frame(builder, stream)

    def _handle_stream_data_blocked_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: Buffer
    ) -> None:
        """The peer waits for credit; it comes when its bytes are read."""
        buf.pull_uint_var()
        buf.pull_uint_var()


def _has_room(builder: QuicPacketBuilder, num_bytes: int) -> bool:
    return min(builder.remaining_buffer_space, builder.remaining_flight_space) >= num_bytes


def _with_sender(stream: QuicStream) -> QuicStream:
    stream_: Any = stream  # qh3 says that it has a sender of its own class
    if not isinstance(stream_.sender, StreamSender):
        stream_.sender = StreamSender(stream_.sender)
    return stream
