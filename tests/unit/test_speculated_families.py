"""Tokens with proposals are those without, for every family that can take tokens back, over stages cut in two.

Whatever is proposed: here it is what comes, with mistakes, so that every number of accepted tokens occurs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest
import torch
import trio
from stage_families import FAMILIES, Checkpoint, Pipeline, shared

from neurogrid.inference.generation.ends_queue import Chosen, EndsQueue, open_ends
from neurogrid.inference.generation.sampling import Sampler, SamplingParams

CANNOT_GO_BACK: Final = {"lfm2", "jamba", "llama-dynamic", "llama4"}
PROMPT, NUM_TOKENS = 6, 34
WAYS: Final = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(
        temperature=0.7,
        seed=3,
        frequency_penalty=0.8,
        presence_penalty=0.3,
        repetition_penalty=1.3,
        logit_bias={5: 2.0, 9: -4.0},
    ),
}


class Speculated:
    """One sequence through the stages of a checkpoint, as a coordinator has it."""

    def __init__(self, checkpoint: Checkpoint, ends: EndsQueue, sampling: SamplingParams) -> None:
        self._pipeline = Pipeline(checkpoint, (checkpoint.num_layers // 2,))
        self._ends = ends
        self.tokens = checkpoint.tokens(PROMPT)
        self._sampler = Sampler(sampling, prompt=tuple(self.tokens))
        self._waiting = list(self.tokens)
        self.num_accepted: list[int] = []

    async def extend(self, proposed: Sequence[int]) -> None:
        pipeline, position = self._pipeline, self._pipeline.position
        hidden_BTD = await self._ends.embed(
            [*self._waiting, *proposed], position=position, session=1
        )
        for stage, cache, (start, stop) in zip(
            pipeline.stages, pipeline.caches, pipeline.ranges, strict=True
        ):
            hidden_BTD = stage.forward(
                hidden_BTD, start=start, stop=stop, position=position, cache=cache
            )
        if proposed:
            values, _ = await self._ends.choose_each(
                hidden_BTD, position=position, proposed=proposed, choose=self._choose, session=1
            )
            pipeline.position = position + len(values)
            for cache in pipeline.caches:
                cache.go_back(pipeline.position)
            self.num_accepted.append(len(values) - 1)
        else:
            value, _ = await self._ends.choose(
                hidden_BTD, position=position, choose=self._choose, session=1
            )
            values = [value]
            pipeline.position = position + hidden_BTD.shape[1]
        self.tokens += [each.value for each in values]
        self._waiting = self.tokens[-1:]

    def _choose(self, logits_V: torch.Tensor) -> Chosen[int]:
        token_id = self._sampler.sample(logits_V)
        return Chosen(token_id, token_id)


async def both(checkpoint: Checkpoint, sampling: SamplingParams) -> None:
    async with open_ends(checkpoint.shared_ends, shares_forward=True) as ends:
        alone = Speculated(checkpoint, ends, sampling)
        while len(alone.tokens) < NUM_TOKENS + 8:
            await alone.extend(())
        expected = alone.tokens
        speculated = Speculated(checkpoint, ends, sampling)
        await speculated.extend(())
        for length, mistake_at in [(5, 2), (3, 0), (8, 8), (1, 1), (4, 3)] * 8:
            at = len(speculated.tokens)
            if at >= NUM_TOKENS:
                break
            proposed = expected[at : at + length]
            if mistake_at < len(proposed):
                proposed[mistake_at] = (proposed[mistake_at] + 1) % 90
            await speculated.extend(proposed)
            if mistake_at == 3:
                await speculated.extend(())
    assert speculated.tokens[:NUM_TOKENS] == expected[:NUM_TOKENS]
    assert {0, 1, 2, 8} <= set(speculated.num_accepted)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_without(family: str) -> None:
    checkpoint = shared(family)
    if family in CANNOT_GO_BACK:
        pytest.skip("it cannot take tokens back, and is not speculated with: test_miniature.py")
    for sampling in WAYS.values():
        trio.run(both, checkpoint, sampling)
