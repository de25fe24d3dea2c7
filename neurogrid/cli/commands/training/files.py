"""`neurogrid train prepare`, `export` and `status`: data sets and the directories of runs, on this machine alone."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio

from neurogrid.cli.commands.training.model import EMBEDDED, place_of
from neurogrid.cli.libraries import import_libraries
from neurogrid.cli.options.common import (
    ExitStatus,
    add_output_options,
    positive_int,
    whole_number,
)
from neurogrid.cli.signals import ending_at_once
from neurogrid.errors import ConfigurationError

if TYPE_CHECKING:
    from neurogrid.cli.terminal.screen import Screen
    from neurogrid.training.runs.changes import Changes
    from neurogrid.training.runs.run_directory import Figures, RunDirectory
    from neurogrid.training.runs.run_file import RunFile, StopSection

__all__ = [
    "add_export_options",
    "add_prepare_options",
    "add_status_options",
    "export",
    "held_out_told",
    "prepare",
    "status",
]

# Lines of metrics over which the speed is told.
_NUM_TIMED: Final = 20
_OF_CHECKS: Final = frozenset({"checked", "measured"})
# Of what came of claims.
_NUM_VERDICTS: Final = 8
# In front of the name of a part of a mixture, in the name of its figure.
_OF_PART: Final = "eval_loss/"
_RUN_SYNC: Any = trio.to_thread.run_sync  # its stubs lack `abandon_on_cancel`


def add_prepare_options(parser: argparse.ArgumentParser) -> None:
    """The options of `neurogrid train prepare`."""
    parser.add_argument(
        "sources",
        type=Path,
        nargs="+",
        metavar="SOURCE",
        help="a file of text, .jsonl, .parquet or token ids (.bin), a directory of such files, or one with a directory "
        "of images for each class; several of one kind are one source, but for --weights",
    )
    parser.add_argument(
        "out", type=Path, metavar="OUT", help="the directory that the data set is written to"
    )
    text = parser.add_argument_group("text")
    text.add_argument(
        "--tokenizer",
        metavar="DIR",
        help=f"the directory of a tokenizer, or {EMBEDDED!r} for that of the model that comes along (default: one is "
        "trained on the text)",
    )
    text.add_argument(
        "--vocab-size",
        type=positive_int,
        metavar="N",
        help="tokens of a tokenizer that is trained, at most (default 4096); of token ids, below which they are",
    )
    text.add_argument(
        "--sequence-length",
        type=positive_int,
        default=256,
        metavar="N",
        help="tokens of a sample (default %(default)s)",
    )
    text.add_argument(
        "--token-bytes",
        type=int,
        choices=(2, 4),
        default=0,
        help="of an id in a .bin file (default: what its header says, else 2 where the vocabulary allows it)",
    )
    images = parser.add_argument_group("images")
    images.add_argument(
        "--image-size",
        type=positive_int,
        default=0,
        metavar="N",
        help="height and width that images are resized to (default: as they are)",
    )
    samples = parser.add_argument_group("samples")
    samples.add_argument(
        "--slice-samples",
        type=positive_int,
        metavar="N",
        help="samples of a slice, which is what machines send one another (default: about a mebibyte)",
    )
    samples.add_argument(
        "--held-out",
        type=share,
        default=0.02,
        metavar="SHARE",
        help="part of the samples that is kept for evaluation (default %(default)g)",
    )
    samples.add_argument(
        "--seed",
        type=whole_number,
        default=0,
        metavar="S",
        help="of the order of the samples, and of what is held out: the same gives the same bytes (default "
        "%(default)s)",
    )
    samples.add_argument(
        "--weights",
        type=weights,
        default=(),
        metavar="W,W…",
        help="mix the sources, which may be data directories then: an epoch has of each as many samples as its weight "
        "says, e.g. 3,1",
    )
    samples.add_argument(
        "--repeat",
        type=positive_int,
        default=1,
        metavar="N",
        help="times that a sample of a mixture may come in an epoch, which ends where a source has come so often, or "
        "where all have come (default %(default)s)",
    )
    samples.add_argument(
        "--licence",
        default="",
        metavar="TEXT",
        help="of the data, in words, which the manifest repeats",
    )
    add_output_options(parser)


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """The options of `neurogrid train export`."""
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="where the run is kept: runs/NAME; or an adapter of PEFT",
    )
    parser.add_argument(
        "out", type=Path, metavar="OUT", help="the directory that the model is written to"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of the weights; float32 is what was trained, bit for bit (default %(default)s)",
    )
    parser.add_argument(
        "--base",
        type=Path,
        metavar="DIR",
        help="of an adapter, which is merged into its model: where that is (default: where the adapter says)",
    )
    add_output_options(parser)


def add_status_options(parser: argparse.ArgumentParser) -> None:
    """The options of `neurogrid train status`."""
    _add_run_directory(parser)
    add_output_options(parser)


def _add_run_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="where the run is kept: runs/NAME"
    )


def share(text: str) -> float:
    """An argparse type: a number from 0 to 0.5."""
    try:
        value = float(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from exc
    if not 0 <= value <= 0.5:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 0.5")
    return value


def weights(text: str) -> tuple[float, ...]:
    """An argparse type: numbers above zero, with commas in between."""
    try:
        values = tuple(float(each) for each in text.split(","))
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers, as 3,1 is") from exc
    if not all(0 < value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"{text}: a weight is above zero")
    return values


async def prepare(options: argparse.Namespace, screen: Screen) -> int:
    """Write a data set, and print where it lies; returns the exit status."""
    with ending_at_once():
        for source in options.sources:
            if not source.exists():
                raise ConfigurationError(f"{source}: there is no such file or directory")
        import_libraries(screen, "neurogrid.training.data.preparing")
    from neurogrid.training.data.preparing import prepare

    write = partial(
        prepare,
        options.sources,
        options.out,
        tokenizer=_tokenizer(options.tokenizer),
        vocab_size=options.vocab_size,
        sequence_length=options.sequence_length,
        slice_samples=options.slice_samples,
        held_out=options.held_out,
        seed=options.seed,
        licence=options.licence,
        token_bytes=options.token_bytes,
        image_size=options.image_size,
        weights=options.weights,
        repeat=options.repeat,
        say=lambda text: trio.from_thread.run_sync(screen.say, text),
    )
    # A signal does not wait for it.
    manifest = await _RUN_SYNC(write, abandon_on_cancel=True)
    screen.say(f"{manifest.num_samples:,} samples in {len(manifest.slices):,} slices")
    screen.print(str(options.out))
    return ExitStatus.OK


def _tokenizer(told: str | None) -> Path | None:
    if told is None:
        return None
    place = place_of(told) if told == EMBEDDED else Path(told)
    assert isinstance(place, Path)
    return place


async def export(options: argparse.Namespace, screen: Screen) -> int:
    """Write the newest checkpoint as a model of transformers, and print where; returns the exit status."""
    from neurogrid.training.checkpoints import export
    from neurogrid.training.runs.run_directory import RunDirectory
    from neurogrid.training.stages.lora import is_adapter

    with ending_at_once():
        directory = RunDirectory(options.directory)
        if not is_adapter(directory.path):
            directory.read_run()  # for its errors
            directory.check_checkpoints()
    write = partial(export, options.directory, options.out, dtype=options.dtype, base=options.base)
    checkpoint = await _RUN_SYNC(write, abandon_on_cancel=True)
    screen.say(f"the model of {checkpoint}")
    screen.print(str(options.out))
    return ExitStatus.OK


async def status(options: argparse.Namespace, screen: Screen) -> int:
    """Print how far a run is, by what is in its directory; returns the exit status."""
    from neurogrid.training.runs.run_directory import RunDirectory

    with ending_at_once():
        for name, value in _rows(RunDirectory(options.directory), now=time.time()):
            screen.print(f"{name:<12} {value}")
    return ExitStatus.OK


def _rows(directory: RunDirectory, *, now: float) -> Iterator[tuple[str, str]]:
    from neurogrid.training.runs.changes import run_at

    run = directory.read_run()
    directory.check_checkpoints()
    changes = _changes(directory)
    yield "run", f"{run.name}, {run.model.config} on {', '.join(run.data.places)}"
    lines = directory.figures()
    if not lines:
        yield "step" if run.is_chain else "round", "none yet"
        yield from _judged(directory)
        return
    last: Figures = {}
    for line in lines:  # not each has all of them
        last |= line
    is_chain = "stages" in last and "replicas" not in last
    if not is_chain:  # a round is a step then
        yield "round", _counted(last, "round")
    yield "step", _counted(last, "step")
    yield "tokens", _counted(last, "tokens")
    if "loss" in last:
        yield "loss", f"{last['loss']:.4f}"
    held_out = [each for each in lines if "eval_loss" in each]
    if held_out:
        at = f" at step {held_out[-1]['step']:g}" if "step" in held_out[-1] else ""
        yield "held out", f"{held_out_told(held_out[-1])}{at}"
    if "replicas" in last:
        yield "replicas", _counted(last, "replicas")
    yield (
        ("stages", _stages(last))
        if is_chain
        else (
            "members",
            _counted(last, "members"),
        )
    )
    if is_chain and "waited" in last:
        yield "waited", _waited(last)
    timed = [each for each in lines if {"tokens", "seconds"} <= each.keys()]
    timed = timed[-_NUM_TIMED:]  # the last rounds of a run train nothing: they sync what is left
    if len(timed) > 1 and (seconds := timed[-1]["seconds"] - timed[0]["seconds"]) > 0:
        num_tokens = timed[-1]["tokens"] - timed[0]["tokens"]
        yield "speed", f"{num_tokens / seconds:,.0f} tokens a second, of all members"
    stop = run_at(run, changes, int(last.get("round", 0)) + 1).stop
    yield "stops", ", ".join(_goals(stop, last))
    yield from _changed(directory, run, changes)
    yield from _banned(directory, now)
    yield from _checked(directory)
    steps = directory.steps()
    newest = directory.checkpoints / f"step-{steps[-1]}" if steps else None
    yield "checkpoint", f"{newest}, of {len(steps)}" if newest is not None else "none yet"
    yield from _judged(directory)
    yield "as of", f"{max(0.0, now - directory.metrics.stat().st_mtime):.0f} s ago"


def _changes(directory: RunDirectory) -> Changes:
    """Changes that were made to the run, as far as its journal can be read."""
    from neurogrid.training.runs.changes import Changes
    from neurogrid.training.runs.journal import read_journal

    try:
        recorded = read_journal(directory.journal) if directory.has_run else ()
    except ConfigurationError:  # which is told of the journal
        recorded = ()
    return Changes.of(each.entry for each in recorded)


def _changed(directory: RunDirectory, run: RunFile, changes: Changes) -> Iterator[tuple[str, str]]:
    """Yield rows of changes that were made to the run, and of those that are wanted and not made yet."""
    from neurogrid.training.runs.changes import changed_run, differing, told, words_of
    from neurogrid.training.runs.run_directory import read_changes

    if changes.made:
        yield "changed", "; ".join(told(each, run) for each in changes.made)
    before = changed_run(run, changes.last)
    try:
        wanted = differing(before, changed_run(before, words_of(read_changes(directory.changes))))
    except ConfigurationError as exc:
        yield "wanted", f"nothing: {exc}"
        return
    if wanted:
        yield "wanted", ", ".join(f"{key} = {value}" for key, value in wanted)


def _banned(directory: RunDirectory, now: float) -> Iterator[tuple[str, str]]:
    """Yield a row for each peer that is banned at the moment, as far as the journal can be read."""
    from neurogrid.p2p.trust.certificate import format_time
    from neurogrid.training.runs.entries import BannedEntry
    from neurogrid.training.runs.journal import read_journal

    try:
        recorded = read_journal(directory.journal) if directory.has_run else ()
    except ConfigurationError:  # which is told of the journal
        return
    newest = {r.entry.peer: r.entry for r in recorded if isinstance(r.entry, BannedEntry)}
    for entry in newest.values():
        if entry.is_in_force(now):
            until = f" until {format_time(entry.until)}" if entry.until else ""
            yield "banned", f"{entry.peer}{until}: {entry.reason}"


def _checked(directory: RunDirectory) -> Iterator[tuple[str, str]]:
    """Yield rows of results that members computed again, and what came of it, as far as that was written down."""
    from neurogrid.training.runs.entries import EpochEntry
    from neurogrid.training.runs.journal import read_journal

    lines = [each for each in directory.all_figures() if not each.keys().isdisjoint(_OF_CHECKS)]
    made = sum(each.get("checked", 0) for each in lines)
    if not made:
        return
    held = sum(each.get("checked_held", 0) for each in lines)
    yield "checked", f"{held:,.0f} of {made:,.0f} results that were computed again hold"
    measured = [each for each in lines if each.get("measured")]
    if number := sum(each["measured"] for each in measured):
        gain = sum(each["measured"] * each["gain"] for each in measured) / number
        yield (
            "worth",
            f"{number:,.0f} results were measured; each alone lowers the loss by {gain:.3g}",
        )
    try:
        recorded = read_journal(directory.journal) if directory.has_run else ()
    except ConfigurationError:  # which is told of the journal
        return
    told = []
    for each in recorded:
        for event in each.entry.events if isinstance(each.entry, EpochEntry) else ():
            if event["kind"] == "eject":
                told.append(("ejected", f"{event.get('peer') or event.get('seat')}: with evidence"))
            elif event["kind"] == "refused":
                told.append(("refused", f"{event.get('peer')}: {event.get('reason')}"))
            elif event["kind"] == "admitted":
                told.append(("admitted", f"{event.get('peer')}: its claim holds"))
    yield from told[-_NUM_VERDICTS:]


def held_out_told(figures: Mapping[str, float]) -> str:
    """The loss on held-out samples, and that of each part of a mixture."""
    parts = [
        f"{name.removeprefix(_OF_PART)} {loss:.4f}"
        for name, loss in figures.items()
        if name.startswith(_OF_PART)
    ]
    whole = f"{figures['eval_loss']:.4f}"
    return f"{whole} ({', '.join(parts)})" if parts else whole


def _stages(figures: Figures) -> str:
    stages, num_members = _counted(figures, "stages"), figures.get("members", 0)
    # Where each stage is one member, the whole chain counts as one.
    is_wide = num_members > figures["stages"]
    return f"{stages}, of {num_members:g} members" if is_wide else stages


def _waited(figures: Figures) -> str:
    """Share of the last step that stages waited, and the share that the order of micro-batches makes them wait."""
    waited = f"{figures['waited']:.0%} of the last step"
    if "bubble" not in figures:
        return waited
    return f"{waited}; {figures['bubble']:.0%} are to be waited by the order of micro-batches alone"


def _judged(directory: RunDirectory) -> Iterator[tuple[str, str]]:
    """Yield a row that says what the journal proves, or its first fault; none where the run has no journal yet."""
    from neurogrid.training.runs.audit import audit
    from neurogrid.training.runs.journal import read_journal
    from neurogrid.training.runs.witnessed_machine import epoch_rules, fold_epochs

    if not directory.has_run:
        return
    try:
        entries = [recorded.entry for recorded in read_journal(directory.journal)]
    except ConfigurationError as exc:
        yield "journal", f"not sound: {exc}"
        return
    if not entries:
        return
    found = audit(entries)
    if not found.is_sound:
        first, *others = found.problems
        more = f", and {len(others)} more" if others else ""
        yield "journal", f"not sound: {first}{more}"
        return
    try:
        run = directory.read_run()
        if run.is_witnessed:
            fold_epochs(epoch_rules(run), entries)
    except ConfigurationError as exc:
        yield "journal", f"not sound: {exc}"
        return
    proven = "none twice in an epoch"
    if found.epochs and not found.missing:
        proven = f"each of {found.epochs:,} {'epoch' if found.epochs == 1 else 'epochs'} once"
    yield (
        "journal",
        f"sound: {found.num_used:,} samples in {found.rounds:,} rounds, {proven}",
    )


def _counted(figures: Figures, name: str) -> str:
    return f"{figures[name]:,.0f}" if name in figures else "not known"


def _goals(stop: StopSection, figures: Figures) -> Iterator[str]:
    """Yield each goal that the run stops at, with the share of it that is done."""
    done = {
        "tokens": figures.get("tokens"),
        "steps": figures.get("step"),
        "rounds": figures.get("round"),
        "hours": figures["seconds"] / 3600 if "seconds" in figures else None,
        "epochs": None,
    }
    for name in stop.keys:
        goal = getattr(stop, name)
        if goal is not None:
            number = done[name]
            part = "" if number is None else f" ({min(1.0, number / goal):.0%})"
            yield f"{goal:,} {name}{part}"
