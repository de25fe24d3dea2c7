"""Estimate that `neurogrid train check` prints of a run whose model lies in a chain of stages."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from neurogrid.errors import ConfigurationError
from neurogrid.planner import format_bytes

if TYPE_CHECKING:
    from neurogrid.training.runs.run_file import RunFile
    from neurogrid.training.stages.chain_estimate import (
        ChainEstimate,
        ChainNumbers,
        StageEstimate,
    )

__all__ = ["chain_lines", "span_of"]


def chain_lines(
    run: RunFile, model: Path, num_samples: int | None, options: argparse.Namespace
) -> list[str]:
    """Estimate what the run takes, and return it in lines for people.

    Args:
        run: with what its data have.
        model: where that is.
        num_samples: of the data; None where it is not known.
        options: of `neurogrid train check`.

    Raises:
        ConfigurationError: the model does not fit into the members; says what would do.
    """
    from neurogrid.training.leading.chains.numbers import chain_numbers
    from neurogrid.training.stages.chain_estimate import estimate_chain

    numbers = chain_numbers(model, run.adapter)
    lent = list(options.memory) or [run.members.memory] * bool(run.members.memory)
    if len(lent) == 1:
        lent *= run.layout.stages
    try:
        told = estimate_chain(
            run,
            numbers,
            lent=lent,
            num_samples=num_samples,
            speeds=[speed / run.data.sequence_length for speed in options.speed],
            bytes_per_second=options.bandwidth,
        )
    except ConfigurationError as exc:
        raise ConfigurationError(f"{exc}{_would_do(run, numbers, lent)}") from exc
    return list(_lines(run, numbers, told, lent))


def _lines(
    run: RunFile, numbers: ChainNumbers, told: ChainEstimate, lent: list[int]
) -> Iterator[str]:
    """An estimate, for people.

    Args:
        lent: bytes that the member of each stage lends; empty where that is not known.
    """
    num_stages, has_adapter = len(told.stages), run.adapter.r > 0
    replicas = run.layout.replicas
    of = f" of each of {replicas} replicas" if replicas > 1 else ""
    yield f"what it takes, in {_counted(num_stages, 'stage')}{of}"
    beside = f" of an adapter, beside {numbers.num_parameters:,} that are not"
    yield f"parameters   {told.num_learning:,} that are trained{beside if has_adapter else ''}"
    for number, stage in enumerate(told.stages, 1):
        yield f"{f'stage {number}':<12} {_layers(stage)}, {_memory(run, stage)}"
    if lent and (tight := [n for n, s in enumerate(told.stages) if s.memory_bytes > lent[n]]):
        names = " and ".join(f"stage {n + 1}" for n in tight)
        yield (
            f"             {names} may take more than its member lends: smaller micro-batches ([layout] "
            "micro_batches) and [layout] recompute make that less"
        )
    if replicas > 1:
        yield from _replicas(run, numbers, told)
    else:
        yield f"members      {_members(run)}"
    tokens = told.samples * run.data.sequence_length
    waiting = f", stages wait for others {told.bubble:.0%} of the time" if num_stages > 1 else ""
    yield (
        f"a step       {told.samples:,} samples ({tokens:,} tokens) in {_counted(told.micro_batches, 'micro-batch')}"
        f"{waiting}"
    )
    if num_stages > 1:
        yield (
            f"bytes        {format_bytes(told.boundary_bytes)} to the next stage in a step, and as many back"
        )
    if told.tied_bytes:
        yield (
            f"             {format_bytes(told.tied_bytes)} from the first stage to the last, and as many back: the "
            "gradient of what is tied"
        )
    yield f"state        {format_bytes(told.state_bytes)} come to the leader after {_when_kept(run)}"
    if told.num_steps is not None:
        yield f"steps        {told.num_steps:,}"
    yield from _time(told)


def _replicas(run: RunFile, numbers: ChainNumbers, told: ChainEstimate) -> Iterator[str]:
    """Yield lines about several replicas: the members of each, and what a round sends."""
    from neurogrid.training.runs.estimate import BASE_BYTES, codec_bytes
    from neurogrid.training.stages.chain_estimate import stage_sizes

    num_stages, replicas, every = len(told.stages), run.layout.replicas, run.outer.every
    whole = BASE_BYTES // 2 + stage_sizes(run, numbers).needed(0, len(numbers.layers))
    yield (
        f"replicas     {replicas} at most, each of {_counted(num_stages, 'member')} or fewer; one that lends "
        f"{format_bytes(whole)} and what a step leaves is one by itself"
    )
    # Each element goes to whoever adds it up, and its mean comes back: of n, n - 1 are another member.
    sent = 2 * codec_bytes(run.outer.codec, told.num_learning) * (replicas - 1) // replicas
    yield (
        f"a round      {_counted(every, 'step')} of each, then about {format_bytes(sent)} from each replica to the "
        "others, and as many back"
    )


def _would_do(run: RunFile, numbers: ChainNumbers, lent: list[int]) -> str:
    """Say how many stages would do, of members that lend the same; empty where no number would."""
    from neurogrid.training.runs.run_file.stage_sections import MAX_STAGES
    from neurogrid.training.stages.chain_estimate import rooms_of, stage_sizes
    from neurogrid.training.stages.cutting import cut_layers

    sizes = stage_sizes(run, numbers)
    least = min(lent, default=0)
    for num_stages in range(run.layout.stages + 1, min(len(numbers.layers), MAX_STAGES) + 1):
        try:
            cut_layers(sizes, rooms_of([least] * num_stages))
        except ConfigurationError:
            continue
        return f". {num_stages} stages would do, of {format_bytes(least)} each"
    return ""


def _when_kept(run: RunFile) -> str:
    """Steps after which the state is kept, for people: it is kept for each checkpoint, too."""
    every = run.steps_between_states
    if every == 1:
        return "each step"
    checkpoint = run.checkpoints.every * (run.outer.every if run.layout.replicas > 1 else 1)
    beside = "" if checkpoint % every == 0 else f", and for a checkpoint after every {checkpoint:,}"
    return f"every {every:,} steps{beside}"


def _members(run: RunFile) -> str:
    """Number of members of a chain, for people."""
    num_stages, most = run.layout.stages, run.layout.stages * run.layout.stage_members
    told = f"{_counted(num_stages, 'member')}, one for each stage"
    if most > num_stages:
        told += f"; up to {min(most, run.members.max):,} share the work of theirs"
    if run.members.max > most:
        told += "; others stand by, and take the place of one that is lost"
    return told


def _layers(stage: StageEstimate) -> str:
    last = stage.stop - 1
    return f"layer {last}" if stage.start == last else f"layers {stage.start} to {last}"


def _memory(run: RunFile, stage: StageEstimate) -> str:
    copies = f", {format_bytes(stage.copies)} for copies in bfloat16" if stage.copies else ""
    under_way = _counted(stage.under_way, "micro-batch")
    whole = f"the inputs of {under_way}, and one of them" if run.layout.recompute else under_way
    learning = stage.gradients + stage.optimizer + stage.step_bytes
    opening = f", before all that {format_bytes(stage.opening)} to open it"
    return (
        f"about {format_bytes(stage.memory_bytes)}: {format_bytes(stage.weights)} for weights, "
        f"{format_bytes(stage.gradients)} for gradients, {format_bytes(stage.optimizer)} for the optimiser{copies}, "
        f"{format_bytes(stage.activations)} for {whole} under way"
        f"{opening if stage.opening > learning else ''}, the rest for Python and torch"
    )


def _time(told: ChainEstimate) -> Iterator[str]:
    if told.compute_seconds is not None:
        sending = "and sending beside it, by its bandwidth (--bandwidth)"
        if told.send_seconds is not None:
            sending = f"and {told.send_seconds:.1f} s sending beside it"
        if told.tied_seconds:
            sending += f", then {told.tied_seconds:.1f} s for what is tied"
        yield f"time         a step takes {told.compute_seconds:.1f} s computing, {sending}"
    if told.step_seconds is not None and told.num_steps is not None:
        yield f"             {span_of(told.num_steps * told.step_seconds)} in all"


def _counted(number: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{number:,} {what}{'' if number == 1 else plural}"


def span_of(seconds: float) -> str:
    """A time span for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"
