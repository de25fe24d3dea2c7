"""Serving over HTTP: the options, the groups of routes put together, and the time that it runs."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from neurogrid.cli.options.common import port_number, positive_float, positive_int
from neurogrid.cli.options.durations import DEFAULT_IDLE_AFTER, idle_after
from neurogrid.cli.options.model import named_model_place
from neurogrid.errors import ConfigurationError

if TYPE_CHECKING:
    from neurogrid.inference.board.status_board import StatusBoard
    from neurogrid.inference.generation.coordinator import Coordinator
    from neurogrid.server.additions import Additions
    from neurogrid.server.backend import Backend
    from neurogrid.server.models import Models
    from neurogrid.server.openai.model_routes import ModelPlaces
    from neurogrid.telemetry.coordinator_metrics import CoordinatorMetrics

__all__ = [
    "DEFAULT_HTTP_HOST",
    "DEFAULT_HTTP_PORT",
    "MIN_KEY_CHARS",
    "SERVING_SESSIONS",
    "Server",
    "ServingOptions",
    "add_serving_options",
    "is_loopback_host",
    "open_server",
    "read_keys",
    "serving_options",
]

logger = logging.getLogger(__name__)

DEFAULT_HTTP_PORT = 8090
DEFAULT_HTTP_HOST = "127.0.0.1"
DEFAULT_MAX_QUEUE = 128
# What OpenAI's own clients wait.
DEFAULT_REQUEST_TIMEOUT = 600.0
# Sessions of the greatest length that workers set memory aside for: each costs a whole KV cache. Most are far
# shorter and share that memory, so that more of them run at once.
SERVING_SESSIONS = 4
# Without a request for so long a model is idle, as in Ollama. Seconds.
MAX_KEY_FILE_BYTES = 1024 * 1024
ADDITIONS_FILE = "additions.json"
# What can be guessed over the network is no key.
MIN_KEY_CHARS = 16


def add_serving_options(parser: argparse.ArgumentParser) -> None:
    """The options of a coordinator that serves."""
    group = parser.add_argument_group("serving", "over HTTP, unless a text is to be continued")
    group.add_argument(
        "--http-port",
        type=port_number,
        default=DEFAULT_HTTP_PORT,
        metavar="PORT",
        help="port of the OpenAI API, 0 for a free one (default %(default)s)",
    )
    group.add_argument(
        "--follow",
        action="store_true",
        help="of a training run that goes on: serve each new checkpoint; what is being answered ends with the one that "
        "it began with",
    )
    group.add_argument(
        "--http-host",
        default=DEFAULT_HTTP_HOST,
        metavar="HOST",
        help="address to serve on; beyond loopback with --api-key-file only, or --insecure (default %(default)s)",
    )
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"serve only who sends one of the keys in FILE: a line each, {MIN_KEY_CHARS} characters or more, and mode "
        "0600",
    )
    group.add_argument(
        "--adapter-root",
        type=Path,
        metavar="DIR",
        help="let clients with a key add adapters that lie below DIR, and remove some: POST and DELETE at "
        "/v1/adapters; with --api-key-file only",
    )
    group.add_argument(
        "--with-model",
        action="append",
        type=named_model_place,
        default=[],
        metavar="[NAME=]MODEL",
        help="another model, served beside the first by the same workers; a request chooses by its `model`; may be "
        "given again",
    )
    group.add_argument(
        "--idle-after",
        type=idle_after,
        default=DEFAULT_IDLE_AFTER,
        metavar="DURATION",
        help="of several models, one that nobody asked for so long gives way when another has no room, and comes back "
        "when it is asked for: 90s, 5m, 1h, or never (default %(default)s)",
    )
    group.add_argument(
        "--model-root",
        type=Path,
        metavar="DIR",
        help="let clients with a key add models that lie below DIR, or in the cache of the hub, and remove some: POST "
        "and DELETE at /v1/models; with --api-key-file only",
    )
    group.add_argument(
        "--max-queue",
        type=positive_int,
        default=DEFAULT_MAX_QUEUE,
        metavar="N",
        help="answers that may wait for room on the workers (--max-sessions); more are refused with status 429 "
        "(default %(default)s)",
    )
    group.add_argument(
        "--request-timeout",
        type=positive_float,
        default=DEFAULT_REQUEST_TIMEOUT,
        metavar="SECONDS",
        help="an answer that is not finished by then ends with status 504 (default %(default)g)",
    )
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let pages of this origin ask, e.g. https://chat.example; may be given again",
    )


@dataclass(frozen=True)
class ServingOptions:
    """The address to serve at, and keys and origins of clients; seconds that an answer may take; roots of the adapters
    and models that clients add, and the file in which it is kept which they have added."""

    host: str
    port: int
    keys: tuple[str, ...]
    cors_origins: tuple[str, ...]
    request_timeout: float
    adapter_root: Path | None = None
    model_root: Path | None = None
    additions_file: Path | None = None

    def read_additions(self) -> Additions:
        """Read what clients had added before; nothing, where they may add nothing.

        Raises:
            ConfigurationError: the file cannot be read, or is not what was written.
        """
        from neurogrid.server.additions import Additions

        if self.adapter_root is None and self.model_root is None:
            return Additions()
        if self.additions_file is None:
            logger.info(
                "what clients add is forgotten when this server ends: --cluster DIR or --identity FILE keeps it"
            )
        return Additions.read(self.additions_file)


def serving_options(options: argparse.Namespace) -> ServingOptions:
    """The options, checked.

    Raises:
        ConfigurationError: keys that cannot be read, that others can read, or that are none; or a host beyond loopback
            without any.
    """
    keys = read_keys(options.api_key_file) if options.api_key_file else ()
    if not keys and not options.insecure and not is_loopback_host(options.http_host):
        raise ConfigurationError(
            f"--http-host {options.http_host[:100]} is not loopback, and anybody who reaches it would be served: "
            "add --api-key-file FILE, or, if everybody on the network may use it, --insecure"
        )
    for flag, root, what in (
        ("--adapter-root", options.adapter_root, "adapters"),
        ("--model-root", options.model_root, "models"),
    ):
        if root is not None and not keys:
            raise ConfigurationError(
                f"{flag} lets clients add {what}, which takes a key: add --api-key-file FILE"
            )
        if root is not None and not root.is_dir():
            raise ConfigurationError(f"{flag} {root}: is no directory")
    return ServingOptions(
        options.http_host,
        options.http_port,
        keys,
        tuple(map(_origin, options.cors_origin)),
        options.request_timeout,
        options.adapter_root,
        options.model_root,
        _additions_file(options),
    )


def _additions_file(options: argparse.Namespace) -> Path | None:
    """File that keeps what clients add, beside the coordinator's cluster or identity; None where it has neither."""
    directory: Path | None = options.cluster or options.new_cluster
    if directory is not None:
        return directory / ADDITIONS_FILE
    identity: Path | None = options.identity
    return identity and identity.with_name(f"{identity.stem}-{ADDITIONS_FILE}")


