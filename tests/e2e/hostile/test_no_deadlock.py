"""Two peers that flood each other, both ways at once, with windows smaller than what is under way.

Each waits for the other in every way there is: for credit, for room, for a place among the requests that are served,
for a reader, for an answer. Nobody here is hostile, and all of it must end with the right answers.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio

from neurogrid.errors import NeuroGridError, PeerRefusedError
from neurogrid.p2p import (
    PROTOCOL_V10,
    PROTOCOL_V11,
    MessageType,
    Protocol,
    TensorMessage,
    open_host,
)
from neurogrid.p2p.streams.bounds import DEFAULT_BOUNDS, Bounds
from neurogrid.p2p.wire import ErrorCode
from tests.e2e.hostile.scene import DEADLINE, VERSIONS, hosts_of, leftovers, until

KIB = 1024
MIB = 1024 * KIB
RELAY_LAYER = 50


@asynccontextmanager
async def two_peers(
    *, bounds: Bounds = DEFAULT_BOUNDS, version: str = PROTOCOL_V11, answering: bool = True
) -> AsyncIterator[tuple[Protocol, Protocol]]:
    """Each answers an activation with its bytes reversed, unless the test sees to it. One is connected to the other."""
    with trio.fail_after(DEADLINE):
        async with hosts_of(version, 2) as (one_host, other_host):
            one = Protocol(one_host, bounds=bounds, versions=(version,))
            other = Protocol(other_host, bounds=bounds, versions=(version,))
            for protocol in (one, other):
                if answering:
                    protocol.on_activation_received(_reversed)
            await one_host.connect(other_host.addresses[0])
            await until(lambda: one_host.peer_id in other_host.connected_peers)
            yield one, other
            for protocol in (one, other):
                await until(lambda protocol=protocol: not leftovers(protocol))


async def _reversed(message: TensorMessage) -> bytes:
    await trio.lowlevel.checkpoint()
    return bytes(message.data)[::-1]


async def both_ways(
    one: Protocol, other: Protocol, work: Callable[[Protocol, str], Awaitable[None]]
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(work, one, other.host.peer_id)
        nursery.start_soon(work, other, one.host.peer_id)


async def ask(protocol: Protocol, peer_id: str, data: bytes, layer_id: int = 1) -> None:
    answer = await protocol.request_activation(peer_id, layer_id, 0, data, timeout=DEADLINE)
    assert bytes(answer.data) == data[::-1]


async def ask_many(
    protocol: Protocol, peer_id: str, *, num_askers: int, num_each: int, max_bytes: int
) -> None:
    """Ask so much at once, with tensors of any size."""
    sizes = random.Random(protocol.host.peer_id)

    async def asker() -> None:
        for _ in range(num_each):
            await ask(protocol, peer_id, sizes.randbytes(sizes.randrange(max_bytes)))

    async with trio.open_nursery() as nursery:
        for _ in range(num_askers):
            nursery.start_soon(asker)


@pytest.mark.parametrize("version", VERSIONS)
def test_both_flood_each_other_with_small_activations(version: str) -> None:
    bounds = Bounds(credit_window=KIB, max_running_per_peer=2, max_waiting_per_peer=200)

    async def main() -> None:
        async with two_peers(bounds=bounds, version=version) as (one, other):

            async def work(protocol: Protocol, peer_id: str) -> None:
                num_each = 10 if version == PROTOCOL_V11 else 2
                await ask_many(protocol, peer_id, num_askers=50, num_each=num_each, max_bytes=500)

            await both_ways(one, other, work)

    trio.run(main)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("window", [1, 64 * KIB, 4 * MIB])
def test_both_send_large_activations_at_once(version: str, window: int) -> None:
    """The answers are as large, and pass what waits for credit."""

    async def main() -> None:
        async with two_peers(bounds=Bounds(credit_window=window), version=version) as (one, other):

            async def work(protocol: Protocol, peer_id: str) -> None:
                await ask_many(protocol, peer_id, num_askers=4, num_each=2, max_bytes=4 * MIB)

            await both_ways(one, other, work)

    trio.run(main)


def test_room_for_one_window_and_one_answer() -> None:
    """The least room that must do: a window, the message that overdraws it, and an answer beside them."""
    bounds = Bounds(
        credit_window=512 * KIB,
        small_message=KIB,
        max_bytes_per_peer=(512 + 512 + 512) * KIB,
        max_bytes=2 * (512 + 512 + 512) * KIB,
    )

    async def main() -> None:
        async with two_peers(bounds=bounds) as (one, other):

            async def work(protocol: Protocol, peer_id: str) -> None:
                await ask_many(protocol, peer_id, num_askers=8, num_each=5, max_bytes=500 * KIB)

            await both_ways(one, other, work)

    trio.run(main)


def test_handlers_that_ask_the_peer_that_asks_them() -> None:
    """Each request holds room and credit while its handler asks for more, over the same stream.

    They hold all of the credit but that for one message: that must do, and less could not (see the ring below).
    """
    bounds = Bounds(
        credit_window=301 * KIB,
        small_message=KIB,
        max_bytes_per_peer=768 * KIB,
        max_bytes=2 * 768 * KIB,
    )

    async def main() -> None:
        async with two_peers(bounds=bounds, answering=False) as (one, other):

            def relay_by(protocol: Protocol) -> None:
                async def relay(message: TensorMessage) -> None:
                    if message.layer_id == RELAY_LAYER:
                        assert message.from_peer is not None
                        await ask(protocol, message.from_peer, bytes(message.data))

                # Before the handler that answers.
                protocol.on_message(MessageType.ACTIVATION, relay)

            relay_by(one)
            relay_by(other)
            for protocol in (one, other):
                protocol.on_activation_received(_reversed)

            async def work(protocol: Protocol, peer_id: str) -> None:
                async with trio.open_nursery() as nursery:
                    for _ in range(6):
                        nursery.start_soon(ask, protocol, peer_id, bytes(50 * KIB), RELAY_LAYER)

            await both_ways(one, other, work)

    trio.run(main)


def test_too_little_room_ends_by_its_deadline() -> None:
    """Where a handler waits for an answer for which there will be no room, the request fails, in time."""
    bounds = Bounds(
        small_message=KIB,
        max_bytes_per_peer=300 * KIB,
        max_bytes=2 * 300 * KIB,
        room_timeout=0.5,
    )

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with open_host() as tight_host, open_host() as peer_host:
                tight = Protocol(tight_host, bounds=bounds)
                peer = Protocol(peer_host)
                failed: list[NeuroGridError] = []

                async def relay(message: TensorMessage) -> bytes:
                    assert message.from_peer is not None
                    try:
                        await ask(tight, message.from_peer, bytes(200 * KIB))
                    except NeuroGridError as exc:
                        failed.append(exc)
                        raise
                    return b"relayed"

                tight.on_activation_received(relay)
                peer.on_activation_received(_reversed)
                tight_id = await peer_host.connect(tight_host.addresses[0])
                with pytest.raises(NeuroGridError) as caught:
                    await ask(peer, tight_id, bytes(200 * KIB))
                if isinstance(caught.value, PeerRefusedError):
                    assert caught.value.code == ErrorCode.BUSY
                await until(lambda: bool(failed) and not leftovers(tight))

    trio.run(main)


@asynccontextmanager
async def ring_of_three(
    *, bounds: Bounds, patience: float
) -> AsyncIterator[Callable[[float], Awaitable[list[NeuroGridError]]]]:
    """Three peers, of which each asks the next before it answers, as often as the layer says.

    Gives a function that lets all three ask at once, three times each, and returns what failed.
    """
    with trio.fail_after(DEADLINE):
        async with open_host() as first, open_host() as second, open_host() as third:
            hosts = [first, second, third]
            ring = [Protocol(host, bounds=bounds) for host in hosts]
            next_ids = [hosts[(at + 1) % 3].peer_id for at in range(3)]
            for at, protocol in enumerate(ring):
                await protocol.host.connect(hosts[(at + 1) % 3].addresses[0])
                protocol.on_activation_received(_relay(protocol, next_ids[at], patience))

            async def all_ask(timeout: float) -> list[NeuroGridError]:
                failed: list[NeuroGridError] = []

                async def one_asks(at: int) -> None:
                    data = bytes(range(256)) * 400
                    try:
                        answer = await ring[at].request_activation(
                            next_ids[at], 2, 0, data, timeout=timeout
                        )
                    except NeuroGridError as exc:
                        failed.append(exc)
                    else:
                        assert bytes(answer.data) == data[::-1]

                async with trio.open_nursery() as nursery:
                    for at in (0, 1, 2) * 3:
                        nursery.start_soon(one_asks, at)
                for protocol in ring:
                    await until(lambda protocol=protocol: not leftovers(protocol))
                return failed

            yield all_ask


def _relay(
    protocol: Protocol, next_id: str, patience: float
) -> Callable[[TensorMessage], Awaitable[bytes]]:
    async def relay(message: TensorMessage) -> bytes:
        if message.layer_id:
            await protocol.request_activation(
                next_id, message.layer_id - 1, 0, message.data, timeout=patience
            )
        return bytes(message.data)[::-1]

    return relay


def test_a_ring_of_three_that_relay_to_each_other() -> None:
    async def main() -> None:
        bounds = Bounds(max_running_per_peer=9)
        async with ring_of_three(bounds=bounds, patience=DEADLINE) as all_ask:
            assert await all_ask(DEADLINE) == []

    trio.run(main)


def test_a_ring_without_credit_to_spare_is_freed_by_its_deadlines() -> None:
    """Handlers that hold the credit of the message that they serve wait for each other's, in a circle.

    No rule about credit can prevent that. The askers' deadlines end it, the askers of those are told, and
    nothing is left over.
    """

    async def main() -> None:
        bounds = Bounds(credit_window=1)
        async with ring_of_three(bounds=bounds, patience=0.5) as all_ask:
            for _ in range(2):
                failed = await all_ask(DEADLINE)
                assert {type(error) for error in failed} <= {PeerRefusedError}, failed

    trio.run(main)


def test_weights_and_activations_and_answers_at_once() -> None:
    """Weights wait for credit, activations pass them, answers pass both."""
    bounds = Bounds(credit_window=2 * MIB)

    async def main() -> None:
        async with two_peers(bounds=bounds) as (one, other):
            taken = {protocol.host.peer_id: 0 for protocol in (one, other)}

            def take_weights(protocol: Protocol) -> None:
                async def take(layer_id: int, chunk_index: int, total: int, data: bytes) -> None:
                    await trio.lowlevel.checkpoint()
                    taken[protocol.host.peer_id] += len(data)

                protocol.on_weights_received(take)

            take_weights(one)
            take_weights(other)

            async def work(protocol: Protocol, peer_id: str) -> None:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(protocol.send_weights, peer_id, 1, bytes(24 * MIB))
                    for _ in range(4):
                        nursery.start_soon(ask, protocol, peer_id, bytes(MIB))

            await both_ways(one, other, work)
            await until(lambda: set(taken.values()) == {24 * MIB})
            for protocol in (one, other):
                protocol._dispatcher.pending._peers.clear()  # nobody acknowledges these weights

    trio.run(main)


def test_both_versions_at_once() -> None:
    """A legacy message goes on a stream of 1.0.0, beside the one of 1.1.0."""

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with open_host() as one_host, open_host() as other_host:
                one, other = Protocol(one_host), Protocol(other_host)
                num_legacy = 0

                async def count(message: TensorMessage) -> None:
                    nonlocal num_legacy
                    await trio.lowlevel.checkpoint()
                    num_legacy += 1

                for protocol in (one, other):
                    protocol.on_activation_received(_reversed)
                    protocol.on_tensor_received(count)
                await one_host.connect(other_host.addresses[0])

                async def work(protocol: Protocol, peer_id: str) -> None:
                    async with trio.open_nursery() as nursery:
                        for _ in range(5):
                            nursery.start_soon(ask, protocol, peer_id, bytes(MIB))
                            nursery.start_soon(protocol.send_tensor, peer_id, 1, 0, bytes(MIB))

                await until(lambda: one_host.peer_id in other_host.connected_peers)
                await both_ways(one, other, work)
                assert num_legacy == 10
                assert not one.is_v10(other_host.peer_id)
                assert PROTOCOL_V10 in other.hello_of(one_host.peer_id).versions  # type: ignore[union-attr]

    trio.run(main)
