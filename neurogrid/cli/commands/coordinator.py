"""`neurogrid-coordinator`: put a model on workers, and serve it or let it write.

stdout gets the completion or the URL, a newline, and nothing else; plan, progress and figures go to stderr.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    nullcontext,
)
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from neurogrid.cli.commands.cluster import add_cluster_options, is_asked, manage_cluster
from neurogrid.cli.commands.coordinator_options import (
    CLUSTER_WAIT,
    MAX_ANSWER_TOKENS,
    MAX_TOKENS,
    WAIT,
    add_generation_options,
    add_model_options,
    add_prompt_options,
    add_question_options,
    add_worker_options,
)
from neurogrid.cli.commands.diagnose import diagnose
from neurogrid.cli.commands.follow import ServedRun
from neurogrid.cli.commands.prompt import read_prompt, write_completion
from neurogrid.cli.commands.serve import (
    SERVING_SESSIONS,
    Server,
    add_serving_options,
    open_server,
    serving_options,
)
from neurogrid.cli.commands.serve_models import (
    each_model,
    find_models,
    has_several,
    serve_models,
)
from neurogrid.cli.entry import leave
from neurogrid.cli.libraries import import_libraries
from neurogrid.cli.options.cache import add_cache_options, cache_of
from neurogrid.cli.options.common import (
    TO_OPEN,
    ArgumentParser,
    ExitStatus,
    Listening,
    add_common_options,
    listening,
    parse_and_run,
    run_command,
    set_up_logging,
    warn_of_loopback,
)
from neurogrid.cli.options.discovery import bootstrap_peers, finding
from neurogrid.cli.options.model import adapters_of, find_model, with_adapters
from neurogrid.cli.options.reach import reaching
from neurogrid.cli.options.telemetry import add_trace_options, exporting_traces
from neurogrid.cli.options.threads import prepare_threads
from neurogrid.cli.options.trust import TICKET_VARIABLE, Trust, existing_trust, is_checked, trust_of
from neurogrid.cli.signals import ending_at_once
from neurogrid.cli.terminal.closed_pipe import ends_with_its_reader
from neurogrid.errors import ConfigurationError
from neurogrid.server.http.listeners import check_port

if TYPE_CHECKING:
    from neurogrid.assembly.coordinator_settings import CoordinatorSettings
    from neurogrid.cli.terminal.panel.view import View
    from neurogrid.cli.terminal.screen import Screen
    from neurogrid.cli.terminal.show import JoinLine
    from neurogrid.inference.board.status_board import StatusBoard
    from neurogrid.inference.generation.coordinator import Coordinator
    from neurogrid.inference.generation.loaded_model import LoadedModel
    from neurogrid.inference.generation.sampling_params import SamplingParams
    from neurogrid.server.models import Models

__all__ = ["add_coordinator_options", "build_parser", "main", "run"]

NAME = "neurogrid-coordinator"
# Whatever it is to do with a model takes these.
LIBRARIES = ("neurogrid.assembly.coordinator", "neurogrid.cli.terminal.show")
# And to serve, these.
SERVER_LIBRARIES = (
    *(
        "neurogrid.server.http.http_server",
        "neurogrid.server.openai.routes",
        "neurogrid.server.page.routes",
    ),
    "neurogrid.telemetry.coordinator_metrics",
)
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
# What most people need: `--help` shows these, `--help-all` all.
FIRST = (
    *("--model", "--prompt", "--chat", "--max-tokens", "--plan-only", "--diagnose"),
    *("--local-workers", "--peer", "--min-peers", "--new-cluster", "--cluster", "--ticket"),
    *("--http-port", "--api-key-file"),
)


def build_parser() -> argparse.ArgumentParser:
    """The command line of `neurogrid-coordinator`."""
    parser = ArgumentParser(
        prog=NAME,
        description="Spread a model over workers, stream them their weights, and serve it over HTTP, or continue "
        "one --prompt and end, or --chat. Without --model, a small one that comes with NeuroGrid.",
        first=FIRST,
        examples=EXAMPLES,
    )
    # Whether nobody else is to take part, which `neurogrid` takes from the other options.
    parser.set_defaults(alone=False)
    add_model_options(parser)
    add_worker_options(parser)
    add_question_options(parser)
    add_prompt_options(parser, with_chat=True)
    add_generation_options(parser)
    add_serving_options(parser)
    add_coordinator_options(parser)
    add_cluster_options(parser)
    return parser


def add_coordinator_options(parser: argparse.ArgumentParser) -> None:
    """Network, trust, output, cache and traces: whatever a coordinator does, it takes these."""
    add_common_options(parser, port_flag="--p2p-port", is_worker=False)
    add_cache_options(parser, "the hashes of the model's files", size=None)
    add_trace_options(parser)


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
    name = parser.prog
    os.environ.pop(TICKET_VARIABLE, None)  # is a worker's, and not for the workers started here
    try:
        manages_cluster = is_asked(options)
    except ConfigurationError as exc:
        parser.error(str(exc))
    if options.system and not options.chat:
        parser.error("--system is what the model is told first in --chat")
    screen = set_up_logging(options.log_level, as_json=options.json_logs)
    if manages_cluster:
        return run_command(name, lambda: _manage(options), screen=screen)
    if options.diagnose:
        return run_command(name, lambda: diagnose(options), screen=screen)
    if options.plan_only:
        return run_command(name, lambda: _show_plan(options, screen), screen=screen)
    if options.chat:
        interrupts: list[Callable[[], bool]] = []
        return run_command(
            name, lambda: _chat(options, screen, interrupts), screen=screen, interrupts=interrupts
        )
    if options.prompt is None and options.prompt_file is None:
        farewells: list[Callable[[], Awaitable[None]]] = []
        with screen.never_waiting():
            return run_command(
                name,
                lambda: _serve(options, screen, farewells),
                screen=screen,
                status_on_signal=ExitStatus.OK,
                farewells=farewells,
            )
    return run_command(name, lambda: _generate(options, screen), screen=screen)


async def _manage(options: argparse.Namespace) -> int:
    manage_cluster(options)
    return ExitStatus.OK


async def _generate(options: argparse.Namespace, screen: Screen) -> int:
    with ending_at_once():
        sampling = _sampling(options)
        adapter = _only_adapter(options)
        prompt = read_prompt(options)
    await find_model(options, screen, lambda: _judge_places(options))
    with ending_at_once():
        where = _listening(options)
        # Here, not above: torch and transformers take seconds, and what is wrong so far needs neither.
        import_libraries(screen, *LIBRARIES)
    from neurogrid.cli.terminal.show import TerminalProgress

    with TerminalProgress(screen) as progress, exporting_traces(options, NAME):
        progress.working("reading the model")
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
                adapter=adapter,
            )
    return ExitStatus.OK


async def _chat(
    options: argparse.Namespace, screen: Screen, interrupts: list[Callable[[], bool]]
) -> int:
    with ending_at_once():
        sampling = _sampling(options)
        adapter = _only_adapter(options)
    await find_model(options, screen, lambda: _judge_places(options))
    with ending_at_once():
        where = _listening(options)
        import_libraries(screen, *LIBRARIES)
    from neurogrid.cli.commands.chat import Chat
    from neurogrid.cli.terminal.line_reader import open_lines
    from neurogrid.cli.terminal.show import TerminalProgress

    with TerminalProgress(screen) as progress, exporting_traces(options, NAME):
        progress.working("reading the model")
        async with _open_coordinator(options, where, progress) as coordinator:
            with open_lines(screen) as lines:
                chat = Chat(
                    coordinator,
                    screen,
                    lines,
                    system=options.system or "",
                    sampling=sampling,
                    max_tokens=options.max_tokens or MAX_ANSWER_TOKENS,
                    adapter=adapter,
                )
                interrupts.append(chat.stop)
                await chat.run()
    return ExitStatus.OK


def _only_adapter(options: argparse.Namespace) -> str | None:
    """The adapter that answers, if there is one.

    Raises:
        ConfigurationError: there are several, or it is not there.
    """
    names = [*adapters_of(options)]
    if len(names) > 1:
        raise ConfigurationError(
            f"one adapter answers at a time, and --adapter names {' and '.join(names)}: serve takes several"
        )
    return names[0] if names else None


def _sampling(options: argparse.Namespace) -> SamplingParams:
    from neurogrid.inference.generation.sampling_params import SamplingParams

    return SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
    )


async def _serve(
    options: argparse.Namespace, screen: Screen, farewells: list[Callable[[], Awaitable[None]]]
) -> int:
    with ending_at_once():
        serving = serving_options(options)
        try:
            await check_port(serving.host, serving.port)
        except ConfigurationError:
            if options.cluster or options.new_cluster:
                _judge_cluster(options)  # whoever has the port may have that, too, which says more
            raise
        each = each_model(options) if has_several(options) else [options]
        runs = [ServedRun.of(one.model, follows=one.follow) for one in each]
        run = runs[0]
        additions = serving.read_additions()
    if run is not None and options.follow:
        await run.wait_first(screen)
    if has_several(options):
        await find_models(each, screen, lambda: _judge_places(options))
    else:
        await find_model(options, screen, lambda: _judge_places(options))
    with ending_at_once():
        for one in each[1:]:
            _judge_plan(one)
        where = _listening(options)
        if options.alone:
            screen.say(
                "this machine computes alone: with --new-cluster DIR it prints the line by which others join"
            )
        import_libraries(screen, *LIBRARIES, *SERVER_LIBRARIES)
    if has_several(options):
        from neurogrid.cli.terminal.show import TerminalProgress
        from neurogrid.inference.board.progress import Progress

        with exporting_traces(options, NAME):
            await serve_models(
                each,
                runs,
                serving,
                additions,
                where,
                screen,
                farewells,
                make_settings=_settings,
                judge=_judge_plan,
                open_shown=partial(_open_shown, screen),
                progress=lambda: Progress() if screen.is_live else TerminalProgress(screen),
            )
        return ExitStatus.OK
    async with AsyncExitStack() as stack:
        # Once, whatever number of checkpoints is served: OpenTelemetry takes no second provider.
        stack.enter_context(exporting_traces(options, NAME))
        server, shown = await _open_shown(screen, stack, open_server(serving, additions))
        await _serve_all(options, where, shown, server, run, screen, farewells)
    return ExitStatus.OK


async def _open_shown(
    screen: Screen,
    stack: AsyncExitStack,
    opening: AbstractAsyncContextManager[Server],
    models: Models | None = None,
) -> tuple[Server, JoinLine]:
    """Open a server, and show it: on a terminal by the panel, else in lines; it, and what says how workers join."""
    from neurogrid.cli.terminal.panel.coordinator import coordinator_view
    from neurogrid.cli.terminal.panel.live import open_panel
    from neurogrid.cli.terminal.show import JoinLine, TerminalProgress

    terminal = stack.enter_context(TerminalProgress(screen))
    terminal.working("reading the model")
    server = await stack.enter_async_context(opening)
    if not screen.is_live:
        return server, terminal
    terminal.stop()
    encoding = screen.console.encoding

    def view() -> View:
        several = models.all() if models is not None else ()
        first = several[0].board if several else server.board
        states = [(each.name, each.state.value) for each in several]
        return coordinator_view(first.status(), url=server.url, encoding=encoding, models=states)

    await stack.enter_async_context(open_panel(screen, view))
    return server, JoinLine(screen)


async def _serve_all(
    options: argparse.Namespace,
    where: Listening,
    shown: JoinLine,
    server: Server,
    run: ServedRun | None,
    screen: Screen,
    farewells: list[Callable[[], Awaitable[None]]],
) -> None:
    """Serve a model until cancelled; of a run that is followed, one checkpoint after the other.

    Workers need not have room for two of them: the next coordinator begins when the last has ended.
    """
    until = run.wait_newer if run is not None and options.follow else trio.sleep_forever
    while True:
        with run.take() if run is not None else nullcontext(options.model) as options.model:
            async with _open_coordinator(options, where, shown, board=server.board) as coordinator:
                given = tuple(coordinator.adapters)
                await server.restore(coordinator)
                if not farewells:
                    farewells.append(server.finish)
                    screen.print(server.url)
                await server.serve(coordinator, until)
                # Clients may have removed some: those do not come back with the next checkpoint.
                left = [each.name for each in given if each in coordinator.adapters]
                options.adapter = with_adapters(options, left).adapter
        screen.say("there is a new checkpoint, which is served next")
        if options.new_cluster:
            options.cluster, options.new_cluster = options.new_cluster, None  # it is made now


def _listening(options: argparse.Namespace) -> Listening:
    """Judge what can be judged without torch, and return the addresses to listen on."""
    _judge_plan(options)
    where = listening(options, port_flag="--p2p-port")
    trust = _judge_cluster(options)
    if options.alone:
        return where
    if options.min_peers is not None or trust is None or trust.cluster is not None:
        # Workers are to come, which may be elsewhere.
        warn_of_loopback(where, is_chosen=bool(options.listen))
    return where


def _judge_places(options: argparse.Namespace) -> None:
    """Refuse what can be known to be wrong without the model, before that is fetched for an hour."""
    adapters_of(options)
    listening(options, port_flag="--p2p-port")
    _judge_cluster(options)


def _judge_cluster(options: argparse.Namespace) -> Trust | None:
    """Return the trust that is given so far; refuse a cluster that another coordinator runs with."""
    trust = existing_trust(options)
    if trust is not None:
        with trust.held():
            return trust
    return None


def _judge_plan(options: argparse.Namespace) -> None:
    """Refuse a model that is none, and numbers that cannot come true; without libp2p, unless peers are named.

    Lenient where more than the options would have to be known: what that lets pass `load_model` refuses.
    """
    from neurogrid.assembly.plan_request import PlanRequest
    from neurogrid.model.embedded import embedded_model_path
    from neurogrid.model.files.checkpoint_files import judge_checkpoint, model_name_of

    path: Path = options.model or embedded_model_path()
    num_layers = judge_checkpoint(path)
    is_reachable = bool(options.listen) or is_checked(options) or options.insecure
    request = PlanRequest(
        num_named=_num_named(options.peer),
        local_workers=options.local_workers,
        is_looking=options.dht or (is_reachable and not options.disable_mdns),
        min_peers=options.min_peers,
        local_layers=options.local_layers,
        stages=options.stages,
    )
    request.check_workers()
    if num_layers is not None:
        request.check_layers(num_layers, options.model_name or model_name_of(path))


def _num_named(addresses: Sequence[str]) -> int:
    """Peers that full multiaddrs lead to."""
    if not addresses:
        return 0
    from neurogrid.p2p.hosts.host import parse_peer_address

    return len({parse_peer_address(address)[1] for address in addresses})


@asynccontextmanager
async def _open_coordinator(
    options: argparse.Namespace,
    where: Listening,
    terminal: JoinLine,
    *,
    check: Callable[[LoadedModel], None] = lambda model: None,
    board: StatusBoard | None = None,
) -> AsyncIterator[Coordinator]:
    """Load the model, and have a coordinator as the options say.

    Args:
        check: raises what is wrong with what the model is to do, before anybody is waited for.
        board: is told what the terminal is told; None for one of the coordinator's own.
    """
    from neurogrid.assembly.coordinator import open_coordinator
    from neurogrid.assembly.planned_fleet import load_model

    trust = existing_trust(options)
    with ExitStack() as stack:
        if trust is not None:
            stack.enter_context(trust.held())
        settings = _settings(options, where, trust or Trust())
        model = await load_model(settings)
        check(model)
        if trust is None:
            # Now that nothing else is known to be wrong.
            trust = trust_of(options, is_worker=False)
            stack.enter_context(trust.held())
            settings = _settings(options, where, trust)
        if trust.cluster is not None:
            terminal.invite = trust.invite
        async with open_coordinator(
            settings, model=model, progress=terminal, board=board
        ) as coordinator:
            yield coordinator


async def _show_plan(options: argparse.Namespace, screen: Screen) -> int:
    """Print the plan to stdout; that the layers do not fit is an error that says what is missing."""
    await find_model(options, screen, lambda: _judge_places(options))
    with ending_at_once():
        _judge_plan(options)
        where = listening(options, port_flag="--p2p-port")
        trust = trust_of(options, is_worker=False)
        if options.min_peers is not None and not options.alone:
            warn_of_loopback(where, is_chosen=bool(options.listen))
        with trust.held():
            pass
        import_libraries(screen, *LIBRARIES)
    from neurogrid.cli.terminal.plan_table import Stdout, print_plan
    from neurogrid.cli.terminal.show import TerminalProgress

    with trust.held(), TerminalProgress(screen) as progress:
        progress.working("reading the model")
        from neurogrid.assembly.planned_fleet import load_model, open_plan
        from neurogrid.assembly.quantize_choices import quantize_choices

        settings = _settings(options, where, trust)
        model = await load_model(settings)
        if trust.cluster is not None:
            progress.invite = trust.invite
        ends_seconds = await trio.to_thread.run_sync(model.ends_seconds)
        async with open_plan(settings, model=model, progress=progress) as planned:
            told = planned.explain(max_sessions=settings.max_sessions, ends_seconds=ends_seconds)
            choices = await trio.to_thread.run_sync(
                lambda: quantize_choices(
                    planned, max_sessions=settings.max_sessions, ends_seconds=ends_seconds
                )
            )
    print_plan(Stdout(), told, planned.infos, choices, note=planned.why_local)
    return ExitStatus.OK


def _settings(options: argparse.Namespace, where: Listening, trust: Trust) -> CoordinatorSettings:
    from neurogrid.assembly.coordinator_settings import CoordinatorSettings

    bootstrap = bootstrap_peers(options)
    how = finding(options, where.addresses, trust, bootstrap, to_open=TO_OPEN)
    serves = options.prompt is None and options.prompt_file is None
    is_for_members = serves and (options.cluster or options.new_cluster)
    return CoordinatorSettings(
        model=options.model,
        model_name=options.model_name,
        name=options.name,
        peers=tuple(options.peer),
        # In a DHT they may be anybody: workers are found among the members.
        bootstrap=() if how.dht else bootstrap,
        finding=how,
        reach=reaching(options, where.addresses),
        min_peers=options.min_peers,
        local_workers=options.local_workers,
        num_threads=options.threads,
        local_layers=options.local_layers,
        stages=options.stages,
        wait=options.wait or (CLUSTER_WAIT if is_for_members else WAIT),
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
        speculate=options.speculate,
        draft=options.draft,
        peer_memory_bytes=int(options.peer_vram_gb * GIB),
        dtype=options.dtype,
        quantize=options.quantize,
        kv_cache_dtype=None if options.kv_cache_dtype == "auto" else options.kv_cache_dtype,
        adapters=adapters_of(options),
        routing=options.routing,
        wire_dtype=options.wire_dtype,
        verify=options.verify,
    )


if __name__ == "__main__":
    leave(main())
