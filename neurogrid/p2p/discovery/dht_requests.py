"""One question to one server of the DHT: a stream, a message each way, within a deadline.

py-libp2p 0.8.1 has the same questions spread over three classes, each with the protocol id written into it, whatever
prefix was asked for, and answers a failure by a warning and an empty result. Here a failure has a reason.

Source: the Kademlia specification of libp2p, "RPC messages".
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import trio
from google.protobuf.message import DecodeError
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from libp2p.utils.varint import encode_varint_prefixed
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from neurogrid.errors import (
    ConfigurationError,
    RemoteProtocolError,
    ResponseTimeout,
    StreamBrokenError,
)
from neurogrid.p2p.hosts.dialing import MAX_ADDRESSES
from neurogrid.p2p.hosts.host import Host, parse_peer_address
from neurogrid.p2p.streams.stream import Stream, receive_prefixed

__all__ = [
    "MAX_ANSWER_BYTES",
    "Answer",
    "add_provider",
    "ask",
    "dialable",
    "find_node",
    "get_providers",
]

REQUEST_TIMEOUT: Final = 10.0
"""Seconds for one question on an open connection."""

MAX_ANSWER_BYTES: Final = 512 * 1024
"""Bytes of an answer: 256 providers and 20 servers, each with some addresses, need under 200 KiB."""

MAX_NAMED_PEERS: Final = 512
"""Peers taken from one answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a server.

    Attributes:
        closer: servers closer to the key, with the addresses to dial them at.
        providers: peers that announced themselves under the key, likewise.
    """

    closer: dict[ID, tuple[str, ...]]
    providers: dict[ID, tuple[str, ...]]


def find_node(key: bytes) -> Message:
    """Make the question for the servers closest to a key."""
    return Message(type=Message.MessageType.FIND_NODE, key=key)


def get_providers(key: bytes) -> Message:
    """Make the question for the peers announced under a key, and for the servers closest to it."""
    return Message(type=Message.MessageType.GET_PROVIDERS, key=key)


def add_provider(key: bytes, own_id: ID, addresses: Sequence[str]) -> Message:
    """We announce ourselves under a key, to be found at these addresses."""
    message = Message(type=Message.MessageType.ADD_PROVIDER, key=key)
    provider = message.providerPeers.add()
    provider.id = own_id.to_bytes()
    # Without the peer id at the end: it stands beside them, and go-libp2p expects none.
    suffix = f"/p2p/{own_id.to_base58()}"
    provider.addrs.extend(
        Multiaddr(address.removesuffix(suffix)).to_bytes() for address in addresses
    )
    return message


async def ask(host: Host, peer_id: str, protocol_id: str, question: Message) -> Answer:
    """Put a question to a connected server.

    go-libp2p and js-libp2p do not answer an announcement: the end of their stream is waited for instead, which says
    that it was read, and the answer is empty.

    Raises:
        PeerUnreachableError: no connection, or the peer is no server of this DHT.
        StreamBrokenError: it refused, or its answer is cut short.
        ResponseTimeout: it did not answer in time.
        RemoteProtocolError: it answered something else.
    """
    try:
        with trio.fail_after(REQUEST_TIMEOUT):
            async with aclosing(await host.open_stream(peer_id, [protocol_id])) as stream:
                await stream.send_all(encode_varint_prefixed(question.SerializeToString()))
                await stream.send_eof()
                if question.type == Message.MessageType.ADD_PROVIDER:
                    await _wait_for_end(stream)
                    return Answer({}, {})
                return _parse(await receive_prefixed(stream, MAX_ANSWER_BYTES), question)
    except trio.TooSlowError as exc:
        raise ResponseTimeout(f"no answer in {REQUEST_TIMEOUT:g} s") from exc


async def _wait_for_end(stream: Stream) -> None:
    try:
        while await stream.receive_some():
            pass
    except StreamBrokenError:
        # js-libp2p resets a stream that ends after a message without an answer, which it has dealt with.
        if not stream.is_reset_by_peer:
            raise


def _parse(body: bytes, question: Message) -> Answer:
    message = Message()
    try:
        message.ParseFromString(body)
    except DecodeError as exc:
        raise RemoteProtocolError("the answer is no message of the DHT") from exc
    if message.type != question.type:
        raise RemoteProtocolError("the answer is to another question")
    return Answer(closer=_peers(message.closerPeers), providers=_peers(message.providerPeers))


def _peers(named: Sequence[Message.Peer]) -> dict[ID, tuple[str, ...]]:
    peers: dict[ID, tuple[str, ...]] = {}
    for peer in named[:MAX_NAMED_PEERS]:
        if 0 < len(peer.id) <= 64:
            peer_id = ID(peer.id)
            peers[peer_id] = _addresses(peer_id, peer.addrs)
    return peers


def _addresses(peer_id: ID, encoded: Sequence[bytes]) -> tuple[str, ...]:
    found = (_address(peer_id.to_bytes(), bytes(data)) for data in encoded[:MAX_ADDRESSES])
    return tuple(dict.fromkeys(address for address in found if address is not None))


# Every server of a walk names the same peers, and multiaddrs are slow to read.
@lru_cache(maxsize=4096)
def _address(peer: bytes, data: bytes) -> str | None:
    """A full address of a peer; None if it is of no kind that we can dial."""
    peer_id = ID(peer).to_base58()
    try:
        text = str(Multiaddr(data))
    except (MultiaddrError, ValueError):
        return None
    address = text if text.endswith(f"/p2p/{peer_id}") else f"{text}/p2p/{peer_id}"
    return address if _is_dialable(address, peer_id) else None


def dialable(addresses: Sequence[str], peer_id: str) -> tuple[str, ...]:
    """Return the addresses of a peer that a host can dial, once each."""
    return tuple(dict.fromkeys(a for a in addresses if _is_dialable(a, peer_id)))


@lru_cache(maxsize=4096)
def _is_dialable(address: str, peer_id: str) -> bool:
    if address.startswith(("/ip4/0.0.0.0/", "/ip6/::/")):
        return False  # where some listen, and nobody is
    try:
        return parse_peer_address(address)[1] == peer_id
    except ConfigurationError:
        return False
