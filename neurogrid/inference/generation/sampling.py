"""Choice of one token from logits: greedy, or drawn after temperature, top-k, top-p and min-p.

The order and the arithmetic are those of transformers' logits processors, so that the distribution is
the one that `generate()` draws from. First of all comes the repetition penalty, which counts the prompt, too; then
penalties and biases as OpenAI defines them
(https://platform.openai.com/docs/guides/text-generation, "Frequency and presence penalties"), which count
what was sampled, not the prompt; then, while there are fewer tokens than wanted, those that would end the sequence are
ruled out; and last, those that the sequence's grammar does not allow. Each sampler has a generator of its own: a seed
gives the same tokens whatever else runs. Logits that are not numbers are an error, never a token.

Log probabilities are those of the model's own logits, before penalties, biases and temperature: what the model
thinks of a token, not how likely it was to be drawn.

V = vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from neurogrid.errors import ConfigurationError, ModelError
from neurogrid.inference.generation.sampling_params import MAX_SEED, SamplingParams
from neurogrid.model.grammars import GrammarState

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
        token_id: the token; with finish reason `stop` the one that ended the sequence, which is no text.
        logprobs: where they were asked for.
        finish_reason: why nothing follows: `stop`, the model ended or a stop token came; `length`, there is no place
            for more. None for all but the last.
        num_reused: tokens of the prompt that were not computed, because an earlier session had begun with the same.
    """

    token_id: int
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    num_reused: int = 0


def derived_seed(seed: int, index: int) -> int:
    """The seed of sequence `index` of several that one `seed` is to give; that of the first is `seed` itself.

    Of the others it is the first eight bytes, little-endian, of the SHA-256 of `seed/index` in decimals, without the
    highest bit.
    """
    if index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & MAX_SEED


class Sampler:
    """Chooses the tokens of one sequence.

    Args:
        prompt: the tokens before the first that is sampled.
        end_token_ids: the tokens that end the sequence, those of `params` included.
        grammar: what the sequence has to be; its state is advanced here. None for anything.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt: Sequence[int] = (),
        end_token_ids: Collection[int] = (),
        grammar: GrammarState | None = None,
    ) -> None:
        self.params = params
        self._grammar = grammar
        self._num_sampled = 0
        self._end_ids = torch.tensor(sorted(end_token_ids), dtype=torch.long)
        self._prompt = prompt
        self._is_seen_V: torch.Tensor | None = None  # of the prompt, or sampled
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
            ConfigurationError: a bias names a token that the model does not have, or min_tokens leaves none, or the
                grammar has come to a bound of its library.
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
        if self._grammar is not None:
            scores = self._by_grammar(scores, self._grammar)
        if self.params.temperature == 0:
            token_id = int(scores.argmax())
        else:
            probabilities = filtered_logits(scores, self.params).softmax(-1)
            token_id = int(torch.multinomial(probabilities, 1, generator=self._generator))
        self._num_sampled += 1
        if self._grammar is not None and token_id not in self._end_ids:
            self._grammar.advance(token_id)
        if self._counts_V is not None:
            self._counts_V[token_id] += 1
        if self._is_seen_V is not None:
            self._is_seen_V[token_id] = True
        return token_id

    def _weighed(self, scores_V: torch.Tensor) -> torch.Tensor:
        """The scores after penalties, biases and what may not end yet; the same where there are none."""
        params = self.params
        if params.repetition_penalty != 1:
            scores_V = self._without_repetition(scores_V)
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
        if self._num_sampled < params.min_tokens:
            # A checkpoint may name an end that its vocabulary does not have.
            ends = self._end_ids[self._end_ids < len(scores_V)]
            scores_V = scores_V.index_fill(0, ends, -torch.inf)
            if not math.isfinite(scores_V.max()):
                raise ConfigurationError(
                    f"the sequence can only end after {self._num_sampled} tokens, and min_tokens is {params.min_tokens}"
                )
        return scores_V

    def _by_grammar(self, scores_V: torch.Tensor, grammar: GrammarState) -> torch.Tensor:
        """The scores of what may come next; a token that ends the sequence may where the grammar is complete."""
        allowed_V = grammar.allowed()
        is_allowed_V = torch.zeros_like(scores_V, dtype=torch.bool)
        length = min(len(allowed_V), len(scores_V))
        is_allowed_V[:length] = allowed_V[:length]
        if grammar.is_complete:
            is_allowed_V[self._end_ids[self._end_ids < len(scores_V)]] = True
        scores_V = scores_V.masked_fill(~is_allowed_V, -torch.inf)
        if not math.isfinite(scores_V.max()):
            raise ModelError(
                "the model rules out all tokens that the answer's grammar allows: ask without one"
            )
        return scores_V

    def _without_repetition(self, scores_V: torch.Tensor) -> torch.Tensor:
        """The scores after the repetition penalty (Keskar et al. 2019, arXiv:1909.05858), as transformers has it."""
        if self._is_seen_V is None:
            prompt = torch.tensor(self._prompt, dtype=torch.long)
            self._is_seen_V = torch.zeros_like(scores_V, dtype=torch.bool)
            self._is_seen_V[prompt[prompt < len(scores_V)]] = True
        penalty = self.params.repetition_penalty
        penalised_V = torch.where(scores_V < 0, scores_V * penalty, scores_V / penalty)
        return torch.where(self._is_seen_V, penalised_V, scores_V)


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
    token that top-k, top-p or min-p takes away. The likeliest always stays. `params` must not be greedy.
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
    if params.min_p > 0:
        probabilities = scores.softmax(-1)
        is_taken_away = probabilities < params.min_p * probabilities.max()
        scores = scores.masked_fill(is_taken_away, -torch.inf)
    return scores
