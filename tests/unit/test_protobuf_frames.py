"""Messages of libp2p's own protocols on a stream, and addresses through relays."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from libp2p.peer.envelope import unmarshal_envelope
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, PeerId, Voucher

from neurogrid.errors import (
    ConfigurationError,
    LocalProtocolError,
    NeuroGridError,
    RemoteProtocolError,
    StreamBrokenError,
)
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.reach.circuit import (
    circuit_address,
    is_relayed_address,
    parse_any_address,
    split_circuit,
)
from neurogrid.p2p.reach.protobuf_frames import MAX_MESSAGE, receive_message, send_message
from neurogrid.p2p.reach.vouchers import DOMAIN, make_voucher
from neurogrid.p2p.streams.stream import Stream


class Bytes(Stream):
    """A stream that has received these bytes and then its end, and keeps what is sent."""

    def __init__(self, received: bytes = b"", *, at_once: int = 1) -> None:
        super().__init__(peer_id="them", protocol_id="/test/1")
        self.left = received
        self.sent = b""
        self._at_once = at_once

    async def receive_some(self, max_bytes: int = 256 * 1024) -> bytes:
        await trio.lowlevel.checkpoint()
        num_bytes = min(max_bytes, self._at_once)
        data, self.left = self.left[:num_bytes], self.left[num_bytes:]
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        self.sent += data

    async def send_eof(self) -> None: ...

    async def aclose(self) -> None: ...

    async def reset(self) -> None: ...


def hop(num_bytes: int) -> HopMessage:
    return HopMessage(type=HopMessage.CONNECT, peer=PeerId(id=bytes(num_bytes)))


def receive(data: bytes, **options: int) -> HopMessage:
    return trio.run(lambda: receive_message(Bytes(data), HopMessage, **options))


def sent(message: HopMessage) -> bytes:
    stream = Bytes()
    trio.run(send_message, stream, message)
    return stream.sent


@pytest.mark.parametrize("num_bytes", [0, 1, 127, 128, 300, 4080])
@pytest.mark.parametrize("at_once", [1, 7, 10_000])
def test_what_is_sent_is_received_and_nothing_behind_it(num_bytes: int, at_once: int) -> None:
    message = hop(num_bytes)
    stream = Bytes(sent(message) + b"what follows", at_once=at_once)
    assert trio.run(receive_message, stream, HopMessage) == message
    assert stream.left == b"what follows"


def test_a_message_that_is_too_large_is_neither_sent_nor_received() -> None:
    with pytest.raises(LocalProtocolError, match="larger"):
        sent(hop(MAX_MESSAGE))
    with pytest.raises(RemoteProtocolError, match="announces a message of 4097 B"):
        receive(b"\x81\x20" + bytes(4097))
    with pytest.raises(RemoteProtocolError, match="without an end"):
        receive(b"\xff" * 100)
    assert receive(sent(hop(50)), max_bytes=100) == hop(50)
    with pytest.raises(RemoteProtocolError, match="20 B are the most"):
        receive(sent(hop(50)), max_bytes=20)


def test_a_message_that_is_cut_is_a_broken_stream() -> None:
    whole = sent(hop(50))
    for length in range(len(whole)):
        with pytest.raises(StreamBrokenError, match="early"):
            receive(whole[:length])


@given(st.binary(max_size=300))
def test_arbitrary_bytes_raise_errors_of_ours(data: bytes) -> None:
    with suppress(NeuroGridError):
        receive(data)


RELAY, PEER = Identity.generate().peer_id, Identity.generate().peer_id
AT_RELAY = f"/ip4/10.0.0.1/tcp/4001/p2p/{RELAY}"


def test_an_address_through_a_relay_has_two_parts() -> None:
    address = circuit_address(AT_RELAY, PEER)
    assert address == f"{AT_RELAY}/p2p-circuit/p2p/{PEER}"
    assert is_relayed_address(address)
    assert not is_relayed_address(AT_RELAY)
    assert split_circuit(address) == (AT_RELAY, PEER)
    assert parse_any_address(address) == (address, PEER)
    assert parse_any_address(AT_RELAY) == (AT_RELAY, RELAY)


@pytest.mark.parametrize(
    "change",
    [
        lambda address: address.removesuffix(f"/p2p/{PEER}"),
        lambda address: address.removesuffix(PEER),
        lambda address: address.replace(PEER, "nobody"),
        lambda address: address.replace(PEER, RELAY),
        lambda address: address.replace(f"/p2p/{RELAY}", ""),
        lambda address: address.replace("/ip4/10.0.0.1/tcp/4001", ""),
        lambda address: f"{address}/p2p-circuit/p2p/{RELAY}",
        lambda address: "/p2p-circuit" + address,
        lambda address: "/p2p-circuit",
    ],
)
def test_what_is_no_such_address_is_refused(change: Callable[[str], str]) -> None:
    with pytest.raises(ConfigurationError):
        parse_any_address(change(circuit_address(AT_RELAY, PEER)))


def test_a_voucher_is_signed_by_its_relay() -> None:
    relay = Identity.generate()
    envelope = unmarshal_envelope(make_voucher(relay, PEER, 1234))
    envelope.validate(DOMAIN)
    assert ID.from_pubkey(envelope.public_key).to_base58() == relay.peer_id
    assert envelope.payload_type == b"\x03\x02"
    voucher = Voucher()
    voucher.ParseFromString(envelope.raw_payload)
    assert ID(voucher.relay).to_base58() == relay.peer_id
    assert ID(voucher.peer).to_base58() == PEER
    assert voucher.expiration == 1234
