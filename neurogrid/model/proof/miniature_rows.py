"""Whether rows of different sessions can share a forward pass: tried on a miniature.

Sessions of several lengths, on both sides of each length at which the model changes its ways, decode
together in changing company, and each is compared with the same session alone. Where that fails for
rows on different sides of such a length (a rope that is scaled by the longest row), it is tried with
rows that are on the same side of all of them.

Shape legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from neurogrid.errors import ModelError
from neurogrid.model.caches.row_groups import zone_of
from neurogrid.model.files.model_code import MODEL_CODE_ERRORS, one_line
from neurogrid.model.proof.miniature_config import LengthLimit
from neurogrid.model.proof.miniature_split import Split

__all__ = ["ROWS_TOLERANCE", "NotEqualError", "row_bounds"]

# Relative to the largest logit. Matrices of several rows are multiplied in another order: 4e-6 off at
# most in 28 families. A row that sees another's keys, or one too few, is off by tenths.
ROWS_TOLERANCE = 1e-4

_NUM_STEPS = 4


class NotEqualError(Exception):
    """Rows that run together do not give what they give alone; says how far off."""


def row_bounds(
    split: Split, token_ids: Sequence[int], limits: Sequence[LengthLimit]
) -> tuple[int, ...]:
    """The lengths (of the model, not the miniature) that rows of one forward must not straddle.

    Args:
        split: the miniature in stages.
        token_ids: random ones, 4 more than the largest limit at least.
        limits: where the model may change its ways.

    Raises:
        NotEqualError: rows cannot share a forward, whatever their lengths.
    """
    small = tuple(limit.small for limit in limits)
    try:
        _compare(split, token_ids, small, bounds=())
    except NotEqualError:
        if not limits:
            raise
        _compare(split, token_ids, small, bounds=small)
        return tuple(limit.full for limit in limits)
    return ()


def _compare(
    split: Split, token_ids: Sequence[int], limits: Sequence[int], *, bounds: tuple[int, ...]
) -> None:
    longest = len(token_ids) - _NUM_STEPS
    lengths = {1, 2, longest, longest - 1, *limits, *(limit - 2 for limit in limits)}
    rows = [_Twins(split, token_ids, n) for n in sorted(lengths) if 0 < n <= longest]
    try:
        for step in range(_NUM_STEPS):
            # One sits out at each step, and goes on alone.
            absent = rows[step % len(rows)]
            zones: dict[int, list[_Twins]] = {}
            for row in rows:
                if row is not absent:
                    zones.setdefault(zone_of(row.position, bounds), []).append(row)
            for zone in zones.values():
                tokens = [row.next_token() for row in zone]
                got = split.step_rows([row.together for row in zone], tokens)
                for row, logits_V in zip(zone, got, strict=True):
                    row.compare(logits_V)
            token_id = absent.next_token()
            absent.compare(absent.together.step([token_id]))
    except (*MODEL_CODE_ERRORS, ModelError) as exc:
        raise NotEqualError(f"{type(exc).__name__}: {one_line(exc)}") from exc


class _Twins:
    """The same sequence twice: once in company, once alone."""

    def __init__(self, split: Split, token_ids: Sequence[int], length: int) -> None:
        self.together, self._alone = split.new_session(), split.new_session()
        # Each length reads the tokens from another place, so that no two rows are alike.
        self._token_ids = [*token_ids[length:], *token_ids[:length]]
        self._alone.step(self._token_ids[:length])
        self.together.step(self._token_ids[:length])

    @property
    def position(self) -> int:
        return self._alone.position

    def next_token(self) -> int:
        return self._token_ids[self.position]

    def compare(self, logits_V: torch.Tensor) -> None:
        """Let the one that is alone take the same step."""
        expected_V = self._alone.step([self.next_token()])
        largest = float(expected_V.abs().max())
        off = float((logits_V - expected_V).abs().max())
        if not off <= ROWS_TOLERANCE * largest:
            raise NotEqualError(
                f"rows of different lengths are off by {off / largest:.2g} of the largest logit"
            )
