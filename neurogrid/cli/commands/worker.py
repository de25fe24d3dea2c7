"""`neurogrid-worker`: lend this machine to a model.

Prints its full addresses to stdout, one a line, when it is ready; runs until SIGINT or SIGTERM.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from neurogrid.cli.entry import leave
from neurogrid.cli.libraries import import_libraries
from neurogrid.cli.options.cache import add_cache_options, cache_of
from neurogrid.cli.options.common import (
    TO_OPEN,
    ArgumentParser,
    ExitStatus,
    add_common_options,
    listening,
    parse_and_run,
    port_number,
    positive_float,
    positive_int,
    run_command,
    set_up_logging,
    size_in_bytes,
    warn_of_loopback,
)
from neurogrid.cli.options.discovery import bootstrap_peers, finding
from neurogrid.cli.options.durations import DEFAULT_IDLE_AFTER, idle_after
from neurogrid.cli.options.model import HUB_NAMES, add_offline_option, find_model, model_place
from neurogrid.cli.options.parent import add_parent_option, wait_stdin_eof
from neurogrid.cli.options.reach import reaching
from neurogrid.cli.options.telemetry import (
    add_metrics_options,
    add_trace_options,
    exporting_traces,
    serving_metrics,
)
from neurogrid.cli.options.threads import prepare_threads
from neurogrid.cli.options.trust import is_loopback, take_ticket, trust_of
from neurogrid.cli.signals import ending_at_once
from neurogrid.cli.terminal.closed_pipe import ends_with_its_reader
from neurogrid.errors import ConfigurationError
from neurogrid.model.files.checkpoint_files import judge_checkpoint
from neurogrid.server.http.listeners import check_port

if TYPE_CHECKING:
    from neurogrid.assembly.worker import Worker
    from neurogrid.telemetry.metric import Registry

__all__ = ["FIRST", "add_worker_options", "build_parser", "main", "run", "take_role", "take_work"]

NAME = "neurogrid-worker"
# As long as a signed one may be.
_MAX_INVITATION_BYTES = 12 * 1024
EXAMPLES = (
    (NAME, "for coordinators on this machine, which dial the address that it prints"),
    (
        f"{NAME} --join - --cluster ~/member",
        "join a cluster with the ticket that its coordinator printed, and remember it",
    ),
    (
        f"{NAME} --cluster ~/member --gpu 1 --memory-limit 20GiB",
        "a member that lends a part of its second GPU",
    ),
)
# What most people need, beside the ticket: `--help` shows these, `--help-all` all.
FIRST = (
    *("--cluster", "--gpu", "--memory-limit", "--cache-dir", "--cache-limit", "--port"),
    *("--allow", "--insecure", "--metrics-port", "--log-level", "--serve", "--train"),
)


def build_parser() -> argparse.ArgumentParser:
    """The command line of `neurogrid-worker`."""
    parser = ArgumentParser(
        prog=NAME,
        description="Hold some layers of a model that is served, and be a member of training runs. Without --model "
        "nothing is needed on disk: config, weights and data come from whoever leads.",
        first=("--join", *FIRST),
        examples=EXAMPLES,
    )
    add_worker_options(parser)
    return parser


def add_worker_options(parser: argparse.ArgumentParser) -> None:
    """All options of a worker."""
    work = parser.add_argument_group("work", "both, unless one of them is named")
    work.add_argument(
        "--serve",
        action="store_true",
        help="hold layers of models that are served (default: this, and --train)",
    )
    work.add_argument(
        "--train",
        action="store_true",
        help="be a member of training runs (default: this, and --serve)",
    )
    work.add_argument(
        "--data",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="train on what is here of a run's data, as `neurogrid train prepare` wrote it, and give it to other "
        "members; it is only read, and what it lacks is fetched; may be given again",
    )
    work.add_argument(
        "--invitation",
        type=Path,
        metavar="FILE",
        help="count at once in an open run, by the invitation that its leader wrote; without one a machine is on trial "
        "at first",
    )
    work.add_argument(
        "--price",
        type=positive_float,
        default=0.0,
        metavar="NUMBER",
        help="what this machine asks for being a member of a run, in the unit that people have agreed on: a run takes "
        "those that ask least for what they lend, and nobody above its `[members] price` (default %(default)g)",
    )
    compute = parser.add_argument_group("compute")
    device = compute.add_mutually_exclusive_group()
    device.add_argument("--gpu", type=int, metavar="N", help="compute on the GPU of number N")
    device.add_argument(
        "--device",
        metavar="D",
        help="cpu, or as torch calls it: cuda:N, xpu:N, mps (default: the first GPU, or the CPU)",
    )
    compute.add_argument(
        "--memory-limit",
        type=size_in_bytes,
        metavar="BYTES",
        help="memory for weights and KV caches, and for all of the process that trains, e.g. 8GiB (default: what the "
        "device has free)",
    )
    compute.add_argument(
        "--max-seq-len",
        type=positive_int,
        default=4096,
        metavar="N",
        help="tokens of the longest session (default %(default)s)",
    )
    compute.add_argument(
        "--idle-after",
        type=idle_after,
        default=DEFAULT_IDLE_AFTER,
        metavar="DURATION",
        help="a coordinator that has had nothing to compute for so long gives its memory to another one that needs it, "
        "and has its layers brought from the disk here when it needs them again: 90s, 5m, 1h, or never (default "
        "%(default)s)",
    )
    compute.add_argument(
        "--prefill-chunk",
        type=positive_int,
        default=512,
        metavar="N",
        help="tokens of a prompt that are computed in one pass while other sessions are open: fewer "
        "keep those waiting less, more read it faster (default %(default)s)",
    )
    compute.add_argument(
        "--threads",
        type=positive_int,
        metavar="N",
        help="compute on the CPU with N threads (default: OMP_NUM_THREADS, or one for each core)",
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        type=model_place,
        metavar="MODEL",
        help=f"a checkpoint of this machine's own: {HUB_NAMES}; a directory may hold some of the layers only",
    )
    add_offline_option(model)
    model.add_argument(
        "--wait-for-assignment",
        action="store_true",
        help="with --model: load only the layers that the coordinator asks for",
    )
    add_common_options(parser, port_flag="--port", is_worker=True)
    add_cache_options(parser, "the layers that came", size=size_in_bytes, with_prefixes=True)
    add_metrics_options(parser, port_type=port_number)
    add_trace_options(parser)
    # For programs that start workers as children: ends with the parent, however that ends.
    add_parent_option(parser)


@ends_with_its_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return parse_and_run(build_parser, run, argv)


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Do what the options of `build_parser` say; returns the exit status.

    Args:
        parser: of the command, for mistakes in how options go together; its name stands before errors.
    """
    prepare_threads(options)
    take_ticket(options)
    is_asked = options.serve
    take_work(options)
    if options.wait_for_assignment and options.model is None:
        parser.error("--wait-for-assignment needs --model")
    if options.data and not options.train:
        parser.error("--data is for training runs: leave out --serve, or give --train, too")
    if options.invitation and not options.train:
        parser.error("--invitation is for training runs: leave out --serve, or give --train, too")
    if options.gpu is not None and options.gpu < 0:
        parser.error(f"there is no GPU {options.gpu}")
    screen = set_up_logging(options.log_level, as_json=options.json_logs)

    farewells: list[Callable[[], Awaitable[None]]] = []

    async def serve() -> int:
        with exporting_traces(options, NAME):
            return await work()

    async def work() -> int:
        await find_model(options, screen, lambda: listening(options, port_flag="--port"))
        with ending_at_once():
            for data in options.data:
                if not data.is_dir():
                    raise ConfigurationError(f"--data {data}: there is no such directory")
            invitation = read_invitation(options.invitation)
            if options.model is not None:
                judge_checkpoint(options.model)
            if options.metrics_port is not None:
                await check_port(options.metrics_host, options.metrics_port, flags="--metrics")
            where = listening(options, port_flag="--port")
            trust = trust_of(options, is_worker=True)
            take_role(options, trust.role, is_asked=is_asked)
            bootstrap = bootstrap_peers(options)
            how = finding(options, where.addresses, trust, bootstrap, to_open=TO_OPEN)
            warn_of_loopback(where, is_chosen=bool(options.listen))
            # Here, not above: torch and transformers take seconds, and --help needs neither.
            import_libraries(screen, "neurogrid.assembly.worker")
        from neurogrid.assembly.worker import WorkerSettings, open_worker

        settings = WorkerSettings(
            name=options.name,
            listen=where.addresses,
            listen_fallback=where.fallback,
            identity_file=trust.identity_file,
            admission=trust.admission,
            device=f"gpu:{options.gpu}" if options.gpu is not None else options.device,
            memory_limit=options.memory_limit,
            model=options.model,
            wait_for_assignment=options.wait_for_assignment,
            # In a DHT they may be anybody: coordinators are found among the members.
            bootstrap=(*(() if how.dht else bootstrap), *trust.bootstrap),
            finding=how,
            reach=reaching(options, where.addresses),
            max_seq_len=options.max_seq_len,
            idle_after=options.idle_after,
            prefill_chunk=options.prefill_chunk,
            cache=cache_of(options),
            prefix_cache_bytes=options.prefix_cache,
            serves=options.serve,
            trains=options.train,
            data=tuple(options.data),
            invitation=invitation,
            price=options.price,
        )
        async with open_worker(settings) as worker, AsyncExitStack() as stack:
            await stack.enter_async_context(serving_metrics(options, lambda: _registry_of(worker)))
            # A parent that started it as a child ends it when nothing is to go on elsewhere.
            if not options.stop_on_stdin_eof:
                farewells.append(worker.drain)
            screen.with_names = worker.board.names.beside_ids
            for address in worker.addresses:
                screen.print(address)
            is_known = options.join or options.cluster or options.allow or options.stop_on_stdin_eof
            if not is_known and all(map(is_loopback, worker.addresses)):
                command = f"neurogrid serve --peer {worker.addresses[0]}"
                screen.say(f"next, on this machine: {command}", whole=True)
            if screen.is_live:
                from neurogrid.cli.terminal.panel.live import open_panel
                from neurogrid.cli.terminal.panel.worker import worker_view

                panel = open_panel(
                    screen,
                    lambda: worker_view(
                        worker.board.status(),
                        worker.training.status() if worker.training is not None else None,
                        trains=options.train,
                        serves=options.serve,
                    ),
                )
                await stack.enter_async_context(panel)
            if options.stop_on_stdin_eof:
                await wait_stdin_eof()
            else:
                await trio.sleep_forever()
        return ExitStatus.OK

    with screen.never_waiting():
        return run_command(
            parser.prog, serve, screen=screen, status_on_signal=ExitStatus.OK, farewells=farewells
        )


