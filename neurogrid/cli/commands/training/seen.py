"""Views of a run that is led: its page, its metrics, its panel in the terminal."""

from __future__ import annotations

import argparse
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from neurogrid.cli.commands.serve import (
    DEFAULT_HTTP_HOST,
    DEFAULT_HTTP_PORT,
    MIN_KEY_CHARS,
    is_loopback_host,
    read_keys,
)
from neurogrid.cli.options.common import port_number
from neurogrid.cli.options.telemetry import add_metrics_options, serving_metrics
from neurogrid.errors import ConfigurationError

if TYPE_CHECKING:
    from neurogrid.cli.terminal.screen import Screen
    from neurogrid.telemetry.training_metrics import TrainingMetrics
    from neurogrid.training.leading.board import RunBoard

__all__ = ["add_seen_options", "check_seen_options", "showing"]

logger = logging.getLogger(__name__)


def add_seen_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run's page, of who may see it, and of metrics."""
    group = parser.add_argument_group("page", "the run in a browser, and for programs, over HTTP")
    port = group.add_mutually_exclusive_group()
    port.add_argument(
        "--http-port",
        type=port_number,
        metavar="PORT",
        help=f"port of the page, 0 for a free one (default {DEFAULT_HTTP_PORT}, or a free one if taken)",
    )
    port.add_argument("--no-http", action="store_true", help="no page")
    group.add_argument(
        "--http-host",
        default=DEFAULT_HTTP_HOST,
        metavar="HOST",
        help="address to serve it on; beyond loopback with --api-key-file only (default %(default)s)",
    )
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"show the run only to who has one of the keys in FILE: a line each, {MIN_KEY_CHARS} characters or more, "
        "and mode 0600",
    )
    add_metrics_options(parser, port_type=port_number)


def check_seen_options(options: argparse.Namespace) -> tuple[str, ...]:
    """The API keys, once it is clear that nobody sees the run who should not.

    Raises:
        ConfigurationError: keys that cannot be read, or a host beyond loopback without any.
    """
    keys = read_keys(options.api_key_file) if options.api_key_file else ()
    if not keys and not options.no_http and not is_loopback_host(options.http_host):
        raise ConfigurationError(
            f"--http-host {options.http_host[:100]} is not loopback, and anybody who reaches it would see the run: add "
            "--api-key-file FILE"
        )
    return keys


@asynccontextmanager
async def showing(
    options: argparse.Namespace, keys: tuple[str, ...], board: RunBoard, screen: Screen
) -> AsyncIterator[None]:
    """Show the run until the block is left: the page, metrics where they are asked for, a panel where there can be one.

    Args:
        keys: as `check_seen_options` gave them.

    Raises:
        ConfigurationError: a port that was named is taken, or a host is not this machine's.
    """
    from neurogrid.telemetry.training_metrics import TrainingMetrics

    metrics = TrainingMetrics(board)
    async with AsyncExitStack() as stack:
        url = ""
        if not options.no_http:
            url = await stack.enter_async_context(_open_page(options, keys, board, metrics))
            screen.say(f"the page of the run: {url}/", whole=True, event="page", url=url)
        await stack.enter_async_context(serving_metrics(options, lambda: metrics.registry))
        if screen.is_live:
            from neurogrid.cli.terminal.panel.live import open_panel
            from neurogrid.cli.terminal.panel.training import training_view

            encoding = screen.console.encoding
            panel = open_panel(
                screen, lambda: training_view(board.status(), url=url, encoding=encoding)
            )
            await stack.enter_async_context(panel)
        try:
            yield
        finally:
            board.events.close()


@asynccontextmanager
async def _open_page(
    options: argparse.Namespace, keys: tuple[str, ...], board: RunBoard, metrics: TrainingMetrics
) -> AsyncIterator[str]:
    from neurogrid.server.http.guard import Access
    from neurogrid.server.http.http_server import open_http
    from neurogrid.server.http.listeners import check_port
    from neurogrid.server.training_app import training_app

    host, port = options.http_host, options.http_port
    if port is None:
        try:
            await check_port(host, DEFAULT_HTTP_PORT)
            port = DEFAULT_HTTP_PORT
        except ConfigurationError as exc:
            logger.info("the page gets a free port: %s", exc)
            await check_port(host, 0)  # where the host is at fault, that is what is to be heard
            port = 0
    app = training_app(
        board,
        metrics.registry,
        access=Access(keys, frozenset({host})),
        statistics=metrics.http,
    )
    async with open_http(app, host=host, port=port) as url:
        yield url
