"""Sampling parameters, checked without torch, so that a mistake is told before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from neurogrid.errors import ConfigurationError

__all__ = ["SamplingParams"]

# Above it every vocabulary is uniform to within a percent; such a value is a typing error.
MAX_TEMPERATURE = 100.0
# torch.Generator takes more; JSON and other languages do not.
MAX_SEED = 2**63 - 1
# As OpenAI bounds them.
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASES = 1024
# A factor beyond these leaves one token or turns the order around; such a value is a typing error.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_STOP_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. Checked when made: ConfigurationError names the flag and its bounds.

    Attributes:
        temperature: 0 is greedy, which leaves top_k, top_p, min_p and seed without effect; at most 100.
        top_k: only the k likeliest tokens are drawn; 0 is all.
        top_p: only the fewest likeliest tokens whose probabilities sum to p or more, 0 < p <= 1.
        min_p: only tokens whose probability is this part of the likeliest one's or more, 0 to 1, of what top_k and
            top_p leave; 0 is all.
        seed: of the sampler's own generator, from 0 to 2^63 - 1; None is another one each time.
        repetition_penalty: divides the logit of each token of the prompt and of those sampled before where it is
            above 0, and multiplies it where it is below; 0.01 to 100, and 1 changes nothing.
        frequency_penalty: taken from a token's logit for each time that it was sampled before, -2 to 2.
        presence_penalty: taken from the logit of each token that was sampled before, -2 to 2.
        logit_bias: added to the logits of these tokens, -100 to 100; at most 1,024 of them.
        min_tokens: new tokens before any that ends the sequence may be sampled.
        stop_token_ids: tokens that end the sequence besides the model's own; at most 1,024 of them.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        _require(
            _is_number(self.temperature) and 0 <= self.temperature <= MAX_TEMPERATURE,
            f"--temperature must be a number from 0 (greedy) to {MAX_TEMPERATURE:g}",
            self.temperature,
        )
        _require(
            _is_whole(self.top_k) and self.top_k >= 0,
            "--top-k must be a whole number from 0 (all tokens) up",
            self.top_k,
        )
        _require(
            _is_number(self.top_p) and 0 < self.top_p <= 1,
            "--top-p must be a number above 0 and at most 1 (all tokens)",
            self.top_p,
        )
        _require(
            _is_number(self.min_p) and 0 <= self.min_p <= 1,
            "--min-p must be a number from 0 (all tokens) to 1",
            self.min_p,
        )
        _require(
            self.seed is None or (_is_whole(self.seed) and 0 <= self.seed <= MAX_SEED),
            "--seed must be a whole number from 0 to 2^63 - 1",
            self.seed,
        )
        _require(
            _is_number(self.repetition_penalty)
            and MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY,
            f"--repetition-penalty must be a number from {MIN_REPETITION_PENALTY:g} to "
            f"{MAX_REPETITION_PENALTY:g} (1 changes nothing)",
            self.repetition_penalty,
        )
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _require(
                _is_number(value) and abs(value) <= MAX_PENALTY,
                f"{name} must be a number from -{MAX_PENALTY:g} to {MAX_PENALTY:g}",
                value,
            )
        _require(
            len(self.logit_bias) <= MAX_BIASES,
            f"logit_bias must name at most {MAX_BIASES:,} tokens",
            len(self.logit_bias),
        )
        for token_id, bias in self.logit_bias.items():
            _require(
                _is_whole(token_id)
                and token_id >= 0
                and _is_number(bias)
                and abs(bias) <= MAX_BIAS,
                f"logit_bias must map token ids to numbers from -{MAX_BIAS:g} to {MAX_BIAS:g}",
                f"{token_id}: {bias}",
            )
        _require(
            _is_whole(self.min_tokens) and self.min_tokens >= 0,
            "min_tokens must be a whole number from 0 up",
            self.min_tokens,
        )
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKENS,
            f"stop_token_ids must name at most {MAX_STOP_TOKENS:,} tokens",
            len(self.stop_token_ids),
        )
        for token_id in self.stop_token_ids:
            _require(
                _is_whole(token_id) and token_id >= 0,
                "stop_token_ids must be token ids, whole numbers from 0 up",
                token_id,
            )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _require(holds: bool, rule: str, value: object) -> None:
    if not holds:
        raise ConfigurationError(f"{rule}, got {str(value)[:40]}")