@dataclass(frozen=True)
class Server:
    """An open port. Made by `open_server`.

    Attributes:
        url: where it serves, without a slash at the end.
        board: to be told what the coordinator does, also before it is there; what is known of it and its workers. Of
            several models, that of the first.
        metrics: to be told of coordinators.
    """

    url: str
    board: StatusBoard
    metrics: CoordinatorMetrics
    _backend: Backend | Models
    _additions: Additions
    _adapter_root: Path | None

    async def restore(self, coordinator: Coordinator) -> None:
        """Have the adapters beside a model again that clients had added."""
        from neurogrid.server.openai.adapter_routes import restore_adapters

        if self._adapter_root is not None:
            await restore_adapters(coordinator, self._additions, self._adapter_root)

    async def serve(
        self, coordinator: Coordinator, until: Callable[[], Awaitable[None]] = trio.sleep_forever
    ) -> None:
        """Serve what `coordinator` generates: until then, and until what is being answered has ended."""
        from neurogrid.server.backend import Backend

        assert isinstance(self._backend, Backend)
        with self._backend.serving(coordinator), self.metrics.of(coordinator):
            await until()
            await self._backend.drain("the next checkpoint is being put on the workers")

    async def finish(self) -> None:
        """Take no new request, and wait for those that are under way."""
        await self._backend.finish()


