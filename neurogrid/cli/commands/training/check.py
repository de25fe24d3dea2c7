"""`neurogrid train check`: whether a run file is right, all that it says, and what the run will take.

stdout gets the run file with every default filled in, and the rest below it as comments: it is a run file again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from neurogrid.cli.commands.training.chain_check import chain_lines, span_of
from neurogrid.cli.commands.training.model import add_run_file, model_of, run_directory
from neurogrid.cli.libraries import import_libraries
from neurogrid.cli.options.common import (
    ExitStatus,
    add_output_options,
    positive_float,
    positive_int,
    size_in_bytes,
)
from neurogrid.cli.options.model import add_offline_option
from neurogrid.cli.signals import ending_at_once
from neurogrid.errors import ConfigurationError, RemoteProtocolError
from neurogrid.planner import format_bytes

if TYPE_CHECKING:
    from neurogrid.cli.terminal.screen import Screen
    from neurogrid.training.leading.model_numbers import ModelNumbers
    from neurogrid.training.runs.estimate import Estimate
    from neurogrid.training.runs.run_directory import RunDirectory
    from neurogrid.training.runs.run_file import RunFile

__all__ = ["add_check_options", "check"]


def add_check_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_run_file(parser)
    group = parser.add_argument_group("what it will take")
    group.add_argument(
        "--members",
        type=positive_int,
        metavar="N",
        help="tell it for N members (default: as many as the run waits for, and at least 2)",
    )
    group.add_argument(
        "--speed",
        type=positive_float,
        action="append",
        default=[],
        metavar="N",
        help="tokens a second that a member trains, of images samples a second; given again for each member where they "
        "differ",
    )
    group.add_argument(
        "--bandwidth",
        type=size_in_bytes,
        metavar="BYTES",
        help="that a member sends in a second, e.g. 10MB",
    )
    group.add_argument(
        "--memory",
        type=size_in_bytes,
        action="append",
        default=[],
        metavar="BYTES",
        help="of stages: that a member lends, e.g. 8GB; given again for the member of each stage where they differ "
        "(default: [members] memory)",
    )
    group.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="where the run is kept, if it has begun: what a round took is measured there (default: runs/NAME)",
    )
    add_offline_option(group)
    add_output_options(parser)


async def check(options: argparse.Namespace, screen: Screen) -> int:
    """Print what the run file comes to; returns the exit status.

    Raises:
        ConfigurationError: it is wrong, or names a model that is none.
    """
    from neurogrid.training.runs.run_directory import RunDirectory, read_run_file

    with ending_at_once():
        run = read_run_file(options.run_file)
        num_members = _num_members(options, run)
        directory = RunDirectory(run_directory(options, run))
    model = await model_of(run, options, screen)
    import_libraries(screen, "neurogrid.training.leading.model_numbers")
    from neurogrid.training.leading.model_numbers import model_numbers
    from neurogrid.training.runs.estimate import activation_bytes, estimate

    numbers = await trio.to_thread.run_sync(model_numbers, model, run.model.kind)
    counted, num_samples = _prepared(run, model, numbers)
    if run.is_chain:
        lines = await trio.to_thread.run_sync(chain_lines, counted, model, num_samples, options)
        _print(screen, run, directory, lines)
        return ExitStatus.OK
    a_sample = 0
    if numbers.hidden_size and numbers.num_layers and numbers.vocab_size:
        a_sample = activation_bytes(
            counted,
            hidden_size=numbers.hidden_size,
            num_layers=numbers.num_layers,
            vocab_size=numbers.vocab_size,
        )
    told = estimate(
        counted,
        numbers.num_parameters,
        num_members=num_members,
        sample_activation_bytes=a_sample,
        num_samples=num_samples,
        speeds=[speed / _unit(counted) for speed in options.speed],
        bytes_per_second=options.bandwidth,
    )
    _print(screen, run, directory, _lines(counted, told))
    return ExitStatus.OK


def _print(screen: Screen, run: RunFile, directory: RunDirectory, lines: Iterable[str]) -> None:
    screen.print(run.text())
    for line in (*lines, *_measured(directory)):
        screen.print(f"# {line}")


def _num_members(options: argparse.Namespace, run: RunFile) -> int:
    """Number of members that the estimate is for; a chain has one for each stage."""
    num_speeds, num_stages = len(options.speed), run.layout.stages
    if run.is_chain:
        for flag, given in (("--speed", num_speeds), ("--memory", len(options.memory))):
            if given not in (0, 1, num_stages):
                raise ConfigurationError(
                    f"give {flag} once for all members, or for each of {num_stages} stages, not {given} times"
                )
        if options.members not in (None, num_stages):
            raise ConfigurationError(
                f"--members {options.members}: a chain has a member for each stage, and [layout] stages is {num_stages}"
            )
        return num_stages
    if options.memory:
        raise ConfigurationError("--memory is for a model in stages: [layout] stages, or [adapter]")
    num_members: int = options.members or (
        num_speeds if num_speeds > 1 else max(2, run.members.min)
    )
    if num_speeds > 1 and num_speeds != num_members:
        raise ConfigurationError(
            f"give --speed once for all members, or for each of {num_members}, not {num_speeds} times"
        )
    return num_members


def _unit(run: RunFile) -> int:
    """Tokens of a sample, where speeds are told in tokens."""
    return run.data.sequence_length if run.model.kind == "causal-lm" else 1


def _prepared(run: RunFile, model: Path, numbers: ModelNumbers) -> tuple[RunFile, int | None]:
    """The run with the samples of its data where they are prepared, and their number; None where they are not.

    Raises:
        ConfigurationError: the model cannot learn from them.
    """
    from neurogrid.training.leading.model_data import check_length, check_model

    file = run.place(run.data.path) / "manifest.json"
    if not run.data.path or not file.is_file():
        if run.model.kind == "causal-lm":
            check_length(numbers, run.data.sequence_length)
        return run, None
    from neurogrid.training.data.manifest import Manifest

    try:
        manifest = Manifest.decode(file.read_bytes())
    except (OSError, RemoteProtocolError) as exc:
        raise ConfigurationError(f"{file}: {exc}") from exc
    check_model(run, model, numbers, manifest)
    if run.model.kind == "causal-lm":
        length = manifest.sequence_length
        # A batch has a sample at least, be that longer than what the run file says.
        inner = replace(run.inner, batch_tokens=max(run.inner.batch_tokens, length))
        run = replace(run, inner=inner, data=replace(run.data, sequence_length=length))
    return run, manifest.num_samples


def _lines(run: RunFile, told: Estimate) -> Iterator[str]:
    """Yield an estimate of what the run takes, in lines for people."""
    known = format_bytes(told.activation_bytes) if told.activation_bytes else "not known,"
    yield f"what it takes, with {told.num_members} members"
    yield f"parameters   {told.num_parameters:,} that are trained"
    yield (
        f"memory       about {format_bytes(told.memory_bytes)} of a member: "
        f"{format_bytes(told.trainer_bytes)} for weights, gradients and optimiser, "
        f"{format_bytes(told.outer_bytes)} for what is averaged, {known} for one sample on its way, the rest for "
        "Python and torch"
    )
    unit = f" ({run.num_batch_samples * _unit(run):,} tokens)" if _unit(run) > 1 else ""
    if run.is_witnessed:
        epochs = run.epochs
        witnesses = min(epochs.witnesses or told.num_members, told.num_members)
        yield (
            f"an epoch     {epochs.rounds:,} rounds with the same members, {witnesses:,} of them witnesses of each"
        )
    about = "" if run.outer.fragments == 1 else f", for 1 of {run.outer.fragments} fragments"
    yield (
        f"a round      {_steps(run.outer.round_steps)} of {run.num_batch_samples:,} samples{unit} for each member, "
        f"{told.round_samples:,} samples in all{about}"
    )
    yield (
        f"bytes        {format_bytes(told.sent_bytes)} sent and {format_bytes(told.received_bytes)} received by a "
        "member in a round"
    )
    if run.checks.audit:
        yield from _audit_lines(run, told)
    yield f"checkpoint   {format_bytes(told.checkpoint_bytes)} of weights"
    if told.num_rounds is not None:
        yield f"rounds       {told.num_rounds:,}"
    if told.compute_seconds is not None:
        exchanging = (
            "and exchanging, by its bandwidth (--bandwidth)"
            if told.exchange_seconds is None
            else f"and {told.exchange_seconds:.1f} s exchanging"
        )
        yield f"time         a round takes {told.compute_seconds:.1f} s computing, {exchanging}"
    if told.round_seconds is not None and told.num_rounds is not None:
        yield f"             {span_of(told.num_rounds * told.round_seconds)} in all"


def _audit_lines(run: RunFile, told: Estimate) -> Iterator[str]:
    """Yield the costs of computing results again, in lines for people."""
    copies = min(run.checks.auditors, told.num_members - 1)
    number, vector = run.checks.audit * copies, 4 * told.num_parameters
    # Of 16 rounds the weights, three momenta of its own, and those that it has fetched.
    disk = int(16 * (1 + 6 * run.checks.audit) * vector)
    yield (
        f"audits       a member computes {number:.0%} more, and receives {format_bytes(int(number * vector))} more "
        f"in a round; it has about {format_bytes(7 * vector)} more in memory, and up to {format_bytes(disk)} on disk"
    )
    if run.checks.worth:
        yield (
            f"             in {run.checks.worth:.0%} of the rounds a member computes 4 losses more, to measure what a "
            "result is worth"
        )
    if told.num_members < 3:
        yield "             with fewer than 3 members nobody can judge what an auditor finds: nobody is ejected for it"


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number:,} steps"


def _measured(directory: RunDirectory) -> Iterator[str]:
    """Yield the time that a round took, and tokens a second, where the run has begun; else nothing."""
    found = [each for each in directory.figures() if {"round", "seconds", "tokens"} <= each.keys()]
    if len(found) < 2 or found[-1]["round"] <= found[0]["round"]:
        return
    first, last = found[0], found[-1]
    seconds = last["seconds"] - first["seconds"]
    yield f"measured     a round took {seconds / (last['round'] - first['round']):.1f} s in {directory.path}"
    if seconds > 0:
        yield f"             {(last['tokens'] - first['tokens']) / seconds:,.0f} tokens a second, of all members"
