"""A host with discovery, in a process of its own: prints what it finds, one line of JSON each.

    python -m tests.e2e.namespaces.discovery_peer '{"listen": [...], "interfaces": [...], "expiry": 120}'

With `"bootstrap": [...]` it asks Kademlia too, as a server of it.
First `{"peer": ID, "addresses": [...]}`, when it is on the network; then `{"found": ID, "addresses": [...],
"sources": [...]}` and `{"lost": ID}`. A line `explain` on its standard input is answered by `{"explain": TABLE}`;
`dial ADDRESS` by `{"dialled": true or false}`. It leaves in order when its standard input ends.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import trio

from neurogrid.errors import NeuroGridError
from neurogrid.p2p import open_host
from neurogrid.p2p.discovery import Discovery, PeerFound
from neurogrid.p2p.discovery.dht import Announcement


def say(**content: Any) -> None:
    print(json.dumps(content), flush=True)


async def tell_changes(discovery: Discovery) -> None:
    async for change in discovery.peers():
        if isinstance(change, PeerFound):
            sources = sorted(change.sources)
            say(found=change.peer_id, addresses=change.addresses, sources=sources)
        else:
            say(lost=change.peer_id)


async def main(options: dict[str, Any]) -> None:
    bootstrap = options.pop("bootstrap", None)
    async with open_host(listen=options.pop("listen")) as host, Discovery(host) as discovery:
        await discovery.setup_mdns(**options)
        if bootstrap is not None:
            await discovery.setup_dht(
                namespace="test",
                record=lambda: Announcement("peer"),
                mode="server",
                bootstrap=bootstrap,
            )
        say(peer=host.peer_id, addresses=host.addresses)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tell_changes, discovery)
            async for line in trio.wrap_file(sys.stdin):
                request, _, argument = line.strip().partition(" ")
                if request == "explain":
                    say(explain=str(discovery.explain()))
                    continue
                try:
                    await discovery.connect(argument)
                    say(dialled=True)
                except NeuroGridError:
                    say(dialled=False)
            nursery.cancel_scope.cancel()


trio.run(main, json.loads(sys.argv[1]))
