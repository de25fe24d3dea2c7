"""Reader of the JSON of Ollama's requests, which is translated into OpenAI's; that is checked and read.

Where a request and the model's makers say nothing of sampling, it is Ollama's: programs that speak its API were tuned
with that.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.server.errors import APIError
from neurogrid.server.ollama.not_offered import refuse_fields
from neurogrid.server.ollama.request_schemas import CHAT_REQUEST, GENERATE_REQUEST
from neurogrid.server.openai.fill_in_prompts import read_filling
from neurogrid.server.openai.image_parts import require_sight
from neurogrid.server.openai.request_reader import (
    CompletionRequest,
    read_chat,
    read_completion,
    read_model_name,
    recommended_sampling,
)
from neurogrid.server.schema_check import check

__all__ = ["Load", "read_name", "read_ollama_chat", "read_ollama_generate"]

TAG: Final = ":latest"

# https://github.com/ollama/ollama/blob/main/docs/modelfile.mdx, "Valid parameters and values".
_DEFAULTS: Final[Mapping[str, float]] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
# Options under the names that they have in OpenAI's API, or in those that go beyond it.
_SAME: Final = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repeat_penalty": "repetition_penalty",
}


@dataclass(frozen=True)
class Load:
    """A request that has nothing to answer, with which clients load a model beforehand, or unload it."""

    reason: str


def read_name(model: LoadedModel, adapters: Collection[str], name: object) -> str:
    """The name, as `/v1/models` has it, of what a request calls with or without Ollama's tag.

    Raises:
        APIError: 404, nothing has it.
    """
    plain = name
    if isinstance(name, str) and name != model.name and name not in adapters:
        plain = name.removesuffix(TAG)
    return read_model_name(model, adapters, plain) or model.name


async def read_ollama_chat(
    body: Mapping[str, Any], model: LoadedModel, adapters: Collection[str]
) -> CompletionRequest | Load:
    """The request of `/api/chat`.

    Raises:
        APIError: 400, 404 or 422.
    """
    refuse_fields(body)
    if body.get("images") not in (None, []):
        raise APIError(
            400,
            "images is not supported here: they are those of a message",
            param="images",
            code="unsupported_parameter",
        )
    check(body, CHAT_REQUEST)
    name = read_name(model, adapters, body["model"])
    if not body.get("messages"):
        return _load(body)
    messages = _messages(body["messages"])
    fields = {**_fields(body, model), "model": name, "messages": messages}
    fields |= _form(body)
    if body.get("tools"):
        fields["tools"] = body["tools"]
    return _bounded(await read_chat(_with_logprobs(fields, body), model, adapters), body)


async def read_ollama_generate(
    body: Mapping[str, Any], model: LoadedModel, adapters: Collection[str]
) -> CompletionRequest | Load:
    """The request of `/api/generate`.

    Raises:
        APIError: 400, 404 or 422.
    """
    refuse_fields(body)
    check(body, GENERATE_REQUEST)
    name = read_name(model, adapters, body["model"])
    prompt, system = body.get("prompt") or "", body.get("system") or ""
    suffix = body.get("suffix") or ""
    if not (prompt or suffix):
        return _load(body)
    if suffix:
        read_filling(model, "suffix")  # before what else is wrong beside it
    fields = {**_fields(body, model), "model": name}
    has_template = model.tokenizer.has_chat_template
    images = body.get("images") or []
    if images:
        require_sight(model, "images[0]", "images")
    if images and (body.get("raw") or suffix or not has_template):
        why = (
            "raw uses no template"
            if body.get("raw")
            else "filling in uses no template"
            if suffix
            else "this model has no chat template"
        )
        raise APIError(400, f"images cannot be told to the model: {why}", param="images")
    if body.get("raw") or suffix or not has_template:
        if system:
            why = "this model has no chat template"
            if body.get("raw") or suffix:
                why = f"{'raw' if body.get('raw') else 'suffix'} uses no template"
            raise APIError(400, f"system cannot be told to the model: {why}", param="system")
        if _form(body):
            raise APIError(
                400,
                "format and think are not supported where no template writes the prompt",
                param="format" if body.get("format") else "think",
                code="unsupported_parameter",
            )
        if body.get("logprobs"):
            fields["logprobs"] = int(body.get("top_logprobs") or 0)
        fields |= {"prompt": prompt, "suffix": suffix}
        request = await read_completion(fields, model, adapters, default_tokens=None)
        return _bounded(request, body)
    before = [{"role": "system", "content": system}] if system else []
    fields["messages"] = [*before, {"role": "user", "content": _content(prompt, images)}]
    fields |= _form(body)
    return _bounded(await read_chat(_with_logprobs(fields, body), model, adapters), body)


def _messages(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as OpenAI's API has them, where calls have ids, and the answer of a tool names its call."""
    messages: list[dict[str, Any]] = []
    unanswered: list[tuple[str, str]] = []  # names of tools, and ids
    num_calls = 0
    for index, message in enumerate(given):
        content = _content(message.get("content") or "", message.get("images") or [])
        told: dict[str, Any] = {"role": message["role"], "content": content}
        calls = []
        for call in message.get("tool_calls") or ():
            function, call_id = call["function"], f"call_{num_calls}"
            num_calls += 1
            unanswered.append((function["name"], call_id))
            arguments = json.dumps(function.get("arguments") or {})
            told_call = {"name": function["name"], "arguments": arguments}
            calls.append({"id": call_id, "type": "function", "function": told_call})
        if calls:
            told["tool_calls"] = calls
        if message.get("thinking"):
            told["reasoning_content"] = message["thinking"]
        if message["role"] == "tool":
            wanted = message.get("tool_name")
            found = [each for each in unanswered if wanted in (None, "", each[0])]
            if not found:
                raise APIError(
                    422,
                    f"messages[{index}] is the answer of a tool, and answers no call before it",
                    param=f"messages[{index}].tool_name",
                    code="invalid_value",
                )
            unanswered.remove(found[0])
            told["tool_call_id"] = found[0][1]
        messages.append(told)
    return messages


