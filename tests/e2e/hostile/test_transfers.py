"""Transfers by raw bytes: chunks out of range, other totals, wrong hashes, offers that lie, and floods of them.

tests/e2e/transfers has what a giver of ours does wrong when it is told to; here are bytes that it would not send.
"""

from __future__ import annotations

import struct

import pytest
from blake3 import blake3

from neurogrid.p2p import PROTOCOL_V10, MessageType
from neurogrid.p2p.transfer import TransferLimits, Transfers, send_blob
from neurogrid.p2p.wire import CHUNK_BYTES, ErrorCode, TransferAccept, TransferOffer
from tests.e2e.hostile.raw_peer import RawStream, header, message
from tests.e2e.hostile.scene import Scene, run, until
from tests.e2e.transfers.nodes import Policy

BLOB = bytes(range(256)) * 5000  # two chunks
CHUNKS = [BLOB[:CHUNK_BYTES], BLOB[CHUNK_BYTES:]]
DIGESTS = b"".join(blake3(chunk).digest() for chunk in CHUNKS)
BLOB_ID = blake3(DIGESTS).digest()
INVALID, LIMIT, WRONG_HASH = (
    ErrorCode.TRANSFER_INVALID,
    ErrorCode.LIMIT_EXCEEDED,
    ErrorCode.HASH_MISMATCH,
)


def chunk(index: int, total: int, data: bytes, *, layer_id: int = 0, request_id: int = 1) -> bytes:
    numbered = struct.pack(">II", index, total) + data
    return header(MessageType.WEIGHTS, len(numbered), layer_id=layer_id, request_id=request_id) + (
        numbered
    )


def offer_of(request_id: int, *, blob_id: bytes = BLOB_ID, digests: bytes = DIGESTS) -> bytes:
    data = TransferOffer(0, len(BLOB), BLOB_ID, DIGESTS).encode()
    data = data.replace(BLOB_ID, blob_id).replace(DIGESTS, digests)
    return message(MessageType.TRANSFER_OFFER, data, request_id=request_id)


async def offered(stream: RawStream, request_id: int = 1) -> None:
    await stream.say(offer_of(request_id))
    accept = await stream.receive(MessageType.TRANSFER_ACCEPT)
    assert accept.request_id == request_id
    assert TransferAccept.decode(accept.data).needed


def with_transfers(scene: Scene, limits: TransferLimits | None = None) -> tuple[Transfers, Policy]:
    policy = Policy()
    return Transfers(scene.victim, policy, limits=limits or TransferLimits()), policy


