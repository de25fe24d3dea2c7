"""Whole messages whose Data lies: each is refused by its request id, and the stream goes on."""

from __future__ import annotations

from typing import Any

import msgpack

from neurogrid.p2p import MessageType
from neurogrid.p2p.wire import ErrorCode, ErrorPayload
from tests.e2e.hostile.raw_peer import activation, message
from tests.e2e.hostile.scene import Scene, run

VIOLATION, LIMIT, SHAPE = (
    ErrorCode.PROTOCOL_VIOLATION,
    ErrorCode.LIMIT_EXCEEDED,
    ErrorCode.SHAPE_MISMATCH,
)
MAX_U32 = 2**32 - 1


def envelope(tensor: bytes = bytes(12), **changes: Any) -> bytes:
    fields = {"sid": 1, "pos": 0, "start": 0, "stop": 1, "dtype": "F32", "shape": [3], **changes}
    entries: bytes = msgpack.packb(fields)
    return entries + bytes(-len(entries) % 16) + tensor


def nested(depth: int) -> bytes:
    """An array in an array in an array."""
    return b"\x91" * depth + b"\xc0"


LIES = {
    "unknown dtype": (envelope(dtype="F128"), VIOLATION),
    "long dtype": (envelope(dtype="F" * 3000), VIOLATION),
    "dtype of another kind": (envelope(dtype=["F32"]), VIOLATION),
    "shape that overflows 64 bits": (envelope(shape=[MAX_U32] * 8), SHAPE),
    "shape that wraps to what there is": (envelope(shape=[2**31, 2**31, 4, 3]), SHAPE),
    "zeros times much": (envelope(shape=[0, MAX_U32]), SHAPE),
    "negative": (envelope(shape=[-3]), VIOLATION),
    "floats": (envelope(shape=[3.0]), VIOLATION),
    "booleans": (envelope(shape=[True, 3]), VIOLATION),
    "rank": (envelope(shape=[1] * 9), LIMIT),
    "rank that is only claimed": (
        envelope()[:1] + b"\xa5shape\xdd\xff\xff\xff\xff" + bytes(50),
        LIMIT,
    ),
    "no shape": (msgpack.packb({"sid": 1}), VIOLATION),
    "other bytes": (envelope(bytes(13)), SHAPE),
    "none": (b"", VIOLATION),
    "padding": (msgpack.packb({"sid": 1}) + b"\xff" * 30, VIOLATION),
    "twice": (b"\x82\xa3sid\x01\xa3sid\x02", VIOLATION),
    "deep under an unknown key": (b"\x81\xa1x" + nested(60_000), LIMIT),
    "deep under a known key": (b"\x81\xa5shape" + nested(60_000), VIOLATION),
    "deep as a key": (b"\x81" + nested(60_000), VIOLATION),
    "many keys": (b"\xdf\xff\xff\xff\xff" + bytes(100), LIMIT),
    "a string of 4 GiB": (b"\x81\xa5dtype\xdb\xff\xff\xff\xff", VIOLATION),
    "layers": (envelope(start=5, stop=5), VIOLATION),
    "position": (envelope(pos=-1), VIOLATION),
}


def test_each_lie_is_refused_alone() -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open_v11()
        refused = {}
        for request_id, (name, (data, _)) in enumerate(LIES.items(), 1):
            msg_type = MessageType.TRACED_ACTIVATION if request_id % 2 else MessageType.ACTIVATION
            await stream.say(message(msg_type, data, request_id=request_id))
            error = await stream.receive(MessageType.ERROR)
            assert error.request_id == request_id, name
            refused[name] = ErrorCode(ErrorPayload.decode(error.data).code)
        assert refused == {name: code for name, (_, code) in LIES.items()}
        await stream.say(activation(b"good", request_id=1000))
        assert (await stream.receive(MessageType.RESPONSE)).request_id == 1000
        assert len(scene.served) == 2  # the honest peer's and the good one

    run(scenario)
