"""Chunks in any order, some twice, some lost, some wrong: what is kept is what was right, over a network in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.errors import (
    LocalProtocolError,
    PeerRefusedError,
    RemoteProtocolError,
    RequestRefusedError,
)
from neurogrid.p2p import MessageType, Protocol, TensorMessage, new_request_id
from neurogrid.p2p.transfer import BlobInfo, BytesSource, Transfers, send_blob
from neurogrid.p2p.wire import (
    CHUNK_BYTES,
    ErrorCode,
    TransferAccept,
    TransferOffer,
    WeightsChunk,
    decode_bitmap,
)
from tests.unit.transfer_peers import Taking, two_protocols

DEADLINE = 60.0
BLOB = Random(5).randbytes(4 * CHUNK_BYTES + 99)
SOURCE = BytesSource(BLOB)
INFO = BlobInfo.of_digests(SOURCE.digests(), len(BLOB))
TOTAL = INFO.num_chunks


class Giver:
    """A peer that sends what it is told to, and its taker."""

    def __init__(self, protocol: Protocol, taker: Protocol) -> None:
        self.protocol = protocol
        self.taker = taker.host.peer_id
        self.policy = Taking()
        self.transfers = Transfers(taker, self.policy)

    async def offer(self, request_id: int) -> frozenset[int]:
        """Offer the blob; the chunks that the taker has."""
        data = TransferOffer(0, INFO.num_bytes, INFO.blob_id, INFO.digests).encode()
        message = TensorMessage(
            msg_type=MessageType.TRANSFER_OFFER, request_id=request_id, data=data
        )
        reply = await self.protocol.request(
            self.taker, message, MessageType.TRANSFER_ACCEPT, timeout=DEADLINE
        )
        accept = TransferAccept.decode(reply.data)
        assert accept.needed
        return decode_bitmap(accept.have, TOTAL)

    async def send(self, request_id: int, data: bytes) -> None:
        message = TensorMessage(msg_type=MessageType.WEIGHTS, request_id=request_id, data=data)
        await self.protocol.send(self.taker, message)


def encoded(index: int, *, is_right: bool = True) -> bytes:
    data = bytearray(SOURCE.chunk(index))
    if not is_right:
        data[-1] ^= 1
    return WeightsChunk(index, TOTAL, data).encode()


@asynccontextmanager
async def giver_and_taker() -> AsyncIterator[Giver]:
    with trio.fail_after(DEADLINE):
        async with two_protocols() as (giver, taker):
            yield Giver(giver, taker)


chunk = st.tuples(st.integers(0, TOTAL - 1), st.sampled_from([True, True, True, True, False]))


@settings(max_examples=25, deadline=None)
@given(attempts=st.lists(st.lists(chunk, max_size=8), min_size=1, max_size=3))
def test_what_is_kept_is_what_was_right(attempts: list[list[tuple[int, bool]]]) -> None:
    """Each attempt is a transfer that ends with a wrong chunk, with the last one, or with one that shows that
    all before it were taken, in order.
    """

    async def main() -> None:
        async with giver_and_taker() as peer:
            right: set[int] = set()
            for chunks in attempts:
                request_id = new_request_id()
                with peer.protocol.expect(
                    peer.taker, MessageType.WEIGHTS_ACK, request_id=request_id
                ) as told:
                    assert await peer.offer(request_id) == right
                    end = WeightsChunk(0, TOTAL + 1, b"").encode()
                    expected = ErrorCode.TRANSFER_INVALID, "the total changed from 5 to 6"
                    for index, is_right in chunks:
                        if not is_right:
                            end = encoded(index, is_right=False)
                            expected = (
                                (ErrorCode.TRANSFER_INVALID, f"chunk {index} came twice with")
                                if index in right
                                else (ErrorCode.HASH_MISMATCH, f"chunk {index} from ")
                            )
                            break
                        await peer.send(request_id, encoded(index))
                        right.add(index)
                    if len(right) == TOTAL:
                        await told.wait(timeout=DEADLINE)
                        break
                    await peer.send(request_id, end)
                    with pytest.raises(PeerRefusedError, match=expected[1]) as caught:
                        await told.wait(timeout=DEADLINE)
                    assert caught.value.code == expected[0]
                while peer.transfers.num_incoming:
                    await trio.lowlevel.checkpoint()
                assert peer.transfers.idle_bytes == len(right) * CHUNK_BYTES
            if len(right) < TOTAL:
                sent = await send_blob(peer.protocol, peer.taker, BLOB)
                assert sent.held_bytes == sum(map(INFO.chunk_bytes, right))
            (stored,) = peer.policy.taken
            assert stored.data == BLOB
            assert peer.transfers.idle_bytes == 0

    trio.run(main)


async def over(peer: Giver) -> None:
    """Wait until no transfer comes in."""
    while peer.transfers.num_incoming:
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("how", ["error", "end of the stream"])
async def test_a_chunk_that_came_before_the_end_is_kept(how: str) -> None:
    async with giver_and_taker() as peer:
        await peer.offer(1)
        await peer.send(1, encoded(0))
        await peer.send(1, encoded(2))
        if how == "error":
            error = RequestRefusedError("going", code=ErrorCode.SHUTTING_DOWN)
            asked = TensorMessage(
                msg_type=MessageType.TRANSFER_OFFER, request_id=1, from_peer=peer.taker
            )
            await peer.protocol.refuse(asked, error)
        else:
            await peer.protocol.close_peer(peer.taker)
        await over(peer)
        assert peer.transfers.idle_bytes == 2 * CHUNK_BYTES
        if how == "error":
            assert await peer.offer(2) == {0, 2}


async def test_a_last_chunk_that_is_wrong_is_not_kept() -> None:
    async with giver_and_taker() as peer:
        await peer.offer(1)
        await peer.send(1, encoded(0))
        await peer.send(1, encoded(1, is_right=False))
        await peer.protocol.close_peer(peer.taker)
        await over(peer)
        assert peer.transfers.idle_bytes == CHUNK_BYTES


@pytest.mark.parametrize("num_chunks", [0, 2])
async def test_a_second_offer_under_one_id_ends_both(num_chunks: int) -> None:
    async with giver_and_taker() as peer:
        await peer.offer(1)
        for index in range(num_chunks):
            await peer.send(1, encoded(index))
        with pytest.raises(PeerRefusedError, match="ends with this") as refused:
            await peer.offer(1)
        assert refused.value.code == ErrorCode.TRANSFER_INVALID
        await over(peer)
        sent = await send_blob(peer.protocol, peer.taker, BLOB)
        assert sent.num_bytes == len(BLOB)
        assert [stored.data for stored in peer.policy.taken] == [BLOB]


async def test_two_offers_under_one_id_at_once_end_both() -> None:
    async with giver_and_taker() as peer:
        data = TransferOffer(0, INFO.num_bytes, INFO.blob_id, INFO.digests).encode()
        offer = TensorMessage(msg_type=MessageType.TRANSFER_OFFER, request_id=1, data=data)
        with peer.protocol.expect(peer.taker, MessageType.WEIGHTS_ACK, request_id=1) as told:
            await peer.protocol.send(peer.taker, offer)
            await peer.protocol.send(peer.taker, offer)
            with pytest.raises(PeerRefusedError) as refused:
                await told.wait(timeout=DEADLINE)
        assert refused.value.code == ErrorCode.TRANSFER_INVALID
        await over(peer)
        assert (await send_blob(peer.protocol, peer.taker, BLOB)).sent_bytes == len(BLOB)


async def test_a_second_offer_in_answer_to_one_request_ends_the_fetch() -> None:
    async with giver_and_taker() as peer:
        refused = trio.Event()

        async def give(message: TensorMessage) -> None:
            data = TransferOffer(0, INFO.num_bytes, INFO.blob_id, INFO.digests).encode()
            offer = TensorMessage(
                msg_type=MessageType.TRANSFER_OFFER, request_id=message.request_id, data=data
            )
            await peer.protocol.request(
                peer.taker, offer, MessageType.TRANSFER_ACCEPT, timeout=DEADLINE
            )
            with pytest.raises(PeerRefusedError):
                await peer.protocol.request(
                    peer.taker, offer, MessageType.TRANSFER_ACCEPT, timeout=DEADLINE
                )
            refused.set()

        peer.protocol.on_message(MessageType.TRANSFER_REQUEST, give)
        with pytest.raises(RemoteProtocolError, match="ends with this"):
            await peer.transfers.fetch_blob(peer.protocol.host.peer_id, INFO.blob_id)
        await refused.wait()


async def test_a_host_can_send_to_itself() -> None:
    async with giver_and_taker() as peer:
        taker = peer.protocol.host.peer_id
        policy = Taking()
        transfers = Transfers(peer.protocol, policy)
        sent = await send_blob(peer.protocol, taker, BLOB)
        assert sent.sent_bytes == len(BLOB)
        assert [stored.data for stored in policy.taken] == [BLOB]
        with pytest.raises(PeerRefusedError) as caught:
            await transfers.fetch_blob(taker, INFO.blob_id)
        assert caught.value.code == ErrorCode.BLOB_UNKNOWN


async def test_a_protocol_has_transfers_once() -> None:
    async with giver_and_taker() as peer:
        Transfers(peer.protocol)
        with pytest.raises(LocalProtocolError, match="has transfers already"):
            Transfers(peer.protocol, Taking())
