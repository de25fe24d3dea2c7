"""Estimate of a chain of stages before it begins: memory of each stage, bytes between them, and time spent waiting.

Arithmetic on numbers alone, by the functions that the leader cuts by. Weights, gradients and the optimiser are exact;
what a step leaves for its backward passes, and what opening a stage takes on its way, is about that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.wire.limits import DEFAULT_LIMITS
from neurogrid.training.runs.estimate import (
    BASE_BYTES,
    activation_bytes,
    num_rounds,
    optimizer_vectors,
)
from neurogrid.training.runs.run_file import OuterSection, RunFile
from neurogrid.training.runs.run_file.stage_sections import MAX_MICRO_BATCHES
from neurogrid.training.stages.cutting import StageSizes, cut_layers
from neurogrid.training.stages.schedule import bubble, most_under_way, window_of

__all__ = [
    "FREE_LAYERS",
    "ChainEstimate",
    "ChainNumbers",
    "StageEstimate",
    "check_boundary",
    "estimate_chain",
    "fitting_micro_batches",
    "is_tied",
    "rooms_of",
    "stage_sizes",
]

FREE_LAYERS: Final = 2
"""Last layers of a model that a subspace leaves as they are (model/stages/subspace.py): no cut lies between them."""

# Python and torch in the process of a stage.
_BASE_BYTES: Final = BASE_BYTES // 2
# Bytes of a value.
_FLOAT: Final = 4
_NARROW: Final = 2
_TOKEN_ID: Final = 8
# Of a tensor in one message, beside what says which it is.
_MOST_SENT: Final = DEFAULT_LIMITS.tensor - 64 * 1024


@dataclass(frozen=True, slots=True)
class ChainNumbers:
    """A model and its adapter in numbers of parameters, as it is cut.

    Attributes:
        layers: of each layer.
        adapters: of what an adapter adds to each; zeros where there is none.
        ends: outside the layers, tied ones once.
        first, last: of those, what learns at the first stage, and at the last; tied ones at both.
        hidden_size, vocab_size: of the model.
        coded: bytes of each layer where matrices of the model are codes; empty where none are.
    """

    layers: tuple[int, ...]
    adapters: tuple[int, ...]
    ends: int
    first: int
    last: int
    hidden_size: int
    vocab_size: int
    coded: tuple[int, ...] = ()

    @property
    def largest_piece(self) -> int:
        """The parameters that learn of the largest piece of a state: of a layer, or of what stands outside of them."""
        learn = self.adapters if any(self.adapters) else self.layers
        return max(*learn, self.first, self.last)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, without the adapter."""
        return sum(self.layers) + self.ends

    @property
    def num_tied(self) -> int:
        """Parameters that both ends have."""
        return self.first + self.last - self.ends


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """Memory of one stage, in bytes.

    Attributes:
        start, stop: its layers.
        weights: of the model and of the adapter.
        gradients, optimizer: of what learns; with replicas what these have in common is the optimiser's, too.
        copies: of weights that are multiplied in another dtype than they are held in.
        activations: what micro-batches leave for their backward passes.
        opening: beside its weights, while it is opened and nothing else is there: what a layer is made of.
        under_way: how many of them there are at most.
    """

    start: int
    stop: int
    weights: int
    gradients: int
    optimizer: int
    copies: int
    activations: int
    opening: int
    under_way: int

    @property
    def memory_bytes(self) -> int:
        """Memory of the stage's process: all of it, with what Python and torch take."""
        learning = self.gradients + self.optimizer + self.step_bytes
        return _BASE_BYTES + self.weights + max(learning, self.opening)

    @property
    def step_bytes(self) -> int:
        """Bytes that are there in a step alone."""
        return self.copies + self.activations


