"""Parts that both commands share: options, listen addresses, logs, signals, exit statuses.

Data goes to stdout, everything else to stderr. A user's mistake ends with status 2, a failure with 1, a
bug of ours with 3 and its traceback.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import FrameType

import trio

from neurogrid.cli.options.discovery import add_finding_options
from neurogrid.cli.options.parser import ArgumentParser
from neurogrid.cli.options.ports import places_of, places_on_port
from neurogrid.cli.options.reach import add_reach_options
from neurogrid.cli.options.trust import add_trust_options, is_checked, is_loopback
from neurogrid.cli.signals import Watchdog, ending_at_once, on_signals, status_of
from neurogrid.cli.terminal.logs import LOG_LEVELS, set_up_logging
from neurogrid.cli.terminal.screen import Screen
from neurogrid.errors import ConfigurationError, NeuroGridError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.extras import missing_extra

__all__ = [
    "ArgumentParser",
    "DEFAULT_PORT",
    "ExitStatus",
    "Listening",
    "TO_OPEN",
    "add_common_options",
    "add_output_options",
    "listening",
    "port_number",
    "positive_float",
    "positive_int",
    "whole_number",
    "run_command",
    "set_up_logging",
    "size_in_bytes",
    "warn_of_loopback",
]

logger = logging.getLogger(__name__)

# Seconds for what a command does before a signal ends it, and for its end in order after that.
FAREWELL_TIMEOUT = 5.0
END_TIMEOUT = 0.5
# Signals that wait to be looked at: more than anybody sends.
MAX_SIGNALS = 16

DEFAULT_PORT = 9000
TO_OPEN = (
    "--cluster DIR (neurogrid-coordinator --new-cluster DIR makes one), --join TICKET (a worker; the "
    "coordinator prints it), --allow PEER_ID=ROLE, or, if everybody on the network may use it, --insecure"
)
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
    **{prefix: 1024**power for power, prefix in enumerate("kmgt", 1)},
}
# Below it, a number without a unit lacks one.
MIN_BARE_BYTES = 1024
# The most that the wire has room for; and more than anybody asks for without mistyping.
MAX_BYTES = 2**63 - 1
MAX_COUNT = 2**31 - 1
MAX_NUMBER = 1e9


class ExitStatus(IntEnum):
    """The exit status that the shell sees."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    BUG = 3


def positive_int(text: str) -> int:
    """An argparse type: a whole number from 1 to 2^31 - 1."""
    value = _whole(text)
    if not 0 < value <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and {MAX_COUNT}")
    return value


def whole_number(text: str) -> int:
    """An argparse type: a whole number from 0 to 2^31 - 1."""
    value = _whole(text)
    if not 0 <= value <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {MAX_COUNT}")
    return value


