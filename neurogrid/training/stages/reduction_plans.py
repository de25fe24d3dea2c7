"""The plans by which members of a stage, or of replicas, add up what they have: each makes the same for itself. Pure.

Source: protocol_spec/training/stages.md, "Several members", "Replicas".
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

from neurogrid.training.averaging.codecs import parse_codec
from neurogrid.training.averaging.plan import ReductionPlan

__all__ = ["WEIGHTS_REDUCTION", "reduction_plan"]

WEIGHTS_REDUCTION: Final = 2
"""The number of the reduction of weights within its step; those of gradients come before it."""

_CHUNKS_OF_A_PART: Final = 4
_LEAST_CHUNK: Final = 4096
_LARGEST_CHUNK: Final = 1024 * 1024


def reduction_plan(
    run: bytes,
    chain: int,
    step: int,
    stage: int,
    number: int,
    *,
    members: Sequence[str],
    reducers: Sequence[str],
    num_elements: int,
    codec: str = "f32",
    weights: Sequence[float] = (),
) -> ReductionPlan:
    """The plan of one of the reductions of a step, or of an attempt at a round.

    Args:
        run: the id of the run.
        number: which one within the step, from 0.
        members: peer ids of the stage, by lane.
        reducers: those of them that the others can dial; empty where nobody can be, and the first reduces.
        num_elements: of the vector, at least 1.
        codec: the form of what members send, and of the mean.
        weights: of the members; empty for 1 each.
    """
    reducing = tuple(reducers) or tuple(members[:1])
    parts = len(reducing)
    block = parse_codec(codec).block
    wanted = -(-num_elements // (_CHUNKS_OF_A_PART * parts))
    wanted = min(max(wanted, _LEAST_CHUNK), _LARGEST_CHUNK)
    chunk = -(-wanted // block) * block
    num_chunks = -(-num_elements // chunk)
    named = hashlib.sha256(run + struct.pack(">4Q", chain, step, stage, number)).digest()
    return ReductionPlan(
        reduction=int.from_bytes(named[:8], "big"),
        members=tuple(members),
        weights=tuple(weights) or (1.0,) * len(members),
        reducers=reducing,
        cuts=tuple(round(num_chunks * part / parts) for part in range(parts + 1)),
        num_elements=num_elements,
        chunk_elements=chunk,
        codec=codec,
        result_codec=codec,
    )
