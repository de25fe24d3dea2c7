"""Weights that are not what they should be: refused, and the worker serves on."""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgpack
import pytest
import torch
import trio
from blake3 import blake3
from safetensors.torch import save

from neurogrid import WorkerSettings, open_worker
from neurogrid.p2p import PROTOCOL_V10, PROTOCOL_V11, MessageType
from neurogrid.p2p.wire import (
    CHUNK_BYTES,
    ErrorCode,
    LayerIds,
    WeightsChunk,
    iter_weights_chunks,
    serialize_config,
)
from tests.e2e.bad_input_peer.peer import BadPeer, Model, connect, refused
from tests.e2e.bad_input_peer.scenarios import (
    MEMORY_LIMIT,
    VERSIONS,
    Good,
    configured,
    generation_on,
    raw_chunk,
    with_peer,
)
from tests.e2e.support import (
    DEADLINE,
    WorkerProcess,
)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_chunk_index_out_of_range(worker: WorkerProcess, tuned: Good, version: str) -> None:
    async def scenario(peer: BadPeer) -> None:
        request_id = await configured(peer, tuned, version)
        with refused(ErrorCode.TRANSFER_INVALID, "chunk 3 of 3 is out of range"):
            await peer.acknowledged(0, [raw_chunk(3, 3)], request_id)

    with_peer(worker, scenario, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_total_that_changes(worker: WorkerProcess, tuned: Good, version: str) -> None:
    async def scenario(peer: BadPeer) -> None:
        request_id = await configured(peer, tuned, version)
        first, second, _ = iter_weights_chunks(tuned.model.layers[0])
        with refused(ErrorCode.TRANSFER_INVALID, "the total changed from 3 to 4"):
            await peer.acknowledged(0, [first, WeightsChunk(1, 4, second.data)], request_id)

    with_peer(worker, scenario, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_chunk_of_the_wrong_length(worker: WorkerProcess, tuned: Good, version: str) -> None:
    async def scenario(peer: BadPeer) -> None:
        request_id = await configured(peer, tuned, version)
        with refused(ErrorCode.TRANSFER_INVALID, f"chunk 0 has 1 B instead of {CHUNK_BYTES}"):
            await peer.acknowledged(0, [raw_chunk(0, 3)], request_id)

    with_peer(worker, scenario, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_duplicate_chunk_with_the_same_bytes_is_ignored(
    worker: WorkerProcess, tuned: Good, version: str
) -> None:
    async def scenario(peer: BadPeer) -> None:
        request_id = await configured(peer, tuned, version)
        first, second, third = iter_weights_chunks(tuned.model.layers[0])
        # In any order, and the first one three times.
        await peer.acknowledged(0, [third, first, first, first, second], request_id)
        status = await peer.ask(
            MessageType.LAYER_REQUEST,
            LayerIds(()).encode(),
            MessageType.LAYER_STATUS,
            request_id=request_id,
        )
        assert 0 in LayerIds.decode(status.data).ids

    with_peer(worker, scenario, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_duplicate_chunk_with_other_bytes(
    worker: WorkerProcess, tuned: Good, version: str
) -> None:
    async def scenario(peer: BadPeer) -> None:
        request_id = await configured(peer, tuned, version)
        first, second, third = iter_weights_chunks(tuned.model.layers[0])
        lie = WeightsChunk(0, 3, bytes(CHUNK_BYTES))
        with refused(ErrorCode.TRANSFER_INVALID, "chunk 0 came twice with different bytes"):
            await peer.acknowledged(0, [first, lie], request_id)
        # That ended the transfer; the next begins anew.
        if version == PROTOCOL_V11:
            with refused(ErrorCode.TRANSFER_INVALID, "without an accepted offer"):
                await peer.acknowledged(0, [second], request_id)
            request_id = await peer.offer(0, tuned.model.layers[0])
        await peer.acknowledged(0, [first, second, third], request_id)

    with_peer(worker, scenario, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_transfer_that_stops_half_way(
    worker: WorkerProcess, good: Good, tuned: Good, version: str
) -> None:
    async def scenario(peer: BadPeer) -> None:
        request_id = await configured(peer, tuned, version)
        first, *_ = iter_weights_chunks(tuned.model.layers[0])
        await peer.send_chunk(0, first, request_id)

    with_peer(worker, scenario, version)
    # Another coordinator is served at once. Over 1.1.0 it sends what the first one did not.
    outcome = tuned.check_on(worker.address)
    (sent,) = outcome.sent.values()
    lacking = sum(map(len, tuned.model.layers)) - (CHUNK_BYTES if version == PROTOCOL_V11 else 0)
    assert lacking < sent["weights"] < lacking + CHUNK_BYTES / 2

    async def again(peer: BadPeer) -> None:
        request_id = await configured(peer, good, version)
        await peer.acknowledged(0, list(iter_weights_chunks(good.model.layers[0])), request_id)

    with_peer(worker, again, version)


def test_a_transfer_that_stops_while_its_peer_stays(good: Good) -> None:
    """In this process, where a worker can be told not to wait a minute."""

    async def main() -> None:
        settings = WorkerSettings(transfer_timeout=1.0, memory_limit=MEMORY_LIMIT)
        with trio.fail_after(DEADLINE):
            async with open_worker(settings) as worker, connect(worker.addresses[0]) as peer:
                request_id = await configured(peer, good, PROTOCOL_V11)
                first, *rest = iter_weights_chunks(good.model.layers[0])
                with refused(ErrorCode.DEADLINE_EXCEEDED, "gave up layer 0: 1 of 3 chunks"):
                    await peer.acknowledged(0, [first], request_id)
                with refused(ErrorCode.CONFIG_REQUIRED, "send ModelConfig first"):
                    await peer.acknowledged(0, rest, request_id)
                async with generation_on(good, worker.addresses[0]) as outcome:
                    assert outcome.tokens == [good.expected]

    trio.run(main)


def test_an_offer_whose_digests_are_not_the_blobs(worker: WorkerProcess, tuned: Good) -> None:
    blob = tuned.model.layers[0]
    fields = {"layer": 0, "bytes": len(blob), "blob": bytes(32), "digests": bytes(3 * 32)}

    async def scenario(peer: BadPeer) -> None:
        await peer.configure(serialize_config(tuned.model.config))
        await peer.assign(0, 2)
        for changes, says in (
            ({}, "the digests of an offer are not those of its blob"),
            ({"digests": bytes(2 * 32)}, "64 bytes of digests for a blob of 3 chunks"),
        ):
            data = msgpack.packb({**fields, **changes})
            with refused(ErrorCode.TRANSFER_INVALID, says):
                await peer.ask(MessageType.TRANSFER_OFFER, data, MessageType.TRANSFER_ACCEPT)
        # That ended no more than the offer.
        await peer.offer(0, blob)

    with_peer(worker, scenario)


def test_weights_with_another_hash_than_announced(worker: WorkerProcess, tuned: Good) -> None:
    async def scenario(peer: BadPeer) -> None:
        await peer.configure(serialize_config(tuned.model.config))
        await peer.assign(0, 2)
        first, second, third = iter_weights_chunks(tuned.model.layers[0])
        digests = [blake3(chunk.data).digest() for chunk in (first, second, third)]
        digests[1] = bytes(32)
        request_id = await peer.offer(0, tuned.model.layers[0], digests=b"".join(digests))
        names = (
            f"layer 0: chunk 1 from {peer.protocol.host.peer_id} has another hash than announced"
        )
        with refused(ErrorCode.HASH_MISMATCH, names):
            await peer.acknowledged(0, [third, second, first], request_id)
        with refused(ErrorCode.LAYER_NOT_HELD, "not ready for layer 0"):
            await peer.open_session(1, 0, 1)

    with_peer(worker, scenario)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "make",
    [
        lambda model: b"",
        lambda model: b"\x80\x04\x95pickled",
        lambda model: struct.pack("<Q", 2**63) + b"{}",
        lambda model: model.layers[1],
        lambda model: model.layers[0][:-4],
        lambda model: save({"model.layers.0.self_attn.q_proj.weight": torch.zeros(256, 256)}),
        lambda model: save({"model.layers.0.self_attn.q_proj.weight": torch.zeros(3, 3)}),
        lambda model: save({"model.layers.0.what": torch.zeros(1)}),
    ],
    ids=["empty", "pickle", "length", "layer 1", "cut", "one tensor", "shape", "name"],
)
def test_weights_that_are_no_such_layer(
    worker: WorkerProcess, tuned: Good, make: Callable[[Model], bytes], version: str
) -> None:
    blob = make(tuned.model)

    async def scenario(peer: BadPeer) -> None:
        await configured(peer, tuned, version)
        request_id = await peer.offer(0, blob) if version == PROTOCOL_V11 else 0
        with refused(ErrorCode.TRANSFER_INVALID, "the weights of layer 0 do not fit its config"):
            await peer.acknowledged(0, list(iter_weights_chunks(blob)), request_id)
        if version == PROTOCOL_V11:
            with refused(ErrorCode.LAYER_NOT_HELD, "not ready for layer 0"):
                await peer.open_session(1, 0, 1)
        else:
            with refused(ErrorCode.LAYER_NOT_HELD, ""):
                await peer.ask(MessageType.ACTIVATION, bytes(512), MessageType.RESPONSE)

    with_peer(worker, scenario, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_more_weights_than_a_layer_can_have(
    worker: WorkerProcess, tuned: Good, version: str
) -> None:
    async def scenario(peer: BadPeer) -> None:
        await configured(peer, tuned, version)
        with refused(ErrorCode.LIMIT_EXCEEDED, "layer 1 was announced with"):
            if version == PROTOCOL_V11:
                await peer.offer(1, b"", num_bytes=60 * 1024**3, digests=bytes(32 * 60 * 1024))
            else:
                await peer.acknowledged(1, [raw_chunk(0, 60 * 1024, bytes(CHUNK_BYTES))])

    with_peer(worker, scenario, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_weights_of_a_layer_that_is_not_wanted(
    worker: WorkerProcess, tuned: Good, version: str
) -> None:
    async def scenario(peer: BadPeer) -> None:
        if version == PROTOCOL_V10:
            await configured(peer, tuned, version)
            with refused(ErrorCode.TRANSFER_INVALID, ""):
                await peer.acknowledged(2, [raw_chunk(0, 1)])
            return
        await peer.configure(serialize_config(tuned.model.config))
        await peer.assign(0, 1)
        with refused(ErrorCode.TRANSFER_INVALID, "layer 1 was offered, and is not assigned"):
            await peer.offer(1, tuned.model.layers[1])
        with refused(ErrorCode.TRANSFER_INVALID, "layer 0 came without an accepted offer"):
            await peer.acknowledged(0, [raw_chunk(0, 1)], 77)

    with_peer(worker, scenario, version)


def test_more_transfers_at_once_than_anybody_needs(worker: WorkerProcess, good: Good) -> None:
    async def scenario(peer: BadPeer) -> None:
        await peer.configure(good.model.config_with(num_hidden_layers=9))
        await peer.assign(0, 9)
        for layer_id in range(8):
            await peer.offer(layer_id, good.model.layers[0])
        with refused(ErrorCode.LIMIT_EXCEEDED, "8 transfers of yours are under way already"):
            await peer.offer(8, good.model.layers[0])

    with_peer(worker, scenario)
