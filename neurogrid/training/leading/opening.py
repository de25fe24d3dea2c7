"""Opening of a run by any of its leaders: its rules, its journal, earlier checkpoints, workers of this machine."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final

import trio

from neurogrid.errors import ConfigurationError, NeuroGridError
from neurogrid.fleet.local_trust import credentials_of_local_workers, listen_address_beside
from neurogrid.fleet.local_workers import start_local_workers
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.transfer import BlobInfo, BytesSource
from neurogrid.training.checkpoints import RunCheckpoint, latest_checkpoint, read_checkpoint
from neurogrid.training.data.manifest import Manifest
from neurogrid.training.leading.facts import draw_run_id
from neurogrid.training.leading.round_figures import RoundFigures
from neurogrid.training.leading.settings import LeaderSettings
from neurogrid.training.runs.entries import Entry, ResumedEntry, RoundEntry, RunEntry
from neurogrid.training.runs.journal import Journal
from neurogrid.training.runs.kept_run import kept_text, text_of_before
from neurogrid.training.runs.machine import Rules
from neurogrid.training.runs.run_directory import Figures, RunDirectory
from neurogrid.training.runs.run_file import RunFile
from neurogrid.training.runs.state import RunState
from neurogrid.training.trainer import free_memory
from neurogrid.training.wire.runs import MAX_RANGES

__all__ = [
    "begin_journal",
    "cut_works",
    "further",
    "keep_local_workers",
    "latest_of",
    "replay",
    "rules_of",
    "weights_of",
    "written_round",
]

logger = logging.getLogger(__name__)

# Of a run: a number of the journal is a u64.
_MAX_SAMPLES: Final = 2**64
# Of this machine's memory, what all local workers together are told that there is.
_LOCAL_MEMORY: Final = 0.8


def rules_of(run: RunFile, manifest: Manifest) -> Rules:
    """Rules of a run, from its run file and data: numbers of members, sizes of batches and rounds, when it ends.

    Raises:
        ConfigurationError: what it says does not go together with the data.
    """
    inner, outer, stop = run.inner, run.outer, run.stop
    if manifest.kind == "text":
        batch_samples = max(1, inner.batch_tokens // manifest.sequence_length)
    else:
        batch_samples = inner.batch_samples
    steps = max(1, outer.every // outer.fragments)
    samples = []
    if stop.tokens is not None:
        samples.append(-(-stop.tokens // manifest.tokens_per_sample))
    if stop.epochs is not None:
        samples.append(max(1, int(stop.epochs * manifest.num_samples)))
    rounds = [] if stop.rounds is None else [stop.rounds]
    if stop.steps is not None:
        rounds.append(-(-stop.steps // steps))
    if not samples and not rounds and inner.schedule != "constant":
        raise ConfigurationError(
            f"[inner] schedule {inner.schedule!r} needs an end that is known beforehand: give [stop] tokens, steps, "
            'rounds or epochs beside hours, or take "constant"'
        )
    rules = Rules(
        min_members=run.members.min,
        max_members=run.members.max,
        batch_samples=batch_samples,
        steps=steps,
        num_parts=outer.fragments,
        projected=outer.projected,
        max_samples=min(samples, default=None),
        max_rounds=min(rounds, default=None),
    )
    if rules.num_samples(rules.max_members) >= _MAX_SAMPLES:
        ends = (key for key in ("rounds", "steps", "epochs") if getattr(stop, key) is not None)
        raise ConfigurationError(
            f"[stop] {next(ends, 'tokens')} comes to more samples than a journal can count: give a smaller number; a "
            'run without an end that is known has hours alone, and [inner] schedule "constant"'
        )
    return rules


def cut_works(manifest: Manifest, num_samples: int) -> str:
    """Warning about a run whose slices have too few samples for what members are to train on in a round.

    Args:
        num_samples: of a member in a round, as the run file says.

    Returns:
        Empty where works are as large as the run file says.
    """
    mean = manifest.num_samples / len(manifest.slices)
    if num_samples <= MAX_RANGES * mean:
        return ""
    return (
        f"members train on about {int(MAX_RANGES * mean):,} samples in a round, and not on {num_samples:,}: one work "
        f"is of {MAX_RANGES:,} pieces of slices at most, and a slice has {mean:.3g} samples here. Prepare the data "
        "with more [data] slice_samples, or give members fewer batches in a round"
    )


async def keep_local_workers(settings: LeaderSettings, exchange: Exchange) -> None:
    """Run workers of this machine, and stay connected to them."""
    host = exchange.host
    with credentials_of_local_workers(
        settings.local_workers,
        settings.admission,
        host.peer_id,
        directory=settings.directory / ".workers",
    ) as credentials:
        # By the numbers that its own log has them under.
        named = [
            (*own, f"--name=local worker {number}") for number, own in enumerate(credentials, 1)
        ]
        async with start_local_workers(
            settings.local_workers,
            memory_bytes=int(free_memory() * _LOCAL_MEMORY),
            max_seq_len=4096,
            listen=listen_address_beside(settings.listen, settings.admission),
            credentials=named,
            num_threads=settings.num_threads,
            options=("--train",),
        ) as addresses:
            await _keep_connected(exchange, addresses)


async def _keep_connected(exchange: Exchange, addresses: Sequence[str]) -> None:
    """Dial workers of this machine, again when they were started again."""
    host = exchange.host
    lost: set[int] = set()
    while True:
        for number, address in enumerate(addresses, 1):
            peer_id = address.rpartition("/p2p/")[2]
            if host.is_connected(peer_id):
                lost.discard(number)
                continue
            try:
                await host.connect(address)
                await exchange.open(peer_id)
            except NeuroGridError as exc:
                if number not in lost:  # said once, until it is there again
                    logger.info("local worker %d cannot be reached: %s", number, exc)
                lost.add(number)
        await trio.sleep(1.0)


def begin_journal(
    journal: Journal, run: RunFile, manifest: Manifest, identity: Identity
) -> tuple[bytes, str]:
    """Write the beginning of a journal, and the run file beside it; or compare both.

    Returns:
        The id of the run, and its run file as members get it.

    Raises:
        ConfigurationError: the run was begun with other data or another run file.
    """
    source = BytesSource(manifest.encode())
    blob_id = BlobInfo.of_digests(source.digests(), source.num_bytes).blob_id
    directory = RunDirectory(journal.path.parent)
    if not journal.entries:
        text = kept_text(run, directory)
        directory.write_run(text)
        journal.append(
            RunEntry(
                run=draw_run_id(),
                leader=identity.peer_id,
                run_file=hashlib.sha256(text.encode()).digest(),
                manifest=blob_id,
                slices=manifest.sizes,
                seed=run.seed,
            )
        )
    entry = journal.entries[0].entry
    assert isinstance(entry, RunEntry)
    if entry.manifest != blob_id:
        raise ConfigurationError(
            f"{journal.path}: the run was begun with other data: go on with those, or begin another run (--dir)"
        )
    try:
        text = text_of_before(run, directory, entry.run_file)
    except ConfigurationError as exc:
        raise ConfigurationError(f"{journal.path}: {exc}. {further(directory)}") from exc
    directory.write_run(text)
    return entry.run, text


def further(directory: RunDirectory) -> str:
    """Advice for people who want more of a run than its run file says: begin another from its last checkpoint."""
    return (
        "To train further or otherwise, begin another run (--dir) with "
        f'[model] config = "{directory.checkpoints.absolute()}/latest"'
    )


def replay(
    journal: Journal,
    manifest: Manifest,
    run: RunFile,
    resumable: Collection[int],
    figures: RoundFigures,
    lines: Sequence[Figures],
) -> RunState:
    """The state that the journal has come to; the figures are told of its rounds, and which of them have lines.

    Args:
        resumable: rounds that the run can go on from, beside those that it was resumed at.
        lines: of metrics.jsonl, oldest first.
    """
    entries = [recorded.entry for recorded in journal.entries]
    before = {entry.round for entry in entries if isinstance(entry, ResumedEntry)}
    state = RunState(manifest.sizes, seed=run.seed, resumable={*before, *resumable})
    for entry in entries:
        state.apply(entry)
        if isinstance(entry, RoundEntry):
            figures.decided(state)
        elif isinstance(entry, ResumedEntry):
            figures.resumed(entry.round)
    figures.written(written_round(lines, entries, state.round))
    return state


def written_round(figures: Sequence[Figures], entries: Iterable[Entry], last: int) -> int:
    """The last round that has a line in the figures.

    Args:
        figures: lines of metrics.jsonl, oldest first.
        entries: of the journal.
        last: round of the journal.
    """
    written = int(figures[-1].get("round", 0)) if figures else 0
    if written <= last:
        return written
    # Of rounds that were taken back: none that came in their place has a line yet.
    resumed = [entry.round for entry in entries if isinstance(entry, ResumedEntry)]
    return resumed[-1] if resumed else last


def latest_of(directory: RunDirectory) -> RunCheckpoint | None:
    """The newest checkpoint, where there is one.

    Raises:
        ConfigurationError: checkpoints are kept elsewhere, and that is not there.
    """
    directory.check_checkpoints()
    path = latest_checkpoint(directory.checkpoints)
    return read_checkpoint(path) if path is not None else None


def weights_of(model: Path, checkpoint: RunCheckpoint | None) -> Path | None:
    """The directory with the weights that the run begins with; None for random ones."""
    if checkpoint is not None:
        return checkpoint.path
    return model if model.is_dir() and any(model.glob("*.safetensors")) else None
