"""Opens what the leader of a witnessed run needs, and leads."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import trio

from neurogrid.exception_groups import unwrap_errors
from neurogrid.node.reach_settings import open_reach
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.hosts.machine import machine_name
from neurogrid.p2p.libp2p.libp2p_host import open_host
from neurogrid.p2p.transfer import Transfers
from neurogrid.training.checks import ClaimRules, Settings, start_of
from neurogrid.training.data.blob_files import PIECE_LIMITS, OfferedFiles
from neurogrid.training.data.blobs import Providers, SliceStore
from neurogrid.training.leading.board import RunBoard
from neurogrid.training.leading.changes import WantedChanges
from neurogrid.training.leading.data import LeaderSlices, data_of
from neurogrid.training.leading.facts import RunFacts
from neurogrid.training.leading.keeper import Keeper
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
from neurogrid.training.leading.round_figures import RoundFigures
from neurogrid.training.leading.settings import LeaderProgress, LeaderSettings
from neurogrid.training.leading.sources import Sources
from neurogrid.training.leading.witnessed.common_weights import CommonWeights
from neurogrid.training.leading.witnessed.leader import EpochLostError, WitnessedLeader
from neurogrid.training.leading.witnessed.trials import write_invitation
from neurogrid.training.runs.changes import Changes, changed_run, run_at
from neurogrid.training.runs.estimate import member_bytes
from neurogrid.training.runs.inner_optimizer import round_rates
from neurogrid.training.runs.journal import Journal
from neurogrid.training.runs.machine import Rules
from neurogrid.training.runs.run_directory import RunDirectory
from neurogrid.training.runs.run_file import RunFile
from neurogrid.training.runs.state import Phase
from neurogrid.training.runs.trainers import trainer_settings, work_seed
from neurogrid.training.runs.witnessed_machine import (
    WitnessedMachine,
    epoch_rules,
    fold_epochs,
)
from neurogrid.training.trainer import Trainer, open_trainer
from neurogrid.training.wire.runs import run_table

__all__ = ["lead_witnessed"]


async def lead_witnessed(
    settings: LeaderSettings, progress: LeaderProgress, board: RunBoard
) -> Path:
    """Lead a witnessed run to its end.

    Returns:
        The last checkpoint.

    Raises:
        ConfigurationError: run file, model and data do not go together, or the directory cannot be used.
        NeuroGridError: the run cannot go on; says why.
    """
    while True:
        try:
            return await _lead(settings, progress, board)
        except EpochLostError as exc:
            progress.warn(str(exc))


async def _lead(settings: LeaderSettings, progress: LeaderProgress, board: RunBoard) -> Path:
    directory = RunDirectory(settings.directory)
    directory.path.mkdir(parents=True, exist_ok=True)
    run = settings.run
    async with AsyncExitStack() as stack:
        identity = Identity.load(settings.identity_file)
        journal = stack.enter_context(Journal.open(directory.journal, identity))
        lines = directory.figures()
        board.replay(journal.entries, lines)
        journal.on_append = board.record
        config = read_config(settings.model)
        prepare = data_of if journal.entries else first_data
        data = await prepare(run, directory, settings.model, progress)
        board.tokens_per_sample = data.manifest.tokens_per_sample
        rules = rules_of(run, data.manifest)
        num_batches = max(1, -(-run.epochs.batches // run.members.min))
        if cut := cut_works(data.manifest, num_batches * rules.batch_samples):
            progress.warn(cut)
        run_id, run_text = begin_journal(journal, run, data.manifest, identity)
        checkpoint = latest_of(directory)
        resume_at = int(checkpoint.state["round"]) if checkpoint is not None else 0
        figures = RoundFigures(run, data.manifest.sequence_length)
        state = replay(journal, data.manifest, run, {resume_at}, figures, lines)
        if state.phase is Phase.ENDED and checkpoint is not None and resume_at == state.round:
            progress.say(f"the run has ended: {state.reason}. {further(directory)}")
            return directory.checkpoints / checkpoint.path.name

        progress.say("starting the model")
        total_steps = _total_steps(rules, run)
        told = trainer_settings(
            run,
            json.dumps(config),
            total_steps=total_steps,
            threads=1 if settings.local_workers else (settings.num_threads or 0),
        )
        trainer = await stack.enter_async_context(
            open_trainer(told, checkpoint=weights_of(settings.model, checkpoint))
        )
        host = await stack.enter_async_context(
            open_host(
                listen=settings.listen,
                listen_fallback=settings.listen_fallback,
                identity=identity,
                admission=settings.admission,
                keep_alive=settings.reach.keep_alive,
            )
        )
        exchange = Exchange(host, run_table(), role="coordinator", name=machine_name(settings.name))
        store, offered = SliceStore(data.path, data.manifest), OfferedFiles()
        providers = Providers(offered)
        transfers = Transfers(exchange, providers, limits=PIECE_LIMITS)
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
        pieces = directory.path / ".pieces"
        stack.callback(shutil.rmtree, pieces, ignore_errors=True)
        weights = CommonWeights(trainer.weights.clone(), resume_at, offered, pieces)
        entries = [recorded.entry for recorded in journal.entries]
        epochs = epoch_rules(run)
        machine = WitnessedMachine(
            rules,
            epochs,
            state,
            fold_epochs(epochs, entries),
            lambda values: rules_of(changed_run(run, values), data.manifest),
        )
        keeper = Keeper(
            directory,
            run_id,
            run,
            partial(_at_epochs_end, run, state.changes),
            journal,
            trainer,
            data.manifest,
            data.path,
            slices,
            _save_nothing,
            progress,
            figures,
            seconds=lines[-1].get("seconds", 0.0) if lines else 0.0,
        )
        if state.num_seats or machine.epoch.epoch or machine.epoch.members:
            machine.resume(resume_at)
            figures.resumed(resume_at)
            keeper.write(machine.drain())
        began, begun_at = trio.current_time(), max(time.time(), _last_time(journal))
        num_parameters = trainer.layout.num_elements
        leader = WitnessedLeader(
            host,
            exchange,
            transfers,
            RunFacts(
                run_id,
                run,
                run_text,
                json.dumps(config),
                store.manifest_info.blob_id,
                num_parameters,
                max(run.members.memory, member_bytes(run.inner, num_parameters)),
            ),
            machine,
            weights,
            keeper,
            sources,
            WantedChanges(directory.changes, run, machine, progress),
            progress,
            directory.pause,
            total_steps=total_steps,
            wait=settings.wait,
            clock=lambda: begun_at + trio.current_time() - began,
            rules=_claim_rules(run, run_id, trainer, total_steps),
            entries=entries,
        )
        stack.enter_context(board.watching(leader.look))
        await open_reach(host, settings.reach)
        if run.members.open:
            path = directory.path / "invitation"
            write_invitation(path, run_id, identity, host.addresses)
            progress.say(
                f"the run is open: who comes is on trial, but for who has {path} (neurogrid-worker --invitation)"
            )
        progress.listening(host.peer_id, host.addresses)
        with unwrap_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(keeper.run)
                if settings.local_workers:
                    nursery.start_soon(keep_local_workers, settings, exchange)
                await leader.run()
                path = await keeper.finish()
                nursery.cancel_scope.cancel()
        return path


def _claim_rules(
    run: RunFile, run_id: bytes, trainer: Trainer, total_steps: int
) -> ClaimRules | None:
    """Rules of claims, which all members know; None where nothing is computed again."""
    if not run.checks.audit:
        return None
    settings = Settings(
        tuple(trainer.layout.shapes),
        run.distro.top_k,
        run.distro.chunk,
        run.distro.decay,
        run.distro.one_bit,
    )
    return ClaimRules(
        run_id,
        settings,
        round_rates(run.inner, total_steps),
        partial(work_seed, run.seed),
        start_of(settings),
    )


def _total_steps(rules: Rules, run: RunFile) -> int:
    """Rounds that the schedule counts on; 0 where the run has no end that is known."""
    known = [] if rules.max_rounds is None else [rules.max_rounds]
    if rules.max_samples is not None:
        batches = run.epochs.batches or rules.min_members
        known.append(-(-rules.max_samples // (rules.batch_samples * batches)))
    return min(known, default=0)


def _at_epochs_end(run: RunFile, changes: Changes, round_number: int) -> RunFile:
    """The run file of a round whose weights are here: each of them is a checkpoint, and evaluated where any is."""
    now = run_at(run, changes, round_number)
    return replace(
        now,
        checkpoints=replace(now.checkpoints, every=1),
        eval=replace(now.eval, every=min(now.eval.every, 1)),
    )


async def _save_nothing(round_number: int, seat: int, path: Path, timeout: float) -> str:
    """Momenta are of members alone, and stay with them."""
    return "momenta stay with members"


def _last_time(journal: Journal) -> float:
    return journal.entries[-1].time if journal.entries else 0.0
