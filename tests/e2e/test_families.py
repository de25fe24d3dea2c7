"""Greedy tokens over real workers equal transformers' own `generate()`, in float32, for every family, be the prompt
one token or so long that it goes through the stages in chunks.

Over two workers; one family over as many as there are, and two over three whose layers are not all alike. How else each
family may be split is in tests/unit/test_stage.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from neurogrid import CoordinatorSettings
from neurogrid.inference.pipeline.prefill import MAX_CHUNK, chunk_lengths
from tests.e2e.support import WorkerProcess, reference_tokens, run_coordinator
from tests.families import FAMILIES, VOCAB_SIZE, Family, save_checkpoint

MAX_TOKENS = 24
LONG_PROMPT = 300
COUNTS = {"llama-tied": (1, 2, 3), "gemma3": (3,), "lfm2": (3,)}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    long = torch.randint(2, VOCAB_SIZE, (LONG_PROMPT,), generator=generator).tolist()
    return [[5], long]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_tokens_equal_generate(
    family: Family, workers: list[WorkerProcess], tmp_path: Path
) -> None:
    model = save_checkpoint(family, tmp_path)
    expected = [reference_tokens(model, prompt, MAX_TOKENS) for prompt in prompts()]
    assert len({token for tokens in expected for token in tokens}) > 4, "the tokens prove nothing"
    for count in COUNTS.get(family.name, (2,)):
        outcome = run_coordinator(
            CoordinatorSettings(
                model=tmp_path,
                peers=tuple(worker.address for worker in workers[:count]),
                stages=count,
                max_seq_len=512,
            ),
            prompts(),
            MAX_TOKENS,
        )
        assert len(outcome.stages) == count
        assert count == 1 or len(chunk_lengths(LONG_PROMPT, count, max_tokens=MAX_CHUNK)) > 1
        assert outcome.tokens == expected, f"over {count} workers: {outcome.stages}"
