"""More transfers than may be: refused, bounded in memory, and the host serves on."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from blake3 import blake3

from neurogrid.errors import (
    PeerRefusedError,
)
from neurogrid.p2p import (
    MessageType,
    TensorMessage,
    new_request_id,
)
from neurogrid.p2p.transfer import (
    OfferedBlob,
    TransferLimits,
    send_blob,
)
from neurogrid.p2p.wire import (
    CHUNK_BYTES,
    ErrorCode,
    TransferOffer,
    WeightsChunk,
)
from tests.e2e.transfers.nodes import (
    BLOB,
    CHUNKS,
    DEADLINE,
    SMALL,
    Policy,
    node,
    offer,
    pair,
    run,
    send_chunk,
)


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (TransferLimits(max_transfers_per_peer=2), "2 transfers of yours are under way already"),
        (TransferLimits(max_transfers=2), "2 transfers of all peers are under way already"),
        (TransferLimits(max_bytes_per_peer=3 * len(SMALL) - 4), "transfers of yours may have"),
        (TransferLimits(max_bytes=3 * len(SMALL) - 4), "transfers of all peers may have"),
    ],
)
def test_more_transfers_than_may_be(limits: TransferLimits, says: str) -> None:
    async def main() -> None:
        async with pair(limits=limits) as (giver, taker):
            for number in range(2):
                await offer(giver, taker, SMALL[: -number - 1])
            with pytest.raises(PeerRefusedError, match=says) as caught:
                await offer(giver, taker, SMALL)
            assert caught.value.code == ErrorCode.LIMIT_EXCEEDED
            assert caught.value.retry_after
            # Whoever gives one up makes room.
            taker.transfers.forget(giver.peer_id)
            await taker.all_over()
            await send_blob(giver.protocol, taker.peer_id, SMALL)
            assert taker.policy.taken == [(0, SMALL)]

    run(main)


def test_a_request_id_is_used_once_at_a_time() -> None:
    async def main() -> None:
        async with pair() as (giver, taker):
            await offer(giver, taker, SMALL, request_id=5)
            with pytest.raises(PeerRefusedError, match="ends with this") as caught:
                await offer(giver, taker, BLOB, request_id=5)
            assert caught.value.code == ErrorCode.TRANSFER_INVALID
            await taker.all_over()

    run(main)


def test_more_offers_than_are_decided_at_once() -> None:
    async def main() -> None:
        go_on = trio.Event()

        async def wait(offered: OfferedBlob) -> None:
            await go_on.wait()

        limits = TransferLimits(max_offers_per_peer=3)
        async with pair(policy=Policy(decide_hook=wait), limits=limits) as (giver, taker):
            refused: list[int] = []

            async def send(number: int) -> None:
                try:
                    await send_blob(giver.protocol, taker.peer_id, SMALL[number:])
                except PeerRefusedError as exc:
                    if exc.code != ErrorCode.BUSY:
                        raise
                    refused.append(number)
                    if len(refused) == 2:
                        go_on.set()

            async with trio.open_nursery() as nursery:
                for number in range(5):
                    nursery.start_soon(send, number)
            assert len(refused) == 2
            assert len(taker.policy.taken) == 3

    run(main)


def test_a_flood_of_transfers_that_are_never_finished() -> None:
    async def main() -> None:
        limits = TransferLimits(
            max_transfers_per_peer=4,
            max_idle_blobs=3,
            max_idle_bytes=2 * CHUNK_BYTES,
            silence_timeout=1.0,
        )
        async with pair(limits=limits) as (giver, taker), node() as honest:
            await honest.meet(taker)
            num_accepted = num_refused = 0
            async with trio.open_nursery() as nursery:
                # An honest peer is served all the while.
                nursery.start_soon(send_blob, honest.protocol, taker.peer_id, BLOB)
                # At least so many, and until some were given up and some had no place.
                while num_accepted + num_refused < 60 or num_accepted <= 4 or not num_refused:
                    number = num_accepted + num_refused
                    blob = SMALL[:-4] + number.to_bytes(4, "big")
                    try:
                        request_id, _ = await offer(giver, taker, blob)
                    except PeerRefusedError as exc:
                        if exc.code != ErrorCode.LIMIT_EXCEEDED:
                            raise
                        num_refused += 1
                        await trio.sleep(0.02)
                    else:
                        num_accepted += 1
                        await send_chunk(giver, taker, request_id, CHUNKS[0])
                    assert taker.transfers.num_incoming <= 5
                    assert taker.transfers.idle_bytes <= limits.max_idle_bytes
            await taker.all_over()
            assert 0 < taker.transfers.idle_bytes <= limits.max_idle_bytes
            assert taker.policy.taken == [(0, BLOB)]
            assert len(taker.policy.given_up) == num_accepted
            await send_blob(giver.protocol, taker.peer_id, SMALL)

    run(main)


def test_sixty_four_gib_are_announced_and_cost_nothing() -> None:
    """Of the largest blob, one chunk comes: only what came is in memory."""

    async def main() -> None:
        size = 65_536 * CHUNK_BYTES
        chunk = bytes(CHUNK_BYTES)
        digests = blake3(chunk).digest() * 65_536
        limits = TransferLimits(max_bytes_per_peer=size, max_bytes=size, silence_timeout=1.0)
        async with pair(policy=Policy(), limits=limits) as (giver, taker):
            before = resident_bytes()
            request_id = new_request_id()
            data = TransferOffer(3, size, blake3(digests).digest(), digests).encode()
            message = TensorMessage(
                msg_type=MessageType.TRANSFER_OFFER, layer_id=3, request_id=request_id, data=data
            )
            with giver.protocol.expect(
                taker.peer_id, MessageType.WEIGHTS_ACK, request_id=request_id
            ) as told:
                try:
                    await giver.protocol.request(
                        taker.peer_id, message, MessageType.TRANSFER_ACCEPT, timeout=DEADLINE
                    )
                except PeerRefusedError as exc:
                    # A system that does not overcommit refuses so much, which is as good.
                    if exc.code != ErrorCode.OUT_OF_MEMORY:
                        raise
                    return
                await send_chunk(
                    giver, taker, request_id, WeightsChunk(40_000, 65_536, chunk), layer_id=3
                )
                with pytest.raises(PeerRefusedError, match="1 of 65536 chunks came"):
                    await told.wait(timeout=DEADLINE)
            assert resident_bytes() - before < 100 * CHUNK_BYTES

    run(main)


def resident_bytes() -> int:
    """Memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024
