"""A long prompt goes through the stages in chunks, so that all of them have one to compute.

In one piece it would be at one stage at a time, and take as long as on one machine. In chunks the second stage computes
the first one while the first stage computes the second: K stages of equal speed take one and a half Kths of the time,
or less. What a chunk needs of those before it is in the caches by then: each stage computes them in order.

One stage gets a prompt in one piece, and so the bits of the whole model, unless that is more than a message or a mask
should be.

T = tokens, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Final, TypeAlias

import torch
import trio

from neurogrid.exception_groups import unwrap_errors
from neurogrid.inference.pipeline.chain import Chain
from neurogrid.p2p.wire import DEFAULT_LIMITS

__all__ = [
    "MAX_CHUNK",
    "Bounds",
    "MakeHidden",
    "Prefill",
    "TakeHidden",
    "chunk_lengths",
    "max_piece",
]

# Each chunk reads all weights again and has its way to go, so none is small; and sessions that decode wait for one.
MIN_CHUNK: Final = 128
MAX_CHUNK: Final = 512
# With so many for each stage a stage is idle for a third of the time at most; more of them cost more than they give.
CHUNKS_PER_STAGE: Final = 2
# The most tokens of a prompt that goes to a stage in one piece. Families with windows, and those that attend without a
# kernel, make a mask of all of them by all of them: of float32 64 MB for so many, and 4 GB for 32,000.
MAX_WHOLE: Final = 4096
# Of activations in one message, bytes: a quarter of what a peer takes, for both ends hold it in memory.
MAX_PIECE_BYTES: Final = DEFAULT_LIMITS.tensor // 4

Bounds: TypeAlias = tuple[int, int]
"""The first position of some tokens, and the one after the last."""

MakeHidden: TypeAlias = Callable[[int, int], Awaitable[torch.Tensor]]
"""Gives what enters layer 0 for the tokens from one position up to another: [1, T, D]."""

TakeHidden: TypeAlias = Callable[[int, torch.Tensor], Awaitable[None]]
"""Takes what leaves the last layer for some tokens, [1, T, D], and the position of the first of them."""


def max_piece(row_bytes: int) -> int:
    """The most tokens that go to a stage in one message, for activations of so many bytes a token."""
    return max(min(MAX_PIECE_BYTES // row_bytes, MAX_WHOLE), 1)


def chunk_lengths(num_tokens: int, num_stages: int, *, max_tokens: int) -> list[int]:
    """Numbers of tokens in the chunks of a prompt, at most `max_tokens` each.

    One stage gets all at once, if it can; else they are no larger than for several, since the mask that each but the
    first needs grows with their size.
    """
    if num_stages == 1 and num_tokens <= max_tokens:
        return [num_tokens]
    num_chunks = min(num_tokens // MIN_CHUNK, CHUNKS_PER_STAGE * num_stages)
    num_chunks = max(num_chunks, -(-num_tokens // min(MAX_CHUNK, max_tokens)))
    ends = [num_tokens * i // num_chunks for i in range(num_chunks + 1)]
    return [stop - start for start, stop in pairwise(ends)]


class Prefill:
    """Chunks on their way through the chains of a session.

    Args:
        session_id: of a session whose tokens end where the first chunk begins.
        chunks: of tokens that follow each other.
        make_hidden: called for each of them in order, when its turn has come.
        take_hidden: called for each of them, in any order, with what leaves the last layer; those behind wait for it
            as for a stage. None where nobody wants that.
    """

    def __init__(
        self,
        chains: Sequence[Chain],
        session_id: int,
        chunks: Sequence[Bounds],
        make_hidden: MakeHidden,
        take_hidden: TakeHidden | None = None,
    ) -> None:
        self._take_hidden = take_hidden
        self._chains = chains
        self._session_id = session_id
        self._chunks = chunks
        self._make_hidden = make_hidden
        # Of each chain and chunk: whether the next may enter, and whether it has left.
        self._sent = [[trio.Event() for _ in chunks] for _ in chains]
        self._left = [[trio.Event() for _ in chunks] for _ in chains]
        self._last_BTD: torch.Tensor | None = None

    async def run(self) -> torch.Tensor:
        """Send all of them; returns what leaves the last layer for the last one.

        Raises:
            NoRouteError, ModelError: the first that one of them met; the others are given up.
        """
        with unwrap_errors():
            async with trio.open_nursery() as nursery:
                for index in range(len(self._chunks)):
                    nursery.start_soon(self._pass, index)
        assert self._last_BTD is not None
        return self._last_BTD

    async def _pass(self, index: int) -> None:
        start, stop = self._chunks[index]
        hidden_BTD: torch.Tensor | None = None
        for chain, sent, left in zip(self._chains, self._sent, self._left, strict=True):
            if index:
                await sent[index - 1].wait()
            # One for each stage, and one on its way to the first.
            ahead = index - len(chain.stages) - 1
            if ahead >= 0:
                await left[ahead].wait()
            if hidden_BTD is None:
                hidden_BTD = await self._make_hidden(start, stop)
            hidden_BTD = await chain.forward(
                self._session_id, hidden_BTD, position=start, on_sent=sent[index].set
            )
            sent[index].set()
            if chain is self._chains[-1] and self._take_hidden is not None:
                await self._take_hidden(start, hidden_BTD)
            left[index].set()
        if index == len(self._chunks) - 1:
            self._last_BTD = hidden_BTD
