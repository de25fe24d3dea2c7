"""A page on a server of this process, whose cluster or run a test tells what to say: for what passes too quickly to be
seen.

What the page shows of a real cluster is in `test_page.py`, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Queue
from typing import TypeVar

import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from neurogrid.inference.board.status_board import StatusBoard
from neurogrid.server.app import make_app
from neurogrid.server.cluster.routes import cluster_routes
from neurogrid.server.http.guard import Access
from neurogrid.server.http.http_server import open_http
from neurogrid.server.page.routes import page_routes

__all__ = ["PageServer", "serve", "serve_page"]

T = TypeVar("T")


class PageServer:
    """A server that runs in a thread."""

    def __init__(self, url: str, token: trio.lowlevel.TrioToken) -> None:
        self.url = url
        self.port = int(url.rpartition(":")[2])
        self._token = token

    def tell(self, function: Callable[..., T], *args: object) -> T:
        """Call a method of a board where it may be called."""
        return trio.from_thread.run_sync(function, *args, trio_token=self._token)


@contextmanager
def serve_page(
    board: StatusBoard,
    *,
    keys: tuple[str, ...] = (),
    port: int = 0,
    models: tuple[str, ...] = ("a-model",),
    takes_images: bool = False,
) -> Iterator[PageServer]:
    """Serve the page of a cluster and what `board` knows until the block is left.

    Args:
        models: that answers can be asked of.
        takes_images: whether they do.
    """

    async def list_models(request: Request) -> JSONResponse:
        kinds = ["text", "image"] if takes_images else ["text"]
        found = [{"id": name, "input_modalities": kinds} for name in models]
        return JSONResponse({"object": "list", "data": found})

    routes = [*cluster_routes(board), Route("/v1/models", list_models)]
    app = make_app(routes, open_routes=page_routes(), access=Access(keys=keys))
    with serve(app, port=port, at_end=board.events.close) as server:
        yield server


@contextmanager
def serve(
    app: Starlette, *, port: int = 0, at_end: Callable[[], None] = lambda: None
) -> Iterator[PageServer]:
    """Serve an application until the block is left; `at_end` is called before its port is closed."""
    started: Queue[PageServer | BaseException] = Queue()
    done = trio.Event()

    async def main() -> None:
        async with open_http(app, host="127.0.0.1", port=port) as url:
            started.put(PageServer(url, trio.lowlevel.current_trio_token()))
            await done.wait()
            at_end()

    def run() -> None:
        try:
            trio.run(main)
        except BaseException as exc:
            started.put(exc)
            raise

    thread = threading.Thread(target=run)
    thread.start()
    server = started.get(timeout=60)
    if isinstance(server, BaseException):
        thread.join()
        raise server
    try:
        yield server
    finally:
        server.tell(done.set)
        thread.join()
