"""Sampling: equal to transformers' warpers, reproducible, and never a token out of NaN."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from neurogrid.errors import ConfigurationError, ModelError
from neurogrid.inference.generation.sampling import (
    Sampler,
    SamplingParams,
    derived_seed,
    filtered_logits,
    token_logprobs,
)


def as_transformers_does(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    ids = torch.zeros((1, 1), dtype=torch.long)
    warped = TemperatureLogitsWarper(float(params.temperature))(ids, scores[None])
    if params.top_k:
        warped = TopKLogitsWarper(params.top_k)(ids, warped)
    if params.top_p < 1:
        warped = TopPLogitsWarper(params.top_p)(ids, warped)
    if params.min_p:
        warped = MinPLogitsWarper(float(params.min_p))(ids, warped)
    return warped[0]


# Derandomised: a token whose cumulated probability is 1 - top_p to the last bit may fall either way.
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.integers(1, 300),
    spread=st.floats(0.01, 20),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 320),
    top_p=st.floats(0.01, 1),
    min_p=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
    num_masked=st.integers(0, 3),
)
def test_distribution_equals_that_of_transformers(
    seed: int,
    vocab: int,
    spread: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    num_masked: int,
) -> None:
    scores = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread
    scores[: min(num_masked, vocab - 1)] = -torch.inf
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ours = filtered_logits(scores, params).softmax(-1)
    theirs = as_transformers_does(scores, params).softmax(-1)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_draws_the_tokens_of_transformers_with_the_same_seed() -> None:
    params = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=11)
    sampler = Sampler(params)
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn((50, 500), generator=torch.Generator().manual_seed(3)) * 3
    for scores in logits:
        probabilities = as_transformers_does(scores, params).softmax(-1)
        assert sampler.sample(scores) == int(
            torch.multinomial(probabilities, 1, generator=generator)
        )


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.integers(4, 200),
    temperature=st.sampled_from([0.0, 0.6, 1.7]),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
    penalty=st.sampled_from([0.5, 1.0, 1.3, 4.0]),
    min_tokens=st.integers(0, 12),
    data=st.data(),
)
def test_penalties_and_least_lengths_are_those_of_transformers(
    seed: int,
    vocab: int,
    temperature: float,
    min_p: float,
    penalty: float,
    min_tokens: int,
    data: st.DataObject,
) -> None:
    """Token for token over one sequence: the prompt counts, and so does what was sampled."""
    # Ids beyond the head's rows: some embeddings have more of them.
    prompt = data.draw(st.lists(st.integers(0, vocab + 3), min_size=1, max_size=20))
    ends = data.draw(st.lists(st.integers(0, vocab + 3), min_size=1, max_size=3, unique=True))
    params = SamplingParams(
        temperature=temperature,
        min_p=min_p,
        repetition_penalty=penalty,
        min_tokens=min_tokens,
        seed=seed,
    )
    sampler = Sampler(params, prompt=prompt, end_token_ids=ends)
    theirs = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)])
    theirs.append(MinNewTokensLengthLogitsProcessor(len(prompt), min_tokens, ends))
    drawing = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    logits = torch.randn((16, vocab), generator=torch.Generator().manual_seed(seed)) * 3
    for scores in logits:
        expected = theirs(torch.tensor([tokens]), scores[None].clone())[0]
        if temperature:
            probabilities = as_transformers_does(expected, params).softmax(-1)
            token_id = int(torch.multinomial(probabilities, 1, generator=drawing))
        else:
            token_id = int(expected.argmax())
        assert sampler.sample(scores) == token_id
        tokens.append(token_id)


def test_no_end_before_the_least_number_of_tokens() -> None:
    logits = torch.tensor([1.0, 9.0, 8.0, 0.0])
    sampler = Sampler(SamplingParams(min_tokens=2), end_token_ids=[1, 2])
    assert [sampler.sample(logits) for _ in range(4)] == [0, 0, 1, 1]
    with pytest.raises(ConfigurationError, match="end after 0 tokens, and min_tokens is 2"):
        Sampler(SamplingParams(min_tokens=2), end_token_ids=range(4)).sample(logits)


def test_greedy_takes_the_first_of_the_largest() -> None:
    sampler = Sampler(SamplingParams(top_k=1, top_p=0.1, seed=3))
    logits = torch.tensor([0.5, 2.0, -torch.inf, 2.0])
    assert sampler.sample(logits) == int(torch.argmax(logits)) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_dtype(dtype: torch.dtype) -> None:
    logits = torch.tensor([0.0, 3.0, 1.0], dtype=dtype)
    assert Sampler(SamplingParams()).sample(logits) == 1


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.tensor([5.0, 40.0, 39.0])
    assert Sampler(SamplingParams(temperature=1e-30)).sample(logits) == 1


def test_frequencies_follow_the_probabilities() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, seed=0))
    probabilities = torch.tensor([0.5, 0.3, 0.2, 0.0])
    counts = Counter(sampler.sample(probabilities.log()) for _ in range(4000))
    assert counts[3] == 0
    for token, expected in enumerate([0.5, 0.3, 0.2]):
        assert abs(counts[token] / 4000 - expected) < 0.04


def test_a_seed_gives_the_same_tokens_whatever_else_draws() -> None:
    logits = torch.zeros(1000)
    params = SamplingParams(temperature=1.0, seed=2**63 - 1)
    first, second, unseeded = Sampler(params), Sampler(params), Sampler(SamplingParams(1.0))
    drawn = []
    for _ in range(20):
        torch.rand(3)
        unseeded.sample(logits)
        drawn.append((first.sample(logits), second.sample(logits)))
    assert all(a == b for a, b in drawn)
    assert len({a for a, _ in drawn}) > 10
    other = Sampler(SamplingParams(temperature=1.0))
    assert [other.sample(logits) for _ in range(20)] != [a for a, _ in drawn]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "logits",
    [
        [0.0, float("nan")],
        [float("inf"), 0.0],
        [float("-inf"), float("-inf")],
        [],
        [[0.0, 1.0]],
    ],
)
def test_what_is_no_number_is_an_error(logits: list[Any], temperature: float) -> None:
    with pytest.raises(ModelError, match="not finite"):
        Sampler(SamplingParams(temperature=temperature)).sample(torch.tensor(logits))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"temperature": -0.1}, "--temperature must be a number from 0 .* got -0.1"),
        ({"temperature": 101}, "--temperature .* to 100, got 101"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"temperature": float("inf")}, "--temperature"),
        ({"temperature": "hot"}, "--temperature .* got hot"),
        ({"temperature": True}, "--temperature"),
        ({"top_k": -1}, "--top-k must be a whole number from 0"),
        ({"top_k": 1.5}, "--top-k"),
        ({"top_p": 0}, "--top-p must be a number above 0 and at most 1"),
        ({"top_p": 1.01}, "--top-p"),
        ({"top_p": None}, "--top-p"),
        ({"min_p": 1.1}, "--min-p must be a number from 0 .* to 1, got 1.1"),
        ({"min_p": -0.1}, "--min-p"),
        ({"repetition_penalty": 0}, "--repetition-penalty must be a number from 0.01 to 100"),
        ({"repetition_penalty": float("nan")}, "--repetition-penalty"),
        ({"min_tokens": -1}, "min_tokens must be a whole number from 0 up, got -1"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids must be token ids"),
        ({"stop_token_ids": range(1025)}, "stop_token_ids must name at most 1,024"),
        ({"seed": -1}, "--seed must be a whole number from 0"),
        ({"seed": 2**63}, "--seed"),
        ({"seed": 1.0}, "--seed"),
        ({"frequency_penalty": 2.1}, "frequency_penalty must be a number from -2 to 2, got 2.1"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"logit_bias": {3: 101}}, "logit_bias .* from -100 to 100, got 3: 101"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias must name at most 1,024"),
    ],
)
def test_bounds_are_named(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        SamplingParams(**fields)


def test_penalties_count_what_was_sampled() -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, with the counts of what was sampled before."""
    logits = torch.tensor([4.0, 3.8, 3.5, 0.0])
    sampler = Sampler(SamplingParams(frequency_penalty=0.5, presence_penalty=0.25))
    counts: Counter[int] = Counter()
    for _ in range(12):
        expected = [
            logit - 0.5 * counts[token] - 0.25 * (counts[token] > 0)
            for token, logit in enumerate(logits.tolist())
        ]
        token_id = sampler.sample(logits)
        assert token_id == max(range(4), key=lambda token: expected[token])
        counts[token_id] += 1
    assert set(counts) == {0, 1, 2}