def _registry_of(worker: Worker) -> Registry:
    from neurogrid.telemetry.worker_metrics import worker_registry

    return worker_registry(worker)


def read_invitation(path: Path | None) -> bytes:
    """The invitation in a file, as it is; empty where none is named.

    Raises:
        ConfigurationError: it cannot be read, or is none.
    """
    if path is None:
        return b""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_INVITATION_BYTES + 1)
    except OSError as exc:
        raise ConfigurationError(f"--invitation {path} cannot be read: {exc.strerror}") from exc
    if not 0 < len(data) <= _MAX_INVITATION_BYTES:
        raise ConfigurationError(
            f"--invitation {path} is none: ask whoever leads the run for the file DIR/invitation"
        )
    return data


def take_role(options: argparse.Namespace, role: str, *, is_asked: bool) -> None:
    """Let a worker that is a member for training alone do nothing else.

    Args:
        is_asked: whether `--serve` was given.

    Raises:
        ConfigurationError: it is to serve.
    """
    from neurogrid.p2p.trust import TRAINER

    if role != TRAINER:
        return
    if is_asked:
        raise ConfigurationError(
            "the membership is for training alone (--ticket-role trainer): leave out --serve, or ask for a ticket of a "
            "worker and join with another --cluster DIR"
        )
    options.serve, options.train = False, True


def take_work(options: argparse.Namespace) -> None:
    """Let a worker of which nothing is said do both: serve models, and train."""
    if not (options.serve or options.train):
        options.serve = options.train = True


if __name__ == "__main__":
    leave(main())
