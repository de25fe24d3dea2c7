"""Prefixes that sessions had and that workers have on disk: for generations that begin with the same tokens.

The index of one coordinator, pure: who asks the workers, and when, is elsewhere. It is a hint. A worker may have
dropped what is in it; then the tokens are computed.

Source: protocol_spec/sessions.md, "Prefixes on disk".
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from neurogrid.inference.generation.prefixes import reusable
from neurogrid.inference.pipeline.selection import Selection
from neurogrid.inference.pipeline.session_worker import Prior

__all__ = ["MIN_STORED", "StoredPrefix", "StoredPrefixes", "prefix_name", "stages_of"]

MIN_STORED: Final = 256
"""Tokens below which nothing is won: they are computed about as soon as they are read."""

# Each is looked at when a generation begins.
MAX_STORED: Final = 1024

Stages = tuple[tuple[str, int, int], ...]


def prefix_name(token_ids: Sequence[int]) -> bytes:
    """32 bytes that stand for these tokens, in this order."""
    return hashlib.sha256(array("Q", token_ids).tobytes()).digest()


def stages_of(selection: Selection) -> Stages:
    """Peer, first layer and end of each stage."""
    return tuple((each.peer_id, each.stage.start, each.stage.stop) for each in selection.stages)


@dataclass(frozen=True, eq=False)
class StoredPrefix:
    """A session that was written to disk, on the workers of all its stages.

    Attributes:
        tokens: those in its caches.
        calls: tokens of each forward pass that computed them, in order.
        adapter: the key of what it was computed with; empty for the base model alone.
        stages: where it is.
    """

    tokens: tuple[int, ...]
    calls: tuple[int, ...]
    adapter: bytes
    stages: Stages

    def prior(self, num_tokens: int) -> Prior:
        """The prior that workers are told for so many of its tokens."""
        return Prior(0, num_tokens, stays_open=False, stored=prefix_name(self.tokens))


class StoredPrefixes:
    """The prefixes that are on disk, the longest unused first.

    Args:
        shortest_cut: the fewest tokens that caches of so many can be cut back to.
        replays: whether the calls of a session must be repeatable as they were, on workers where that matters.
    """

    def __init__(self, *, shortest_cut: Callable[[int], int], replays: bool) -> None:
        self._shortest_cut = shortest_cut
        self._replays = replays
        self._stored: list[StoredPrefix] = []

    def __len__(self) -> int:
        return len(self._stored)

    def lacks(self, prefix: StoredPrefix) -> bool:
        """Whether it is worth writing: long enough, and nothing there that begins with it."""
        length = len(prefix.tokens)
        return (
            length >= MIN_STORED
            and not any(
                each.adapter == prefix.adapter
                and each.stages == prefix.stages
                # The last one tells most of those apart that begin alike, and all of them is a copy.
                and each.tokens[length - 1 : length] == prefix.tokens[-1:]
                and each.tokens[:length] == prefix.tokens
                and self._shortest_cut(len(each.tokens)) <= length
                for each in self._stored
            )
        )

    def add(self, prefix: StoredPrefix) -> None:
        """Add a prefix that is on all disks."""
        self._stored.append(prefix)
        del self._stored[:-MAX_STORED]

    def forget(self, prefix: StoredPrefix) -> None:
        """A worker has it no more."""
        if prefix in self._stored:
            self._stored.remove(prefix)

    def best(
        self, token_ids: Sequence[int], adapter: bytes, selection: Selection
    ) -> tuple[StoredPrefix, int] | None:
        """The prefix on the workers of `selection` with the most tokens to begin with, and how many; None for none."""
        stages = stages_of(selection)
        best: tuple[StoredPrefix, int] | None = None
        for prefix in self._stored:
            if prefix.adapter != adapter or prefix.stages != stages:
                continue
            # Where it has another token than one that is better has to have, the rest is not looked at.
            least = best[1] if best is not None else MIN_STORED - 1
            if list(prefix.tokens[least : least + 1]) != list(token_ids[least : least + 1]):
                continue
            num_tokens = reusable(
                prefix.tokens,
                prefix.calls,
                token_ids,
                shortest_cut=self._shortest_cut,
                replays=self._replays and not selection.has_same_bits,
            )
            if num_tokens >= MIN_STORED and (best is None or num_tokens > best[1]):
                best = prefix, num_tokens
        if best is not None:
            self._stored.remove(best[0])
            self._stored.append(best[0])
        return best
