"""From logits to one token: greedy, or drawn after temperature, top-k and top-p.

The order and the arithmetic are those of transformers' logits warpers, so that the distribution is
the one that `generate()` draws from. Each sampler has a generator of its own: a seed gives the same
tokens whatever else runs. Logits that are not numbers are an error, never a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from neurogrid.errors import ConfigurationError, ModelError

__all__ = ["Sampler", "SamplingParams", "filtered_logits"]

# Above it every vocabulary is uniform to within a percent; such a value is a typing error.
MAX_TEMPERATURE = 100.0
# torch.Generator takes more; JSON and other languages do not.
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Checked when made: ConfigurationError names the flag and its bounds.

    Attributes:
        temperature: 0 is greedy, which leaves the others without effect; at most 100.
        top_k: only the k likeliest tokens are drawn; 0 is all.
        top_p: only the fewest likeliest tokens whose probabilities sum to p or more, 0 < p <= 1.
        seed: of the sampler's own generator, from 0 to 2^63 - 1; None is another one each time.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

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


class Sampler:
    """Chooses the tokens of one sequence."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
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
            ModelError: NaN or +inf among the logits, or no token that can be drawn.
        """
        scores = logits.detach().to(device="cpu", dtype=torch.float32)
        # The largest is finite exactly when there is neither NaN nor +inf, and not all are -inf.
        if scores.ndim != 1 or not len(scores) or not math.isfinite(scores.max()):
            raise ModelError(
                "the model's logits are not finite numbers; half precision overflows in some "
                "models: try --dtype float32"
            )
        if self.params.temperature == 0:
            return int(scores.argmax())
        probabilities = filtered_logits(scores, self.params).softmax(-1)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


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
