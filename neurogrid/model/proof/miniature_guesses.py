"""Whether tokens may be guessed, several in a pass, and the wrong ones forgotten again: tried on a miniature.

A sequence goes through twice: once token by token, and once with guesses behind each right token, of which some are
right. After each pass the caches go back to the last right one. What comes of every right token is compared.

Shape legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from neurogrid.errors import ModelError
from neurogrid.model.files.model_code import MODEL_CODE_ERRORS
from neurogrid.model.proof.miniature_rows import ROWS_TOLERANCE
from neurogrid.model.proof.miniature_split import Split

__all__ = ["rolls_back"]

_PROMPT = 2
# Of each pass, in turn: right tokens, and guesses that are wrong.
_PASSES = ((1, 3), (2, 1), (3, 2), (1, 1), (2, 0))


def rolls_back(split: Split, token_ids: Sequence[int]) -> bool:
    """Whether caches that went back give what they would give if they had never gone on.

    Args:
        split: the miniature in stages.
        token_ids: random ones, as many as go past each length at which it changes its ways.
    """
    guessed, alone = split.new_session(), split.new_session()
    if not all(cache.can_go_back for cache in guessed.caches):
        return False
    wrong = token_ids[::-1]
    try:
        for session in (guessed, alone):
            session.step(token_ids[:_PROMPT])
        at = 0
        while guessed.position < len(token_ids):
            num_right, num_wrong = _PASSES[at % len(_PASSES)]
            at += 1
            start = guessed.position
            right = token_ids[start : start + num_right]
            got = guessed.step_each([*right, *wrong[at % 2 : at % 2 + num_wrong]])
            guessed.go_back(start + len(right))
            if not all(
                _is_close(mine, alone.step([t])) for mine, t in zip(got, right, strict=False)
            ):
                return False
    except (*MODEL_CODE_ERRORS, ModelError):
        return False
    return True


def _is_close(got_V: torch.Tensor, expected_V: torch.Tensor) -> bool:
    off, largest = float((got_V - expected_V).abs().max()), float(expected_V.abs().max())
    return off <= ROWS_TOLERANCE * largest
