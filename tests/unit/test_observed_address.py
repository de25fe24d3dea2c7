"""Our address as a peer says that it sees us: whatever it says, what is taken from it is an IP address with a port."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.utils.varint import encode_varint_prefixed
from multiaddr import Multiaddr

from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.reach.autonat import _moved_to
from neurogrid.p2p.reach.observed import observed_address
from neurogrid.p2p.streams.stream import Stream

PEER = "12D3KooWHotzAKeuFdqtxBmsxbZvWFSDQJV75LqknYGgTm4jQ4TY"  # in the names of tests


class Saying(Stream):
    """A stream that brings one Identify."""

    def __init__(self, observed: bytes) -> None:
        super().__init__(peer_id=PEER, protocol_id="/ipfs/id/1.0.0")
        self._bytes = encode_varint_prefixed(Identify(observed_addr=observed).SerializeToString())

    async def receive_some(self, max_bytes: int = 256 * 1024) -> bytes:
        taken, self._bytes = self._bytes[:max_bytes], self._bytes[max_bytes:]
        return taken

    async def send_all(self, data: bytes | bytearray | memoryview) -> None: ...

    async def send_eof(self) -> None: ...

    async def aclose(self) -> None: ...

    async def reset(self) -> None: ...


class Asked:
    """A host as far as it is needed here, whose peer sees us at `observed`."""

    def __init__(self, observed: bytes) -> None:
        self._observed = observed

    async def open_stream(self, peer_id: str, protocol_ids: Sequence[str]) -> Stream:
        return Saying(self._observed)


async def seen_as(observed: bytes) -> str | None:
    return await observed_address(cast(Host, Asked(observed)), PEER)


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        ("/ip4/203.0.113.7/tcp/4001", "/ip4/203.0.113.7/tcp/4001"),
        (f"/ip6/2001:db8::1/tcp/4001/p2p/{PEER}", "/ip6/2001:db8::1/tcp/4001"),
        ("/ip4/203.0.113.7/udp/4001/quic-v1", "/ip4/203.0.113.7/udp/4001/quic-v1"),
    ],
)
async def test_an_ip_address_with_a_port_is_taken(observed: str, expected: str) -> None:
    assert await seen_as(Multiaddr(observed).to_bytes()) == expected


@pytest.mark.parametrize(
    "observed",
    [
        "/p2p-circuit",
        f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER}/p2p-circuit",
        "/ip4/203.0.113.7",
        f"/unix/{'a' * 5000}",
    ],
)
async def test_any_other_address_is_not(observed: str) -> None:
    seen = await seen_as(Multiaddr(observed).to_bytes())
    assert seen is None
    assert _moved_to(seen, ["/ip4/127.0.0.1/tcp/4001"]) == []


@pytest.mark.parametrize("observed", [b"", b"\xff", b"\x04\x01"])
async def test_what_is_no_address_at_all_is_not_either(observed: bytes) -> None:
    assert await seen_as(observed) is None
