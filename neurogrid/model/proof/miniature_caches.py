"""The proof that a family computes with coded caches what it computes with others, but for the rounding of the codes.

On the miniature, in stages: a prompt in one piece, in two, one token after another past every length at which the model
changes its ways, and several sessions in one pass; where its layers are compiled, with compiled ones, too. What reads a
cache otherwise than by what `update` gives it would take codes for numbers, and is far off.

It knows no family, and is for those who ask for coded caches. Shape legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from transformers import PreTrainedConfig

from neurogrid.errors import UnsupportedModelError
from neurogrid.model.proof.miniature import proving, small_model
from neurogrid.model.proof.miniature_split import Session, Split, saved_tensors
from neurogrid.model.stages.cost import layer_cost

__all__ = ["check_coded_caches"]

# Relative to the largest logit. The miniatures of 30 families are off by 0.03 at most; one whose codes
# are taken for numbers by much more.
TOLERANCE: Final = 0.1

_PAST_LAST_LIMIT: Final = 4


def check_coded_caches(config: PreTrainedConfig, *, rows: bool, fuses: bool) -> None:
    """Prove it, on the CPU and in float32.

    Args:
        rows: whether sessions of it share passes.
        fuses: whether its layers are compiled where they can be.

    Raises:
        UnsupportedModelError: with the reason, in one line.
    """
    what = f"model type {config.model_type!r} cannot keep keys and values as int8 (--kv-cache-dtype auto does as ever)"
    if all(cost.coded == cost for cost in layer_cost(config, torch.float32)):
        raise UnsupportedModelError(f"{what}: its layers keep none")
    with proving(what):
        limits, model = small_model(config)
        length = max((limit.small for limit in limits), default=8) + _PAST_LAST_LIMIT
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        tokens = torch.randint(0, vocab_size, (length,)).tolist()
        tensors = saved_tensors(model)
        for is_fused in (False, True)[: 1 + fuses]:
            split = Split(model.config, tensors, (), is_fused=is_fused)
            _compare(split, tokens, rows=rows)


def _compare(split: Split, tokens: Sequence[int], *, rows: bool) -> None:
    length = len(tokens)
    for plan in ([length], [length // 2, length - length // 2], [2, *[1] * (length - 2)]):
        plain, coded = _session(split, coded=False), _session(split, coded=True)
        position = 0
        for size in plan:
            step = tokens[position : position + size]
            _require_close(coded.step(step), plain.step(step), f"at token {position + size}")
            position += size
    if not rows:
        return
    lengths = range(2, min(length, 5))
    sessions = [[_session(split, coded=coded) for _ in lengths] for coded in (False, True)]
    for each in sessions:
        for session, count in zip(each, lengths, strict=True):
            session.step(tokens[:count])
    plain_rows, coded_rows = (split.step_rows(each, tokens[: len(lengths)]) for each in sessions)
    for got_V, expected_V in zip(coded_rows, plain_rows, strict=True):
        _require_close(got_V, expected_V, "with sessions together")


def _session(split: Split, *, coded: bool) -> Session:
    for stage in split.stages:
        stage.codes_caches = coded
    return split.new_session()


def _require_close(got_V: torch.Tensor, expected_V: torch.Tensor, where: str) -> None:
    off = float((got_V - expected_V).abs().max() / expected_V.abs().max())
    if not off <= TOLERANCE:
        raise UnsupportedModelError(
            f"on its miniature the logits are off by {off:.2g} of the largest {where}"
        )
