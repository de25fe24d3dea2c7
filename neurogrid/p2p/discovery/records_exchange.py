"""`/neurogrid/record/1`: two members of a cluster tell each other their records, on a connection of their own.

The record is asked of the member itself, and not stored in the DHT: the answer proves that the member is alive and
reachable, is as new as can be, and no server of the DHT can keep an old one back; besides, servers of other
implementations refuse to store values of a namespace that they do not know. The asker sends its own record along,
so one look-up introduces both.

One message each way, each ended by the end of the stream. Source: `protocol_spec/discovery.md`, "Exchange".
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import trio

from neurogrid.errors import (
    PeerUnreachableError,
    RemoteProtocolError,
    ResponseTimeout,
    StreamBrokenError,
)
from neurogrid.p2p.discovery.dht_key import CLUSTER_KEY_BYTES
from neurogrid.p2p.discovery.records import MAX_RECORD_BYTES, RecordRefusedError
from neurogrid.p2p.discovery.records_book import Acceptance, RecordBook
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.streams.stream import Stream
from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.p2p.wire.faults import over_limit
from neurogrid.p2p.wire.forms import Map, binary, fixed, optional

__all__ = ["EXCHANGE_TIMEOUT", "RECORD_PROTOCOL", "RecordExchange", "RecordMessage"]

logger = logging.getLogger(__name__)

RECORD_PROTOCOL: Final = "/neurogrid/record/1"

EXCHANGE_TIMEOUT: Final = 10.0
"""Seconds for one exchange on an open connection: two round trips and two signatures."""

# Exchanges that we serve at once; a peer has no use for more than one, but two may cross.
_MAX_SERVED: Final = 64
_MAX_SERVED_PER_PEER: Final = 2
# The key and the names of the two entries beside the record.
_MAX_MESSAGE_BYTES: Final = MAX_RECORD_BYTES + 256


@dataclass(frozen=True, slots=True)
class RecordMessage(ControlPayload):
    """Question and answer alike.

    Attributes:
        cluster: the key of the cluster that it is about.
        record: the sender's signed record, encoded; empty when it is no member and only looks.
    """

    cluster: bytes
    record: bytes

    _map = Map(
        "a record message",
        {
            "cluster": fixed(CLUSTER_KEY_BYTES),
            "record": optional(binary(MAX_RECORD_BYTES), is_written=True),
        },
        max_bytes=_MAX_MESSAGE_BYTES,
    )


class RecordExchange:
    """Asks and answers for one cluster on one host.

    Args:
        host: where; from now on it serves `/neurogrid/record/1`.
        cluster: the key of the cluster.
        book: decides what is believed.
        own_record: our signed record as it is now; empty when we are no member.
        members_only: whether a peer that sends no record gets none.
        on_accepted: told of each record that came with a question.
    """

    def __init__(
        self,
        host: Host,
        cluster: bytes,
        book: RecordBook,
        *,
        own_record: Callable[[], bytes],
        members_only: bool,
        on_accepted: Callable[[Acceptance], None],
    ) -> None:
        self._host = host
        self._cluster = cluster
        self._book = book
        self._own_record = own_record
        self._members_only = members_only
        self._on_accepted = on_accepted
        self._serving: Counter[str] = Counter()
        self._is_closed = False
        host.set_stream_handler(RECORD_PROTOCOL, self._serve)

    def close(self) -> None:
        """Answer nobody any more."""
        self._is_closed = True
        self._host.remove_stream_handler(RECORD_PROTOCOL)

    async def ask(self, peer_id: str) -> Acceptance | None:
        """Exchange records with a connected peer; None if it is no member and only looks.

        Raises:
            PeerUnreachableError: no connection, or it does not speak the protocol.
            StreamBrokenError: it refuses: it belongs to another cluster, or does not believe our record.
            ResponseTimeout: no answer within `EXCHANGE_TIMEOUT`.
            RecordRefusedError: its record is not to be believed; that is logged.
            RemoteProtocolError: its answer is malformed.

        After cancellation the stream is reset.
        """
        try:
            with trio.fail_after(EXCHANGE_TIMEOUT):
                opened = await self._host.open_stream(peer_id, [RECORD_PROTOCOL])
                async with aclosing(opened) as stream:
                    question = RecordMessage(self._cluster, self._own_record())
                    await stream.send_all(question.encode())
                    await stream.send_eof()
                    answer = RecordMessage.decode(await _receive_all(stream))
        except trio.TooSlowError as exc:
            raise ResponseTimeout(f"no record from {peer_id} in {EXCHANGE_TIMEOUT:g} s") from exc
        if answer.cluster != self._cluster:
            raise RemoteProtocolError(f"{peer_id} answers for another cluster")
        return self._accept(answer.record, peer_id) if answer.record else None

    async def _serve(self, stream: Stream) -> None:
        peer_id = stream.peer_id
        is_busy = self._serving[peer_id] >= _MAX_SERVED_PER_PEER
        if self._is_closed or is_busy or self._serving.total() >= _MAX_SERVED:
            await stream.reset()
            return
        self._serving[peer_id] += 1
        try:
            with trio.move_on_after(EXCHANGE_TIMEOUT) as scope:
                await self._answer(stream)
            if scope.cancelled_caught:
                await stream.reset()
        except RecordRefusedError:
            await stream.reset()  # logged
        except RemoteProtocolError as exc:
            logger.warning("refused the question of %s for our record: %s", peer_id, exc)
            await stream.reset()
        except (StreamBrokenError, PeerUnreachableError) as exc:
            logger.debug("%s asked for our record and did not wait: %s", peer_id, exc)
        finally:
            self._serving[peer_id] -= 1
            if not self._serving[peer_id]:
                del self._serving[peer_id]

    async def _answer(self, stream: Stream) -> None:
        question = RecordMessage.decode(await _receive_all(stream))
        if question.cluster != self._cluster:
            raise RemoteProtocolError("it asks for another cluster")
        if question.record:
            self._on_accepted(self._accept(question.record, stream.peer_id))
        elif self._members_only:
            raise RemoteProtocolError("it shows no record of its own")
        await stream.send_all(RecordMessage(self._cluster, self._own_record()).encode())
        await stream.send_eof()
        await stream.aclose()

    def _accept(self, data: bytes, peer_id: str) -> Acceptance:
        try:
            return self._book.accept(data, from_peer=peer_id)
        except RecordRefusedError as exc:
            logger.warning("refused the record of %s: %s", peer_id, exc)
            raise


async def _receive_all(stream: Stream) -> bytes:
    """Receive all bytes until the end of the stream."""
    received = bytearray()
    while some := await stream.receive_some(_MAX_MESSAGE_BYTES):
        received += some
        if len(received) > _MAX_MESSAGE_BYTES:
            raise over_limit(f"a record message has more than {_MAX_MESSAGE_BYTES} bytes")
    return bytes(received)
