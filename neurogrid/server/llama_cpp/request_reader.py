"""Reader of the JSON of `/infill`, which is translated into a completion; that is checked and read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.model.files.fill_in import ExtraText
from neurogrid.server.llama_cpp.request_schemas import INFILL_REQUEST, refuse_fields
from neurogrid.server.openai.fill_in_prompts import fill_in_ends, fill_in_prompt, read_filling
from neurogrid.server.openai.request_reader import (
    CompletionRequest,
    read_completion,
    recommended_sampling,
)
from neurogrid.server.schema_check import check

__all__ = ["read_infill"]

# Of its README; what the model's makers recommend goes before them.
_DEFAULTS: Final[Mapping[str, float]] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
}
# Options under the names that completions have them by.
_SAME: Final = {
    **{name: name for name in _DEFAULTS},
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "ignore_eos": "ignore_eos",
    "model": "model",
}
# What llama.cpp means by any.
_RANDOM_SEED: Final = 2**32 - 1


async def read_infill(
    body: Mapping[str, Any], model: LoadedModel, adapters: Collection[str]
) -> CompletionRequest:
    """The request of `/infill`. Where the prompt is to be read alone, one token is asked for, and not told.

    Raises:
        APIError: 400, 404 or 422.
    """
    refuse_fields(body)
    check(body, INFILL_REQUEST)
    filling = read_filling(model, "input_suffix")
    n_predict = body.get("n_predict")
    wanted = None if n_predict is None or n_predict < 0 else max(int(n_predict), 1)
    prompt = await fill_in_prompt(
        filling,
        body["input_prefix"] + (body.get("prompt") or ""),
        body["input_suffix"],
        [
            ExtraText(each.get("filename") or "file", each.get("text") or "")
            for each in body.get("input_extra") or ()
        ],
        max_tokens=model.max_seq_len - (wanted or 1),
    )
    recommended = recommended_sampling(model)
    fields: dict[str, Any] = {
        name: value for name, value in _DEFAULTS.items() if name not in recommended
    }
    fields |= {_SAME[name]: body[name] for name in _SAME if body.get(name) is not None}
    seed = body.get("seed")
    if seed is not None and 0 <= seed != _RANDOM_SEED:
        fields["seed"] = seed
    fields |= {"prompt": prompt, "stop_token_ids": fill_in_ends(filling, model, None)}
    request = await read_completion(fields, model, adapters, default_tokens=None)
    (choice,) = request.choices
    room = choice.max_tokens if wanted is None else min(choice.max_tokens, wanted)
    stop = body.get("stop") or ()
    return replace(
        request,
        choices=(replace(choice, max_tokens=room),),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stream=bool(body.get("stream")),
        include_usage=True,
    )
