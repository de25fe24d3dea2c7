"""Chunks and bitmaps that are not what they should be: named, refused, and cheap."""

from __future__ import annotations

import pytest
import trio

from neurogrid.errors import (
    PeerRefusedError,
    RemoteProtocolError,
)
from neurogrid.p2p import (
    MessageType,
    Protocol,
    TensorMessage,
    open_host,
)
from neurogrid.p2p.transfer import (
    send_blob,
)
from neurogrid.p2p.wire import (
    CHUNK_BYTES,
    ErrorCode,
    TransferAccept,
    WeightsChunk,
)
from tests.e2e.transfers.nodes import (
    BLOB,
    CHUNKS,
    DEADLINE,
    SMALL,
    LyingSource,
    offer,
    pair,
    run,
    send_chunk,
)


def test_a_wrong_chunk_is_named_with_its_sender_and_costs_that_chunk() -> None:
    async def main() -> None:
        async with pair() as (giver, taker):
            source = LyingSource(BLOB, wrong=4)
            with pytest.raises(PeerRefusedError, match="chunk 4 from") as caught:
                await send_blob(giver.protocol, taker.peer_id, source)
            assert caught.value.code == ErrorCode.HASH_MISMATCH
            assert giver.peer_id in caught.value.text
            await taker.all_over()
            held = taker.transfers.idle_bytes // CHUNK_BYTES
            # Two chunks are under way at once, so the one before may come after.
            assert held >= 3
            sent = await send_blob(giver.protocol, taker.peer_id, BLOB)
            assert sent.held_bytes == held * CHUNK_BYTES
            assert sent.sent_bytes == len(BLOB) - held * CHUNK_BYTES
            assert taker.policy.taken == [(0, BLOB)]

    run(main)


@pytest.mark.parametrize(
    ("chunks", "layer_id", "says"),
    [
        ([WeightsChunk(0, 4, CHUNKS[0].data)], 0, "the total changed from 3 to 4"),
        ([WeightsChunk(2, 4, CHUNKS[2].data)], 0, "the total changed from 3 to 4"),
        ([WeightsChunk(0, 3, b"x")], 0, f"chunk 0 has 1 B instead of {CHUNK_BYTES}"),
        ([CHUNKS[0], WeightsChunk(0, 3, CHUNKS[1].data)], 0, "chunk 0 came twice with different"),
        ([CHUNKS[0]], 1, "a chunk of layer 1 came instead"),
    ],
)
def test_chunks_that_do_not_fit(chunks: list[WeightsChunk], layer_id: int, says: str) -> None:
    async def main() -> None:
        async with pair() as (giver, taker):
            request_id, accept = await offer(giver, taker, SMALL)
            assert accept.needed
            with giver.protocol.expect(
                taker.peer_id, MessageType.WEIGHTS_ACK, request_id=request_id
            ) as told:
                for chunk in chunks:
                    await send_chunk(giver, taker, request_id, chunk, layer_id)
                with pytest.raises(PeerRefusedError, match=says) as caught:
                    await told.wait(timeout=DEADLINE)
            assert caught.value.code == ErrorCode.TRANSFER_INVALID
            await taker.all_over()
            await send_blob(giver.protocol, taker.peer_id, SMALL)
            assert taker.policy.taken == [(0, SMALL)]

    run(main)


def test_a_bitmap_that_does_not_fit_is_the_takers_fault() -> None:
    async def main() -> None:
        async with pair() as (giver, _):
            accepted = TransferAccept(layer_id=0, needed=True, have=b"\xff\xff").encode()
            errors: list[str] = []

            async def accept(message: TensorMessage) -> None:
                assert message.from_peer is not None
                with liar.expect(
                    message.from_peer, MessageType.WEIGHTS, request_id=message.request_id
                ) as told:
                    reply = TensorMessage(
                        msg_type=MessageType.TRANSFER_ACCEPT,
                        request_id=message.request_id,
                        data=accepted,
                    )
                    await liar.send(message.from_peer, reply)
                    try:
                        await told.wait(timeout=DEADLINE)
                    except PeerRefusedError as exc:
                        if exc.code != ErrorCode.TRANSFER_INVALID:
                            raise
                        errors.append(exc.text)

            async with open_host() as host:
                liar = Protocol(host)
                liar.on_message(MessageType.TRANSFER_OFFER, accept)
                await giver.protocol.host.connect(host.addresses[0])
                with pytest.raises(RemoteProtocolError, match="a bitmap of 2 bytes for 3 chunks"):
                    await send_blob(giver.protocol, host.peer_id, SMALL)
                while not errors:
                    await trio.sleep(0.01)
            assert giver.chunks_sent() == 0

    run(main)
