"""From logits to one token: greedy, or drawn after temperature, top-k and top-p.

The order and the arithmetic are those of transformers' logits warpers, so that the distribution is
the one that `generate()` draws from. Before them come penalties and biases, as OpenAI defines them
(https://platform.openai.com/docs/guides/text-generation, "Frequency and presence penalties"): they count
what was sampled, not the prompt. Each sampler has a generator of its own: a seed gives the same
tokens whatever else runs. Logits that are not numbers are an error, never a token.

Log probabilities are those of the model's own logits, before penalties, biases and temperature: what the model
thinks of a token, not how likely it was to be drawn.

V = vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from neurogrid.errors import ConfigurationError, ModelError

__all__ = [
    "FinishReason",
    "GeneratedToken",
    "Logprobs",
    "Sampler",
    "SamplingParams",
    "derived_seed",
    "filtered_logits",
    "token_logprobs",
]

FinishReason = Literal["stop", "length"]

# Above it every vocabulary is uniform to within a percent; such a value is a typing error.
MAX_TEMPERATURE = 100.0
# torch.Generator takes more; JSON and other languages do not.
MAX_SEED = 2**63 - 1
# As OpenAI bounds them.
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASES = 1024


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Checked when made: ConfigurationError names the flag and its bounds.

    Attributes:
        temperature: 0 is greedy, which leaves the others without effect; at most 100.
        top_k: only the k likeliest tokens are drawn; 0 is all.
        top_p: only the fewest likeliest tokens whose probabilities sum to p or more, 0 < p <= 1.
        seed: of the sampler's own generator, from 0 to 2^63 - 1; None is another one each time.
        frequency_penalty: taken from a token's logit for each time that it was sampled before, -2 to 2.
        presence_penalty: taken from the logit of each token that was sampled before, -2 to 2.
        logit_bias: added to the logits of these tokens, -100 to 100; at most 1,024 of them.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

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
            self.seed is None or (_is_whole(self.seed) and 0 <= self.seed <= MAX_SEED),
            "--seed must be a whole number from 0 to 2^63 - 1",
            self.seed,
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


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of probabilities, of one token and of the likeliest ones in its place.

    Attributes:
        chosen: of the token itself; -inf where the model rules it out.
        top: token ids and their logarithms, the likeliest first.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One token of a generation.

    Attributes:
        token_id: the token; with finish reason `stop` the end-of-sequence token, which is no text.
        logprobs: where they were asked for.
        finish_reason: why nothing follows: `stop`, the model ended; `length`, there is no place for more. None
            for all but the last.
        num_reused: tokens of the prompt that were not computed, because an earlier session had begun with the same.
    """

    token_id: int
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    num_reused: int = 0


def derived_seed(seed: int, index: int) -> int:
    """The seed of sequence `index` of several that one `seed` is to give; that of the first is `seed` itself."""
    if index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & MAX_SEED


class Sampler:
    """Chooses the tokens of one sequence."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._counts_V: torch.Tensor | None = None  # how often each token was sampled
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.long)
        self._biases = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def sample(self, logits: torch.Tensor) -> int:
        """The next token's id.

        Args:
            logits: [vocab], any float dtype and device; -inf is a token that is never drawn. At
                temperature 0 the first of the largest is taken, as torch.argmax does.

        Raises:
            ConfigurationError: a bias names a token that the model does not have.
            ModelError: NaN or +inf among the logits, or no token that can be drawn.
        """
        scores = logits.detach().to(device="cpu", dtype=torch.float32)
        # The largest is finite exactly when there is neither NaN nor +inf, and not all are -inf.
        if scores.ndim != 1 or not len(scores) or not math.isfinite(scores.max()):
            raise ModelError(
                "the model's logits are not finite numbers; half precision overflows in some "
                "models: try --dtype float32"
            )
        scores = self._weighed(scores)
        if self.params.temperature == 0:
            token_id = int(scores.argmax())
        else:
            probabilities = filtered_logits(scores, self.params).softmax(-1)
            token_id = int(torch.multinomial(probabilities, 1, generator=self._generator))
        if self._counts_V is not None:
            self._counts_V[token_id] += 1
        return token_id

    def _weighed(self, scores_V: torch.Tensor) -> torch.Tensor:
        """The scores after penalties and biases; the same where there are none."""
        params = self.params
        if params.frequency_penalty or params.presence_penalty:
            if self._counts_V is None:
                self._counts_V = torch.zeros_like(scores_V)
            scores_V = (
                scores_V
                - params.frequency_penalty * self._counts_V
                - params.presence_penalty * (self._counts_V > 0)
            )
        if len(self._bias_ids):
            if int(self._bias_ids.max()) >= len(scores_V):
                raise ConfigurationError(
                    f"logit_bias names token {int(self._bias_ids.max())}, and the model has tokens 0 to "
                    f"{len(scores_V) - 1}"
                )
            scores_V = scores_V.index_add(0, self._bias_ids, self._biases)
        return scores_V


def token_logprobs(logits_V: torch.Tensor, token_id: int, *, num_top: int) -> Logprobs:
    """Log probabilities of `token_id` and of the `num_top` likeliest tokens, in float32."""
    logprobs_V = logits_V.detach().to(device="cpu", dtype=torch.float32).log_softmax(-1)
    top = logprobs_V.topk(min(num_top, len(logprobs_V)))
    return Logprobs(
        float(logprobs_V[token_id]),
        tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)),
    )


def filtered_logits(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """`scores` [vocab], float32, finite or -inf, scaled by the temperature, with -inf for every
    token that top-k or top-p takes away. The likeliest always stays. `params` must not be greedy.
    """
    # Below the largest, so that a tiny temperature sends the rest to -inf and not all to inf.
    scores = (scores - scores.max()) / params.temperature
    if 0 < params.top_k < len(scores):
        smallest_kept = scores.topk(params.top_k).values[-1]
        scores = scores.masked_fill(scores < smallest_kept, -torch.inf)
    if params.top_p < 1:
        ascending, order = scores.sort()
        is_taken_away = ascending.softmax(-1).cumsum(-1) <= 1 - params.top_p
        is_taken_away[-1] = False
        scores = scores.masked_fill(
            torch.zeros_like(is_taken_away).scatter(0, order, is_taken_away), -torch.inf
        )
    return scores


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _require(holds: bool, rule: str, value: object) -> None:
    if not holds:
        raise ConfigurationError(f"{rule}, got {str(value)[:40]}")
