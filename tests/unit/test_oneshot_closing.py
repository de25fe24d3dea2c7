"""A host that is left while a message of 1.0.0 is not confirmed yet: its sender does not take it for confirmed."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from neurogrid.errors import TransportError
from neurogrid.p2p import Protocol
from neurogrid.p2p.memory import open_memory_network
from neurogrid.p2p.wire import PROTOCOL_V10, TensorMessage


async def test_what_was_not_confirmed_when_the_host_was_left_is_an_error() -> None:
    async def never_done(message: TensorMessage) -> None:
        await trio.sleep_forever()

    async def send(protocol: Protocol, peer_id: str) -> None:
        with pytest.raises(TransportError):
            await protocol.send_tensor(peer_id, 1, 2, b"data")

    async with open_memory_network() as network, network.open_host() as server:
        Protocol(server, versions=(PROTOCOL_V10,)).on_tensor_received(never_done)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery, network.open_host() as client:
                protocol = Protocol(client, versions=(PROTOCOL_V10,))
                peer_id = await client.connect(server.addresses[0])
                nursery.start_soon(send, protocol, peer_id)
                await trio.testing.wait_all_tasks_blocked()
