"""Ask an ASGI application in this process, as Hypercorn would: bodies in parts, clients that go away."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

__all__ = ["Answered", "ask", "run"]

DEADLINE = 30.0


@dataclass
class Answered:
    """What came back; the status is 0 where nothing did."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    is_finished: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """Of a stream; [DONE] as that string."""
        lines = [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def ask(
    app: Any,
    method: str,
    path: str,
    *,
    json_body: object = None,
    parts: Sequence[bytes] = (),
    headers: Sequence[tuple[str, str]] = (),
    leaves: Callable[[Answered], bool] = lambda answered: False,
) -> Answered:
    """Send a request and read the answer.

    Args:
        json_body: sent as JSON, with its content type; `parts` are sent as they are.
        leaves: asked after each part of the answer whether the client goes away.
    """
    given = dict(headers)
    if json_body is not None:
        parts = [json.dumps(json_body).encode()]
        given.setdefault("content-type", "application/json")
    given.setdefault("host", "127.0.0.1:8090")
    sending, receiving = trio.open_memory_channel[dict[str, Any]](0)
    answered, has_left = Answered(), trio.Event()

    async def send_request() -> None:
        for part in parts:
            await sending.send({"type": "http.request", "body": part, "more_body": True})
        await sending.send({"type": "http.request", "body": b"", "more_body": False})
        await has_left.wait()
        await sending.send({"type": "http.disconnect"})

    async def take(message: dict[str, Any]) -> None:
        await trio.lowlevel.checkpoint()
        if message["type"] == "http.response.start":
            answered.status = message["status"]
            answered.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            assert answered.status
            assert not answered.is_finished
            answered.parts.append(message.get("body", b""))
            answered.is_finished = not message.get("more_body", False)
        if leaves(answered) or answered.is_finished:
            has_left.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.1"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8090),
        "state": {},
        "extensions": {},
    }
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_request)
        await app(scope, receiving.receive, take)
        nursery.cancel_scope.cancel()
    return answered


def run(function: Callable[[], Any]) -> Any:
    """Run it in trio, for some seconds at most."""

    async def main() -> Any:
        with trio.fail_after(DEADLINE):
            return await function()

    return trio.run(main)
