"""Routes that are forged, and activations that they do not allow: refused, named in the log, nobody harmed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from neurogrid.p2p import Identity, MessageType, TensorMessage
from neurogrid.p2p.exchange.routes import sign_route
from neurogrid.p2p.tensor.protocol import new_request_id
from neurogrid.p2p.wire import ErrorCode, Route
from tests.e2e.bad_input_peer.peer import BadPeer, connect, refused
from tests.e2e.bad_input_peer.scenarios import Good, hidden, with_peer
from tests.e2e.support import DEADLINE, WorkerProcess

STRANGER = Identity.generate()


def route_of(peer: BadPeer, predecessor: str = STRANGER.peer_id) -> Route:
    """Through somebody with a layer before it, and then through the worker with layers 0 and 1 of its model."""
    return Route(
        session_id=1,
        until=int(time.time()) + 60,
        peers=(peer.worker_id,) if not predecessor else (predecessor, peer.worker_id),
        bounds=(0, 2) if not predecessor else (0, 1, 2),
    )


def signed(peer: BadPeer, route: Route) -> bytes:
    return sign_route(route, peer.protocol.host.identity)


FORGERIES: dict[str, tuple[Callable[[BadPeer], bytes], str]] = {
    "wrong signer": (lambda peer: sign_route(route_of(peer), STRANGER), "was not signed by"),
    "altered": (
        lambda peer: signed(peer, route_of(peer))[:64] + replace(route_of(peer), until=1).encode(),
        "was not signed by",
    ),
    "another session": (
        lambda peer: signed(peer, replace(route_of(peer), session_id=2)),
        "is that of session 2, not of 1",
    ),
    "expired": (
        lambda peer: signed(peer, replace(route_of(peer), until=int(time.time()) - 1000)),
        "the route expired 100",
    ),
    "not naming the worker": (
        lambda peer: signed(
            peer, replace(route_of(peer), peers=(STRANGER.peer_id, peer.protocol.host.peer_id))
        ),
        "does not name this worker",
    ),
    "other layers": (
        lambda peer: signed(peer, replace(route_of(peer), bounds=(0, 2, 3))),
        "gives this worker layers 2 to 2, not 1 to 1",
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_route(worker: WorkerProcess, good: Good, forgery: str) -> None:
    forge, says = FORGERIES[forgery]

    async def scenario(peer: BadPeer) -> None:
        await peer.place(good.model)
        logged = len(worker.log)
        with refused(ErrorCode.UNAUTHORIZED, says):
            await peer.open_session(1, 1, 2, route=forge(peer))
        line = worker.log[logged:]
        assert f"refused SESSION_OPEN of {peer.protocol.host.peer_id}: the route" in line
        with refused(ErrorCode.SESSION_UNKNOWN, "is not open"):
            await peer.activate(hidden(good), start_layer=1)

    with_peer(worker, scenario)


def test_activations_come_from_the_named_predecessor_alone(
    worker: WorkerProcess, good: Good
) -> None:
    async def scenario(peer: BadPeer) -> None:
        await peer.place(good.model)
        await peer.open_session(2, 1, 2)
        expected = await peer.activate(hidden(good), session_id=2, start_layer=1)
        async with connect(worker.address) as before, connect(worker.address) as stranger:
            route = route_of(peer, before.protocol.host.peer_id)
            await peer.open_session(1, 1, 2, route=signed(peer, route))
            logged = len(worker.log)
            for other in (stranger, peer):
                with refused(ErrorCode.UNAUTHORIZED, "takes no activations from"):
                    await other.activate(hidden(good), start_layer=1)
                name = other.protocol.host.peer_id
                assert f"refused ACTIVATION of {name}: session 1" in worker.log[logged:]

            # The predecessor sends, and the coordinator is answered.
            async def pass_on() -> TensorMessage:
                request_id = new_request_id()
                with peer.protocol.expect(
                    peer.worker_id, MessageType.RESPONSE, request_id=request_id
                ) as waiter:
                    data = before.activation(hidden(good), start_layer=1)
                    stream = before.protocol._streams[worker.peer_id]
                    await stream.send(
                        TensorMessage(MessageType.ACTIVATION, request_id=request_id, data=data)
                    )
                    return await waiter.wait(timeout=DEADLINE)

            answer = await pass_on()
            assert answer.envelope is not None
            assert answer.envelope.session_id == 1
            assert bytes(answer.data) == bytes(expected.data)
            # Again: refused to the coordinator, though the predecessor sent it.
            with refused(ErrorCode.POSITION_MISMATCH, "position 0 came to a session of 3 tokens"):
                await pass_on()
            with refused(ErrorCode.UNAUTHORIZED, "its coordinator is another"):
                await before.activate(hidden(good), session_id=2, start_layer=1)
            with refused(ErrorCode.CONFIG_REQUIRED, "send ModelConfig first"):
                await before.activate(hidden(good), session_id=3, start_layer=1)

    with_peer(worker, scenario)


def test_a_route_that_was_seen_is_no_use_to_others(worker: WorkerProcess, good: Good) -> None:
    routes: list[bytes] = []

    async def first(peer: BadPeer) -> None:
        await peer.place(good.model)
        routes.append(signed(peer, route_of(peer)))
        await peer.open_session(1, 1, 2, route=routes[0])
        async with connect(worker.address) as thief:
            with refused(ErrorCode.CONFIG_REQUIRED, "send ModelConfig first"):
                await thief.open_session(1, 1, 2, route=routes[0])

    async def second(peer: BadPeer) -> None:
        await peer.place(good.model)
        with refused(ErrorCode.UNAUTHORIZED, "was not signed by"):
            await peer.open_session(1, 1, 2, route=routes[0])

    with_peer(worker, first)
    with_peer(worker, second)


def test_a_successor_that_is_not_there(worker: WorkerProcess, good: Good) -> None:
    async def scenario(peer: BadPeer) -> None:
        await peer.place(good.model)
        route = replace(route_of(peer), peers=(peer.worker_id, STRANGER.peer_id))
        with refused(ErrorCode.PEER_UNREACHABLE, f"cannot reach {STRANGER.peer_id}: the route has"):
            await peer.open_session(1, 0, 1, route=signed(peer, route))
        nowhere = f"/ip4/127.0.0.1/tcp/9/p2p/{STRANGER.peer_id}"
        with refused(ErrorCode.PEER_UNREACHABLE, "connection refused"):
            await peer.open_session(
                1, 0, 1, route=signed(peer, replace(route, addresses=(nowhere,)))
            )
        await peer.open_session(1, 0, 1)  # nothing is left of it

    with_peer(worker, scenario)
