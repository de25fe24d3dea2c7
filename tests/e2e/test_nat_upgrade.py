"""What `Reach` does with peers that turn out to be reachable, and what DCUtR and AutoNAT refuse; on loopback."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from libp2p.host.autonat.pb.autonat_pb2 import Message
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from neurogrid.errors import StreamBrokenError
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost, open_host
from neurogrid.p2p.reach import hole_punching
from neurogrid.p2p.reach.autonat import AUTONAT_PROTOCOL, MAX_DIALS_PER_PEER, Reachability
from neurogrid.p2p.reach.backoff import Backoff
from neurogrid.p2p.reach.hole_punching import DCUTR_PROTOCOL, HolePuncher, Path
from neurogrid.p2p.reach.protobuf_frames import receive_message, send_message
from neurogrid.p2p.reach.reach import Reach, ReachOptions
from neurogrid.p2p.reach.relay_service import RelayLimits

DEADLINE = 120.0
QUIC = ("/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1")

Scene = Callable[[Libp2pHost, Libp2pHost, Libp2pHost], Awaitable[None]]


def play(scene: Scene) -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with open_host() as one, open_host(listen=QUIC) as two, open_host() as three:
                await scene(one, two, three)

    trio.run(main)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await trio.sleep(0.02)


async def dial_request(
    asker: Libp2pHost, server: Libp2pHost, peer_id: str, address: str
) -> Message:
    stream = await asker.open_stream(server.peer_id, [AUTONAT_PROTOCOL])
    request = Message(type=Message.DIAL)
    request.dial.peer.id = ID.from_base58(peer_id).to_bytes()
    request.dial.peer.addrs.append(Multiaddr(address).to_bytes())
    await send_message(stream, request)
    answer = await receive_message(stream, Message)
    await stream.aclose()
    return answer


def test_a_caller_that_can_be_dialled_after_all_is_dialled() -> None:
    async def scene(relay: Libp2pHost, server: Libp2pHost, client: Libp2pHost) -> None:
        Reach(relay, ReachOptions(relay_service=RelayLimits()))
        called = Reach(server, ReachOptions(relays=[relay.addresses[0]]))
        calling = Reach(client)
        await until(lambda: len(called.addresses) > len(server.listen_addresses))
        (address,) = [a for a in called.addresses if "/p2p-circuit/" in a]
        await calling.connect(address)
        for reach in (called, calling):
            await until(lambda reach=reach: [p.path for p in reach.state().paths] == [Path.DIRECT])
        (seen,) = called.state().observed
        assert f"{seen}/p2p/{server.peer_id}" in server.addresses
        await client.disconnect(server.peer_id)
        await until(lambda: not called.state().paths)
        assert not calling.state().paths

    play(scene)


def test_what_stayed_relayed_becomes_direct_when_the_way_opens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_open = False
    dial = HolePuncher._dial

    async def dial_if_open(self: HolePuncher, *args: Any) -> None:
        if is_open:
            await dial(self, *args)

    monkeypatch.setattr(HolePuncher, "_dial", dial_if_open)
    monkeypatch.setattr(hole_punching, "PLAIN_TIMEOUT", 0.1)
    monkeypatch.setattr(hole_punching, "PUNCH_TIMEOUT", 0.1)
    monkeypatch.setattr(hole_punching, "LATER", Backoff(first=0.1, largest=0.2))

    async def scene(relay: Libp2pHost, server: Libp2pHost, client: Libp2pHost) -> None:
        nonlocal is_open
        Reach(relay, ReachOptions(relay_service=RelayLimits()))
        called = Reach(server, ReachOptions(relays=[relay.addresses[0]]))
        calling = Reach(client)
        await until(lambda: len(called.addresses) > len(server.listen_addresses))
        (address,) = [a for a in called.addresses if "/p2p-circuit/" in a]
        await calling.connect(address)
        reaches = called, calling

        def paths() -> set[Path]:
            return {path.path for reach in reaches for path in reach.state().paths}

        def num_failures() -> int:
            return sum("stays relayed" in text for text in caplog.messages)

        await until(lambda: paths() == {Path.RELAYED})
        # Both sides have given up, and begun again: that they have a way is said all the time, and why it is no better.
        begun, shown = num_failures(), set[Path]()
        await until(lambda: shown.update(paths()) or num_failures() >= begun + 4)
        assert shown == {Path.RELAYED}
        is_open = True
        for timeout in ("PLAIN_TIMEOUT", "PUNCH_TIMEOUT"):
            monkeypatch.setattr(hole_punching, timeout, DEADLINE)
        for reach in reaches:
            await until(lambda reach=reach: [p.path for p in reach.state().paths] == [Path.DIRECT])

    with caplog.at_level(logging.DEBUG, logger="neurogrid.p2p.reach.hole_punching"):
        play(scene)
    # Of each side people hear it once.
    said = [r for r in caplog.records if r.levelno >= logging.WARNING and "stays" in r.message]
    assert len(said) == 2


def test_holes_are_punched_over_relays_alone() -> None:
    async def scene(one: Libp2pHost, two: Libp2pHost, three: Libp2pHost) -> None:
        reach = Reach(one)
        await two.connect(one.addresses[0])
        stream = await two.open_stream(one.peer_id, [DCUTR_PROTOCOL])
        with pytest.raises(StreamBrokenError):
            await stream.receive_some()
        assert reach.state().paths == ()

    play(scene)


def test_a_peer_finds_out_that_it_can_be_dialled() -> None:
    async def scene(one: Libp2pHost, two: Libp2pHost, three: Libp2pHost) -> None:
        asking = Reach(two)
        Reach(one)
        assert asking.autonat is not None
        await two.connect(one.addresses[0])
        await two.connect(three.addresses[0])
        # `three` speaks no AutoNAT, so what it says does not count.
        state = await asking.autonat.check([three.peer_id])
        assert state.reachability is Reachability.UNKNOWN
        state = await asking.autonat.check([three.peer_id, one.peer_id])
        assert (state.reachability, state.num_asked) == (Reachability.PUBLIC, 1)
        assert state.address is not None
        assert f"{state.address}/p2p/{two.peer_id}" in two.addresses
        # The dial left no connection behind.
        assert one.connected_peers == {two.peer_id}

    play(scene)


def test_nobody_is_dialled_who_did_not_ask_or_is_not_there() -> None:
    async def scene(one: Libp2pHost, two: Libp2pHost, three: Libp2pHost) -> None:
        Reach(one)
        await two.connect(one.addresses[0])
        arrived: list[str] = []
        three.on_connected(arrived.append)
        place = three.addresses[0].partition("/p2p/")[0]
        answer = await dial_request(two, one, three.peer_id, place)
        assert answer.dialResponse.status == Message.E_BAD_REQUEST
        answer = await dial_request(two, one, two.peer_id, "/ip4/127.0.0.2/tcp/4001")
        assert answer.dialResponse.status == Message.E_DIAL_REFUSED
        answer = await dial_request(two, one, two.peer_id, place)  # somebody else lives there
        assert answer.dialResponse.status == Message.E_DIAL_ERROR
        assert not arrived

    play(scene)


def test_who_asks_too_often_is_refused() -> None:
    async def scene(one: Libp2pHost, two: Libp2pHost, three: Libp2pHost) -> None:
        Reach(one)
        await two.connect(one.addresses[0])
        own = two.addresses[0].partition("/p2p/")[0]
        answers = [
            (await dial_request(two, one, two.peer_id, own)).dialResponse.status
            for _ in range(MAX_DIALS_PER_PEER + 1)
        ]
        assert answers == [Message.OK] * MAX_DIALS_PER_PEER + [Message.E_DIAL_REFUSED]

    play(scene)
