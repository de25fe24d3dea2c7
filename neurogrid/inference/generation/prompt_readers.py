"""Readers of a prompt: for its embedding, or for the log probabilities of its own tokens.

A reader is shown what leaves the last layer, some tokens at a time, and keeps what it needs: never all hidden states of
a long prompt, and never a vocabulary for each of its tokens.

T = tokens, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch

from neurogrid.errors import ConfigurationError, ModelError
from neurogrid.inference.generation.sampling import Logprobs
from neurogrid.model.files.pooling import Pooling, PoolingMode
from neurogrid.model.stages.stage import Ends

__all__ = ["PooledHidden", "PromptLogprobs", "PromptReader"]

# Logits that are held at once, float32: 32 MiB, and as much again while they become logarithms.
MAX_LOGITS: Final = 8 * 1024 * 1024
# Tokens whose hidden states are normed at once.
MAX_HIDDEN_TOKENS: Final = 512


class PromptReader(Protocol):
    """Shown all tokens of a prompt, in any order of their pieces; from the beginning again where a worker failed.

    Attributes:
        max_tokens: that it is shown at once, at most.
    """

    max_tokens: int

    def restart(self) -> None:
        """Forget what was shown."""

    def read(self, ends: Ends, hidden_BTD: torch.Tensor, position: int) -> None:
        """Take what left the last layer for some tokens; runs in the torch thread.

        Args:
            hidden_BTD: [1, T, D].
            position: of the first of them.
        """


class PooledHidden:
    """Pools the final hidden states of a text.

    Args:
        dimensions: of the embedding: the first so many; None for all.
    """

    max_tokens = MAX_HIDDEN_TOKENS

    def __init__(self, pooling: Pooling, dimensions: int | None = None) -> None:
        self._pooling = pooling
        self._dimensions = dimensions
        self._parts: dict[
            int, tuple[int, torch.Tensor]
        ] = {}  # by position: tokens, and what came of them

    def restart(self) -> None:
        self._parts.clear()

    def read(self, ends: Ends, hidden_BTD: torch.Tensor, position: int) -> None:
        # In double precision, so that it is of no consequence where a prompt was cut.
        final_TD = ends.final_hidden(hidden_BTD, position=position).cpu().double()
        mode, num_tokens = self._pooling.mode, len(final_TD)
        if mode is PoolingMode.LAST:
            part_D = final_TD[-1]
        elif mode is PoolingMode.FIRST:
            part_D = final_TD[0]
        elif mode is PoolingMode.MAX:
            part_D = final_TD.max(0).values
        elif mode is PoolingMode.WEIGHTED_MEAN:
            weights_T = torch.arange(position + 1, position + num_tokens + 1, dtype=torch.double)
            part_D = weights_T @ final_TD
        else:
            part_D = final_TD.sum(0)
        self._parts[position] = num_tokens, part_D

    def embedding(self) -> list[float]:
        """The embedding, in float32.

        Raises:
            ConfigurationError: it has fewer dimensions than were asked for.
            ModelError: there are values in it that are not finite.
        """
        parts_PD = torch.stack([part_D for _, (_, part_D) in sorted(self._parts.items())])
        num_tokens = sum(number for number, _ in self._parts.values())
        mode = self._pooling.mode
        if mode is PoolingMode.LAST:
            pooled_D = parts_PD[-1]
        elif mode is PoolingMode.FIRST:
            pooled_D = parts_PD[0]
        elif mode is PoolingMode.MAX:
            pooled_D = parts_PD.max(0).values
        else:
            pooled_D = parts_PD.sum(0) / _divisor(mode, num_tokens)
        if self._dimensions is not None:
            if self._dimensions > len(pooled_D):
                raise ConfigurationError(
                    f"embeddings of this model have {len(pooled_D)} dimensions, and not {self._dimensions}"
                )
            pooled_D = pooled_D[: self._dimensions]
        if self._pooling.normalises or self._dimensions is not None:
            pooled_D = torch.nn.functional.normalize(pooled_D, dim=0)
        if not bool(pooled_D.isfinite().all()):
            raise ModelError(
                "the model's hidden states are not finite numbers; half precision overflows in some "
                "models: try --dtype float32"
            )
        embedding: list[float] = pooled_D.float().tolist()
        return embedding


def _divisor(mode: PoolingMode, num_tokens: int) -> float:
    if mode is PoolingMode.WEIGHTED_MEAN:
        return num_tokens * (num_tokens + 1) / 2
    return num_tokens**0.5 if mode is PoolingMode.MEAN_SQRT_LENGTH else num_tokens


class PromptLogprobs:
    """Log probabilities of a prompt's tokens, each given those before it.

    Args:
        num_top: of how many of the likeliest in each place besides.
        vocab_size: V.
    """

    def __init__(self, token_ids: Sequence[int], *, num_top: int, vocab_size: int) -> None:
        self.max_tokens = max(MAX_LOGITS // vocab_size, 1)
        self._token_ids = list(token_ids)
        self._num_top = num_top
        self._by_position: dict[int, Logprobs] = {}

    def restart(self) -> None:
        self._by_position.clear()

    def read(self, ends: Ends, hidden_BTD: torch.Tensor, position: int) -> None:
        # What is known after the last token is about the first that is generated.
        num_tokens = min(hidden_BTD.shape[1], len(self._token_ids) - 1 - position)
        if num_tokens < 1:
            return
        hidden_BTD = hidden_BTD[:, :num_tokens]
        logprobs_TV = ends.logits_of_all(hidden_BTD, position=position).cpu().log_softmax(-1)
        next_ids = torch.tensor(self._token_ids[position + 1 : position + 1 + num_tokens])
        chosen_T = logprobs_TV.gather(1, next_ids[:, None])[:, 0]
        top = logprobs_TV.topk(min(self._num_top, logprobs_TV.shape[1]))
        rows = zip(chosen_T.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)
        for place, (chosen, ids, values) in enumerate(rows, position + 1):
            self._by_position[place] = Logprobs(chosen, tuple(zip(ids, values, strict=True)))

    def logprobs(self) -> list[Logprobs | None]:
        """Log probabilities of each token of the prompt; None for the first, before which there is nothing."""
        return [None, *(self._by_position[place] for place in range(1, len(self._token_ids)))]
