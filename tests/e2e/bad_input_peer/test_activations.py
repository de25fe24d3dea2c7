"""Activations that are not the next: refused, and their session goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from neurogrid.errors import PeerRefusedError
from neurogrid.p2p import PROTOCOL_V10, MessageType, TensorMessage
from neurogrid.p2p.wire import (
    ErrorCode,
    LayerIds,
    iter_weights_chunks,
    serialize_config,
)
from tests.e2e.bad_input_peer.peer import BadPeer, refused
from tests.e2e.bad_input_peer.scenarios import MAX_SEQ_LEN, Good, configured, hidden, with_peer
from tests.e2e.support import (
    WorkerProcess,
)


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"session_id": 99}, ErrorCode.SESSION_UNKNOWN, "session 99 is not open"),
        ({"stop_layer": 1}, ErrorCode.LAYER_NOT_HELD, "was asked for layer 0"),
        (
            {"start_layer": 7, "stop_layer": 9},
            ErrorCode.LAYER_NOT_HELD,
            "was asked for layers 7 to 8",
        ),
        ({"position": 1}, ErrorCode.POSITION_MISMATCH, "position 1 came to a session of 0 tokens"),
        ({"position": 2**32 - 1}, ErrorCode.POSITION_MISMATCH, "position 4294967295 came"),
        (
            {"shape": (3, 256)},
            ErrorCode.SHAPE_MISMATCH,
            "[3, 256] came instead of [1, tokens, 256]",
        ),
        ({"shape": (3, 1, 256)}, ErrorCode.SHAPE_MISMATCH, "[3, 1, 256] came instead of"),
        ({"shape": (1, 6, 128)}, ErrorCode.SHAPE_MISMATCH, "[1, 6, 128] came instead of"),
        ({"shape": (1, 0, 256), "data": b""}, ErrorCode.SHAPE_MISMATCH, "[1, 0, 256] came"),
        (
            {"shape": (1, 6, 256), "dtype": "F16"},
            ErrorCode.SHAPE_MISMATCH,
            "an activation in F16 came; this session's are in F32",
        ),
        (
            {"shape": (1, 33, 256), "data": bytes(4 * 33 * 256)},
            ErrorCode.LIMIT_EXCEEDED,
            "33 tokens are more than the 32 that were agreed",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_activation_that_is_not_the_next(
    worker: WorkerProcess, good: Good, change: dict[str, Any], code: ErrorCode, says: str
) -> None:
    async def scenario(peer: BadPeer) -> None:
        await peer.place(good.model)
        await peer.open_session(1, 0, 2)
        with refused(code, says):
            await peer.activate(hidden(good), **change)
        # The session goes on as if nothing had been.
        await peer.open_session(2, 0, 2)
        undisturbed = await peer.activate(hidden(good), session_id=2)
        answered = await peer.activate(hidden(good))
        size = 4 * 3 * good.model.hidden_size
        assert bytes(answered.data)[-size:] == bytes(undisturbed.data)[-size:]

    with_peer(worker, scenario)


def test_what_1_1_0_has_agreed_on_is_not_had_again_over_1_0_0(
    worker: WorkerProcess, good: Good
) -> None:
    async def scenario(peer: BadPeer) -> None:
        await peer.place(good.model)
        await peer.open_session(1, 0, 2)
        chunk = next(iter(iter_weights_chunks(good.model.layers[0]))).encode()
        row = bytes(2 * good.model.hidden_size)
        for msg_type, data in ((MessageType.ACTIVATION, row), (MessageType.WEIGHTS, chunk)):
            message = TensorMessage(msg_type=msg_type, layer_id=0, request_id=0, data=data)
            with pytest.raises(PeerRefusedError):
                await peer.protocol._oneshot.send(peer.worker_id, message)
        # Nor a layer beside those that were assigned.
        await peer.assign(0, 1)
        data = LayerIds((1,)).encode()
        with refused(ErrorCode.LAYER_NOT_HELD, "layer 1: not assigned to this worker"):
            await peer.ask(MessageType.LAYER_REQUEST, data, MessageType.LAYER_STATUS)
        await peer.assign(0, 2)

    with_peer(worker, scenario)


def test_an_activation_that_is_not_finite(worker: WorkerProcess, good: Good) -> None:
    async def scenario(peer: BadPeer) -> None:
        await peer.place(good.model)
        await peer.open_session(1, 0, 2)
        for value in (torch.nan, -torch.inf):
            spoilt = hidden(good)
            spoilt[0, 1, 7] = value
            with refused(ErrorCode.NOT_FINITE, "gave NaN or infinity"):
                await peer.activate(spoilt)
        await peer.activate(hidden(good))

    with_peer(worker, scenario)


def test_an_activation_that_is_no_envelope(worker: WorkerProcess, good: Good) -> None:
    async def scenario(peer: BadPeer) -> None:
        await peer.configure(serialize_config(good.model.config))
        for data in (b"", b"\xc1" * 100, bytes(1000)):
            with refused(ErrorCode.PROTOCOL_VIOLATION, ""):
                await peer.ask(MessageType.ACTIVATION, data, MessageType.RESPONSE)

    with_peer(worker, scenario)


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"layer_id": 1}, bytes(512)),
        ({"layer_id": 2**24 - 1}, bytes(512)),
        ({}, b""),
        ({}, bytes(511)),
        ({}, bytes(513)),
        ({"seq_id": 1}, bytes(512)),
        ({"seq_id": 2**64 - 1}, bytes(512)),
        ({}, bytes(512 * (MAX_SEQ_LEN + 1))),
    ],
    ids=["not held", "no layer", "empty", "odd", "not whole", "position", "far", "long"],
)
def test_an_activation_over_1_0_0_that_cannot_be_computed(
    worker: WorkerProcess, good: Good, header: dict[str, int], data: bytes
) -> None:
    async def scenario(peer: BadPeer) -> None:
        await configured(peer, good, PROTOCOL_V10)
        await peer.acknowledged(0, list(iter_weights_chunks(good.model.layers[0])))
        with refused(ErrorCode.SHAPE_MISMATCH, ""):
            await peer.ask(MessageType.ACTIVATION, data, MessageType.RESPONSE, **header)
        reply = await peer.ask(MessageType.ACTIVATION, bytes(1024), MessageType.RESPONSE)
        assert len(reply.data) == 1024

    with_peer(worker, scenario, PROTOCOL_V10)
