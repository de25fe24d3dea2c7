"""`neurogrid train`: lead a training run, or serve its data, until it has ended.

stdout gets the path of the last checkpoint, and nothing else. What ends at once is in `training`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from neurogrid.cli.commands.cluster import add_ticket_options
from neurogrid.cli.commands.coordinator_options import CLUSTER_WAIT
from neurogrid.cli.commands.training.change import add_change_options, change
from neurogrid.cli.commands.training.check import add_check_options, check
from neurogrid.cli.commands.training.files import (
    add_export_options,
    add_prepare_options,
    add_status_options,
    export,
    held_out_told,
    prepare,
    status,
)
from neurogrid.cli.commands.training.model import add_run_file, check_paths, model_of, run_directory
from neurogrid.cli.commands.training.seen import add_seen_options, check_seen_options, showing
from neurogrid.cli.commands.training.testnet import add_testnet_options, testnet
from neurogrid.cli.commands.training.verify import add_verify_options, verify
from neurogrid.cli.libraries import import_libraries
from neurogrid.cli.options.common import (
    ArgumentParser,
    ExitStatus,
    add_output_options,
    listening,
    port_number,
    positive_float,
    positive_int,
    run_command,
    set_up_logging,
    warn_of_loopback,
    whole_number,
)
from neurogrid.cli.options.discovery import bootstrap_address, bootstrap_peers
from neurogrid.cli.options.model import add_offline_option
from neurogrid.cli.options.parent import add_parent_option, wait_stdin_eof
from neurogrid.cli.options.reach import add_reach_options, reaching
from neurogrid.cli.options.telemetry import add_trace_options, exporting_traces
from neurogrid.cli.options.threads import prepare_threads
from neurogrid.cli.options.trust import (
    TICKET_VARIABLE,
    Trust,
    add_trust_options,
    take_ticket,
    trust_of,
)
from neurogrid.cli.signals import ending_at_once
from neurogrid.errors import ConfigurationError, NeuroGridError
from neurogrid.server.http.listeners import check_port

if TYPE_CHECKING:
    from neurogrid.cli.terminal.screen import Screen
    from neurogrid.training.runs.run_directory import RunDirectory

__all__ = [
    "add_change_options",
    "add_check_options",
    "add_data_options",
    "add_deputy_options",
    "add_export_options",
    "add_prepare_options",
    "add_run_options",
    "add_status_options",
    "add_testnet_options",
    "add_verify_options",
    "build_parser",
    "run",
]

NAME: Final = "neurogrid train"
Farewells = list[Callable[[], Awaitable[None]]]


def build_parser() -> argparse.ArgumentParser:
    """The options that all of its commands have."""
    return ArgumentParser(prog=NAME, description="", is_whole=False)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """The options of a run to lead."""
    add_run_file(parser)
    run_group = parser.add_argument_group("run")
    run_group.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="keep the run here: run file, journal, metrics, checkpoints (default: runs/NAME, by the name of the run)",
    )
    run_group.add_argument(
        "--resume", action="store_true", help="go on with the run that is kept there"
    )
    run_group.add_argument(
        "--without-deputy",
        action="store_true",
        help="with --resume: the run's deputy has not taken over, and never will, as its machine is lost",
    )
    run_group.add_argument(
        "--local-workers",
        type=whole_number,
        default=0,
        metavar="N",
        help="start N workers on this machine, which share it (default %(default)s)",
    )
    run_group.add_argument(
        "--threads",
        type=positive_int,
        metavar="N",
        help="compute on the CPU with N threads, of which local workers get equal parts (default: OMP_NUM_THREADS, "
        "or one for each core)",
    )
    run_group.add_argument(
        "--wait",
        type=positive_float,
        default=CLUSTER_WAIT,
        metavar="SECONDS",
        help="how long to wait for as many members as the run file asks for (default %(default)g)",
    )
    add_offline_option(run_group)
    _add_network_options(parser, port_flag="--p2p-port")
    add_ticket_options(parser.add_argument_group("cluster"))
    add_seen_options(parser)
    add_trace_options(parser)
    add_output_options(parser)
    add_parent_option(parser)


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """The options of a data node."""
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="what `neurogrid train prepare` wrote"
    )
    trust = parser.add_argument_group("trust", "which run's members are served")
    add_trust_options(trust, is_worker=True)
    _add_network_options(parser, port_flag="--port")
    add_output_options(parser)


def add_deputy_options(parser: argparse.ArgumentParser) -> None:
    """The options of a deputy."""
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="where the copy of the run is kept, new or of before",
    )
    parser.add_argument(
        "--threads",
        type=positive_int,
        metavar="N",
        help="compute on the CPU with N threads (default: OMP_NUM_THREADS, or one for each core)",
    )
    parser.add_argument(
        "--wait",
        type=positive_float,
        default=CLUSTER_WAIT,
        metavar="SECONDS",
        help="once it leads: how long to wait for as many members as the run file asks for (default %(default)g)",
    )
    parser.add_argument(
        "--bootstrap",
        action="append",
        type=bootstrap_address,
        default=[],
        metavar="MULTIADDR",
        help="where another deputy of the run listens, which may come to lead it; @FILE reads some from a file; may be "
        "given again",
    )
    trust = parser.add_argument_group("trust", "which run is copied")
    add_trust_options(trust, is_worker=True)
    _add_network_options(parser, port_flag="--port")
    add_output_options(parser)


def _add_network_options(parser: argparse.ArgumentParser, *, port_flag: str) -> None:
    network = parser.add_argument_group("network")
    network.add_argument(
        port_flag,
        dest="port",
        type=port_number,
        metavar="PORT",
        help="port to listen on, for TCP and QUIC, 0 for a free one (default 9000, or a free one if taken)",
    )
    network.add_argument(
        "--listen",
        action="append",
        default=[],
        metavar="MULTIADDR",
        help="listen here instead, e.g. /ip4/192.168.1.5/tcp/9000; may be given again",
    )
    network.add_argument(
        "--name",
        metavar="NAME",
        help="what other peers are told that this machine is called, '' for nothing (default: its host name)",
    )
    add_reach_options(network)
    # Whoever is admitted stands in a certificate here, always.
    parser.set_defaults(insecure=False, identity=None)


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Do what the options say; returns the exit status."""
    prepare_threads(options)
    screen = set_up_logging(options.log_level, as_json=options.json_logs)
    ends = {
        "change": change,
        "check": check,
        "prepare": prepare,
        "export": export,
        "status": status,
        "testnet": testnet,
        "verify": verify,
    }
    if (ends_at_once := ends.get(options.word)) is not None:
        return run_command(parser.prog, lambda: ends_at_once(options, screen), screen=screen)
    farewells: Farewells = []
    serves, stands_by = options.word == "data", options.word == "deputy"
    if stands_by:
        take_ticket(options)
        _take_membership(options, parser)
    elif serves:
        take_ticket(options)
        if not (options.join or options.cluster or options.allow):
            parser.error(
                "a ticket is needed, which `neurogrid train` prints, or --cluster DIR where this machine has joined "
                "before"
            )
    else:
        os.environ.pop(TICKET_VARIABLE, None)  # is not for the workers started here
    work = _serve_data if serves else _stand_by if stands_by else _lead
    with screen.never_waiting():
        return run_command(
            parser.prog,
            lambda: work(options, screen, farewells),
            screen=screen,
            # A data node does its work until a signal ends it; a run that is cut off has not reached its end.
            status_on_signal=ExitStatus.OK if serves else None,
            farewells=farewells,
        )