def test_a_negative_penalty_repeats() -> None:
    logits = torch.tensor([1.0, 1.05])
    sampler = Sampler(SamplingParams(presence_penalty=-2.0, temperature=0.5, seed=1))
    first = sampler.sample(logits)
    assert [sampler.sample(logits) for _ in range(20)].count(first) > 15


def test_a_bias_is_added_to_the_logits() -> None:
    logits = torch.tensor([4.0, 1.0, 3.0])
    assert Sampler(SamplingParams(logit_bias={0: -100})).sample(logits) == 2
    assert Sampler(SamplingParams(logit_bias={0: -2.0, 1: 2.5})).sample(logits) == 1
    with pytest.raises(ConfigurationError, match="names token 3, and the model has tokens 0 to 2"):
        Sampler(SamplingParams(logit_bias={3: 1.0})).sample(logits)


def test_log_probabilities_are_those_of_the_bare_logits() -> None:
    logits = torch.tensor([2.0, -torch.inf, 1.0, 3.0], dtype=torch.bfloat16)
    expected = logits.float().softmax(-1).log()
    found = token_logprobs(logits, 2, num_top=2)
    assert found.chosen == pytest.approx(float(expected[2]), abs=1e-6)
    assert [token_id for token_id, _ in found.top] == [3, 0]
    assert [value for _, value in found.top] == pytest.approx(expected[[3, 0]].tolist(), abs=1e-6)
    assert token_logprobs(logits, 1, num_top=0).chosen == -float("inf")
    assert len(token_logprobs(logits, 1, num_top=20).top) == 4


def test_one_seed_gives_several_others() -> None:
    seeds = [derived_seed(2**63 - 1, index) for index in range(128)]
    assert seeds[0] == 2**63 - 1
    assert len(set(seeds)) == 128
    assert seeds == [derived_seed(2**63 - 1, index) for index in range(128)]
    for seed in seeds:
        SamplingParams(seed=seed)
