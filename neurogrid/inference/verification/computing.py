"""Layers computed again: on a worker that holds them, in a short session of its own, or here (`OwnLayers`).

T = tokens, D = hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

import torch

from neurogrid.inference.pipeline.pipeline_stage import PipelineStage
from neurogrid.inference.pipeline.routing import Routing
from neurogrid.inference.pipeline.session import open_session
from neurogrid.model.adapters import AdapterSource
from neurogrid.node.hidden_states import pack, unpack

__all__ = ["MAX_PIECE", "OwnLayers", "as_travelled", "compute_on"]

# Tokens of one step: other sessions of the worker have their turns in between.
MAX_PIECE: Final = 128


class OwnLayers(ABC):
    """The coordinator's own computation of any layers of its model."""

    @abstractmethod
    async def compute(
        self, layers: range, hidden_BTD: torch.Tensor, adapter: AdapterSource | None
    ) -> torch.Tensor:
        """Compute these layers for a session of [1, T, D], with its adapter or none; [1, T, D].

        Raises:
            NoRouteError: it cannot be computed here; says why.
        """


async def compute_on(
    stage: PipelineStage,
    routing: Routing,
    hidden_BTD: torch.Tensor,
    *,
    max_piece: int | None,
    adapter: AdapterSource | None,
) -> torch.Tensor:
    """Have a stage compute a session of [1, T, D] from its first token on; [1, T, D].

    Args:
        max_piece: tokens that it takes at once; None where they cannot be cut.

    Raises:
        NoRouteError: it failed.
    """
    num_tokens = hidden_BTD.shape[1]
    size = num_tokens if max_piece is None else min(max_piece, MAX_PIECE)
    async with await open_session(
        [stage], routing, max_length=num_tokens, adapter=adapter
    ) as session:
        pieces = [await session.forward(piece_BTD) for piece_BTD in hidden_BTD.split(size, dim=1)]
    return torch.cat(pieces, dim=1)


def as_travelled(hidden_BTD: torch.Tensor, wire: str) -> torch.Tensor:
    """Hidden states as they are after they travelled: rounded, where that is in another type."""
    if not wire:
        return hidden_BTD
    envelope = pack(hidden_BTD, session_id=1, start=0, stop=1, position=0, wire=wire)
    return unpack(envelope, hidden_size=hidden_BTD.shape[2], dtype=hidden_BTD.dtype)