WRONG = {
    "index out of range": (chunk(2, 2, CHUNKS[0]), INVALID),
    "index far out of range": (chunk(2**32 - 1, 2, CHUNKS[0]), INVALID),
    "of none": (chunk(0, 0, CHUNKS[0]), INVALID),
    "changed total": (chunk(0, 3, CHUNKS[0]), INVALID),
    "total of four billion": (chunk(0, 2**32 - 1, CHUNKS[0]), LIMIT),
    "index in a changed total": (chunk(2, 3, CHUNKS[0]), INVALID),
    "short": (chunk(0, 2, CHUNKS[0][:-1]), INVALID),
    "empty": (chunk(1, 2, b""), INVALID),
    "long": (chunk(1, 2, CHUNKS[0]), INVALID),
    "another layer": (chunk(0, 2, CHUNKS[0], layer_id=7), INVALID),
    "wrong hash": (chunk(0, 2, CHUNKS[0][::-1]), WRONG_HASH),
    "another chunk's bytes": (chunk(1, 2, bytes(len(CHUNKS[1]))), WRONG_HASH),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_chunk_that_does_not_fit(name: str) -> None:
    said, code = WRONG[name]

    async def scenario(scene: Scene) -> None:
        transfers, policy = with_transfers(scene)
        stream = await scene.hostile.open_v11()
        await offered(stream)
        await stream.say(said)
        await stream.refused(code, request_id=1)
        await until(lambda: not transfers.num_incoming)
        # The stream goes on, and so may the blob.
        await offered(stream, request_id=2)
        for index, data in enumerate(CHUNKS):
            await stream.say(chunk(index, 2, data, request_id=2))
        assert (await stream.receive(MessageType.WEIGHTS_ACK)).request_id == 2
        assert policy.taken == [(0, BLOB)]

    run(scenario)


def test_a_chunk_without_numbers() -> None:
    async def scenario(scene: Scene) -> None:
        transfers, _ = with_transfers(scene)
        stream = await scene.hostile.open_v11()
        await offered(stream)
        await stream.say(header(MessageType.WEIGHTS, 7), bytes(7))
        await stream.ended(ErrorCode.PROTOCOL_VIOLATION)
        await until(lambda: not transfers.num_incoming)

    run(scenario)


def test_chunks_that_nobody_accepted() -> None:
    async def scenario(scene: Scene) -> None:
        with_transfers(scene)
        stream = await scene.hostile.open_v11()
        for request_id in range(1, 40):
            await stream.say(chunk(0, 2, CHUNKS[0], request_id=request_id))
        for request_id in range(1, 40):
            await stream.refused(INVALID, request_id=request_id)

    run(scenario)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (offer_of(1, blob_id=bytes(32)), INVALID),
        (offer_of(1, digests=DIGESTS[::-1]), INVALID),
        (offer_of(1)[:-40] + bytes(40), None),
        (message(MessageType.TRANSFER_OFFER, b"\xff" * 20, request_id=1), None),
        (message(MessageType.TRANSFER_REQUEST, b"\x91" * 20, request_id=1), None),
        (message(MessageType.TRANSFER_OFFER, offer_of(1)[25:], request_id=0), None),
    ],
    ids=["another id", "other digests", "broken", "noise", "deep", "no request id"],
)
def test_an_offer_that_lies(said: bytes, code: ErrorCode | None) -> None:
    async def scenario(scene: Scene) -> None:
        transfers, _ = with_transfers(scene)
        stream = await scene.hostile.open_v11()
        await stream.say(said)
        if code is None:
            error = await stream.receive(MessageType.ERROR)
            assert error.request_id in (0, 1)
        else:
            await stream.refused(code, request_id=1)
        assert not transfers.num_incoming

    run(scenario)


def test_a_flood_of_transfers_never_finished() -> None:
    limits = TransferLimits(max_transfers_per_peer=4, max_idle_blobs=2, silence_timeout=1.0)

    async def scenario(scene: Scene) -> None:
        transfers, policy = with_transfers(scene, limits)
        stream = await scene.hostile.open_v11()
        accepted = refused = 0
        for request_id in range(1, 101):
            await stream.say(offer_of(request_id))
            await stream.say(chunk(0, 2, CHUNKS[0], request_id=request_id))
        while accepted + refused < 100:
            answer = await stream.receive()
            accepted += answer.msg_type is MessageType.TRANSFER_ACCEPT
            refused += answer.msg_type is MessageType.ERROR and answer.request_id > 4
            assert transfers.num_incoming <= 4
        # An honest peer has a place of its own.
        sent = await send_blob(scene.honest, scene.victim_id, b"of the honest peer")
        assert sent.sent_bytes == len(b"of the honest peer")
        await until(lambda: not transfers.num_incoming)
        assert policy.taken == [(0, b"of the honest peer")]

    run(scenario)


@pytest.mark.parametrize(
    "said",
    [
        chunk(2, 2, b"x", request_id=0),
        chunk(0, 0, b"x", request_id=0),
        chunk(0, 2**32 - 1, b"x", request_id=0),
        header(MessageType.WEIGHTS, 3, request_id=0) + bytes(3),
        header(MessageType.WEIGHTS, CHUNK_BYTES + 9, request_id=0),
    ],
    ids=["index out of range", "of none", "total of four billion", "no numbers", "long"],
)
def test_a_chunk_over_1_0_0_that_is_none(said: bytes) -> None:
    """Its stream is reset. Whether chunks fit each other is for their handler; a worker's is tested with it."""

    async def scenario(scene: Scene) -> None:
        taken: list[tuple[int, int, int, bytes]] = []
        scene.victim.on_weights_received(
            lambda layer_id, index, total, data: taken.append((layer_id, index, total, bytes(data)))
        )
        await (await scene.hostile.say_v10(said)).ended()
        await (
            await scene.hostile.say_v10(chunk(0, 1, b"fine", layer_id=5, request_id=0))
        ).end_in_any_way()
        assert taken == [(5, 0, 1, b"fine")]

    run(scenario, version=PROTOCOL_V10)
