"""A peer whose stream ends while messages to it wait for that stream: each is sent, or its sender hears why not."""

from __future__ import annotations

import trio
import trio.abc

from neurogrid.errors import TransportError
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.wire import DEFAULT_LIMITS, MessageType, TensorMessage, v11_table
from tests.unit.blocking_pair import open_two

DEADLINE = 300.0


class At(trio.abc.Instrument):
    """Sets an event after so many steps of whatever tasks."""

    def __init__(self, num_steps: int) -> None:
        self.left = num_steps
        self.is_due = trio.Event()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.left -= 1
        if not self.left:
            self.is_due.set()


async def attempt(num_steps: int) -> bool:
    """Lose the stream after so many steps of two senders; whether they were through before."""
    outcomes: list[Exception | None] = []
    instrument = At(num_steps)

    async def send(exchange: Exchange, peer_id: str, layer_id: int) -> None:
        try:
            message = TensorMessage(msg_type=MessageType.WEIGHTS_ACK, layer_id=layer_id)
            await exchange.send(peer_id, message)
            outcomes.append(None)
        except TransportError as exc:
            outcomes.append(exc)

    async def lose(exchange: Exchange, peer_id: str) -> None:
        await instrument.is_due.wait()
        await exchange.close_peer(peer_id)

    async with open_two() as (client, server):
        Exchange(server, v11_table(DEFAULT_LIMITS))
        exchange = Exchange(client, v11_table(DEFAULT_LIMITS))
        peer_id = await client.connect(server.addresses[0])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose, exchange, peer_id)
            await trio.lowlevel.checkpoint()
            trio.lowlevel.add_instrument(instrument)
            try:
                async with trio.open_nursery() as senders:
                    for layer_id in range(3):
                        senders.start_soon(send, exchange, peer_id, layer_id)
            finally:
                trio.lowlevel.remove_instrument(instrument)
            nursery.cancel_scope.cancel()
    assert len(outcomes) == 3
    return not instrument.is_due.is_set()


async def test_a_stream_that_ends_at_any_step_is_an_error_of_the_network() -> None:
    with trio.fail_after(DEADLINE):
        num_steps = 1
        while not await attempt(num_steps):
            num_steps += 1
    assert num_steps > 10