def positive_float(text: str) -> float:
    """An argparse type: a number above zero, at most a billion."""
    try:
        value = float(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from exc
    if not 0 < value <= MAX_NUMBER:
        raise argparse.ArgumentTypeError(f"{text} is not above zero and at most {MAX_NUMBER:g}")
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
    if not 0 < value <= MAX_BYTES:
        raise argparse.ArgumentTypeError(f"{text} is not above zero and below 2^63 bytes")
    if not unit and value < MIN_BARE_BYTES:
        raise argparse.ArgumentTypeError(f"{text} is {text} bytes: {text}G is meant, or {text}M")
    return value


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from exc


def port_number(text: str) -> int:
    """An argparse type: a port, 0 for a free one."""
    value = _whole(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port: 0 to 65535, 0 for a free one")
    return value


def add_common_options(parser: argparse.ArgumentParser, *, port_flag: str, is_worker: bool) -> None:
    """Options of both commands that say who we are and where we listen."""
    network = parser.add_argument_group("network")
    network.add_argument(
        port_flag,
        dest="port",
        type=port_number,
        metavar="PORT",
        help=f"port to listen on, for TCP and QUIC, 0 for a free one (default {DEFAULT_PORT}, or a free one if taken)",
    )
    network.add_argument(
        "--listen",
        action="append",
        default=[],
        metavar="MULTIADDR",
        help=f"listen here instead, e.g. /ip4/192.168.1.5/tcp/{DEFAULT_PORT}; may be given again",
    )
    network.add_argument(
        "--name",
        metavar="NAME",
        help="what other peers are told that this machine is called, '' for nothing (default: its host name)",
    )
    network.add_argument(
        "--identity",
        type=Path,
        metavar="FILE",
        help="private key of this peer, made if missing (default: a new key each time; with --cluster DIR "
        "the one in DIR)",
    )
    add_reach_options(network)
    trust = parser.add_argument_group(
        "trust", "who may use this peer; without any of these it listens on loopback only"
    )
    add_trust_options(trust, is_worker=is_worker)
    trust.add_argument(
        "--insecure",
        action="store_true",
        help="listen beyond loopback although any peer that finds the port may use it",
    )
    add_finding_options(parser.add_argument_group("finding peers"), is_worker=is_worker)
    add_output_options(parser)


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of output: how much a command says, and in which form."""
    output = parser.add_argument_group("output")
    output.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        default="info",
        help="how much goes to stderr; debug-all: with what the libraries underneath say (default %(default)s)",
    )
    output.add_argument(
        "--json-logs",
        action="store_true",
        help="one JSON object a line on stderr, for programs that collect logs; no panel then",
    )


@dataclass(frozen=True)
class Listening:
    """Addresses to listen on, and others to fall back on if those are taken; empty for none."""

    addresses: tuple[str, ...]
    fallback: tuple[str, ...] = ()


def listening(options: argparse.Namespace, *, port_flag: str) -> Listening:
    """Return the addresses to listen on, by the options; tries all but those that have a fallback.

    Raises:
        ConfigurationError: contradicting options, an address that is taken or no address to listen
            on, or one beyond loopback without --insecure.
    """
    from neurogrid.p2p.libp2p.libp2p_host import check_listen_address

    is_open = is_checked(options) or options.insecure
    if options.listen:
        if options.quic is not None:
            raise ConfigurationError(
                "give either --listen or --quic, not both: --listen /ip4/ADDRESS/udp/PORT/quic-v1 is QUIC"
            )
        if options.port is not None:
            raise ConfigurationError(f"give either {port_flag} or --listen, not both")
        for address in options.listen:
            check_listen_address(address)
            if not is_loopback(address) and not is_open:
                raise ConfigurationError(
                    f"{address} is not loopback, and nothing says who may use this peer: add {TO_OPEN}"
                )
        return Listening(tuple(options.listen))
    ip = "0.0.0.0" if is_open else "127.0.0.1"
    quic = is_open if options.quic is None else options.quic
    if options.port is not None:
        return Listening(places_on_port(ip, options.port, quic=quic))
    return Listening(places_of(ip, DEFAULT_PORT, quic=quic), places_on_port(ip, 0, quic=quic))


def warn_of_loopback(where: Listening, *, is_chosen: bool) -> None:
    """Log that other machines cannot reach this peer, if they cannot, and, unless it was chosen, what to type."""
    if all(is_loopback(address) for address in where.addresses):
        remedy = "" if is_chosen else f". For others add {TO_OPEN}"
        logger.info("listening on loopback only: other machines cannot reach this peer%s", remedy)


def run_command(
    name: str,
    function: Callable[[], Awaitable[int]],
    *,
    screen: Screen,
    status_on_signal: int | None = None,
    farewells: Sequence[Callable[[], Awaitable[None]]] = (),
    interrupts: Sequence[Callable[[], bool]] = (),
) -> int:
    """Run an async command to its exit status; SIGINT and SIGTERM end it in order.

    Args:
        name: of the command, before its error line.
        screen: what `set_up_logging` gave; gets the error line.
        status_on_signal: of a command that does its work until a signal ends it, once there are farewells; None, and
            before, for 128 + the signal's number, as shells have it.
        farewells: what is done before a signal ends it, for a few seconds at most; a second signal does not wait.
            Read when the signal comes.
        interrupts: asked at SIGINT, in turn; one that answers True has made something else of it than the end.
            Read when the signal comes.
    """
    try:
        with Watchdog() as watchdog, screen.ending_line():
            return trio.run(
                _with_signals, function, status_on_signal, farewells, interrupts, watchdog
            )
    except ConfigurationError as exc:
        screen.say(f"{name}: {exc}", level=logging.ERROR)
        return ExitStatus.USAGE
    except NeuroGridError as exc:
        screen.say(f"{name}: {exc}", level=logging.ERROR)
        return ExitStatus.FAILURE
    except BrokenPipeError:
        raise  # the reader of our stdout has gone: see `closed_pipe`
    except Exception as exc:  # nobody is above: what is left is a bug, and is told as one
        if isinstance(exc, ModuleNotFoundError) and (missing := missing_extra(exc)):
            screen.say(f"{name}: {missing}", level=logging.ERROR)
            return ExitStatus.USAGE
        logger.exception("%s met a bug of its own; please report this", name)
        return ExitStatus.BUG


def parse_and_run(
    build_parser: Callable[[], argparse.ArgumentParser],
    run: Callable[[argparse.ArgumentParser, argparse.Namespace], int],
    argv: Sequence[str] | None,
) -> int:
    """Read the command line and do what it says; returns the exit status."""
    with ending_at_once():
        parser = build_parser()
        return run(parser, parser.parse_args(argv))


async def _with_signals(
    function: Callable[[], Awaitable[int]],
    status_on_signal: int | None,
    farewells: Sequence[Callable[[], Awaitable[None]]],
    interrupts: Sequence[Callable[[], bool]],
    watchdog: Watchdog,
) -> int:
    status: int = ExitStatus.OK
    send, receive = trio.open_memory_channel[int](MAX_SIGNALS)
    token = trio.lowlevel.current_trio_token()

    def status_at(signum: int) -> int:
        if status_on_signal is not None and farewells:
            return status_on_signal
        return status_of(signum)

    own_pid = os.getpid()

    def on_signal(signum: int, _: FrameType | None) -> None:
        if os.getpid() != own_pid:
            return  # a fork's, which has this handler and the watchdog's pipe with all else
        if not interrupts:  # or it may mean something else than the end
            watchdog.arm(status_at(signum), END_TIMEOUT + FAREWELL_TIMEOUT * bool(farewells))
        token.run_sync_soon(hand_over, signum)

    def hand_over(signum: int) -> None:
        with suppress(trio.WouldBlock, trio.BrokenResourceError):
            send.send_nowait(signum)

    async def say_farewell(scope: trio.CancelScope) -> None:
        with trio.move_on_after(FAREWELL_TIMEOUT):
            for farewell in farewells:
                await farewell()
        scope.cancel()

    async def watch(nursery: trio.Nursery) -> None:
        nonlocal status
        async for signum in receive:
            if signum == signal.SIGINT and any(take() for take in interrupts):
                continue
            status = status_at(signum)
            watchdog.arm(status, END_TIMEOUT + FAREWELL_TIMEOUT * bool(farewells))
            nursery.start_soon(say_farewell, nursery.cancel_scope)
            async for _ in receive:
                watchdog.arm(status, END_TIMEOUT)
                nursery.cancel_scope.cancel()

    with on_signals(on_signal), unwrap_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, nursery)
            status = await function()
            nursery.cancel_scope.cancel()
    return status
