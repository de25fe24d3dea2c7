"""Errors of requests, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}; below `/api/` in Ollama's:
{"error": "message"}.

Clients of OpenAI's API look at the status first, and at `code` where one status has several reasons.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from neurogrid.errors import ConfigurationError
from neurogrid.telemetry.http_metrics import CLIENT_LEFT

__all__ = [
    "OLLAMA_PREFIX",
    "APIError",
    "answer_api_error",
    "answer_bug",
    "answer_http_exception",
    "answer_nobody",
    "keeping",
]

logger = logging.getLogger(__name__)

OLLAMA_PREFIX = "/api/"
"""The paths of Ollama's API, and of no other."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}


class APIError(Exception):
    """A request that is not served.

    Attributes:
        status: of HTTP, 400 to 599.
        message: what happened, and what to do.
        param: the field that is wrong, as `stop` or `messages[0].role`.
        code: for programs, where one status has several reasons.
        retry_after: seconds after which it may be tried again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self._headers = dict(headers or {})

    @property
    def body(self) -> dict[str, object]:
        """The JSON object that is answered, or sent as the last event of a stream."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def json(self) -> bytes:
        """`body`, written out."""
        return json.dumps(self.body, separators=(",", ":")).encode()

    @property
    def ollama_body(self) -> dict[str, object]:
        """The same as `body`, as clients of Ollama's API read it."""
        return {"error": self.message}

    def response(self, path: str) -> JSONResponse:
        """The answer to a request of `path`, in the shape of its API."""
        body = self.ollama_body if path.startswith(OLLAMA_PREFIX) else self.body
        headers = self._headers
        if self.retry_after is not None:
            headers = {**headers, "Retry-After": str(max(math.ceil(self.retry_after), 1))}
        return JSONResponse(body, status_code=self.status, headers=headers)


@contextmanager
def keeping() -> Iterator[None]:
    """A change that is written for the next start, for a client: the machine's files are named in the log alone.

    Raises:
        APIError: 500, it cannot be written.
    """
    try:
        yield
    except ConfigurationError as exc:
        logger.error("what a client changed was not kept, and so not done: %s", exc)
        raise APIError(
            500,
            "nothing was changed, for it could not be kept until the next start: the server's log says why",
            code="not_kept",
        ) from exc


async def answer_api_error(request: Request, exc: Exception) -> JSONResponse:
    """Starlette's handler of `APIError`."""
    assert isinstance(exc, APIError)
    return exc.response(request.url.path)


async def answer_http_exception(request: Request, exc: Exception) -> JSONResponse:
    """Starlette's handler of its own errors: a path that is nobody's, a method that it does not take."""
    assert isinstance(exc, HTTPException)
    path = request.url.path[:200]
    if exc.status_code == HTTPStatus.NOT_FOUND:
        offered = ", ".join(_paths(request.app))
        error = APIError(
            404, f"{path} is not offered here; what is offered: {offered}", code="unknown_url"
        )
    elif exc.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (exc.headers or {}).get("Allow", "")
        error = APIError(
            405,
            f"{path} does not take {request.method[:20]}; it takes {allowed}",
            code="method_not_allowed",
            headers=exc.headers,
        )
    else:
        error = APIError(exc.status_code, str(exc.detail), headers=exc.headers)
    return error.response(request.url.path)


def _paths(app: Starlette) -> list[str]:
    """The paths of programs, those of one thing among several left out."""
    paths = [route.path for route in app.routes if isinstance(route, Route)]
    return [path for path in dict.fromkeys(paths) if path != "/" and "{" not in path]


async def answer_nobody(request: Request, exc: Exception) -> Response:
    """Starlette's handler of a client that went away before all of its request was there."""
    return Response(status_code=CLIENT_LEFT)


async def answer_bug(request: Request, exc: Exception) -> JSONResponse:
    """Starlette's handler of everything else: it is logged with its traceback, and told nobody."""
    error = APIError(500, "the server met a bug of its own; its log says more")
    return error.response(request.url.path)
