"""A server of a DHT that names members who are none, each for a reason of its own; in a process of its own.

    python -m tests.e2e.namespaces.dht_liars '{"listen": "/ip4/10.1.0.2/tcp/0", "namespace": "neurogrid"}'

Prints `{"peer": ID, "addresses": [...], "members": {REASON: ID}}`, and leaves when its standard input ends.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

import trio
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from neurogrid.p2p import Identity, Stream, open_host
from neurogrid.p2p.discovery.dht import Dht, open_dht
from neurogrid.p2p.discovery.dht_key import cluster_key
from neurogrid.p2p.discovery.records import MemberRecord, sign_record
from neurogrid.p2p.discovery.records_exchange import RECORD_PROTOCOL, RecordMessage


def expired_record(identity: Identity, key: bytes) -> bytes:
    record = MemberRecord(
        cluster=key, peer_id=identity.peer_id, sequence=1, expires=1, role="worker", addresses=()
    )
    return RecordMessage(key, sign_record(record, identity)).encode()


def plant(dht: Dht, key: bytes, members: Mapping[str, str]) -> None:
    """Have the server name these, by peer id: at an address each."""
    for peer_id, address in members.items():
        info = PeerInfo(ID.from_base58(peer_id), [Multiaddr(address)])
        dht._kademlia.provider_store.add_provider(key, info)


async def main(options: dict[str, str]) -> None:
    listen, key = options["listen"], cluster_key(options["namespace"])
    async with (
        open_host(listen=[listen]) as server,
        open_host(listen=[listen]) as liar,
        open_dht(
            server,
            namespace=None,
            record=None,
            mode="server",
            on_sighting=lambda sighting: None,
            on_attempt=lambda attempt: None,
        ) as dht,
    ):

        async def show_expired(stream: Stream) -> None:
            await stream.send_all(expired_record(liar.identity, key))
            await stream.send_eof()
            await stream.aclose()

        liar.set_stream_handler(RECORD_PROTOCOL, show_expired)
        place = server.addresses[0].split("/p2p/")[0]
        ip = place.split("/")[2]
        places = {
            "connection refused": f"/ip4/{ip}/tcp/1",
            "wrong key": place,
            "no route": "/ip4/203.0.113.1/tcp/1",
            "no common transport": f"/ip4/{ip}/udp/1/webrtc-direct",
        }
        members = {reason: Identity.generate().peer_id for reason in places}
        plant(dht, key, {members[reason]: places[reason] for reason in places})
        members["expired"] = liar.peer_id
        plant(dht, key, {liar.peer_id: liar.addresses[0].split("/p2p/")[0]})
        ready = {"peer": server.peer_id, "addresses": server.addresses, "members": members}
        print(json.dumps(ready), flush=True)
        async for _ in trio.wrap_file(sys.stdin):
            pass


trio.run(main, json.loads(sys.argv[1]))
