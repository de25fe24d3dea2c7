"""Cancellation at any time: both ends stay usable."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import trio

from neurogrid.errors import (
    PeerRefusedError,
)
from neurogrid.p2p.transfer import (
    BytesSource,
    TransferLimits,
    send_blob,
)
from neurogrid.p2p.wire import (
    ErrorCode,
)
from tests.conformance.cancellation import Attempt
from tests.e2e.transfers.nodes import BLOB, SMALL, Node, Policy, id_of, pair, run


def test_sending_may_be_cancelled_at_any_time() -> None:
    async def main() -> None:
        async with pair() as (giver, taker):
            whole = Attempt(sys.maxsize)
            await whole.run(send_blob, giver.protocol, taker.peer_id, BLOB)
            taker.policy.taken.clear()
            num_cancelled = 0
            # Evenly over what one takes, and beyond.
            for number in range(24):
                blob = BLOB[:-1] + bytes([number])
                attempt = Attempt(whole.num_steps * number // 20)
                send = partial(send_blob, layer_id=number)
                await attempt.run(send, giver.protocol, taker.peer_id, blob)
                num_cancelled += not attempt.is_through
                # The taker learns of it long before it would give up.
                await taker.all_over()
            assert num_cancelled > 3
            for node_ in (giver, taker):
                node_.policy.taken.clear()
            await send_blob(giver.protocol, taker.peer_id, SMALL)
            await send_blob(taker.protocol, giver.peer_id, SMALL)
            assert taker.policy.taken == giver.policy.taken == [(0, SMALL)]

    run(main)


def test_sending_cancelled_at_each_chunk() -> None:
    async def main() -> None:
        async with pair() as (giver, taker):
            for number in range(4):
                blob = SMALL[:-1] + bytes([number])
                sent: list[int] = []

                def on_sent(num_bytes: int, sent: list[int] = sent, last: int = number) -> None:
                    sent.append(num_bytes)
                    if len(sent) == last:
                        scope.cancel()

                with trio.CancelScope() as scope:
                    if not number:
                        scope.cancel()
                    await send_blob(giver.protocol, taker.peer_id, blob, on_sent=on_sent)
                await taker.all_over()
                result = await send_blob(giver.protocol, taker.peer_id, blob)
                assert result.sent_bytes + result.held_bytes == len(blob)
            assert not giver.protocol.host.connected_peers ^ {taker.peer_id}

    run(main)


def test_fetching_may_be_cancelled_at_any_time() -> None:
    async def main() -> None:
        policy = Policy(provided={id_of(BLOB): BytesSource(BLOB)})
        limits = TransferLimits(max_served_per_peer=1)
        async with pair(policy=policy, limits=limits) as (taker, giver):
            whole = Attempt(sys.maxsize)
            await whole.run(taker.transfers.fetch_blob, giver.peer_id, id_of(BLOB))
            num_cancelled = 0
            for number in range(16):
                attempt = Attempt(whole.num_steps * number // 16)
                await attempt.run(fetch_in_turn, taker, giver)
                num_cancelled += not attempt.is_through
                assert taker.transfers.num_incoming == 0
            assert num_cancelled > 3
            fetched = await fetch_in_turn(taker, giver)
            assert fetched.blob.data == BLOB
            assert taker.transfers.idle_bytes == 0

    run(main)


async def fetch_in_turn(taker: Node, giver: Node) -> Any:
    """Fetch from a giver that serves one at a time, and frees itself once it is told."""
    while True:
        try:
            return await taker.transfers.fetch_blob(giver.peer_id, id_of(BLOB))
        except PeerRefusedError as exc:
            if exc.code != ErrorCode.BUSY:
                raise
        await trio.sleep(0.01)
