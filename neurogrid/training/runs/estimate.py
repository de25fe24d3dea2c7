"""Estimates of a run before it begins: memory of a member, bytes and seconds of a round. Arithmetic on numbers alone.

What is counted exactly is said so; the rest is near enough to tell a machine that will do from one that will not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from neurogrid.training.runs.run_file import InnerSection, RunFile

__all__ = [
    "BASE_BYTES",
    "Estimate",
    "activation_bytes",
    "codec_bytes",
    "distro_bytes",
    "estimate",
    "leader_bytes",
    "member_bytes",
    "num_rounds",
    "optimizer_vectors",
]

BASE_BYTES: Final = 800 * 1024**2
"""Python, torch, transformers and the network, in the two processes of a member, as measured on the CPU."""

# float32
_WIDTH: Final = 4
# Bytes of a block beside its elements, and elements of a block (protocol_spec/training/forms.md).
_SCALE_BYTES: Final = 4
_GROUP: Final = 256
_BLOCK: Final = 4096


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory, traffic and time that a run takes of a member.

    Attributes:
        num_parameters: that are trained.
        num_members: that everything is told for.
        round_samples: of all members, in a round.
        memory_bytes: of a member, in all.
        trainer_bytes: of that, weights, gradients and optimiser in float32.
        outer_bytes: of that, the common weights, the outer momentum, and vectors on their way.
        activation_bytes: of that, what one sample leaves for the backward pass; 0 where it is not known.
        sent_bytes, received_bytes: of a member, in a round.
        checkpoint_bytes: of the weights in one checkpoint, in float32.
        num_rounds: until the run stops; None where that depends on what is not known.
        compute_seconds, exchange_seconds: of a round; None where speed, or bandwidth, is not known.
        round_seconds: of a round: computing, then exchanging, or both at once where they overlap; None where either is
            not known.
    """

    num_parameters: int
    num_members: int
    round_samples: int
    memory_bytes: int
    trainer_bytes: int
    outer_bytes: int
    activation_bytes: int
    sent_bytes: int
    received_bytes: int
    checkpoint_bytes: int
    num_rounds: int | None
    compute_seconds: float | None
    exchange_seconds: float | None
    round_seconds: float | None


