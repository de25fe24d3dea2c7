"""Relays of others: p2pd, the go-libp2p daemon, relays for us, and reaches us through a relay of ours."""

from __future__ import annotations

import trio

from neurogrid.p2p.libp2p.libp2p_host import open_host
from neurogrid.p2p.reach.circuit import circuit_address
from neurogrid.p2p.reach.reach import Reach, ReachOptions
from neurogrid.p2p.reach.relay_service import RelayLimits
from neurogrid.p2p.streams.stream import Stream
from tests.e2e.interop.go_control import GoControl
from tests.e2e.interop.go_peer import run_p2pd

DEADLINE = 120.0
ECHO = "/test/echo/1"


async def echo(stream: Stream) -> None:
    while data := await stream.receive_some():
        await stream.send_all(data)
    await stream.aclose()


async def reserved(reach: Reach) -> None:
    while not any("/p2p-circuit/" in address for address in reach.addresses):
        await trio.sleep(0.05)


def test_a_go_peer_relays_for_us() -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            relaying = run_p2pd("-relay=true", "-relayService=true", "-forceReachabilityPublic")
            async with relaying as relay, open_host() as server, open_host() as client:
                server.set_stream_handler(ECHO, echo)
                options = ReachOptions(relays=[relay.address], hole_punching=False)
                called, calling = Reach(server, options), Reach(client)
                await reserved(called)
                await calling.connect(circuit_address(relay.address, server.peer_id))
                stream = await client.open_stream(server.peer_id, [ECHO])
                await stream.send_all(b"through Go")
                assert await stream.receive_some() == b"through Go"

    trio.run(main)


def test_a_go_peer_reaches_us_through_our_relay() -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            calling = run_p2pd("-relay=true", "-relayService=false")
            async with calling as caller, open_host() as relay, open_host() as server:
                server.set_stream_handler(ECHO, echo)
                Reach(relay, ReachOptions(relay_service=RelayLimits()))
                options = ReachOptions(relays=[relay.addresses[0]], hole_punching=False)
                called = Reach(server, options)
                await reserved(called)
                place = f"{relay.addresses[0]}/p2p-circuit"
                await caller._ask(GoControl().connect(server.peer_id, place))
                while caller.peer_id not in server.connected_peers:
                    await trio.sleep(0.05)
                stream = await caller.open_stream(server.peer_id, [ECHO])
                await stream.send_all(b"from Go")
                assert await stream.receive_exactly(7) == b"from Go"

    trio.run(main)
