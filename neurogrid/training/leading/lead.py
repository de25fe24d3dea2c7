"""Opens what a leader needs, and leads: data, model, journal, host, workers of this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from neurogrid.errors import NeuroGridError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.node.reach_settings import open_reach
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.hosts.machine import machine_name
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost, open_host
from neurogrid.p2p.transfer import Transfers
from neurogrid.p2p.wire import TensorMessage
from neurogrid.training.checkpoints import RunCheckpoint
from neurogrid.training.data.blob_files import PIECE_LIMITS, OfferedFiles, fetch_file
from neurogrid.training.data.blobs import Providers, SliceStore
from neurogrid.training.leading.board import RunBoard
from neurogrid.training.leading.chains.lead import lead_chain
from neurogrid.training.leading.changes import WantedChanges
from neurogrid.training.leading.data import LeaderSlices, data_of
from neurogrid.training.leading.deputies import Copying, OfferedCopies
from neurogrid.training.leading.facts import RunFacts
from neurogrid.training.leading.keeper import Keeper
from neurogrid.training.leading.leader import GroupLostError, Leader
from neurogrid.training.leading.model_data import first_data
from neurogrid.training.leading.model_numbers import read_config
from neurogrid.training.leading.opening import (
    begin_journal,
    cut_works,
    further,
    keep_local_workers,
    latest_of,
    replay,
    rules_of,
    weights_of,
)
from neurogrid.training.leading.progress import ProgressTee
from neurogrid.training.leading.round_figures import RoundFigures
from neurogrid.training.leading.settings import LeaderProgress, LeaderSettings
from neurogrid.training.leading.sources import Sources
from neurogrid.training.leading.tracking import open_tracking
from neurogrid.training.leading.witnessed import lead_witnessed
from neurogrid.training.runs.changes import changed_run, run_at
from neurogrid.training.runs.estimate import member_bytes
from neurogrid.training.runs.journal import Journal, Recorded
from neurogrid.training.runs.machine import RunMachine
from neurogrid.training.runs.methods import weights_by
from neurogrid.training.runs.run_directory import RunDirectory
from neurogrid.training.runs.state import Phase
from neurogrid.training.runs.trainers import trainer_settings
from neurogrid.training.trainer import Trainer, open_trainer
from neurogrid.training.wire.runs import run_table

__all__ = ["Opened", "lead"]


@dataclass(frozen=True, slots=True)
class Opened:
    """Journal, host and trainer that a deputy has opened by the time that it leads.

    Attributes:
        journal: with the line that says so.
        host, exchange: of this peer, connected to members.
        providers, transfers: of blobs, on the exchange.
        trainer: with any weights: members have those of the run.
        reports: the last of members that have promised, by peer id.
    """

    journal: Journal
    host: Libp2pHost
    exchange: Exchange
    providers: Providers
    transfers: Transfers
    trainer: Trainer
    reports: Mapping[str, TensorMessage]


async def lead(
    settings: LeaderSettings,
    progress: LeaderProgress,
    board: RunBoard | None = None,
    *,
    opened: Opened | None = None,
    is_anew: bool = False,
) -> Path:
    """Lead a run to its end.

    Args:
        board: gathers what is known of the run, for readers that want to look before it is there; None for nobody.
        opened: what there is already, with a deputy; None where it is to be opened.
        is_anew: whether members that are in a group of before are to leave it.

    Returns:
        The last checkpoint.

    Raises:
        ConfigurationError: run file, model and data do not go together, or the directory cannot be used.
        GroupLostError: of a deputy: the members do not go on. What it has opened is to be closed, and then the run goes
            on anew.
        NeuroGridError: the run cannot go on; says why.
    """
    board = board or RunBoard(settings.run)
    track = RunDirectory(settings.directory).track
    board.on_alarm = progress.warn
    async with open_tracking(settings.run, track, progress.warn) as tracking:
        progress = ProgressTee(board, progress, tracking)
        if settings.run.is_chain:
            return await lead_chain(settings, progress, board)
        if settings.run.is_witnessed:
            return await lead_witnessed(settings, progress, board)
        while True:
            try:
                return await _lead(settings, progress, board, opened, is_anew=is_anew)
            except GroupLostError as exc:
                if opened is not None:
                    raise
                progress.warn(f"{exc}. The run goes on from what is here")
                is_anew = True


async def _lead(
    settings: LeaderSettings,
    progress: LeaderProgress,
    board: RunBoard,
    opened: Opened | None,
    *,
    is_anew: bool,
) -> Path:
    directory = RunDirectory(settings.directory)
    directory.path.mkdir(parents=True, exist_ok=True)
    run = settings.run
    async with AsyncExitStack() as stack:
        identity = Identity.load(settings.identity_file)
        journal = stack.enter_context(
            Journal.open(directory.journal, identity) if opened is None else opened.journal
        )
        lines = directory.figures()
        board.replay(journal.entries, lines)
        journal.on_append = board.record
        config = read_config(settings.model)
        if journal.entries:
            data = await data_of(run, directory, settings.model, progress)
        else:
            data = await first_data(run, directory, settings.model, progress)
        board.tokens_per_sample = data.manifest.tokens_per_sample
        rules = rules_of(run, data.manifest)
        if cut := cut_works(data.manifest, rules.steps * rules.batch_samples):
            progress.warn(cut)
        run_id, run_text = begin_journal(journal, run, data.manifest, identity)
        # Of a deputy members have the weights, or it begins anew.
        checkpoint = latest_of(directory) if opened is None else None
        figures = RoundFigures(run, data.manifest.sequence_length)
        state = replay(journal, data.manifest, run, _resumable(checkpoint), figures, lines)
        if (
            state.phase is Phase.ENDED
            and checkpoint is not None
            and int(checkpoint.state["round"]) == state.round
        ):
            progress.say(f"the run has ended: {state.reason}. {further(directory)}")
            return directory.checkpoints / checkpoint.path.name

        trainer_told = trainer_settings(
            run, json.dumps(config), total_steps=rules.total_steps, threads=_threads(settings)
        )
        if opened is None:
            progress.say("starting the model")
            trainer = await stack.enter_async_context(
                open_trainer(trainer_told, checkpoint=weights_of(settings.model, checkpoint))
            )
        else:
            trainer = opened.trainer
        outer = weights_by(run, trainer.layout, trainer.weights.clone(), trainer_told)
        if checkpoint is not None:
            stored = {"theta0": trainer.weights.clone(), **checkpoint.outer()}
            outer.load_state_dict(stored, int(checkpoint.state["round"]))

        store, offered = SliceStore(data.path, data.manifest), OfferedFiles()
        if opened is None:
            host: Libp2pHost = await stack.enter_async_context(
                open_host(
                    listen=settings.listen,
                    listen_fallback=settings.listen_fallback,
                    identity=identity,
                    admission=settings.admission,
                    keep_alive=settings.reach.keep_alive,
                )
            )
            machine_named = machine_name(settings.name)
            exchange = Exchange(host, run_table(), role="coordinator", name=machine_named)
            providers = Providers()
            transfers = Transfers(exchange, providers, limits=PIECE_LIMITS)
        else:
            host, exchange = opened.host, opened.exchange
            providers, transfers = opened.providers, opened.transfers
        providers.providers.append(offered)
        sources = Sources(
            exchange,
            run_id,
            data.manifest,
            store.manifest_info.blob_id,
            () if data.web else await trio.to_thread.run_sync(store.missing),
            str(data.path),
            progress,
        )
        slices = LeaderSlices(
            data, store, transfers, directory.path / ".slices", sources.peers_with
        )
        providers.providers.append(slices)
        saved = {}
        for seat, file in (checkpoint.members if checkpoint is not None else {}).items():
            saved[seat] = await offered.offer(file)

        async def fetch_state(round_number: int, seat: int, path: Path, timeout: float) -> str:
            told = await leader.wait_saved(round_number, seat)
            if told is None:
                return "the member is lost, or has saved none after this round"
            peer_id, blob_id = told
            try:
                await fetch_file(transfers, blob_id, [peer_id], path, timeout=timeout)
            except NeuroGridError as exc:
                return str(exc)
            return ""

        keeper = Keeper(
            directory,
            run_id,
            run,
            partial(run_at, run, state.changes),
            journal,
            trainer,
            data.manifest,
            data.path,
            slices,
            fetch_state,
            progress,
            figures,
            seconds=lines[-1].get("seconds", 0.0) if lines else _seconds_of(journal),
        )
        machine = RunMachine(
            rules, state, lambda values: rules_of(changed_run(run, values), data.manifest)
        )
        facts = RunFacts(
            run_id,
            run,
            run_text,
            json.dumps(config),
            store.manifest_info.blob_id,
            trainer.layout.num_elements,
            max(run.members.memory, member_bytes(run.inner, trainer.layout.num_elements)),
        )
        files = OfferedCopies(directory, data.path, offered)
        copying = Copying(exchange, journal, facts, files, progress)
        journal.on_append = _both(board.record, copying.wrote)
        if settings.without_deputy:
            copying.do_without()
        leader = Leader(
            host,
            exchange,
            facts,
            machine,
            outer,
            keeper,
            sources,
            WantedChanges(
                directory.changes, run, machine, progress, partial(cut_works, data.manifest)
            ),
            copying,
            progress,
            total_steps=rules.total_steps,
            wait=settings.wait,
            resume_at=_resume_at(checkpoint) if opened is None else None,
            saved=saved,
            is_anew=is_anew,
        )
        if opened is not None:
            leader.hear(opened.reports.values())
        stack.enter_context(board.watching(leader.look))
        if opened is None:
            await open_reach(host, settings.reach)
            progress.listening(host.peer_id, host.addresses)
        return await _run(settings, host, exchange, leader, keeper)


async def _run(
    settings: LeaderSettings, host: object, exchange: Exchange, leader: Leader, keeper: Keeper
) -> Path:
    with unwrap_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.run)
            if settings.local_workers:
                nursery.start_soon(keep_local_workers, settings, exchange)
            try:
                await leader.run()
            except GroupLostError:
                await leader.keep_state()
                raise
            path = await keeper.finish()
            nursery.cancel_scope.cancel()
    return path


def _threads(settings: LeaderSettings) -> int:
    return 1 if settings.local_workers else (settings.num_threads or 0)


def _both(
    first: Callable[[Recorded], None], second: Callable[[Recorded], None]
) -> Callable[[Recorded], None]:
    def told(recorded: Recorded) -> None:
        first(recorded)
        second(recorded)

    return told


def _seconds_of(journal: Journal) -> float:
    """Seconds that the run has taken by its journal: a deputy has none of its figures."""
    entries = journal.entries
    return max(0.0, entries[-1].time - entries[0].time) if len(entries) > 1 else 0.0


def _resume_at(checkpoint: RunCheckpoint | None) -> int:
    return int(checkpoint.state["round"]) if checkpoint is not None else 0


def _resumable(checkpoint: RunCheckpoint | None) -> set[int]:
    return set() if checkpoint is None else {int(checkpoint.state["round"])}
