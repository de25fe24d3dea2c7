"""Cancellation at every step of sending and fetching a blob: both ends stay usable, and nothing is left behind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random

import trio
import trio.abc

from neurogrid.p2p import Protocol
from neurogrid.p2p.transfer import BlobInfo, BytesSource, Transfers, send_blob
from neurogrid.p2p.wire import CHUNK_BYTES
from tests.unit.transfer_peers import Taking, two_protocols

DEADLINE = 300.0
BLOB = Random(6).randbytes(CHUNK_BYTES + 9)
SOURCE = BytesSource(BLOB)
INFO = BlobInfo.of_digests(SOURCE.digests(), len(BLOB))


class CancelAfter(trio.abc.Instrument):
    """Cancels a scope after so many steps of whatever tasks."""

    def __init__(self, num_steps: int, scope: trio.CancelScope) -> None:
        self.left = num_steps
        self.scope = scope

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.left -= 1
        if not self.left:
            self.scope.cancel()


class Peers:
    def __init__(self, giver: Protocol, taker: Protocol) -> None:
        self.giver, self.taker = giver, taker
        self.policy = Taking()
        self.giving = Transfers(giver, Taking({INFO.blob_id: SOURCE}))
        self.taking = Transfers(taker, self.policy)


@asynccontextmanager
async def two_peers() -> AsyncIterator[Peers]:
    async with two_protocols() as (giver, taker):
        await giver.open(taker.host.peer_id)
        yield Peers(giver, taker)


async def cancelled_at_every_step(
    peers: Peers, call: Callable[[], Awaitable[object]], check: Callable[[], Awaitable[None]]
) -> int:
    """Cancel `call` after one step, after two, and so on until it is through; how many those were."""
    num_steps = 0
    while True:
        num_steps += 1
        with trio.CancelScope() as scope:
            instrument = CancelAfter(num_steps, scope)
            trio.lowlevel.add_instrument(instrument)
            try:
                await call()
            finally:
                trio.lowlevel.remove_instrument(instrument)
        await check()
        if not scope.cancelled_caught:
            return num_steps


async def idle(peers: Peers) -> None:
    """Return when neither side has anything under way. It does not take the silence of a minute."""
    with trio.fail_after(30):
        while peers.taking.num_incoming or peers.giving.num_incoming or peers.giving.num_served:
            await trio.sleep(0)


async def test_sending() -> None:
    with trio.fail_after(DEADLINE):
        async with two_peers() as peers:
            number = 0

            async def send() -> None:
                nonlocal number
                number += 1
                blob = BLOB[:-2] + number.to_bytes(2, "big")
                await send_blob(peers.giver, peers.taker.host.peer_id, blob)

            async def check() -> None:
                await idle(peers)

            num_steps = await cancelled_at_every_step(peers, send, check)
            assert num_steps > 10
            await send_blob(peers.giver, peers.taker.host.peer_id, BLOB)
            assert peers.policy.taken[-1].data == BLOB


async def test_fetching() -> None:
    with trio.fail_after(DEADLINE):
        async with two_peers() as peers:

            async def fetch() -> None:
                fetched = await peers.taking.fetch_blob(peers.giver.host.peer_id, INFO.blob_id)
                assert fetched.blob.data == BLOB

            async def check() -> None:
                await idle(peers)

            num_steps = await cancelled_at_every_step(peers, fetch, check)
            assert num_steps > 10
            await fetch()
            assert peers.policy.taken == []
            assert peers.taking.idle_bytes == 0
