"""A host for the tests of NATs, as a process of its own: `python -m tests.e2e.nat_peer ROLE [ARGUMENT...]`.

It says what happens as lines of JSON. A `relay` relays. A `server` reserves a slot at the relay ADDRESS and echoes.
A `client` connects to ADDRESS, uses one stream throughout, and says which way that and new streams go. An `insider`
asks the `outsider` at ADDRESS whether it can be dialled. A `keeper` keeps a connection to the `target` at ADDRESS.
With `hasty` at the end it gives up sooner where a hole is punched in vain.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import trio
from libp2p.connection_types import ConnectionType

from neurogrid.errors import PeerUnreachableError
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost, open_host
from neurogrid.p2p.reach import hole_punching
from neurogrid.p2p.reach.hole_punching import Path
from neurogrid.p2p.reach.keeper import KeeperLimits, keep_connections
from neurogrid.p2p.reach.reach import Reach, ReachOptions
from neurogrid.p2p.reach.relay_service import RelayLimits
from neurogrid.p2p.reach.relayed import connection_of
from neurogrid.p2p.streams.stream import Stream

ECHO = "/test/echo/1"
LISTEN = ["/ip4/0.0.0.0/tcp/4001"]
DEADLINE = 240.0


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


async def echo(stream: Stream) -> None:
    while data := await stream.receive_some():
        await stream.send_all(data)
    await stream.aclose()


async def run_relay() -> None:
    async with open_host(listen=LISTEN) as host:
        reach = Reach(host, ReachOptions(relay_service=RelayLimits()))
        say(addresses=[a for a in reach.addresses if "/127." not in a])
        await trio.sleep_forever()


async def run_server(relay: str) -> None:
    async with open_host(listen=LISTEN) as host:
        host.set_stream_handler(ECHO, echo)
        reach = Reach(host, ReachOptions(relays=[relay]))
        while not (addresses := [a for a in reach.addresses if "/p2p-circuit/" in a]):
            await trio.sleep(0.02)
        say(addresses=addresses, observed=reach.state().observed)
        await say_paths(reach)


async def run_outsider() -> None:
    """Dials each address that comes as a line, on a new connection."""
    async with open_host(listen=LISTEN) as host:
        reach = Reach(host)
        say(addresses=[a for a in reach.addresses if "/127." not in a])
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            async with open_host() as visitor:
                try:
                    say(reached=await visitor.connect(line.strip()))
                except PeerUnreachableError as exc:
                    say(reached=None, reason=str(exc))


async def run_insider(outsider: str, maps_ports: str) -> None:
    """Finds out whether it can be dialled, and ends when its input does."""
    options = ReachOptions(port_mapping=maps_ports == "maps")
    async with open_host(listen=LISTEN) as host:
        reach = Reach(host, options)
        while options.port_mapping and all(
            address in host.listen_addresses for address in reach.addresses
        ):
            await trio.sleep(0.05)
        peer_id = await reach.connect(outsider)
        assert reach.autonat is not None
        found = await reach.autonat.check([peer_id])
        say(
            reachability=found.reachability.value,
            reached_at=found.address,
            reason=found.reason,
            addresses=[a for a in reach.addresses if "/127." not in a],
        )
        await trio.to_thread.run_sync(sys.stdin.readline)


async def run_target() -> None:
    async with open_host(listen=LISTEN) as host:
        host.set_stream_handler(ECHO, echo)
        say(addresses=[a for a in host.addresses if "/127." not in a])
        await trio.sleep_forever()


async def run_keeper(address: str) -> None:
    """Keeps a connection to ADDRESS, and says when it comes and goes."""
    peer_id = address.rpartition("/")[2]
    limits = KeeperLimits(ping_interval=2.0, ping_timeout=4.0)
    async with open_host(listen=LISTEN) as host, keep_connections(host, limits=limits) as keeper:
        keeper.want(peer_id, [address])
        while True:
            await until_connected(host, peer_id)
            stream = await host.open_stream(peer_id, [ECHO])
            await stream.send_all(b"hello")
            say(connected=peer_id, echo=(await stream.receive_some()).decode())
            await host.wait_disconnected(peer_id)
            while (state := keeper.state(peer_id)) is None or not state.num_failures:
                await trio.sleep(0.05)
            say(lost=peer_id, last_error=state.last_error, num_failures=state.num_failures)


async def until_connected(host: Libp2pHost, peer_id: str) -> None:
    while peer_id not in host.connected_peers:
        await trio.sleep(0.05)


async def say_paths(reach: Reach) -> None:
    before: object = None
    while True:
        paths = [(p.peer_id, p.path.value, p.reason) for p in reach.state().paths]
        if paths != before:
            before = paths
            say(paths=paths)
        await trio.sleep(0.1)


class Talk:
    """A stream that is in use all the time."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.num_echoes = 0
        self._is_over = False

    async def run(self) -> None:
        while not self._is_over:
            message = b"%08d" % self.num_echoes
            await self.stream.send_all(message)
            received = b""
            while len(received) < len(message):
                data = await self.stream.receive_some(len(message) - len(received))
                if not data:
                    raise RuntimeError("the stream in use ended")
                received += data
            if received != message:
                raise RuntimeError(f"sent {message!r}, received {received!r}")
            self.num_echoes += 1
            await trio.sleep(0.01)
        await self.stream.aclose()

    def end(self) -> None:
        self._is_over = True

    async def go_on(self) -> None:
        wanted = self.num_echoes + 100
        while self.num_echoes < wanted:
            await trio.sleep(0.02)