async def _lead(options: argparse.Namespace, screen: Screen, farewells: Farewells) -> int:
    with exporting_traces(options, NAME.replace(" ", "-")):
        return await _lead_run(options, screen, farewells)


async def _lead_run(options: argparse.Namespace, screen: Screen, farewells: Farewells) -> int:
    from neurogrid.training.runs.run_directory import RunDirectory, read_run_file

    with ending_at_once():
        run_file = read_run_file(options.run_file)
        directory = RunDirectory(run_directory(options, run_file))
        _judge_directory(directory, resume=options.resume)
        _take_cluster(options, directory)
    model = await model_of(run_file, options, screen)
    with ending_at_once():
        check_paths(run_file, model)
        where = listening(options, port_flag="--p2p-port")
        # A deputy is another coordinator of the run's cluster.
        trust = trust_of(options, is_worker=False, leads_run=True)
        warn_of_loopback(where, is_chosen=bool(options.listen))
        keys = check_seen_options(options)
        if options.http_port:
            await check_port(options.http_host, options.http_port)
        if options.metrics_port is not None:
            await check_port(options.metrics_host, options.metrics_port, flags="--metrics")
        # Here, not above: torch and transformers take seconds, and what is wrong so far needs neither.
        import_libraries(screen, "neurogrid.training.leading", "neurogrid.server.training_app")
    from neurogrid.training.leading import lead
    from neurogrid.training.leading.board import RunBoard
    from neurogrid.training.leading.settings import LeaderSettings

    assert trust.admission is not None
    assert trust.identity_file is not None
    settings = LeaderSettings(
        run=run_file,
        directory=directory.path,
        model=model,
        admission=trust.admission,
        identity_file=trust.identity_file,
        local_workers=options.local_workers,
        num_threads=options.threads,
        wait=options.wait,
        resume=options.resume,
        without_deputy=options.without_deputy,
        listen=where.addresses,
        listen_fallback=where.fallback,
        name=options.name,
        reach=reaching(options, where.addresses),
    )
    board = RunBoard(run_file)
    lines = TrainingLines(screen, trust, farewells)
    with trust.held():
        async with showing(options, keys, board, screen), trio.open_nursery() as nursery:
            if options.stop_on_stdin_eof:
                nursery.start_soon(_end_with_parent)
            checkpoint = await lead(settings, lines, board)
            nursery.cancel_scope.cancel()
    screen.print(str(checkpoint))
    return ExitStatus.OK


