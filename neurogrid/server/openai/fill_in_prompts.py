"""Prompts that have the model write between two texts: `suffix` of completions, and `/infill`."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.model.files.fill_in import ExtraText, FillIn, read_fill_in
from neurogrid.server.errors import APIError

__all__ = ["fill_in_ends", "fill_in_prompt", "read_filling"]


def read_filling(model: LoadedModel, param: str) -> FillIn:
    """Read the tokens that the model's tokenizer has for filling in.

    Args:
        param: the field of the request that asks for it.

    Raises:
        APIError: 400, it has nothing.
    """
    filling = read_fill_in(model.tokenizer)
    if filling is None:
        raise APIError(
            400,
            f"{param} is not supported by this model: its tokenizer has no tokens that say where text is to be filled "
            "in, as those of models for code have",
            param=param,
            code="unsupported_parameter",
        )
    return filling


async def fill_in_prompt(
    filling: FillIn,
    prefix: str | Sequence[float],
    suffix: str,
    extra: Sequence[ExtraText] = (),
    *,
    max_tokens: int = 0,
) -> list[int]:
    """The tokens of a prompt.

    Args:
        prefix: text before the gap, or its tokens.
        extra: other texts of the project, of which as many go before it as fit.
        max_tokens: of all of the prompt, by which it is known what fits.
    """

    before = prefix if isinstance(prefix, str) else [int(token_id) for token_id in prefix]

    def write() -> list[int]:
        prompt = filling.prompt(before, suffix)
        if not extra:
            return prompt
        told = filling.extra(extra, max_tokens=max_tokens - len(prompt))
        return filling.prompt(before, suffix, extra=told)

    return await trio.to_thread.run_sync(write)


def fill_in_ends(filling: FillIn, model: LoadedModel, given: Sequence[float] | None) -> list[int]:
    """The tokens that end such an answer: those of the form, and those that a request names."""
    own = (token_id for token_id in filling.end_ids if token_id < model.ends.vocab_size)
    return list(dict.fromkeys([*own, *map(int, given or ())]))
