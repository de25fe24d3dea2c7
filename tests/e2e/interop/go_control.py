"""The messages of the control socket of `p2pd`, the go-libp2p daemon.

Each is a protobuf message (p2pd.proto of go-libp2p-daemon) behind its length as an unsigned varint. Written by
hand, because five requests and two answers do not earn a protobuf compiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from libp2p.peer.id import ID
from multiaddr import Multiaddr

from tests.e2e.interop.control import Answer, Control, RequestFailedError, StreamStart

__all__ = ["GoControl"]

# Wire types of protobuf. The fixed-width ones occur in no message that we read.
VARINT, BLOCK = 0, 2
MAX_VARINT_BYTES = 10  # longer ones do not fit 64 bits

# The type of a request.
IDENTIFY, CONNECT, STREAM_OPEN, STREAM_HANDLER, LIST_PEERS, DISCONNECT = 0, 1, 2, 3, 5, 7
OK = 0  # the type of a response

UNIX = 400  # the code of /unix in the table of multiaddr


class GoControl(Control):
    """See `Control`."""

    def identify(self) -> bytes:
        return _frame(_number(1, IDENTIFY))

    def connect(self, peer_id: str, address: str) -> bytes:
        content = _block(1, _peer(peer_id)) + _block(2, Multiaddr(address).to_bytes())
        return _frame(_number(1, CONNECT) + _block(2, content))

    def list_peers(self) -> bytes:
        return _frame(_number(1, LIST_PEERS))

    def disconnect(self, peer_id: str) -> bytes:
        return _frame(_number(1, DISCONNECT) + _block(7, _block(1, _peer(peer_id))))

    def open_stream(self, peer_id: str, protocols: Sequence[str]) -> bytes:
        content = _block(1, _peer(peer_id)) + b"".join(_block(2, p.encode()) for p in protocols)
        return _frame(_number(1, STREAM_OPEN) + _block(3, content))

    def accept_streams(self, path: str, protocols: Sequence[str]) -> bytes:
        # Go keeps the leading slash of the path in the binary form, which py-multiaddr drops.
        address = _varint(UNIX) + _varint(len(path.encode())) + path.encode()
        content = _block(1, address) + b"".join(_block(2, p.encode()) for p in protocols)
        # Several handlers for one protocol, in turn: no. The fork in the wheel requires the field.
        balanced = _number(3, 0)
        return _frame(_number(1, STREAM_HANDLER) + _block(4, content + balanced))

    def take_answer(self, buffer: bytearray) -> Answer | None:
        message = _take_frame(buffer)
        if message is None:
            return None
        fields = dict(_fields(message))
        if fields.get(1) != OK:
            error = dict(_fields(_bytes(fields.get(2, b"")))).get(1, b"no reason given")
            raise RequestFailedError(_bytes(error).decode())
        identity = list(_fields(_bytes(fields.get(4, b""))))
        stream_info = fields.get(3)
        return Answer(
            peer_id="".join(_peer_id(value) for key, value in identity if key == 1),
            addresses=tuple(str(Multiaddr(_bytes(value))) for key, value in identity if key == 2),
            peers=tuple(
                _peer_id(dict(_fields(_bytes(value)))[1])
                for key, value in _fields(message)
                if key == 6
            ),
            stream=None if stream_info is None else _stream_start(_bytes(stream_info)),
        )

    def take_stream_start(self, buffer: bytearray) -> StreamStart | None:
        message = _take_frame(buffer)
        return None if message is None else _stream_start(message)


def _stream_start(stream_info: bytes) -> StreamStart:
    return StreamStart(protocol=_bytes(dict(_fields(stream_info))[3]).decode())


def _peer(peer_id: str) -> bytes:
    return ID.from_base58(peer_id).to_bytes()


def _peer_id(value: int | bytes) -> str:
    return ID(_bytes(value)).to_base58()


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3 | VARINT) + _varint(value)


def _block(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | BLOCK) + _varint(len(content)) + content


def _frame(message: bytes) -> bytes:
    return _varint(len(message)) + message


def _take_frame(buffer: bytearray) -> bytes | None:
    header = _read_varint(buffer, 0)
    if header is None:
        return None
    length, start = header
    if len(buffer) < start + length:
        return None
    message = bytes(buffer[start : start + length])
    del buffer[: start + length]
    return message


def _read_varint(data: bytes | bytearray, start: int) -> tuple[int, int] | None:
    """The value and where it ends; None when `data` stops within it."""
    value = 0
    for index, byte in enumerate(data[start : start + MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, start + index + 1
    assert len(data) - start < MAX_VARINT_BYTES, "a varint of more than ten bytes"
    return None


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message by their numbers, in their order."""
    position = 0
    while position < len(message):
        tag, position = _whole_varint(message, position)
        value, position = _whole_varint(message, position)
        if tag & 7 == VARINT:
            yield tag >> 3, value
            continue
        assert tag & 7 == BLOCK, f"wire type {tag & 7} occurs in no message of the daemon"
        assert position + value <= len(message), "a field is longer than its message"
        yield tag >> 3, message[position : position + value]
        position += value


def _whole_varint(message: bytes, start: int) -> tuple[int, int]:
    read = _read_varint(message, start)
    assert read is not None, "a message stops within a varint"
    return read


def _bytes(value: int | bytes) -> bytes:
    assert isinstance(value, bytes), "a number where bytes belong"
    return value