def estimate(
    run: RunFile,
    num_parameters: int,
    *,
    num_members: int = 2,
    sample_activation_bytes: int = 0,
    num_samples: int | None = None,
    speeds: Sequence[float] = (),
    bytes_per_second: float | None = None,
) -> Estimate:
    """Estimate what a run takes.

    Args:
        run: with all defaults.
        num_parameters: that are trained, tied ones once.
        num_members: that take part.
        sample_activation_bytes: what one sample leaves for the backward pass, as `activation_bytes` has it.
        num_samples: of the data, for `epochs`; None where it is not known.
        speeds: samples a second of each member, as measured; one stands for all. Empty where nothing is known.
        bytes_per_second: that a member sends while it receives as many; None where that is not known.
    """
    if num_members < 1 or len(speeds) not in (0, 1, num_members) or not all(s > 0 for s in speeds):
        raise ValueError(f"{num_members} members with speeds {list(speeds)[:8]}")
    outer, inner = run.outer, run.inner
    even_samples = outer.round_steps * run.num_batch_samples
    if run.is_witnessed and run.epochs.batches:
        even_samples = -(-run.epochs.batches * run.num_batch_samples // num_members)
    round_samples = num_members * even_samples
    # And the weights that are shared with the process of the network.
    trainer_bytes = member_bytes(inner, num_parameters) + _WIDTH * num_parameters
    if inner.precision == "bfloat16":
        trainer_bytes += 2 * num_parameters  # autocast keeps them for a pass
    num_elements = -(-num_parameters // outer.fragments)
    encoded = codec_bytes(outer.codec, num_elements)
    aggregate = codec_bytes(outer.result_codec, num_elements)
    # The common weights and the outer momentum; what is contributed, its form, and the aggregate.
    outer_bytes = _WIDTH * num_parameters * (1 + (outer.momentum > 0) + 2) + encoded + aggregate
    if run.is_witnessed:
        # The weights, the momentum and that of before the round, a mean gradient, and a sum of results on its way.
        encoded, outer_bytes = distro_bytes(run, num_parameters), _WIDTH * num_parameters * 5
    samples_at_once = inner.micro_batch or 1
    activations = sample_activation_bytes * samples_at_once
    way = "everybody" if run.is_witnessed else outer.way
    sent, received = _traffic(way, num_members, encoded, aggregate, _WIDTH * num_elements)
    if run.is_witnessed:
        sent -= encoded  # the leader has none of it
    compute = _compute_seconds(run, num_members, even_samples, speeds)
    exchange = max(sent, received) / bytes_per_second if bytes_per_second else None
    seconds = None
    if compute is not None and exchange is not None:
        seconds = max(compute, exchange) if outer.overlap else compute + exchange
    return Estimate(
        num_parameters=num_parameters,
        num_members=num_members,
        round_samples=round_samples,
        memory_bytes=BASE_BYTES + trainer_bytes + outer_bytes + activations,
        trainer_bytes=trainer_bytes,
        outer_bytes=outer_bytes,
        activation_bytes=activations,
        sent_bytes=sent,
        received_bytes=received,
        checkpoint_bytes=_WIDTH * num_parameters,
        num_rounds=num_rounds(run, round_samples, num_samples, seconds),
        compute_seconds=compute,
        exchange_seconds=exchange,
        round_seconds=seconds,
    )


def member_bytes(inner: InnerSection, num_parameters: int) -> int:
    """Bytes that a member's trainer needs before any sample: weights, gradients, and what the optimiser keeps. Exact;
    a member that has no more than that is too small all the same."""
    return _WIDTH * num_parameters * (2 + optimizer_vectors(inner))


def optimizer_vectors(inner: InnerSection) -> int:
    """Values that the optimiser keeps of each parameter that learns."""
    return 2 if inner.optimizer == "adamw" else 1 if inner.momentum else 0


def saved_bytes(run: RunFile, num_parameters: int) -> int:
    """Bytes that a member saves for a checkpoint: its optimiser, and its weights where they are not the common ones.
    About: without what a file has besides."""
    has_own = run.outer.fragments > 1
    return _WIDTH * num_parameters * (optimizer_vectors(run.inner) + has_own)


def leader_bytes(run: RunFile, num_parameters: int) -> int:
    """Bytes that the leader needs at least: weights in its trainer, and shared with it; the common weights and the
    outer momentum; and an aggregate on its way."""
    return _WIDTH * num_parameters * (4 + (run.outer.momentum > 0))


def activation_bytes(run: RunFile, *, hidden_size: int, num_layers: int, vocab_size: int) -> int:
    """Bytes that one sample of text leaves for the backward pass, about.

    A layer keeps 34 values of 2 bytes for each token and channel where attention keeps no scores (Korthikanti et al.,
    "Reducing activation recomputation in large transformer models", 2022), and twice as much in float32; the loss keeps
    logits, their logarithms and their gradient in float32.
    """
    width = 34 if run.inner.precision == "bfloat16" else 68
    a_token = width * hidden_size * num_layers + 3 * _WIDTH * vocab_size
    return run.data.sequence_length * a_token


def distro_bytes(run: RunFile, num_parameters: int) -> int:
    """A member's result of a round with method "distro", where sides of tensors are whole chunks; else about that."""
    size = run.distro.chunk**2
    chunks = -(-num_parameters // size)
    sent = chunks * min(run.distro.top_k, size)
    width = 0 if run.distro.top_k >= size else (size - 1).bit_length()
    if not run.distro.one_bit:
        return 8 + -(-sent * (width + 32) // 8)
    return 8 + -(-sent * (width + 1) // 8) + -(-chunks // 8)


def codec_bytes(codec: str, num_elements: int) -> int:
    """The size of a vector in a form of the wire; exact where it fills its blocks, else a few bytes more.

    Raises:
        ValueError: there is no such form.
    """
    match codec.partition(":"):
        case "f32", _, _:
            return 4 * num_elements
        case (("f16" | "bf16"), _, _):
            return 2 * num_elements
        case "int8", _, _:
            return num_elements + _SCALE_BYTES * math.ceil(num_elements / _GROUP)
        case "int4", _, _:
            return (num_elements + 1) // 2 + _SCALE_BYTES * math.ceil(num_elements / _GROUP)
        case "sign", _, _:
            return (num_elements + 7) // 8 + _SCALE_BYTES * math.ceil(num_elements / _BLOCK)
        case "topk", _, number:
            sent = int(number or 64)
            block = 2 * _SCALE_BYTES + (3 * sent + 1) // 2 + (sent + 3) // 4
            return block * math.ceil(num_elements / _BLOCK)
    raise ValueError(f"no form of the wire is called {codec!r}")


def _traffic(
    way: str, num_members: int, encoded: int, aggregate: int, plain: int
) -> tuple[int, int]:
    """Bytes that a member sends and receives in a round; the leader of the run gets the aggregate, too."""
    others = num_members - 1
    if way == "server":
        return encoded, aggregate
    if way == "everybody":
        return num_members * encoded, others * encoded
    num_rows = math.isqrt(num_members) if way == "grid" else 1
    if num_rows > 1:
        # Within the row as in a butterfly; of its part what the row gave, in float32, to those of the other rows.
        in_row = num_members // num_rows
        sent, received = _traffic("butterfly", in_row, encoded, aggregate, plain)
        handed_on = (plain + aggregate) * (num_rows - 1) // (num_rows * in_row)
        return sent + handed_on, received + handed_on
    # All but its own part goes to the others, and the aggregate of that to them and to the leader.
    contributed = others * encoded // num_members
    return contributed + aggregate, contributed + others * aggregate // num_members


def _compute_seconds(
    run: RunFile, num_members: int, even_samples: int, speeds: Sequence[float]
) -> float | None:
    if not speeds:
        return None
    each = list(speeds) * (num_members if len(speeds) == 1 else 1)
    if run.outer.projected:  # all finish together
        return num_members * even_samples / sum(each)
    return even_samples / min(each)


def num_rounds(
    run: RunFile, round_samples: int, num_samples: int | None, seconds: float | None
) -> int | None:
    """Rounds until the first of what the run stops at, of those that can be told; None where none can be.

    Args:
        round_samples: of all members.
        num_samples: of the data; None where it is not known.
        seconds: of a round; None where they are not known.
    """
    stop, found = run.stop, []
    if stop.tokens is not None:
        found.append(stop.tokens / (round_samples * run.data.sequence_length))
    if stop.steps is not None:
        found.append(stop.steps / run.outer.round_steps)
    if stop.rounds is not None:
        found.append(stop.rounds)
    if stop.epochs is not None and num_samples is not None:
        found.append(stop.epochs * num_samples / round_samples)
    if stop.hours is not None and seconds is not None:
        found.append(stop.hours * 3600 / seconds)
    return max(1, math.ceil(min(found))) if found else None
