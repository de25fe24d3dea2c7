"""`/v1/cluster/info`: what is known of the cluster. `/v1/cluster/events`: the same, and every change of it, by SSE.

A stream of events begins with `snapshot`, the whole status; `patch` is what changed since, as a merge patch (RFC
7396); `event` is something that happened, in words; `heartbeat` says that nothing did. What is not known is left out.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from typing import Final, cast

import trio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from neurogrid.errors import CapacityError
from neurogrid.fleet.board.status import Health, Json, to_json
from neurogrid.inference.board.status import ClusterStatus
from neurogrid.inference.board.status_board import StatusBoard
from neurogrid.node.events import MAX_SUBSCRIBERS
from neurogrid.server.cluster.merge_patch import merge_patch, without_nulls
from neurogrid.server.errors import APIError
from neurogrid.server.http.places import NoPlaceError, Places, client_address, share_of
from neurogrid.server.models import Models
from neurogrid.server.openapi import Paths, json_answer, operation

__all__ = ["CLUSTER_PATHS", "cluster_info", "cluster_routes"]

# Between two patches of one stream. Seconds.
INTERVAL: Final = 0.25
# Of the time, what may go into making what is sent.
MAX_SHARE: Final = 0.02
# A proxy closes a connection on which nothing comes, mostly after a minute. Seconds.
HEARTBEAT: Final = 15.0
# What a client is told to wait before it connects again. Milliseconds.
RETRY_MILLISECONDS: Final = 1000
RETRY_AFTER: Final = 10.0
# Numbers beyond that are times of the day, which are sent to the millisecond.
A_TIME: Final = 1e9
SIGNIFICANT_DIGITS: Final = 3

_BY_PEER = {"type": "object", "description": "By peer id."}
_LAYERS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_INFO = {
    "type": "object",
    "required": [
        "peer_id",
        "connected_peers",
        "layer_assignments",
        "memory_usage",
        "total_layers",
        "loaded_layers",
    ],
    "properties": {
        "peer_id": {"type": "string"},
        "connected_peers": {"type": "array", "items": {"type": "string"}},
        "layer_assignments": {**_BY_PEER, "additionalProperties": _LAYERS},
        "memory_usage": {**_BY_PEER, "additionalProperties": {"type": "object"}},
        "total_layers": {"type": "integer", "minimum": 0},
        "loaded_layers": _LAYERS,
        "status": {"type": "object"},
        "models": {
            "type": "array",
            "description": "Of a server with several: each with its `state`, and the `reason` of it.",
            "items": {"type": "object", "required": ["id", "state"]},
        },
    },
}
# Events are not in it: a document of requests and answers has no words for a stream that does not end.
CLUSTER_PATHS: Paths = {
    "/v1/cluster/info": {
        "get": operation(
            "What is known of the cluster at this moment; of several models, of the one that is named, or the first.",
            json_answer(_INFO),
            errors=(404,),
            parameters=[
                {"name": "model", "in": "query", "required": False, "schema": {"type": "string"}}
            ],
        )
    }
}


def cluster_routes(
    board: StatusBoard | None = None, models: Models | None = None
) -> list[BaseRoute]:
    """The two routes. They answer before the workers are there, too: with what is known by then.

    Args:
        board: of the one coordinator; None where there are several.
        models: those that there are then.
    """
    views: dict[StatusBoard, _View] = {}
    places: Places[object] = Places(MAX_SUBSCRIBERS, share_of(MAX_SUBSCRIBERS))

    def chosen(request: Request) -> StatusBoard:
        if models is None:
            assert board is not None
            return board
        return models.choose(request.query_params.get("model")).board

    def view_of(board: StatusBoard) -> _View:
        if board not in views:
            for gone in set(views) - {each.board for each in (models.all() if models else ())}:
                del views[gone]
            views[board] = _View(board)
        return views[board]

    async def info(request: Request) -> JSONResponse:
        told = cluster_info(chosen(request).status())
        if models is not None:
            told["models"] = [{"id": each.name, **each.told} for each in models.all()]
        return JSONResponse(told)

    async def events(request: Request) -> Response:
        board = chosen(request)
        view = view_of(board)
        address = client_address(request.client.host) if request.client else ""
        if board.events.is_full or not places.has_room(address):
            raise _too_many()
        return _ClosedStream(
            _stream(view, places, address),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    return [Route("/v1/cluster/info", info), Route("/v1/cluster/events", events)]


def cluster_info(status: ClusterStatus) -> dict[str, Json]:
    """Make the answer of `/v1/cluster/info`.

    `layer_assignments` and `memory_usage` are by peer id; layers are numbers from 0, memory is in bytes. The status
    as a whole, as `ClusterStatus` describes it, is under `status`.
    """
    peers = {
        peer_id: peer for peer_id, peer in status.peers.items() if peer.health is not Health.LOST
    }
    return {
        "peer_id": status.peer_id,
        "connected_peers": list(peers),
        "layer_assignments": {
            peer_id: list(peer.layers_assigned) for peer_id, peer in peers.items()
        },
        "memory_usage": {
            peer_id: {
                "total_bytes": peer.memory_total_bytes,
                "used_bytes": peer.memory_used_bytes,
                "free_bytes": peer.memory_free_bytes,
                "stage_bytes": peer.memory_stage_bytes,
            }
            for peer_id, peer in peers.items()
        },
        "total_layers": status.total_layers,
        "loaded_layers": list(status.loaded_layers),
        "status": status.to_json(),
    }


class _View:
    """The status as streams send it, made once for all that ask within `INTERVAL`.

    Making it takes milliseconds in which nothing else goes on here: where there are many workers, it is made less
    often.
    """

    def __init__(self, board: StatusBoard) -> None:
        self.board = board
        self._document: dict[str, Json] = {}
        self._good_until = -math.inf

    def document(self) -> dict[str, Json]:
        """The status without events; links and requests by name, so that a patch says which of them changed."""
        now = time.monotonic()
        if now >= self._good_until:
            status = self.board.status()
            document = status.to_json()
            del document["events"], document["at"]
            document["links"] = {
                f"{link.source}>{link.target}": item
                for link, item in zip(
                    status.links, cast("list[Json]", document["links"]), strict=True
                )
            }
            document["requests"] = {
                str(request.number): item
                for request, item in zip(
                    status.requests, cast("list[Json]", document["requests"]), strict=True
                )
            }
            self._document = cast("dict[str, Json]", _rounded(without_nulls(document)))
            spent = time.monotonic() - now
            self._good_until = now + max(INTERVAL / 2, spent / MAX_SHARE)
        return self._document


class _ClosedStream(StreamingResponse):
    """A stream that ends with its answer: its place is free also when the client goes while something is sent."""

    body_iterator: AsyncGenerator[bytes, None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):
            await super().__call__(scope, receive, send)


async def _stream(view: _View, places: Places[object], address: str) -> AsyncGenerator[bytes, None]:
    events = view.board.events
    holder = object()
    with ExitStack() as stack:
        try:
            places.take(holder, address)
            stack.callback(places.leave, holder)
            places.keep(holder)
            subscription = stack.enter_context(events.subscribe())
        except (CapacityError, NoPlaceError):  # others came while this answer began
            yield _message("error", _too_many().body)
            return
        sent = view.document()
        first = {**sent, "at": time.time(), "events": to_json(events.last)}
        yield f"retry: {RETRY_MILLISECONDS}\n\n".encode()
        yield _message("snapshot", first)
        last = trio.current_time()
        while not events.is_closed:
            with trio.move_on_after(INTERVAL):
                await subscription.wait()
            parts = [_message("event", to_json(event)) for event in subscription.take()]
            document = view.document()
            if patch := merge_patch(sent, document):
                parts.append(_message("patch", patch))
                sent = document
            now = trio.current_time()
            if not parts and now - last >= HEARTBEAT:
                parts.append(_message("heartbeat", {}))
            if parts:
                last = now
                yield b"".join(parts)


def _message(event: str, data: object) -> bytes:
    # One line: JSON escapes line breaks.
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"event: {event}\ndata: {text}\n\n".encode()


def _rounded(value: Json) -> Json:
    """Numbers as exact as anybody looks at them, so that what did not really change is not sent."""
    if isinstance(value, float):
        if not value or abs(value) >= A_TIME:
            return round(value, 3)
        return round(value, SIGNIFICANT_DIGITS - 1 - math.floor(math.log10(abs(value))))
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


def _too_many() -> APIError:
    return APIError(
        503,
        "as many clients follow the events of this cluster as it serves at once, or as many from one address: "
        f"{MAX_SUBSCRIBERS}, and {share_of(MAX_SUBSCRIBERS)}",
        code="too_many_subscribers",
        retry_after=RETRY_AFTER,
    )
