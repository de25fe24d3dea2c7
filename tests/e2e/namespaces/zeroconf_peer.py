"""A libp2p peer by the stock responder of `zeroconf`, as another implementation: `zeroconf_peer.py IP PEER_ID`.

It announces `/ip4/IP/tcp/4001` and `/ip4/IP/udp/4001/quic-v1` of that peer, for an hour, as go-libp2p's responder
does; and prints `{"instance": NAME, "port": N, "host": NAME, "ips": [...], "text": [...]}` for each instance of
`_neurogrid._tcp.local` that it finds and resolves.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import sys
from typing import Any

from zeroconf import ServiceInfo, ServiceStateChange
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

TYPE = "_p2p._udp.local."
FOUND_TYPE = "_neurogrid._tcp.local."


def strings(text: bytes) -> list[str]:
    found = []
    while text:
        found.append(text[1 : 1 + text[0]].decode())
        text = text[1 + text[0] :]
    return found


async def main(ip: str, peer_id: str) -> None:
    places = [f"/ip4/{ip}/tcp/4001", f"/ip4/{ip}/udp/4001/quic-v1"]
    attributes = [f"dnsaddr={place}/p2p/{peer_id}".encode() for place in places]
    own = ServiceInfo(
        TYPE,
        f"randomname.{TYPE}",
        addresses=[ipaddress.ip_address(ip).packed],
        port=4001,
        properties=b"".join(bytes([len(item)]) + item for item in attributes),
        server="randomname.local.",
        host_ttl=3200,
        other_ttl=3200,
    )
    network = AsyncZeroconf(interfaces=[ip])
    tasks = set()

    async def resolve(name: str) -> None:
        info = AsyncServiceInfo(FOUND_TYPE, name)
        if await info.async_request(network.zeroconf, 30_000):
            line: dict[str, Any] = {"instance": name, "port": info.port, "host": info.server}
            line["ips"] = info.parsed_addresses()
            line["text"] = strings(info.text or b"")
            print(json.dumps(line), flush=True)

    def changed(state_change: ServiceStateChange, name: str, **_: object) -> None:
        if state_change is ServiceStateChange.Added:
            tasks.add(asyncio.ensure_future(resolve(name)))

    await network.async_register_service(own)
    AsyncServiceBrowser(network.zeroconf, [FOUND_TYPE], handlers=[changed])
    print(json.dumps({"peer": peer_id, "addresses": []}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await network.async_close()


asyncio.run(main(*sys.argv[1:]))
