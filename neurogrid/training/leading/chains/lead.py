"""Opens what the leader of a chain of stages needs, and leads."""

from __future__ import annotations

import json
import shutil
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from neurogrid.errors import ConfigurationError
from neurogrid.model.files.config import build_config
from neurogrid.model.proof.subspace_proof import check_subspace, subspace_of
from neurogrid.model.proof.training_proof import check_trainable
from neurogrid.node.reach_settings import open_reach
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.hosts.machine import machine_name
from neurogrid.p2p.libp2p.libp2p_host import open_host
from neurogrid.p2p.transfer import Transfers
from neurogrid.training.checkpoints import sync, sync_tree
from neurogrid.training.data.blob_files import PIECE_LIMITS, OfferedFiles
from neurogrid.training.data.blobs import Providers, SliceStore
from neurogrid.training.data.manifest import Manifest
from neurogrid.training.leading.board import RunBoard
from neurogrid.training.leading.chains.keeper import ChainKeeper
from neurogrid.training.leading.chains.leader import ChainLeader
from neurogrid.training.leading.chains.numbers import chain_numbers
from neurogrid.training.leading.chains.rates import StepRates
from neurogrid.training.leading.chains.replicas import ReplicasLeader
from neurogrid.training.leading.chains.state import ChainState
from neurogrid.training.leading.chains.weights import ChainWeights
from neurogrid.training.leading.changes import WantedChanges
from neurogrid.training.leading.data import LeaderSlices, data_of
from neurogrid.training.leading.facts import RunFacts
from neurogrid.training.leading.model_data import first_data
from neurogrid.training.leading.model_numbers import read_config
from neurogrid.training.leading.opening import (
    begin_journal,
    further,
    keep_local_workers,
    latest_of,
    replay,
    rules_of,
    weights_of,
)
from neurogrid.training.leading.round_figures import RoundFigures
from neurogrid.training.leading.settings import LeaderProgress, LeaderSettings
from neurogrid.training.runs.changes import changed_run
from neurogrid.training.runs.journal import Journal
from neurogrid.training.runs.machine import Rules, RunMachine
from neurogrid.training.runs.run_directory import RunDirectory
from neurogrid.training.runs.run_file import OuterSection, RunFile
from neurogrid.training.runs.state import Phase
from neurogrid.training.stages.chain_estimate import (
    ChainNumbers,
    check_boundary,
    stage_sizes,
)
from neurogrid.training.stages.cutting import cut_layers
from neurogrid.training.stages.lora import require_peft
from neurogrid.training.trainer.batches import BatchReader
from neurogrid.training.trainer.models import make_model, save_model
from neurogrid.training.wire.runs import run_table

__all__ = ["lead_chain"]

# Of a file of the weights that a run begins with.
_FILE_BYTES: Final = 256 * 1024 * 1024