def way(stream: Stream) -> str:
    return str(connection_of(stream).get_connection_type().value)


def num_relayed(host: Libp2pHost, peer_id: str) -> int:
    network: Any = host.libp2p.get_network()
    return sum(
        connection.muxed_conn.peer_id.to_base58() == peer_id
        and connection.get_connection_type() == ConnectionType.RELAYED
        for connection in network.get_connections()
    )


async def run_client(address: str) -> None:
    async with open_host(listen=LISTEN) as host, trio.open_nursery() as nursery:
        reach = Reach(host)
        peer_id = await reach.connect(address)
        talk = Talk(await host.open_stream(peer_id, [ECHO]))
        say(first_stream=way(talk.stream))
        nursery.start_soon(talk.run)
        await talk.go_on()
        while not (paths := reach.state().paths) or paths[0].path is Path.PUNCHING:
            await trio.sleep(0.02)
        await talk.go_on()
        fresh = await host.open_stream(peer_id, [ECHO])
        await fresh.send_all(b"fresh")
        assert await fresh.receive_some() == b"fresh"
        say(
            path=paths[0].path.value,
            reason=paths[0].reason,
            first_stream=way(talk.stream),
            new_stream=way(fresh),
        )
        talk.end()
        await fresh.aclose()
        if paths[0].path is Path.DIRECT:
            while num_relayed(host, peer_id):
                await trio.sleep(0.1)
            last = await host.open_stream(peer_id, [ECHO])
            await last.send_all(b"last")
            assert await last.receive_some() == b"last"
            say(num_relayed=num_relayed(host, peer_id), last_stream=way(last))
        say(done=True, connected=peer_id in host.connected_peers)


async def main(role: str, *addresses: str) -> None:
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("neurogrid").setLevel(logging.DEBUG)
    run = {
        "target": run_target,
        "keeper": run_keeper,
        "relay": run_relay,
        "server": run_server,
        "client": run_client,
        "outsider": run_outsider,
        "insider": run_insider,
    }[role]
    if addresses[-1:] == ("hasty",):
        # Where a punch is to fail, it need not fail slowly; commands wait as long as the package says.
        hole_punching.PUNCH_TIMEOUT = hole_punching.PLAIN_TIMEOUT = 1.0  # type: ignore[misc]
        addresses = addresses[:-1]
    with trio.fail_after(DEADLINE):
        await run(*addresses)


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