@dataclass(frozen=True, slots=True)
class ChainEstimate:
    """Estimate of a chain: memory of its stages, bytes and seconds of a step, number of steps.

    Attributes:
        num_learning: parameters that learn.
        micro_batches: of a step.
        samples: of a step.
        boundary_bytes: that a stage sends the next in a step, and as many come back.
        tied_bytes: that the first and the last stage send each other in a step.
        state_bytes: that the leader fetches to keep the state once.
        bubble: the share of a step in which a stage waits for others.
        num_steps: of each chain, until the run stops; None where that is not known.
        compute_seconds, send_seconds, tied_seconds: of a step: of computing, of sending over a boundary, which goes on
            beside it, and of sending what is tied behind both. None where speed, or bandwidth, is not known.
    """

    stages: tuple[StageEstimate, ...]
    num_learning: int
    micro_batches: int
    samples: int
    boundary_bytes: int
    tied_bytes: int
    state_bytes: int
    bubble: float
    num_steps: int | None
    compute_seconds: float | None
    send_seconds: float | None
    tied_seconds: float | None

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step, at least; None where something is not known."""
        return _step_seconds(self.compute_seconds, self.send_seconds, self.tied_seconds)


def rooms_of(lent: Sequence[int]) -> list[int]:
    """Bytes for stages, of what members lend: Python and torch have their part of it. 0 is for whatever there is."""
    return [max(each - _BASE_BYTES, 1) if each else 0 for each in lent]


def is_tied(run: RunFile, numbers: ChainNumbers) -> bool:
    """Whether something that learns is in both ends of a chain: the first and the last stage exchange its gradient."""
    return bool(numbers.num_tied) and not run.adapter.r


def stage_sizes(run: RunFile, numbers: ChainNumbers) -> StageSizes:
    """Return the bytes of each layer and of the ends, as they lie at stages: a chain is cut by them.

    Raises:
        ConfigurationError: hidden states have no such subspace.
    """
    subspace = run.layout.subspace
    if subspace >= numbers.hidden_size:
        raise ConfigurationError(
            f"[layout] subspace is {subspace:,}, and the model's hidden states have {numbers.hidden_size:,} numbers: "
            "give fewer, or 0"
        )
    held, learning = _held_width(run), _FLOAT * (2 + _optimizer_vectors(run))
    if run.adapter.r:
        bases = numbers.coded or [held * layer for layer in numbers.layers]
        layers = tuple(
            base + learning * adapter for base, adapter in zip(bases, numbers.adapters, strict=True)
        )
        ends = held * numbers.ends
        # Ends come in float32.
        return StageSizes(
            layers, ends, ends, ends, layer_copies=max(bases), end_copies=_FLOAT * numbers.ends
        )
    # An end has all that stands outside the layers, and learns its own part of it.
    more = learning - _FLOAT
    return StageSizes(
        tuple(learning * layer for layer in numbers.layers),
        _FLOAT * numbers.ends + more * numbers.first,
        _FLOAT * numbers.ends + more * numbers.last,
        learning * numbers.ends,
        fewest_last=FREE_LAYERS if subspace else 1,
    )


def fitting_micro_batches(
    run: RunFile,
    numbers: ChainNumbers,
    bounds: Sequence[int],
    lent: Sequence[int],
    widths: Sequence[int],
) -> int:
    """The micro-batches of a step that leave room at each stage: as many as the run file says, else the fewest that do.

    Those that are tried are four for each member, and twice as many, up to one a sample, or as many as a step may have;
    the last, if none leave room. A message has room for the hidden states of each.

    Args:
        bounds: of the stages.
        lent: bytes that the least of the members of each stage lends; 0 for any.
        widths: members of each stage.
    """
    samples = run.num_batch_samples
    most_wanted = min(samples, MAX_MICRO_BATCHES)
    wanted = run.layout.num_micro_batches(samples, sum(widths))
    if run.layout.micro_batches:
        return wanted

    def fits(num: int) -> bool:
        size = -(-samples // num)
        if len(widths) > 1 and _boundary_bytes(run, numbers, size) > _MOST_SENT:
            return False
        stages = (
            _stage(run, numbers, bounds, index, size, -(-samples // size), widths)
            for index in range(len(widths))
        )
        return all(
            not most or stage.memory_bytes <= most for stage, most in zip(stages, lent, strict=True)
        )

    while wanted < most_wanted and not fits(wanted):
        wanted = min(2 * wanted, most_wanted)
    return wanted


def check_boundary(run: RunFile, numbers: ChainNumbers) -> None:
    """Check that a message has room for the hidden states of a micro-batch.

    Raises:
        ConfigurationError: it has not, also where a batch is cut into as many micro-batches as there may be.
    """
    samples = run.num_batch_samples
    size = -(-samples // min(run.layout.micro_batches or MAX_MICRO_BATCHES, samples))
    num_bytes = _boundary_bytes(run, numbers, size)
    if run.layout.stages > 1 and num_bytes > _MOST_SENT:
        raise ConfigurationError(
            f"a micro-batch of {size:,} samples has hidden states of {num_bytes:,} bytes, and stages send each other "
            f"{_MOST_SENT:,} at once: give more [layout] micro_batches, or shorter samples ([data] sequence_length)"
        )


def _boundary_bytes(run: RunFile, numbers: ChainNumbers, num_samples: int) -> int:
    """Bytes of the hidden states of so many samples, as a stage sends them to the next."""
    width = _FLOAT if run.layout.activations == "float32" else _NARROW
    size = run.layout.subspace or numbers.hidden_size
    return width * num_samples * run.data.sequence_length * size


def estimate_chain(
    run: RunFile,
    numbers: ChainNumbers,
    *,
    lent: Sequence[int] = (),
    num_samples: int | None = None,
    speeds: Sequence[float] = (),
    bytes_per_second: float | None = None,
) -> ChainEstimate:
    """Estimate what a chain takes.

    Args:
        run: with all defaults.
        numbers: of its model.
        lent: bytes that the member of each stage lends; empty for any.
        num_samples: of the data, for `epochs`; None where it is not known.
        speeds: samples a second that the member of each stage would train of the whole model; one stands for all.
        bytes_per_second: that a member sends while it receives as many.

    Raises:
        ConfigurationError: it cannot be cut so; says why.
    """
    num_stages, samples = run.layout.stages, run.num_batch_samples
    check_boundary(run, numbers)
    bounds = cut_layers(stage_sizes(run, numbers), rooms_of(lent or [0] * num_stages))
    wanted = fitting_micro_batches(
        run, numbers, bounds, lent or [0] * num_stages, (1,) * num_stages
    )
    # As the leader cuts a batch: into pieces that are as large, but for the last.
    micro_batch = -(-samples // wanted)
    micro_batches = -(-samples // micro_batch)
    learning = sum(numbers.adapters) if run.adapter.r else numbers.num_parameters
    idle = bubble(num_stages, micro_batches)
    boundary = _boundary_bytes(run, numbers, samples)
    has_boundary = num_stages > 1
    tied = _FLOAT * numbers.num_tied if has_boundary and is_tied(run, numbers) else 0
    compute = samples / (min(speeds) * num_stages) / (1 - idle) if speeds else None
    send = boundary * has_boundary / bytes_per_second if bytes_per_second else None
    tied_seconds = tied / bytes_per_second if bytes_per_second else None
    seconds = _step_seconds(compute, send, tied_seconds)
    return ChainEstimate(
        stages=tuple(
            _stage(run, numbers, bounds, index, micro_batch, micro_batches, (1,) * num_stages)
            for index in range(num_stages)
        ),
        num_learning=learning,
        micro_batches=micro_batches,
        samples=samples,
        boundary_bytes=boundary * has_boundary,
        tied_bytes=tied,
        state_bytes=_FLOAT * (1 + optimizer_vectors(run.inner) + _has_momentum(run)) * learning,
        bubble=idle,
        num_steps=_num_steps(run, num_samples, seconds),
        compute_seconds=compute,
        send_seconds=send,
        tied_seconds=tied_seconds,
    )


def _num_steps(run: RunFile, num_samples: int | None, seconds: float | None) -> int | None:
    """Steps of each chain until the run stops; None where that is not known."""
    replicas = run.layout.replicas
    # A step of one chain is a round.
    rounds = run if replicas > 1 else replace(run, outer=OuterSection.of("data_parallel"))
    every = rounds.outer.round_steps
    samples = replicas * every * run.num_batch_samples
    num = num_rounds(rounds, samples, num_samples, None if seconds is None else every * seconds)
    return None if num is None else num * every


def _step_seconds(compute: float | None, send: float | None, tied: float | None) -> float | None:
    return None if compute is None or send is None or tied is None else max(compute, send) + tied


def _stage(
    run: RunFile,
    numbers: ChainNumbers,
    bounds: Sequence[int],
    index: int,
    micro_batch: int,
    micro_batches: int,
    widths: Sequence[int],
) -> StageEstimate:
    start, stop = bounds[index], bounds[index + 1]
    is_first, is_last = start == 0, stop == len(numbers.layers)
    width = _held_width(run)
    layers = sum(numbers.coded[start:stop]) or width * sum(numbers.layers[start:stop])
    adapter = sum(numbers.adapters[start:stop])
    ends = width * numbers.ends if is_first or is_last else 0
    most = max(numbers.coded or [width * layer for layer in numbers.layers])
    if run.adapter.r:
        learning = adapter
    else:
        of_ends = numbers.ends if is_first and is_last else numbers.first if is_first else 0
        of_ends += numbers.last if is_last and not is_first else 0
        learning = sum(numbers.layers[start:stop]) + of_ends
    # Of several members each has its turn.
    own = range(0, micro_batches, widths[index])
    under_way = most_under_way(own, window_of(index, widths))
    a_sample = activation_bytes(
        run,
        hidden_size=numbers.hidden_size,
        num_layers=stop - start,
        vocab_size=numbers.vocab_size if is_last else 0,
    )
    # With `recompute` inputs wait, and one micro-batch at a time is there as a whole.
    a_token = _TOKEN_ID if is_first else width * numbers.hidden_size
    whole, inputs = (1, under_way) if run.layout.recompute else (under_way, 0)
    # Autocast makes a copy of what it multiplies, for each pass.
    copied = 0 if run.adapter.r or run.inner.precision == "float32" else learning
    return StageEstimate(
        start=start,
        stop=stop,
        weights=layers + ends + _FLOAT * adapter,
        gradients=_FLOAT * learning,
        optimizer=_FLOAT * _optimizer_vectors(run) * learning,
        copies=_NARROW * copied * whole,
        opening=max(most, _FLOAT * numbers.ends - layers if ends else 0),
        activations=micro_batch * (whole * a_sample + inputs * run.data.sequence_length * a_token),
        under_way=under_way,
    )


def _optimizer_vectors(run: RunFile) -> int:
    """Values that optimisers keep of a parameter; replicas have the common weights and the outer momentum besides."""
    common = run.layout.replicas > 1
    return optimizer_vectors(run.inner) + common + _has_momentum(run)


def _has_momentum(run: RunFile) -> bool:
    return run.layout.replicas > 1 and run.outer.momentum > 0


def _held_width(run: RunFile) -> int:
    """Bytes of a weight of the model: what does not learn is held in what is multiplied."""
    return _NARROW if run.adapter.r and run.inner.precision == "bfloat16" else _FLOAT
