"""What both commands share: options, listen addresses, logs, signals, exit statuses.

Data goes to stdout, everything else to stderr. A user's mistake ends with status 2, a failure with 1, a
bug of ours with 3 and its traceback.
"""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import trio
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from neurogrid.errors import ConfigurationError, NeuroGridError
from neurogrid.exception_groups import unwrap_errors

__all__ = [
    "DEFAULT_PORT",
    "ExitStatus",
    "add_common_options",
    "listen_addresses",
    "positive_int",
    "run_command",
    "set_up_logging",
    "size_in_bytes",
]

logger = logging.getLogger(__name__)

DEFAULT_PORT = 9000
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
    **{prefix: 1024**power for power, prefix in enumerate("kmgt", 1)},
}
_LOG_LEVELS = ("debug", "info", "warning", "error")


class ExitStatus(IntEnum):
    """What the shell sees."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    BUG = 3


def positive_int(text: str) -> int:
    """An argparse type: a whole number above zero."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


def size_in_bytes(text: str) -> int:
    """An argparse type: bytes, with an optional unit (k, M, G, T are powers of 1024; kB is 1000)."""
    number = text.strip().rstrip("bBiIkKmMgGtT")
    unit = text.strip()[len(number) :].lower()
    try:
        value = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError) as exc:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: try 8GiB, or a number of bytes"
        ) from exc
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port: 0 to 65535, 0 for a free one")
    return value


def add_common_options(parser: argparse.ArgumentParser, *, port_flag: str) -> None:
    """Options of both commands that say who we are and where we listen."""
    network = parser.add_argument_group("network")
    network.add_argument(
        port_flag,
        dest="port",
        type=_port,
        metavar="PORT",
        help=f"TCP port to listen on, 0 for a free one (default {DEFAULT_PORT}, or a free one if taken)",
    )
    network.add_argument(
        "--listen",
        action="append",
        default=[],
        metavar="MULTIADDR",
        help=f"listen here instead, e.g. /ip4/192.168.1.5/tcp/{DEFAULT_PORT}; may be given again",
    )
    network.add_argument(
        "--insecure",
        action="store_true",
        help="listen beyond loopback although any peer that finds the port may use it",
    )
    network.add_argument(
        "--identity",
        type=Path,
        metavar="FILE",
        help="private key of this peer, made if missing (default: a new key each time)",
    )
    parser.add_argument(
        "--log-level",
        choices=_LOG_LEVELS,
        default="info",
        help="how much goes to stderr (default %(default)s)",
    )


@dataclass(frozen=True)
class _Listening:
    addresses: tuple[str, ...]
    notice: str | None


def listen_addresses(options: argparse.Namespace, *, port_flag: str) -> tuple[str, ...]:
    """The multiaddrs to listen on, from the options; logs what a user should know about them.

    Raises:
        ConfigurationError: contradicting options, or an address beyond loopback without --insecure.
    """
    if options.listen:
        if options.port is not None:
            raise ConfigurationError(f"give either {port_flag} or --listen, not both")
        for address in options.listen:
            if not _is_loopback(address) and not options.insecure:
                raise ConfigurationError(
                    f"{address} is not loopback, and connections are not checked for who may use this "
                    "peer: add --insecure if everybody on that network may"
                )
        return tuple(options.listen)
    ip = "0.0.0.0" if options.insecure else "127.0.0.1"
    port = options.port
    if port is None:
        port = DEFAULT_PORT
        if not _is_free(ip, port):
            logger.warning("port %d is taken: listening on a free one instead", port)
            port = 0
    if not options.insecure:
        logger.info(
            "listening on loopback only: other machines cannot reach this peer. On a network that "
            "you trust, add --insecure"
        )
    return (f"/ip4/{ip}/tcp/{port}",)


def _is_loopback(address: str) -> bool:
    try:
        multiaddr = Multiaddr(address)
        protocol = next(iter(multiaddr.protocols())).name
        host = str(multiaddr.value_for_protocol(protocol))
    except (MultiaddrError, ValueError, StopIteration) as exc:
        raise ConfigurationError(
            f"{address!r} is not a multiaddr: expected /ip4/ADDRESS/tcp/PORT"
        ) from exc
    return host.startswith("127.") or host == "::1"


def _is_free(ip: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ip, port))
        except OSError:
            return False
    return True


def set_up_logging(level: str) -> None:
    """Logs to stderr. The libraries underneath speak only when `debug` is asked for."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s"
        if level == "debug"
        else "%(levelname).1s %(message)s",
        force=True,
    )
    if level != "debug":
        for name in ("libp2p", "multiaddr", "transformers", "torch"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def run_command(
    name: str, function: Callable[[], Awaitable[int]], *, status_on_signal: int | None = None
) -> int:
    """Run an async command to its exit status; SIGINT and SIGTERM end it in order.

    Args:
        name: of the command, before its error line.
        status_on_signal: None for 128 + the signal's number, as shells have it.
    """
    try:
        return trio.run(_with_signals, function, status_on_signal)
    except ConfigurationError as exc:
        print(f"{name}: {exc}", file=sys.stderr)
        return ExitStatus.USAGE
    except NeuroGridError as exc:
        print(f"{name}: {exc}", file=sys.stderr)
        return ExitStatus.FAILURE
    except BrokenPipeError:
        return ExitStatus.FAILURE  # whoever read our stdout has gone
    except Exception:
        logger.exception("%s met a bug of its own; please report this", name)
        return ExitStatus.BUG


async def _with_signals(
    function: Callable[[], Awaitable[int]], status_on_signal: int | None
) -> int:
    status: int = ExitStatus.OK

    async def watch(
        scope: trio.CancelScope, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        nonlocal status
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for signum in signals:
                status = 128 + signum if status_on_signal is None else status_on_signal
                scope.cancel()

    with unwrap_errors():
        async with trio.open_nursery() as nursery:
            await nursery.start(watch, nursery.cancel_scope)
            status = await function()
            nursery.cancel_scope.cancel()
    return status
