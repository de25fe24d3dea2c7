"""What `dht_kademlia` mends in py-libp2p 0.8.1: each test fails on the stock class, which strict xfail holds.

When one passes on a newer py-libp2p, pytest says so, and the workaround can go.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import trio
import trio.testing
from libp2p import new_host
from libp2p.abc import IHost, INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.routing_table import KBucket, gen_random_key_in_bucket
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.utils.varint import encode_varint_prefixed
from multiaddr import Multiaddr

from neurogrid.p2p.discovery import dht_kademlia
from neurogrid.p2p.discovery.dht_kademlia import (
    MAX_HEARSAY,
    MAX_PEER_ADDRESSES,
    MAX_PROVIDERS_PER_KEY,
    STREAM_IDLE_TIMEOUT,
    Kademlia,
    KademliaNetwork,
    key_in_bucket,
)
from neurogrid.p2p.discovery.dht_requests import find_node

Make = Callable[[IHost], KadDHT]
LAB = "/lab/kad/1.0.0"


def ours(libp2p: IHost) -> Kademlia:
    network = KademliaNetwork(libp2p, protocol_id=LAB, addresses=lambda: ["/ip4/127.0.0.1/tcp/1"])
    return Kademlia(network, on_asked=lambda peer: None)


def stock(libp2p: IHost) -> KadDHT:
    return KadDHT(libp2p, DHTMode.CLIENT, protocol_prefix="/lab")  # type: ignore[arg-type]


both = pytest.mark.parametrize(
    "make", [ours, pytest.param(stock, marks=pytest.mark.xfail(strict=True))]
)


def a_host() -> IHost:
    """A host that does not run."""
    return new_host(key_pair=create_new_key_pair())


def peer(number: int) -> ID:
    return ID(b"\x12\x20" + hashlib.sha256(b"%d" % number).digest())


def info(number: int, address: str = "/ip4/127.0.0.1/tcp/4001") -> PeerInfo:
    return PeerInfo(peer(number), [Multiaddr(address)])


async def add(dht: KadDHT, number: int, address: str) -> None:
    if isinstance(dht, Kademlia):
        await dht.add_server(peer(number), [address])
    else:
        await dht.routing_table.add_peer(info(number, address), skip_server_mode_check=True)


@both
def test_a_large_cluster_is_kept_whole(make: Make) -> None:
    dht = make(a_host())
    for number in range(50):
        dht.provider_store.add_provider(b"key", info(number))
    assert len(dht.provider_store.get_providers(b"key")) == 50


@both
def test_the_newest_providers_are_kept(make: Make) -> None:
    dht = make(a_host())
    for number in range(MAX_PROVIDERS_PER_KEY + 10):
        dht.provider_store.add_provider(b"key", info(number))
        dht.provider_store.add_provider(b"key", info(0))  # still announces itself
    kept = {provider.peer_id for provider in dht.provider_store.get_providers(b"key")}
    assert len(kept) == MAX_PROVIDERS_PER_KEY
    assert {peer(0), peer(MAX_PROVIDERS_PER_KEY + 9)} <= kept
    assert peer(1) not in kept


@both
def test_there_is_a_bound_on_all_provider_records(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dht_kademlia, "MAX_PROVIDER_RECORDS", 300)
    dht = make(a_host())
    for number in range(400):
        dht.provider_store.add_provider(b"key %d" % number, info(number % 7))
    assert dht.provider_store.size() == 300
    assert len(dht.provider_store.providers) == 300


@both
async def test_many_servers_of_one_subnet_are_known(make: Make) -> None:
    dht = make(a_host())
    for number in range(15):
        await add(dht, number, f"/ip4/8.8.8.{number}/tcp/4001")
    assert dht.routing_table.size() == 15


@both
async def test_a_server_that_has_moved_is_known_where_it_is(make: Make) -> None:
    dht = make(a_host())
    for port in (4001, 4002):
        await add(dht, 1, f"/ip4/127.0.0.1/tcp/{port}")
    known = dht.routing_table.get_peer_info(peer(1))
    assert known is not None
    assert str(known.addrs[0]) == "/ip4/127.0.0.1/tcp/4002"


async def test_what_others_say_takes_the_place_of_nothing_that_is_known() -> None:
    dht = ours(a_host())
    book = cast(KademliaNetwork, dht.host).get_peerstore()
    await add(dht, 1, "/ip4/127.0.0.1/tcp/4001")
    # A hostile server names two thousand peers that are not there, and where the known one is not.
    for number in range(2, 2002):
        book.hear(peer(number), [Multiaddr("/ip4/192.0.2.1/tcp/80")])
    book.hear(peer(1), [Multiaddr(f"/ip4/192.0.2.1/tcp/{port}") for port in range(1, 40)])
    assert len(book.peer_ids()) == MAX_HEARSAY + 1
    assert str(book.addrs(peer(1))[0]) == "/ip4/127.0.0.1/tcp/4001"
    assert len(book.addrs(peer(1))) == MAX_PEER_ADDRESSES
    # Who answers is there, and stays.
    await add(dht, 2001, "/ip4/127.0.0.1/tcp/4002")
    for number in range(2002, 4002):
        book.hear(peer(number), [Multiaddr("/ip4/192.0.2.1/tcp/80")])
    assert str(book.addrs(peer(2001))[0]) == "/ip4/127.0.0.1/tcp/4002"


@both
async def test_a_server_that_becomes_a_client_still_knows_the_others(make: Make) -> None:
    dht = make(a_host())
    await dht.switch_mode(DHTMode.SERVER)
    await add(dht, 1, "/ip4/127.0.0.1/tcp/4001")
    await dht.switch_mode(DHTMode.CLIENT)
    assert dht.routing_table.size() == 1


@both
async def test_another_prefix_is_another_protocol(make: Make) -> None:
    host = a_host()
    await make(host).switch_mode(DHTMode.SERVER)
    served = host.get_mux().get_protocols()
    assert LAB in served
    assert "/ipfs/kad/1.0.0" not in served


@both
def test_values_of_strangers_are_not_stored(make: Make) -> None:
    validator = make(a_host()).validator
    assert validator is not None
    with pytest.raises(Exception, match=r"validator|namespace"):
        validator.validate("a key", bytes(1_000_000))


@pytest.mark.parametrize(
    "key_of",
    [key_in_bucket, pytest.param(gen_random_key_in_bucket, marks=pytest.mark.xfail(strict=True))],
)
def test_a_key_to_refresh_a_bucket_lies_in_it(key_of: Callable[[KBucket], bytes]) -> None:
    bucket = KBucket(a_host(), min_range=2**255, max_range=2**255 + 2**253)
    for _ in range(20):
        place = int.from_bytes(hashlib.sha256(key_of(bucket)).digest(), "big")
        assert bucket.min_range <= place < bucket.max_range


class UnreadStream:
    """A peer that asks, and takes no answer."""

    def __init__(self, question: bytes) -> None:
        self.muxed_conn = SimpleNamespace(peer_id=peer(1))
        self.metric_send_channel = None
        self.num_written = 0
        self.is_reset = False
        self._question = io.BytesIO(question)

    async def read(self, n: int | None = None) -> bytes:
        return self._question.read(n)

    async def write(self, data: bytes) -> None:
        self.num_written += 1
        await trio.sleep_forever()

    async def close(self) -> None:
        pass

    async def reset(self) -> None:
        self.is_reset = True


@both
async def test_who_takes_no_answer_loses_its_place(
    make: Make, autojump_clock: trio.testing.MockClock
) -> None:
    dht = make(a_host())
    question = find_node(peer(2).to_bytes()).SerializeToString()
    stream = UnreadStream(encode_varint_prefixed(question))
    with trio.move_on_after(10 * STREAM_IDLE_TIMEOUT) as scope:
        await dht.handle_stream(cast(INetStream, stream))
    assert stream.num_written == 1
    assert not scope.cancelled_caught
    assert stream.is_reset