async def _end_with_parent() -> None:
    await wait_stdin_eof()
    raise NeuroGridError("the program that started this one has ended")


async def _serve_data(options: argparse.Namespace, screen: Screen, farewells: Farewells) -> int:
    with ending_at_once():
        where = listening(options, port_flag="--port")
        trust = trust_of(options, is_worker=True)
        warn_of_loopback(where, is_chosen=bool(options.listen))
        import_libraries(screen, "neurogrid.training.leading")
    from neurogrid.training.leading import serve_data
    from neurogrid.training.leading.settings import DataNodeSettings

    settings = DataNodeSettings(
        directory=options.directory,
        admission=trust.admission,
        identity_file=trust.identity_file,
        bootstrap=trust.bootstrap,
        listen=where.addresses,
        listen_fallback=where.fallback,
        name=options.name,
        reach=reaching(options, where.addresses),
    )
    await serve_data(settings, TrainingLines(screen, trust, farewells))
    return ExitStatus.OK


def _take_membership(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Let the membership of a deputy lie in its directory, unless the options name another."""
    own = options.directory / "cluster"
    options.cluster = options.cluster or own
    if not (options.join or options.allow or options.cluster.exists()):
        parser.error(
            "a ticket for deputies is needed, which `neurogrid ticket DIR/cluster --deputy` prints where the run is led"
        )


async def _stand_by(options: argparse.Namespace, screen: Screen, farewells: Farewells) -> int:
    with ending_at_once():
        where = listening(options, port_flag="--port")
        trust = trust_of(options, is_worker=True)
        warn_of_loopback(where, is_chosen=bool(options.listen))
        import_libraries(screen, "neurogrid.training.leading.deputies.deputy")
    from neurogrid.training.leading.deputies.deputy import stand_by
    from neurogrid.training.leading.settings import DeputySettings

    assert trust.admission is not None
    assert trust.identity_file is not None
    settings = DeputySettings(
        directory=options.directory,
        admission=trust.admission,
        identity_file=trust.identity_file,
        bootstrap=(*trust.bootstrap, *bootstrap_peers(options)),
        num_threads=options.threads,
        wait=options.wait,
        listen=where.addresses,
        listen_fallback=where.fallback,
        name=options.name,
        reach=reaching(options, where.addresses),
    )
    checkpoint = await stand_by(settings, TrainingLines(screen, trust, farewells))
    if checkpoint is not None:
        screen.print(str(checkpoint))
    return ExitStatus.OK


def _judge_directory(directory: RunDirectory, *, resume: bool) -> None:
    """Refuse to begin where a run is kept, to go on where there is none, and to lead one that another process leads."""
    from neurogrid.training.runs.journal import check_unled

    if directory.has_run:
        check_unled(directory.journal)
    if resume and not directory.has_run:
        raise ConfigurationError(
            f"{directory.path} has no run to go on with: leave out --resume to begin one, or name its directory with "
            "--dir"
        )
    if directory.has_begun and not resume:
        raise ConfigurationError(
            f"{directory.path} has a run already: --resume goes on with it, and --dir DIR begins another one elsewhere"
        )


def _take_cluster(options: argparse.Namespace, directory: RunDirectory) -> None:
    """Let the cluster of the run stand for the options that name one: it is made when the run begins."""
    is_there = directory.cluster.exists()
    options.cluster = directory.cluster if is_there else None
    options.new_cluster = None if is_there else directory.cluster
    options.allow, options.join = [], None


class TrainingLines:
    """A run in lines on stderr."""

    def __init__(self, screen: Screen, trust: Trust, farewells: Farewells) -> None:
        self._screen, self._trust, self._farewells = screen, trust, farewells

    def listening(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Say how others join, where they join here."""
        if self._trust.cluster is None:
            return
        line = self._trust.invite(peer_id, addresses, self._screen.is_terminal)
        # As it is to be typed elsewhere: one line, however narrow the terminal.
        self._screen.say(
            line, whole=True, event="listening", peer_id=peer_id, addresses=list(addresses)
        )

    def at_end(self, farewell: Callable[[], Awaitable[None]]) -> None:
        """Do this before a signal ends the process."""
        self._farewells.append(farewell)

    def say(self, text: str) -> None:
        """Say something, on a line of its own."""
        if not self._screen.is_live:  # else the panel does
            self._screen.say(text)

    def warn(self, text: str) -> None:
        """Say what went wrong, and what is done about it."""
        if not self._screen.is_live:
            self._screen.say(text)

    def metrics(self, figures: Mapping[str, float]) -> None:
        """Say how far the run is."""
        if not self._screen.is_live:
            self._screen.say(told(figures), event="metrics", figures=dict(figures))


def told(figures: Mapping[str, float]) -> str:
    """A line of metrics.jsonl for people, with what it has."""
    # Of a chain alone a round is a step, of all stages together.
    has_replicas = "replicas" in figures
    is_chain = "stages" in figures and not has_replicas
    parts = [
        f"round {figures['round']:g}" if "round" in figures and not is_chain else "",
        f"step {figures['step']:g}" if "step" in figures else "",
        f"loss {figures['loss']:.4f}" if "loss" in figures else "",
        f"held-out loss {held_out_told(figures)}" if "eval_loss" in figures else "",
        f"{figures['tokens']:,.0f} tokens" if "tokens" in figures else "",
        f"{figures['replicas']:g} replica{'' if figures['replicas'] == 1 else 's'}"
        if has_replicas
        else "",
        f"{figures['members']:g} member{'' if figures['members'] == 1 else 's'}"
        if "members" in figures and not is_chain
        else "",
        f"{figures['stages']:g} stage{'' if figures['stages'] == 1 else 's'}" if is_chain else "",
    ]
    return ", ".join(filter(None, parts))