@asynccontextmanager
async def open_server(
    where: ServingOptions,
    additions: Additions,
    models: Models | None = None,
    places: ModelPlaces | None = None,
) -> AsyncIterator[Server]:
    """Open the port: `/health` is answered at once, and `/ready` says what is waited for.

    Args:
        additions: what clients have added, and add.
        models: that are served, where they are several, the first of them there already; None for one.
        places: where further ones are, if clients may add some.

    Raises:
        ConfigurationError: the port is taken, or the host is not this machine's.
    """
    from neurogrid.inference.board.status_board import StatusBoard
    from neurogrid.server.app import make_app
    from neurogrid.server.backend import Backend
    from neurogrid.server.cluster.routes import CLUSTER_PATHS, cluster_routes
    from neurogrid.server.health import HEALTH_PATHS, health_routes
    from neurogrid.server.http.guard import Access
    from neurogrid.server.http.http_server import open_http
    from neurogrid.server.llama_cpp.paths import LLAMA_CPP_PATHS
    from neurogrid.server.llama_cpp.routes import llama_cpp_routes
    from neurogrid.server.metrics import METRICS_PATHS, metrics_routes
    from neurogrid.server.ollama.paths import OLLAMA_PATHS
    from neurogrid.server.ollama.routes import ollama_routes
    from neurogrid.server.openai.adapter_routes import adapter_routes
    from neurogrid.server.openai.paths import OPENAI_PATHS
    from neurogrid.server.openai.routes import openai_routes
    from neurogrid.server.openapi import openapi_routes
    from neurogrid.server.page.routes import page_routes
    from neurogrid.telemetry.coordinator_metrics import CoordinatorMetrics

    backend: Backend | Models
    if models is None:
        board = StatusBoard()
        backend, metrics = Backend(board), CoordinatorMetrics(board)
        clusters = cluster_routes(board)
    else:
        board = models.all()[0].board
        backend, metrics = models, CoordinatorMetrics(models=models.all)
        clusters = cluster_routes(models=models)
    app = make_app(
        [
            *openai_routes(
                backend, request_timeout=where.request_timeout, models=models, places=places
            ),
            *adapter_routes(backend, where.adapter_root, additions),
            *ollama_routes(backend, request_timeout=where.request_timeout),
            *llama_cpp_routes(backend, request_timeout=where.request_timeout),
            *clusters,
            *metrics_routes(metrics.registry),
        ],
        open_routes=[
            *health_routes(backend),
            *openapi_routes(
                OPENAI_PATHS,
                OLLAMA_PATHS,
                LLAMA_CPP_PATHS,
                CLUSTER_PATHS,
                HEALTH_PATHS,
                METRICS_PATHS,
            ),
            *page_routes(),
        ],
        access=Access(where.keys, frozenset({where.host}), where.cors_origins),
        statistics=metrics.http,
    )
    async with open_http(app, host=where.host, port=where.port) as url:
        logger.info("the page is at %s/", url)
        try:
            yield Server(url, board, metrics, backend, additions, where.adapter_root)
        finally:
            # So that nobody waits for more of them.
            for each in [board] if models is None else [model.board for model in models.all()]:
                each.events.close()


def read_keys(file: Path) -> tuple[str, ...]:
    """The API keys in a file.

    Raises:
        ConfigurationError: it cannot be read, others can read it, or it has something that is no key.
    """
    from neurogrid.p2p.trust.key_files import check_owner_alone

    try:
        check_owner_alone(file, "which opens this server")
        with file.open("rb") as stream:
            data = stream.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as exc:
        raise ConfigurationError(f"cannot read the API keys in {file}: {exc.strerror}") from exc
    if len(data) > MAX_KEY_FILE_BYTES:
        raise ConfigurationError(f"{file} is longer than {MAX_KEY_FILE_BYTES:,} B: are those keys?")
    keys = []
    for number, line in enumerate(data.split(b"\n"), 1):
        key = line.strip()
        if not key or key.startswith(b"#"):
            continue
        # What fits into a header, so that it can be sent.
        if len(key) < MIN_KEY_CHARS or not all(0x21 <= byte <= 0x7E for byte in key):
            raise ConfigurationError(
                f"{file}, line {number}: a key has {MIN_KEY_CHARS} characters or more, of ASCII and without spaces"
            )
        keys.append(key.decode())
    if not keys:
        raise ConfigurationError(f"there is no key in {file}: write one on a line of its own")
    return tuple(keys)


def is_loopback_host(host: str) -> bool:
    """Whether only this machine reaches what is served at a host.

    Raises:
        ConfigurationError: it is no address, and no name that is known here.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as exc:
        raise ConfigurationError(
            f"--http-host {host[:100]} is no address and no name that is known here: {exc.strerror}"
        ) from exc
    return all(
        ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found
    )


def _origin(text: str) -> str:
    scheme, separator, host = text.partition("://")
    if scheme not in ("http", "https") or not separator or not host or set(host) & set("/?#*@ "):
        raise ConfigurationError(
            f"--cors-origin {text[:100]!r} is no origin: scheme and host, as https://chat.example"
        )
    return text
