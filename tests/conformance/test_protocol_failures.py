"""What is left of a message, and of the connection, when it breaks in the middle."""

from __future__ import annotations

import secrets

import pytest
import trio

from neurogrid.errors import DataWriteError, NeuroGridError, StreamBrokenError, TransportError
from neurogrid.p2p import PROTOCOL_V11, TensorMessage
from tests.conformance.networks import Network, until
from tests.conformance.protocols import PATIENCE, Calls, Pair, check_echo, open_pair, serve_echo

MIB = 1024 * 1024


@pytest.mark.parametrize("num_bytes", [100, 100_000, 3 * MIB])
async def test_a_request_cut_in_mid_frame(network: Network, version: str, num_bytes: int) -> None:
    async with open_pair(network, version) as pair:
        calls = Calls("sync")
        pair.server.on_activation_received(calls.handler)
        network.cut_after(num_bytes, sender=pair.client.host, receiver=pair.server.host)
        data = secrets.token_bytes(8 * MIB)
        with pytest.raises(TransportError):
            await pair.client.request_activation(pair.server_id, 1, 2, data, timeout=PATIENCE)
        await pair.wait_disconnected()
        assert calls.seen == []  # nobody is given half a tensor
        assert len(pair.client._dispatcher.pending) == 0
        await pair.connect()
        pair.server.on_gpu_info_request_received(lambda from_peer: None)
        await pair.client.send_activation(pair.server_id, 1, 2, 3, data[:1000])
        assert bytes((await calls.message()).data) == data[:1000]


async def test_a_message_cut_in_mid_frame_says_so(network: Network, version: str) -> None:
    async with open_pair(network, version) as pair:
        pair.server.on_activation_received(lambda message: None)
        network.cut_after(MIB, sender=pair.client.host, receiver=pair.server.host)
        with pytest.raises(DataWriteError):
            # More than can be under way, so that its end cannot be written before the cut is known.
            await pair.client.send_activation(pair.server_id, 1, 2, 3, bytes(64 * MIB))


@pytest.mark.parametrize("num_bytes", [100, 100_000, 3 * MIB])
async def test_an_answer_cut_in_mid_frame(network: Network, version: str, num_bytes: int) -> None:
    async with open_pair(network, version) as pair:

        async def answer(message: TensorMessage) -> bytes:
            network.cut_after(num_bytes, sender=pair.server.host, receiver=pair.client.host)
            return bytes(8 * MIB)

        pair.server.on_activation_received(answer)
        with pytest.raises(TransportError):
            await pair.client.request_activation(pair.server_id, 1, 2, b"?", timeout=PATIENCE)
        await pair.wait_disconnected()
        assert len(pair.client._dispatcher.pending) == 0
        serve_echo(pair.client)
        await pair.connect()
        await check_echo(pair.server, pair.client_id)


async def test_weights_cut_in_mid_chunk(network: Network, version: str) -> None:
    async with open_pair(network, version) as pair:
        sizes: list[int] = []

        def on_chunk(layer_id: int, index: int, total: int, data: memoryview) -> None:
            sizes.append(len(data))

        pair.server.on_weights_received(on_chunk)
        network.cut_after(int(5.5 * MIB), sender=pair.client.host, receiver=pair.server.host)
        with pytest.raises(TransportError):
            await pair.client.send_weights(pair.server_id, 1, bytes(64 * MIB))
        await pair.wait_disconnected()
        assert 0 < len(sizes) <= 5
        assert set(sizes) == {MIB}  # whole chunks alone
        with pytest.raises(TransportError):
            await pair.client.wait_for_weights_ack(pair.server_id, 1, timeout=10 * PATIENCE)


async def test_a_lost_peer_is_told_once(network: Network) -> None:
    async with open_pair(network, "v11") as pair:
        lost: list[tuple[str, str]] = []

        def note(peer_id: str, reason: NeuroGridError) -> None:
            assert isinstance(reason, StreamBrokenError)
            lost.append(("lost", peer_id))

        pair.client.on_peer_lost(note)
        pair.client.on_peer_opened(lambda peer_id, hello: lost.append((hello.role, peer_id)))
        for _ in range(3):
            pair.cut()
            await pair.wait_disconnected()
            await pair.connect()
        assert lost == [("lost", pair.server_id), ("worker", pair.server_id)] * 3


async def test_all_that_wait_are_freed(pair: Pair) -> None:
    async def never(message: TensorMessage) -> None:
        await trio.sleep_forever()

    pair.server.on_activation_received(never)
    num_freed = 0

    async def ask(num_bytes: int) -> None:
        nonlocal num_freed
        with pytest.raises(TransportError):
            await pair.client.request_activation(
                pair.server_id, 1, 2, bytes(num_bytes), timeout=10 * PATIENCE
            )
        num_freed += 1

    async with trio.open_nursery() as nursery:
        for number in range(60):
            nursery.start_soon(ask, 10_000 * number)
        await until(lambda: len(pair.client._dispatcher.pending) == 60)
        await trio.sleep(0.05)
        pair.cut()
    assert num_freed == 60
    await pair.wait_disconnected()
    serve_echo(pair.client)
    await pair.connect()
    await check_echo(pair.server, pair.client_id)


async def test_the_other_side_closes_in_order(pair: Pair) -> None:
    serve_echo(pair.server)
    for _ in range(3):
        await pair.server.close_peer(pair.client_id)
        await pair.wait_disconnected()
        with pytest.raises(TransportError):
            await check_echo(pair.client, pair.server_id)
        await pair.connect()
        await check_echo(pair.client, pair.server_id)


async def test_a_stream_that_says_no_hello_takes_no_answers(network: Network) -> None:
    """A call that opened one may be cancelled: what is asked meanwhile is answered on the stream that is up."""
    async with open_pair(network, "v11") as pair:
        serve_echo(pair.server)
        await check_echo(pair.client, pair.server_id)
        silent = await pair.client.host.open_stream(pair.server_id, [PROTOCOL_V11])
        await until(lambda: len(pair.server._running.get(pair.client_id, ())) == 2)
        with trio.fail_after(PATIENCE):
            await check_echo(pair.client, pair.server_id)
        await silent.reset()
        await until(lambda: len(pair.server._running.get(pair.client_id, ())) == 1)
        await check_echo(pair.client, pair.server_id)
