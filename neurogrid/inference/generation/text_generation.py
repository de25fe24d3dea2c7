"""Text in, text out, on top of token ids: what most programs want of a coordinator.

Knows the model's tokenizer and `generate`, and nothing of workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

import trio

from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.inference.generation.sampling import SamplingParams

__all__ = ["DEFAULT_MAX_TOKENS", "Prompt", "TextGeneration"]

# A text, or a conversation: messages with `role` and `content`, which the model's own chat template makes a text of.
Prompt = str | Sequence[Mapping[str, str]]

DEFAULT_MAX_TOKENS = 128


class TextGeneration(ABC):
    """Continues texts with what generates tokens.

    Attributes:
        model: whose tokenizer it is.
    """

    model: LoadedModel

    @abstractmethod
    def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        sampling: SamplingParams | None = None,
        adapter: str | None = None,
    ) -> AsyncGenerator[int, None]:
        """Yield new token ids."""

    async def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        sampling: SamplingParams | None = None,
        adapter: str | None = None,
    ) -> AsyncGenerator[str, None]:
        """Yield what follows `prompt`, piece by piece, as soon as no later token can change a piece.

        The pieces together are the text of all new tokens; none is empty. For the rest as `generate`: close it when
        you want no more of it.

        Args:
            prompt: a text to continue, or a conversation to answer, as a list of messages:
                `[{"role": "user", "content": "Why?"}]`.
            max_tokens: new tokens at most.
            sampling: how they are chosen; None for the likeliest each time.
            adapter: the name of an adapter to compute them with; None for the model alone.

        Raises:
            ConfigurationError: the prompt cannot be served; or it is a conversation, and the model has no chat
                template, or one that refuses it.
            CheckpointError: the model has no tokenizer.
            NoRouteError, CapacityError: as `generate`.
        """
        # In a thread: the tokenizer may have to be read first, and a prompt may be a book.
        token_ids = await trio.to_thread.run_sync(self._encode, prompt)
        text = self.model.tokenizer.stream()
        tokens = self.generate(token_ids, max_tokens=max_tokens, sampling=sampling, adapter=adapter)
        async with aclosing(tokens):
            async for token_id in tokens:
                if piece := text.push(token_id):
                    yield piece
        if rest := text.finish():
            yield rest

    async def complete(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        sampling: SamplingParams | None = None,
        adapter: str | None = None,
    ) -> str:
        """Return the text that follows `prompt`, whole.

        Raises:
            As `stream`.
        """
        pieces = self.stream(prompt, max_tokens=max_tokens, sampling=sampling, adapter=adapter)
        async with aclosing(pieces):
            return "".join([piece async for piece in pieces])

    def _encode(self, prompt: Prompt) -> list[int]:
        tokenizer = self.model.tokenizer
        return (
            tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)
        )
