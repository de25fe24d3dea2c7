"""A host with discovery, in a process of its own: prints what it finds, one line of JSON each.

    python -m tests.e2e.namespaces.discovery_peer '{"listen": [...], "interfaces": [...], "expiry": 120}'

With `"bootstrap": [...]` it asks Kademlia too, as a server of it; with `"cluster": DIR` and `"role": ROLE` it is a
member of a cluster, in the cluster's namespace; with `"mdns": false` it uses no multicast.
First `{"peer": ID, "addresses": [...]}`, when it is on the network; then `{"found": ID, "addresses": [...],
"sources": [...]}` and `{"lost": ID}`. A line `explain` on its standard input is answered by `{"explain": TABLE}`;
`dial ADDRESS` by `{"dialled": true or false}`. It leaves in order when its standard input ends.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import trio

from neurogrid.errors import NeuroGridError
from neurogrid.p2p import Identity, open_host
from neurogrid.p2p.discovery import Discovery, PeerFound
from neurogrid.p2p.discovery.dht import Announcement
from neurogrid.p2p.trust import COORDINATOR, WORKER, ClusterAdmission, Membership


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
    role, directory = options.pop("role", "peer"), options.pop("cluster", None)
    identity, admission, namespace = None, None, "test"
    if directory is not None:
        identity = Identity.load(Path(directory) / "identity.key")
        membership = Membership.load(Path(directory))
        # As the commands do: workers admit coordinators, and these workers.
        admits = {COORDINATOR if role == WORKER else WORKER}
        admission = ClusterAdmission(membership, admits=admits)
        namespace = membership.cluster_id
    async with (
        open_host(listen=options.pop("listen"), identity=identity, admission=admission) as host,
        Discovery(host) as discovery,
    ):
        if options.pop("mdns", True):
            await discovery.setup_mdns(**options)
        if bootstrap is not None:
            certificate = admission.own_certificate if admission else None
            announcement = Announcement(role, certificate=certificate or b"")
            await discovery.setup_dht(
                namespace=namespace,
                record=lambda: announcement,
                mode="server",
                bootstrap=bootstrap,
                verify=admission.verify if admission else None,
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
