"""Access to the server, checked before any route sees the request.

A page of another site can make a browser send requests to loopback. Three things keep it out: no CORS header unless
its origin was named, so that it reads no answer; only `application/json` is taken, which a browser sends to another
origin only after it has asked; and, where no key is needed, the Host header has to be an address or a name of this
machine, since a name that its owner points at 127.0.0.1 makes any site the same origin (DNS rebinding).

A request whose answer nobody may read still costs what it asks for. Browsers say where a request comes from
(Sec-Fetch-Site): where no key is needed, one of another site is refused, unless somebody followed a link to the page.
Source: https://www.w3.org/TR/fetch-metadata/

Programs that speak to Ollama often send JSON and do not say so. Below `/api/` that is taken of a client that is no
browser: those name the origin of every POST.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from neurogrid.server.errors import OLLAMA_PREFIX, APIError

__all__ = ["KEEP_PLACE", "Access", "Guard"]

# In a scope's state: what to call, without arguments, when its client has shown that it is to be served.
KEEP_PLACE = "neurogrid.keep_place"

_METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


@dataclass(frozen=True)
class Access:
    """The clients that are served.

    Attributes:
        keys: API keys, one of which a request has to carry; empty where none is needed.
        hosts: what a Host header may name besides addresses, `localhost` and this machine's name.
        cors_origins: pages of these origins may read answers, as `https://chat.example`.
    """

    keys: tuple[str, ...] = ()
    hosts: frozenset[str] = frozenset()
    cors_origins: tuple[str, ...] = ()


class Guard:
    """ASGI middleware.

    Args:
        open_routes: need no key: those that say whether the process lives, and the page that asks for the key.
        routes: all others. A body for none of them need not be JSON: that it has the wrong path is what its client is
            to hear.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        open_routes: Sequence[BaseRoute],
        routes: Sequence[BaseRoute],
    ) -> None:
        self._app = app
        self._routes = tuple(routes)
        self._open_routes = tuple(open_routes)
        # Digests have one length, so that comparing tells nothing of the keys' lengths either.
        self._key_digests = [_digest(key.encode()) for key in access.keys]
        name = socket.gethostname().lower()
        self._hosts = {"localhost", name, f"{name}.local", *map(str.lower, access.hosts)}
        self._cors_origins = frozenset(origin.encode() for origin in access.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except APIError as error:
                await error.response(scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        is_open = _is_taken(scope, self._open_routes)
        if not self._key_digests:
            self._check_host(headers.get(b"host", b""))
            self._check_site(headers, is_open=is_open)
        elif not is_open:
            self._check_key(headers.get(b"authorization", b""))
        has_body = scope["method"] in _METHODS_WITH_BODY
        may_say_nothing = scope["path"].startswith(OLLAMA_PREFIX) and not _is_browser(headers)
        if has_body and not may_say_nothing and (is_open or _is_taken(scope, self._routes)):
            _check_content_type(headers.get(b"content-type", b""))
        keep_place = scope.get("state", {}).get(KEEP_PLACE)
        if keep_place is not None and not is_open:
            keep_place()

    def _check_site(self, headers: dict[bytes, bytes], *, is_open: bool) -> None:
        if headers.get(b"sec-fetch-site") != b"cross-site":
            return
        if headers.get(b"origin") in self._cors_origins:
            return
        is_link = headers.get(b"sec-fetch-mode") == b"navigate"
        if not (is_open and is_link and headers.get(b"sec-fetch-dest") == b"document"):
            raise APIError(
                403,
                "a page of another site asked for this; a server without API keys answers its own page only, and "
                "origins that are named (--cors-origin, --api-key-file)",
                code="cross_site",
            )

    def _check_host(self, host: bytes) -> None:
        try:
            name = urlsplit(f"//{host.decode('ascii')}").hostname or ""
        except ValueError:
            name = ""
        if name not in self._hosts and not _is_address(name):
            raise APIError(
                403,
                "the Host header names neither an address nor this machine; a server without API keys answers "
                "to those only, because of DNS rebinding (--api-key-file)",
                code="host_not_allowed",
            )

    def _check_key(self, authorization: bytes) -> None:
        scheme, _, key = authorization.partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._key_digests]
        if scheme.lower() != b"bearer" or not any(matches):
            what = "is not one of this server's" if authorization else "is missing"
            raise APIError(
                401,
                f"the API key {what}: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _is_taken(scope: Scope, routes: Sequence[BaseRoute]) -> bool:
    """Whether one of `routes` takes this path and this method."""
    return any(route.matches(scope)[0] is Match.FULL for route in routes)


def _is_browser(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a request with a body may be a browser's. Source: https://fetch.spec.whatwg.org/#origin-header"""
    return any(
        name in headers for name in (b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"referer")
    )


def _check_content_type(value: bytes) -> None:
    media_type = value.partition(b";")[0].strip().lower()
    if media_type != b"application/json":
        raise APIError(
            415,
            "the body has to be JSON: send the header Content-Type: application/json",
            code="unsupported_media_type",
        )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
