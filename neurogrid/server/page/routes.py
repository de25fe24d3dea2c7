"""The page at `/`, of a cluster that serves or of a run that trains: a few static files from this package, read once.

It needs no key: it asks for one, and everything that it shows comes from routes that do. What it may do is said
by the content security policy: run our scripts, ask this server, and nothing else.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

__all__ = ["SERVING", "TRAINING", "page_routes"]

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_HEADERS: Final = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            # What is attached to a message is shown.
            "img-src 'self' data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Asked each time whether it is still the same: another version of the server has another page.
    "Cache-Control": "no-cache",
}


SERVING: Final = "index.html"
"""The page of a coordinator that serves."""

TRAINING: Final = "training.html"
"""The page of the leader of a training run."""


def page_routes(name: str = SERVING) -> list[BaseRoute]:
    """A page and its files. None of them needs a key.

    Args:
        name: of the page, one of this module's.
    """
    found = {}
    for file in files("neurogrid.server.page").joinpath("static").iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in _TYPES:
            found[file.name] = _File(file.read_bytes(), _TYPES[suffix])
    index = {page: found.pop(page) for page in (SERVING, TRAINING)}[name]

    async def page(request: Request) -> Response:
        return index.answer(request)

    async def static(request: Request) -> Response:
        file = found.get(request.path_params["file"])
        if file is None:
            raise HTTPException(404)
        return file.answer(request)

    return [Route("/", page), Route("/static/{file}", static)]


class _File:
    def __init__(self, content: bytes, media_type: str) -> None:
        self._content = content
        self._media_type = media_type
        self._etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'

    def answer(self, request: Request) -> Response:
        headers = {**_HEADERS, "ETag": self._etag}
        if request.headers.get("if-none-match") == self._etag:
            return Response(status_code=304, headers=headers)
        return Response(self._content, media_type=self._media_type, headers=headers)