def _content(text: str, images: Sequence[str]) -> str | list[dict[str, Any]]:
    """A message as OpenAI's API has it; its images stand before its text, as Ollama tells them."""
    if not images:
        return text
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": f"data:;base64,{image}"}} for image in images
    ]
    return [*parts, {"type": "text", "text": text}]


def _form(body: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a request about thoughts and the answer's format, as OpenAI's API has them."""
    fields: dict[str, Any] = {}
    wanted = body.get("format")
    if wanted == "json":
        fields["response_format"] = {"type": "json_object"}
    elif wanted:
        named = {"name": "format", "schema": wanted, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": named}
    think = body.get("think")
    if isinstance(think, str):
        fields["reasoning_effort"] = think
    elif think is not None:
        fields["enable_thinking"] = think
    return fields


def _load(body: Mapping[str, Any]) -> Load:
    return Load("unload" if body.get("keep_alive") in (0, "0", "0s") else "load")


def _with_logprobs(fields: dict[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a chat with those that ask for log probabilities."""
    if not body.get("logprobs"):
        return fields
    return {**fields, "logprobs": True, "top_logprobs": int(body.get("top_logprobs") or 0)}


def _fields(body: Mapping[str, Any], model: LoadedModel) -> dict[str, Any]:
    """Fields of a request about sampling, as OpenAI's API has them."""
    options = body.get("options") or {}
    recommended = recommended_sampling(model)
    fields = {name: value for name, value in _DEFAULTS.items() if name not in recommended}
    given = {name: options[name] for name in _SAME if options.get(name) is not None}
    if options.get("repeat_last_n") == 0:
        given["repeat_penalty"] = 1.0
    fields |= {_SAME[name]: value for name, value in given.items()}
    seed = options.get("seed")
    if seed is not None and seed >= 0:
        fields["seed"] = seed
    return fields


def _bounded(request: CompletionRequest, body: Mapping[str, Any]) -> CompletionRequest:
    """The request with the bounds that Ollama's options name: they cut an answer short, and refuse none."""
    options = body.get("options") or {}
    (choice,) = request.choices
    room = choice.max_tokens
    if (num_predict := int(options.get("num_predict") or 0)) > 0:
        room = min(room, num_predict)
    if num_ctx := int(options.get("num_ctx") or 0):
        room = min(room, num_ctx - len(choice.prompt))
        if room < 1:
            raise APIError(
                400,
                f"the prompt has {len(choice.prompt)} tokens, and num_ctx is {num_ctx}: nothing is cut off here",
                param="options.num_ctx",
                code="context_length_exceeded",
            )
    stop = options.get("stop") or ()
    return replace(
        request,
        choices=(replace(choice, max_tokens=room),),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stream=body.get("stream") is not False,
        include_usage=True,
    )