async def lead_chain(settings: LeaderSettings, progress: LeaderProgress, board: RunBoard) -> Path:
    """Lead a run whose model lies in a chain of stages, to its end.

    Returns:
        The last checkpoint.

    Raises:
        ConfigurationError: run file, model and data do not go together, or the directory cannot be used.
        UnsupportedModelError: stages of this model do not give its gradients.
        NeuroGridError: the run cannot go on; says why.
    """
    run = settings.run
    if run.adapter.r:
        require_peft()  # whose files are written here
    directory = RunDirectory(settings.directory)
    directory.path.mkdir(parents=True, exist_ok=True)
    has_replicas = run.layout.replicas > 1
    rounds = _as_rounds(run)
    every = rounds.outer.round_steps
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
        rules_for = partial(_rules_for, manifest=data.manifest)
        rules = rules_for(run)
        run_id, run_text = begin_journal(journal, run, data.manifest, identity)
        checkpoint = latest_of(directory)
        figures = RoundFigures(rounds, data.manifest.sequence_length)
        offered = OfferedFiles()
        kept = await ChainState.open(directory.path / "stages", offered)
        state = replay(journal, data.manifest, run, {kept.step // every}, figures, lines)
        if (
            state.phase is Phase.ENDED
            and checkpoint is not None
            and int(checkpoint.state["round"]) == state.round
        ):
            progress.say(f"the run has ended: {state.reason}. {further(directory)}")
            return directory.checkpoints / checkpoint.path.name

        built = build_config(config)
        progress.say("proving that stages give the model's gradients")
        await trio.to_thread.run_sync(check_trainable, built)
        if run.layout.subspace:
            if weights_of(settings.model, None) is not None:
                raise ConfigurationError(
                    f"[layout] subspace would damage what the weights in {settings.model} have learned: it is for a "
                    "config.json and a tokenizer alone"
                )
            await trio.to_thread.run_sync(check_subspace, built)
            subspace = subspace_of(built, run.layout.subspace, seed=run.seed)
            vocab_size = built.get_text_config(decoder=True).vocab_size
            digest = await trio.to_thread.run_sync(subspace.digest, vocab_size)
            progress.say(f"the subspace has the digest {digest.hex()}")
        model = await trio.to_thread.run_sync(_begun_with, settings.model, config, run, directory)
        numbers = await trio.to_thread.run_sync(chain_numbers, model, run.adapter)
        check_boundary(run, numbers)
        sizes = stage_sizes(run, numbers)
        # Before anybody has joined: more stages than there are layers no members could be.
        cut_layers(sizes, [0] * run.layout.stages)
        progress.say("reading the weights")
        weights = await trio.to_thread.run_sync(ChainWeights, model, run.adapter.quantize)
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
        store = SliceStore(data.path, data.manifest)
        if not data.web and (missing := await trio.to_thread.run_sync(store.missing)):
            raise ConfigurationError(
                f"{data.path} lacks {len(missing)} slices: the leader of a chain reads them itself"
            )
        transfers = Transfers(exchange, Providers(offered, weights), limits=PIECE_LIMITS)
        slices = LeaderSlices(data, store, transfers, directory.path / ".slices", lambda _: ())
        keeper = ChainKeeper(
            directory,
            run,
            journal,
            model,
            data.path,
            progress,
            figures,
            seconds=lines[-1].get("seconds", 0.0) if lines else 0.0,
            steps_a_round=every,
        )
        machine = RunMachine(
            rules,
            state,
            lambda values: _changed_rules(changed_run(run, values), numbers, data.manifest),
        )
        make_leader = ReplicasLeader if has_replicas else ChainLeader
        leader = make_leader(
            host,
            exchange,
            transfers,
            RunFacts(
                run_id,
                run,
                run_text,
                json.dumps(config),
                store.manifest_info.blob_id,
                weights.num_elements,
                run.members.memory,
            ),
            machine,
            weights,
            kept,
            keeper,
            slices,
            data.manifest,
            BatchReader(run.model.kind, built),
            sizes,
            numbers,
            WantedChanges(directory.changes, run, machine, progress),
            StepRates(run, state, rules_for),
            progress,
            total_steps=rules.total_steps,
            wait=settings.wait,
        )
        stack.enter_context(board.watching(leader.look))
        await open_reach(host, settings.reach)
        progress.listening(host.peer_id, host.addresses)
        async with trio.open_nursery() as nursery:
            if settings.local_workers:
                nursery.start_soon(keep_local_workers, settings, exchange)
            await leader.run()
            nursery.cancel_scope.cancel()
        return keeper.finish(kept.step)


def _as_rounds(run: RunFile) -> RunFile:
    """Return the run file as its rounds are: a step of a single chain is a round of one member, the whole chain."""
    if run.layout.replicas > 1:
        return run
    return replace(run, outer=OuterSection.of("data_parallel"))


def _rules_for(run: RunFile, manifest: Manifest) -> Rules:
    rules = rules_of(_as_rounds(run), manifest)
    least = run.members.min if run.layout.replicas > 1 else 1
    return replace(rules, min_members=least, max_members=run.layout.replicas, projected=False)


def _changed_rules(run: RunFile, numbers: ChainNumbers, manifest: Manifest) -> Rules:
    """The rules of a run file that was changed: what stages could not send each other changes nothing.

    Raises:
        ConfigurationError: they could not, or it does not go together with the data.
    """
    check_boundary(run, numbers)
    return _rules_for(run, manifest)


def _begun_with(model: Path, config: dict[str, Any], run: RunFile, directory: RunDirectory) -> Path:
    """The directory of the weights that stages begin with: the checkpoint's, or of random ones by the run's seed."""
    if weights_of(model, None) is not None:
        return model
    made = directory.path / "stages" / "initial"
    if not (made / "config.json").is_file():
        partial = made.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a time before, that did not come to its end
        partial.mkdir(parents=True)
        # The leader need not have room for the whole model in its memory, nor is it held afterwards.
        text = json.dumps(config)
        try:
            begun = make_model(run.model.kind, text, seed=run.seed, checkpoint=None, folder=partial)
            save_model(begun, partial, file_bytes=_FILE_BYTES)
            # Before it has its name: a machine that loses its power has all of it, or none.
            sync_tree(partial)
        except OSError as exc:
            shutil.rmtree(partial, ignore_errors=True)
            raise ConfigurationError(
                f"{partial}: the weights to begin with cannot be written: {exc}; make room there"
            ) from exc
        partial.rename(made)
        sync(made.parent)
    return made
