"""Messages in the wrong order: refused, and the worker serves on."""

from __future__ import annotations

from typing import Any

import pytest
from blake3 import blake3

from neurogrid.errors import PeerRefusedError
from neurogrid.p2p import PROTOCOL_V10, PROTOCOL_V11, MessageType, TensorMessage
from neurogrid.p2p.wire import (
    Assign,
    ErrorCode,
    ErrorPayload,
    LayerIds,
    Ready,
    SessionClose,
    SessionOpen,
    TransferOffer,
    iter_weights_chunks,
    serialize_config,
)
from tests.e2e.bad_input_peer.peer import BadPeer, connect, refused
from tests.e2e.bad_input_peer.scenarios import VERSIONS, Good, hidden, with_peer
from tests.e2e.support import (
    WorkerProcess,
)


@pytest.mark.parametrize("version", VERSIONS)
def test_weights_before_config(worker: WorkerProcess, good: Good, version: str) -> None:
    async def scenario(peer: BadPeer) -> None:
        chunks = list(iter_weights_chunks(good.model.layers[0]))
        request_id = 7 if version == PROTOCOL_V11 else 0
        with refused(ErrorCode.CONFIG_REQUIRED, "send ModelConfig first"):
            await peer.acknowledged(0, [*chunks], request_id)

    with_peer(worker, scenario, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_an_activation_before_config(worker: WorkerProcess, good: Good, version: str) -> None:
    async def scenario(peer: BadPeer) -> None:
        with refused(ErrorCode.CONFIG_REQUIRED, "send ModelConfig first"):
            if version == PROTOCOL_V11:
                await peer.activate(hidden(good))
            else:
                await peer.ask(MessageType.ACTIVATION, bytes(512), MessageType.RESPONSE)

    with_peer(worker, scenario, version)


@pytest.mark.parametrize(
    ("msg_type", "data", "answer"),
    [
        (MessageType.ASSIGN, Assign(0, 2, 64, 1, "F32").encode(), MessageType.ASSIGN_ACK),
        (
            MessageType.TRANSFER_OFFER,
            TransferOffer(0, 100, blake3(bytes(32)).digest(), bytes(32)).encode(),
            MessageType.TRANSFER_ACCEPT,
        ),
        (MessageType.SESSION_OPEN, SessionOpen(1, 0, 2, 8).encode(), MessageType.SESSION_ACK),
        (MessageType.LAYER_REQUEST, LayerIds((0, 1)).encode(), MessageType.LAYER_STATUS),
    ],
    ids=lambda value: value.name if isinstance(value, MessageType) else "",
)
def test_anything_before_config(
    worker: WorkerProcess, msg_type: MessageType, data: bytes, answer: MessageType
) -> None:
    async def scenario(peer: BadPeer) -> None:
        with refused(ErrorCode.CONFIG_REQUIRED, "send ModelConfig first"):
            await peer.ask(msg_type, data, answer)

    with_peer(worker, scenario)


def test_a_session_before_the_weights(worker: WorkerProcess, good: Good) -> None:
    async def scenario(peer: BadPeer) -> None:
        await peer.configure(serialize_config(good.model.config))
        with refused(ErrorCode.LAYER_NOT_HELD, "not ready for layers 0, 1"):
            await peer.open_session(1, 0, 2)
        await peer.assign(0, 2)
        # The worker holds these layers from the last test's coordinator; nobody confirmed them to us.
        with refused(ErrorCode.LAYER_NOT_HELD, "not ready for layers 0, 1"):
            await peer.open_session(1, 0, 2)

    with_peer(worker, scenario)


def test_answers_that_nobody_asked_for(worker: WorkerProcess) -> None:
    async def scenario(peer: BadPeer) -> None:
        await peer.send(MessageType.LAYER_STATUS, LayerIds((0, 1)).encode())
        await peer.send(MessageType.READY, Ready(0, 2).encode(), request_id=5)
        await peer.send(MessageType.RESPONSE, bytes(100), request_id=5)
        await peer.send(MessageType.ERROR, ErrorPayload(code=9, text="out\x1b[2J").encode())
        await peer.ask(MessageType.LAYER_REQUEST, LayerIds(()).encode(), MessageType.LAYER_STATUS)

    with_peer(worker, scenario)


@pytest.mark.parametrize(
    ("assign", "code", "says"),
    [
        ({"stop": 3}, ErrorCode.LAYER_NOT_HELD, "the model has 2"),
        ({"max_length": 2**31}, ErrorCode.LIMIT_EXCEEDED, "takes 64: start it with"),
        ({"max_sessions": 65_536}, ErrorCode.SESSION_LIMIT, "65536 sessions at once"),
        ({"dtype": "F16"}, ErrorCode.CONFIG_INVALID, "the config says F32 and the assignment F16"),
    ],
    ids=str,
)
def test_an_assignment_that_cannot_be_met(
    worker: WorkerProcess, good: Good, assign: dict[str, Any], code: ErrorCode, says: str
) -> None:
    async def scenario(peer: BadPeer) -> None:
        await peer.configure(serialize_config(good.model.config))
        with refused(code, says):
            await peer.assign(0, **{"stop": 2, **assign})

    with_peer(worker, scenario)


def test_sessions_beyond_what_was_agreed(worker: WorkerProcess, good: Good) -> None:
    async def scenario(peer: BadPeer) -> None:
        await peer.configure(serialize_config(good.model.config))
        await peer.assign(0, 2, max_length=32, max_sessions=2)
        for layer_id, blob in enumerate(good.model.layers):
            await peer.transfer(layer_id, blob)
        with refused(ErrorCode.LIMIT_EXCEEDED, "33 tokens was asked for, and 32 were agreed"):
            await peer.open_session(1, 0, 2, max_length=33)
        with refused(
            ErrorCode.LAYER_NOT_HELD, "not ready for layers 2, 3, 4, 5, 6, 7, 8, 9 and 65"
        ):
            await peer.open_session(1, 0, 65_536)
        await peer.open_session(1, 0, 2)
        with refused(ErrorCode.PROTOCOL_VIOLATION, "session 1 is open already"):
            await peer.open_session(1, 0, 2)
        await peer.open_session(2, 0, 2)
        with refused(ErrorCode.SESSION_LIMIT, "2 sessions are open"):
            await peer.open_session(3, 0, 2)

    with_peer(worker, scenario)


@pytest.mark.parametrize(
    ("msg_type", "data"),
    [
        (MessageType.ASSIGN, Assign(0, 2, 64, 1, "F32").encode()),
        (
            MessageType.TRANSFER_OFFER,
            TransferOffer(0, 100, blake3(bytes(32)).digest(), bytes(32)).encode(),
        ),
        (MessageType.SESSION_OPEN, SessionOpen(1, 0, 2, 8).encode()),
        (MessageType.SESSION_CLOSE, SessionClose(1).encode()),
        (MessageType.ERROR, ErrorPayload(code=9, text="no").encode()),
    ],
    ids=lambda value: value.name if isinstance(value, MessageType) else "",
)
def test_what_1_1_0_alone_has_is_not_taken_over_1_0_0(
    worker: WorkerProcess, good: Good, msg_type: MessageType, data: bytes
) -> None:
    """On a stream of its own, beside the 1.1.0 of the same peer or of another coordinator: nothing comes of it."""

    async def scenario(peer: BadPeer) -> None:
        await peer.place(good.model)
        await peer.open_session(1, 0, 2)
        message = TensorMessage(msg_type=msg_type, layer_id=0, request_id=0, data=data)
        async with connect(worker.address, PROTOCOL_V10) as another:
            for sender in (peer, another):
                with pytest.raises(PeerRefusedError):
                    await sender.protocol._oneshot.send(sender.worker_id, message)
            for msg_type_v10 in (MessageType.ACTIVATION, MessageType.WEIGHTS):
                with pytest.raises(PeerRefusedError):
                    await another.send(msg_type_v10, bytes(512))
        # The session is there, and is the only one.
        await peer.activate(hidden(good))
        await peer.open_session(2, 0, 2)

    with_peer(worker, scenario)
