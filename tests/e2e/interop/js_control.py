"""The messages of the control socket of `js/peer.js`: one line of JSON each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.e2e.interop.control import Answer, Control, RequestFailedError, StreamStart

__all__ = ["JsControl"]


class JsControl(Control):
    """See `Control`."""

    def identify(self) -> bytes:
        return _line(do="identify")

    def connect(self, peer_id: str, address: str) -> bytes:
        return _line(do="connect", address=f"{address}/p2p/{peer_id}")

    def list_peers(self) -> bytes:
        return _line(do="peers")

    def disconnect(self, peer_id: str) -> bytes:
        return _line(do="disconnect", peer=peer_id)

    def open_stream(self, peer_id: str, protocols: Sequence[str]) -> bytes:
        return _line(do="open", peer=peer_id, protocols=list(protocols))

    def accept_streams(self, path: str, protocols: Sequence[str]) -> bytes:
        return _line(do="handle", path=path, protocols=list(protocols))

    def take_answer(self, buffer: bytearray) -> Answer | None:
        answer = _take_line(buffer)
        if answer is None:
            return None
        if "error" in answer:
            raise RequestFailedError(answer["error"])
        return Answer(
            peer_id=answer.get("peer", ""),
            addresses=tuple(a.partition("/p2p/")[0] for a in answer.get("addresses", ())),
            peers=tuple(answer.get("peers", ())),
            stream=_stream_start(answer) if "stream" in answer else None,
        )

    def take_stream_start(self, buffer: bytearray) -> StreamStart | None:
        header = _take_line(buffer)
        return None if header is None else _stream_start(header)

    def reset_stream(self, name: str, after_bytes: int) -> bytes:
        return _line(do="reset", stream=name, after=after_bytes)


def _stream_start(header: dict[str, Any]) -> StreamStart:
    return StreamStart(protocol=header["protocol"], name=header["stream"])


def _line(**content: Any) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _take_line(buffer: bytearray) -> dict[str, Any] | None:
    line, newline, rest = buffer.partition(b"\n")
    if not newline:
        return None
    buffer[:] = rest
    content: dict[str, Any] = json.loads(line)
    return content
