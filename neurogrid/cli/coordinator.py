"""`neurogrid-coordinator`: put a model on workers, and serve it or let it write.

stdout gets the completion or the URL, a newline, and nothing else; plan, progress and figures go to stderr.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from neurogrid.cli.cache import add_cache_options, cache_of
from neurogrid.cli.closed_pipe import ends_with_its_reader
from neurogrid.cli.cluster import add_cluster_options, is_asked, manage_cluster
from neurogrid.cli.common import (
    TO_OPEN,
    ArgumentParser,
    ExitStatus,
    Listening,
    add_common_options,
    listening,
    positive_float,
    positive_int,
    run_command,
    set_up_logging,
    warn_of_loopback,
    whole_number,
)
from neurogrid.cli.diagnose import DIAGNOSE_WAIT, diagnose
from neurogrid.cli.finding import bootstrap_peers, finding, peer_address
from neurogrid.cli.libraries import import_libraries
from neurogrid.cli.prompt import read_prompt, write_completion
from neurogrid.cli.reach import reaching
from neurogrid.cli.serving import (
    SERVING_SESSIONS,
    add_serving_options,
    open_server,
    serving_options,
)
from neurogrid.cli.telemetry import add_trace_options, exporting_traces
from neurogrid.cli.trust import Trust, existing_trust, trust_of
from neurogrid.errors import ConfigurationError

if TYPE_CHECKING:
    from neurogrid.cli.screen import Screen
    from neurogrid.cli.show import JoinLine
    from neurogrid.inference.coordinator import Coordinator
    from neurogrid.inference.coordinator_settings import CoordinatorSettings
    from neurogrid.inference.loaded_model import LoadedModel
    from neurogrid.inference.progress import Progress
    from neurogrid.inference.sampling import SamplingParams

__all__ = ["build_parser", "main"]

NAME = "neurogrid-coordinator"
# Whatever it is to do with a model takes these.
LIBRARIES = ("neurogrid.inference.opening", "neurogrid.cli.show")
EXAMPLES = (
    (
        f"{NAME} --local-workers 2",
        "serve the small model, on two workers of this machine",
    ),
    (
        f'{NAME} --local-workers 2 --prompt "A function definition"',
        "continue a text, and end",
    ),
    (
        f"{NAME} --model DIR --chat --new-cluster ~/cluster --min-peers 2",
        "talk to a model on two workers that join with the ticket it prints",
    ),
    (
        f"{NAME} --model DIR --plan-only --peer MULTIADDR",
        "which layers that worker would get, and how fast it would be",
    ),
)
GIB = 1024**3
MAX_TOKENS = 128
MAX_ANSWER_TOKENS = 1024
# Seconds to wait for workers: they may still be importing torch.
WAIT = 60.0


def build_parser() -> argparse.ArgumentParser:
    """The command line of `neurogrid-coordinator`."""
    parser = ArgumentParser(
        prog=NAME,
        description="Spread a model over workers, stream them their weights, and serve it over HTTP, or continue "
        "one --prompt and end, or --chat. Without --model, a small one that comes with NeuroGrid.",
        examples=EXAMPLES,
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint: config.json, safetensors, tokenizer"
    )
    model.add_argument("--model-name", metavar="NAME", help="what to call it (default: DIR's name)")
    model.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="to compute in (default: the checkpoint's)",
    )
    model.add_argument(
        "--max-seq-len",
        type=positive_int,
        default=4096,
        metavar="N",
        help="tokens of the longest session (default %(default)s, or the model's bound if less)",
    )
    model.add_argument(
        "--max-sessions",
        type=positive_int,
        metavar="N",
        help="sessions of --max-seq-len tokens that workers set memory aside for; shorter ones share it, so that "
        f"more run at once (default {SERVING_SESSIONS}; 1 for a --prompt)",
    )
    model.add_argument(
        "--no-prefix-reuse",
        dest="prefix_reuse",
        action="store_false",
        help="compute every prompt whole; otherwise what it shares with a finished session is not computed again, "
        "and the time to the first token tells whether somebody asked the same before",
    )
    workers = parser.add_argument_group("workers")
    workers.add_argument(
        "--peer",
        action="append",
        type=peer_address,
        default=[],
        metavar="MULTIADDR",
        help="a worker to dial, as it printed its address; may be given again",
    )
    workers.add_argument(
        "--local-workers",
        type=positive_int,
        default=0,
        metavar="N",
        help="start N workers on this machine; they share its memory, each gets a stage "
        "(default %(default)s)",
    )
    workers.add_argument(
        "--local-layers",
        type=_local_layers,
        default="auto",
        metavar="auto|none|N",
        help="layers that this machine computes itself: exactly N, the first; auto: as many as it takes where the "
        "workers cannot hold the model, or where a GPU here makes it much faster (default %(default)s)",
    )
    workers.add_argument(
        "--min-peers",
        type=whole_number,
        metavar="N",
        help="workers to wait for (default: as many as are named and started); 0 to compute here until some come",
    )
    workers.add_argument(
        "--wait",
        type=positive_float,
        metavar="SECONDS",
        help=f"how long to wait for them (default {WAIT:g}; to --diagnose {DIAGNOSE_WAIT:g})",
    )
    workers.add_argument(
        "--diagnose",
        action="store_true",
        help="look for workers, print what was tried and what came of it, and end",
    )
    workers.add_argument(
        "--plan-only",
        action="store_true",
        help="wait for the workers, print which layers each would hold and how fast that would be, and end",
    )
    workers.add_argument(
        "--stages",
        type=positive_int,
        metavar="N",
        help="that many stages (default: fewest that fit)",
    )
    workers.add_argument(
        "--routing",
        choices=("chain", "star"),
        default="chain",
        help="chain: each worker hands on to the next, unless it cannot reach it; star: every activation "
        "comes back here in between (default %(default)s)",
    )
    workers.add_argument(
        "--wire-dtype",
        choices=("float32", "float16", "bfloat16", "int8"),
        help="in which activations travel between the stages; int8 is off by up to 1/254 of the largest of 64 "
        "neighbours (default: what is computed in, which loses nothing)",
    )
    workers.add_argument(
        "--no-replicas",
        action="store_true",
        help="send nothing to workers that are left over: they stand by without layers",
    )
    workers.add_argument(
        "--patience",
        type=positive_float,
        default=120.0,
        metavar="SECONDS",
        help="how long a generation waits for a way around a worker that failed, or for one that has no room "
        "(default %(default)g)",
    )
    workers.add_argument(
        "--skip-weight-transfer",
        action="store_true",
        help="send no weights: workers must hold this model's layers already",
    )
    workers.add_argument(
        "--peer-vram-gb",
        type=positive_float,
        default=8.0,
        metavar="G",
        help="GiB assumed for workers that do not tell their memory (default %(default)g)",
    )
    generation = parser.add_argument_group("generation")
    prompt = generation.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument(
        "--prompt-file", metavar="FILE", help="a file with the text to continue, - for stdin"
    )
    prompt.add_argument(
        "--chat",
        action="store_true",
        help="talk to the model in the terminal; on a pipe, each line of stdin is a turn",
    )
    generation.add_argument(
        "--system", metavar="TEXT", help="with --chat: what the model is told first"
    )
    generation.add_argument(
        "--max-tokens",
        type=positive_int,
        metavar="N",
        help=f"new tokens at most (default {MAX_TOKENS}; of each answer in --chat {MAX_ANSWER_TOKENS})",
    )
    generation.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token each time (default %(default)g)",
    )
    generation.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="sample among the K likeliest; 0 for all (default %(default)s)",
    )
    generation.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample among the likeliest that make up P (default %(default)g: all)",
    )
    generation.add_argument(
        "--seed",
        type=int,
        metavar="S",
        help="makes sampling repeatable (default: another each time)",
    )
    add_serving_options(parser)
    add_common_options(parser, port_flag="--p2p-port", is_worker=False)
    add_cache_options(parser, "the hashes of the model's files", size=None)
    add_trace_options(parser)
    add_cluster_options(parser)
    return parser


def _local_layers(text: str) -> str | int:
    """An argparse type: `auto`, `none`, or a number of layers; 0 is none."""
    if text in ("auto", "none"):
        return text
    return whole_number(text) or "none"


@ends_with_its_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = build_parser()
    options = parser.parse_args(argv)
    try:
        manages_cluster = is_asked(options)
    except ConfigurationError as exc:
        parser.error(str(exc))
    if options.system and not options.chat:
        parser.error("--system is what the model is told first in --chat")
    screen = set_up_logging(options.log_level, as_json=options.json_logs)
    if manages_cluster:
        return run_command(NAME, lambda: _manage(options), screen=screen)
    if options.diagnose:
        return run_command(NAME, lambda: diagnose(options), screen=screen)
    if options.plan_only:
        return run_command(NAME, lambda: _show_plan(options, screen), screen=screen)
    if options.chat:
        interrupts: list[Callable[[], bool]] = []
        return run_command(
            NAME, lambda: _chat(options, screen, interrupts), screen=screen, interrupts=interrupts
        )
    if options.prompt is None and options.prompt_file is None:
        farewells: list[Callable[[], Awaitable[None]]] = []
        with screen.never_waiting():
            return run_command(
                NAME,
                lambda: _serve(options, screen, farewells),
                screen=screen,
                status_on_signal=ExitStatus.OK,
                farewells=farewells,
            )
    return run_command(NAME, lambda: _generate(options, screen), screen=screen)


async def _manage(options: argparse.Namespace) -> int:
    manage_cluster(options)
    return ExitStatus.OK


async def _generate(options: argparse.Namespace, screen: Screen) -> int:
    prompt = await trio.to_thread.run_sync(read_prompt, options)
    where = _listening(options)

    # Here, not above: torch and transformers take seconds, and what is wrong so far needs neither.
    import_libraries(screen, *LIBRARIES)
    from neurogrid.cli.show import TerminalProgress

    with TerminalProgress(screen) as progress:
        progress.working("reading the model")
        sampling = _sampling(options)
        token_ids: list[int] = []

        def check(model: LoadedModel) -> None:
            token_ids.extend(model.tokenizer.encode(prompt))
            model.check_prompt(token_ids)

        async with _open_coordinator(options, where, progress, check=check) as coordinator:
            await write_completion(
                coordinator,
                token_ids,
                screen,
                sampling=sampling,
                max_tokens=options.max_tokens or MAX_TOKENS,
            )
    return ExitStatus.OK


async def _chat(
    options: argparse.Namespace, screen: Screen, interrupts: list[Callable[[], bool]]
) -> int:
    where = _listening(options)

    import_libraries(screen, *LIBRARIES)
    from neurogrid.cli.chat import Chat
    from neurogrid.cli.line_reader import open_lines
    from neurogrid.cli.show import TerminalProgress

    with TerminalProgress(screen) as progress:
        progress.working("reading the model")
        sampling = _sampling(options)
        async with _open_coordinator(options, where, progress) as coordinator:
            with open_lines(screen) as lines:
                chat = Chat(
                    coordinator,
                    screen,
                    lines,
                    system=options.system or "",
                    sampling=sampling,
                    max_tokens=options.max_tokens or MAX_ANSWER_TOKENS,
                )
                interrupts.append(chat.stop)
                await chat.run()
    return ExitStatus.OK


def _sampling(options: argparse.Namespace) -> SamplingParams:
    from neurogrid.inference.sampling import SamplingParams

    return SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )


async def _serve(
    options: argparse.Namespace, screen: Screen, farewells: list[Callable[[], Awaitable[None]]]
) -> int:
    serving = await trio.to_thread.run_sync(serving_options, options)
    where = _listening(options)

    import_libraries(screen, *LIBRARIES)
    from neurogrid.cli.panel.coordinator import coordinator_view
    from neurogrid.cli.panel.live import open_panel
    from neurogrid.cli.show import JoinLine, TerminalProgress

    async with AsyncExitStack() as stack:
        shown: JoinLine
        shown = terminal = stack.enter_context(TerminalProgress(screen))
        terminal.working("reading the model")
        server = await stack.enter_async_context(open_server(serving))
        if screen.is_live:
            terminal.stop()
            shown, encoding = JoinLine(screen), screen.console.encoding
            panel = open_panel(
                screen,
                lambda: coordinator_view(server.board.status(), url=server.url, encoding=encoding),
            )
            await stack.enter_async_context(panel)
        coordinator = await stack.enter_async_context(
            _open_coordinator(options, where, shown, also=server.progress)
        )
        farewells.append(server.finish)
        await server.serve(coordinator, screen)
    return ExitStatus.OK


def _listening(options: argparse.Namespace) -> Listening:
    where = listening(options, port_flag="--p2p-port")
    trust = existing_trust(options)
    if options.min_peers is not None or trust is None or trust.cluster is not None:
        # Somebody is to come, who may be elsewhere.
        warn_of_loopback(where, is_chosen=bool(options.listen))
    return where


@asynccontextmanager
async def _open_coordinator(
    options: argparse.Namespace,
    where: Listening,
    terminal: JoinLine,
    *,
    check: Callable[[LoadedModel], None] = lambda model: None,
    also: Progress | None = None,
) -> AsyncIterator[Coordinator]:
    """Load the model, and have a coordinator as the options say.

    Args:
        check: raises what is wrong with what the model is to do, before anybody is waited for.
        also: is told what the terminal is told.
    """
    from neurogrid.inference.opening import open_coordinator
    from neurogrid.inference.planned_fleet import load_model
    from neurogrid.inference.progress import ProgressTee

    trust = existing_trust(options)
    with exporting_traces(options, NAME):
        settings = _settings(options, where, trust or Trust())
        model = await load_model(settings)
        check(model)
        if trust is None:
            # Now that nothing else is known to be wrong.
            trust = trust_of(options, is_worker=False)
            settings = _settings(options, where, trust)
        if trust.cluster is not None:
            terminal.ticket_for = trust.ticket
        progress = terminal if also is None else ProgressTee(terminal, also)
        async with open_coordinator(settings, model=model, progress=progress) as coordinator:
            yield coordinator


async def _show_plan(options: argparse.Namespace, screen: Screen) -> int:
    """Print the plan to stdout; that the layers do not fit is an error that says what is missing."""
    where = listening(options, port_flag="--p2p-port")
    trust = trust_of(options, is_worker=False)
    if options.min_peers is not None:
        warn_of_loopback(where, is_chosen=bool(options.listen))

    import_libraries(screen, *LIBRARIES)
    from neurogrid.cli.plan_table import Stdout, print_plan
    from neurogrid.cli.show import TerminalProgress

    with TerminalProgress(screen) as progress:
        progress.working("reading the model")
        from neurogrid.inference.planned_fleet import load_model, open_plan

        settings = _settings(options, where, trust)
        model = await load_model(settings)
        if trust.cluster is not None:
            progress.ticket_for = trust.ticket
        ends_seconds = await trio.to_thread.run_sync(model.ends_seconds)
        async with open_plan(settings, model=model, progress=progress) as planned:
            told = planned.explain(max_sessions=settings.max_sessions, ends_seconds=ends_seconds)
    print_plan(Stdout(), told, planned.infos, note=planned.why_local)
    return ExitStatus.OK


def _settings(options: argparse.Namespace, where: Listening, trust: Trust) -> CoordinatorSettings:
    from neurogrid.inference.coordinator_settings import CoordinatorSettings

    bootstrap = bootstrap_peers(options)
    how = finding(options, where.addresses, trust, bootstrap, to_open=TO_OPEN)
    serves = options.prompt is None and options.prompt_file is None
    return CoordinatorSettings(
        model=options.model,
        model_name=options.model_name,
        peers=tuple(options.peer),
        # In a DHT they may be anybody: workers are found among the members.
        bootstrap=() if how.dht else bootstrap,
        finding=how,
        reach=reaching(options, where.addresses),
        min_peers=options.min_peers,
        local_workers=options.local_workers,
        local_layers=options.local_layers,
        stages=options.stages,
        wait=options.wait or WAIT,
        listen=where.addresses,
        listen_fallback=where.fallback,
        identity_file=trust.identity_file,
        admission=trust.admission,
        cache=cache_of(options),
        skip_weight_transfer=options.skip_weight_transfer,
        with_replicas=not options.no_replicas,
        patience=options.patience,
        max_seq_len=options.max_seq_len,
        max_sessions=options.max_sessions or (SERVING_SESSIONS if serves else 1),
        max_waiting=options.max_queue,
        prefix_reuse=options.prefix_reuse,
        peer_memory_bytes=int(options.peer_vram_gb * GIB),
        dtype=options.dtype,
        routing=options.routing,
        wire_dtype=options.wire_dtype,
    )


if __name__ == "__main__":
    raise SystemExit(main())
