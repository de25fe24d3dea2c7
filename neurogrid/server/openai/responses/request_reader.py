"""From the JSON of `/v1/responses` to a chat, which is checked and read as others are.

What this API has and is not there is refused by name, in one table. Nothing is stored here: a response is the answer to
its request, and whoever goes on from it sends what was said.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.server.errors import APIError
from neurogrid.server.openai.request_reader import CompletionRequest, read_chat
from neurogrid.server.openai.request_schemas import MAX_MESSAGES
from neurogrid.server.openai.responses.schemas import RESPONSE_REQUEST
from neurogrid.server.schema_check import check

__all__ = ["read_response"]

_NOT_STORED: Final = "nothing is stored here; send the whole conversation as input"
# By field: the values that change nothing, and what is missing.
_NOT_OFFERED: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "tools": (
        (None, []),
        "calls of tools are not offered in responses; /v1/chat/completions is for them",
    ),
    "tool_choice": ((None, "none", "auto"), "calls of tools are not offered in responses"),
    "store": ((None, False), "nothing is stored here; leave it out, or say false"),
    "previous_response_id": ((None,), _NOT_STORED),
    "conversation": ((None,), _NOT_STORED),
    "background": ((None, False), "nothing is stored here, so nothing can be asked for later"),
    "prompt": ((None,), "no prompts are kept here; write it into instructions and input"),
    "top_logprobs": (
        (None, 0),
        "responses have no log probabilities here; /v1/chat/completions has them",
    ),
    "context_management": ((None, []), "nothing is cut off or summed up here"),
}
# Of `include`: what there is none of in any answer here, so that leaving it out tells all.
_INCLUDED: Final = frozenset({"reasoning.encrypted_content"})
_FIELDS: Final = ("model", "temperature", "top_p", "stream", "user")


async def read_response(
    body: Mapping[str, Any], model: LoadedModel, adapters: Collection[str]
) -> CompletionRequest:
    """The request of `/v1/responses`.

    Raises:
        APIError: 400, 404 or 422, with the field.
    """
    _refuse(body)
    check(body, RESPONSE_REQUEST)
    given = body["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = [{"role": item["role"], "content": _text(item["content"])} for item in items]
    if body.get("instructions"):
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    fields = {name: body[name] for name in _FIELDS if body.get(name) is not None}
    fields |= {"messages": messages, "max_completion_tokens": body.get("max_output_tokens")}
    if effort := (body.get("reasoning") or {}).get("effort"):
        fields["reasoning_effort"] = effort
    request = await read_chat(fields, model, adapters)
    return replace(request, include_usage=True)


def _text(content: str | list[Mapping[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _refuse(body: Mapping[str, Any]) -> None:
    """Refuse what would change the answer and is not there. `body` is not checked yet."""
    for name, (harmless, reason) in _NOT_OFFERED.items():
        value = body.get(name)
        if not any(value == each and type(value) is type(each) for each in harmless):
            raise _not_offered(f"{name} is not supported: {reason}", name)
    text = body.get("text")
    if isinstance(text, dict) and text.get("format") not in (None, {"type": "text"}):
        raise _not_offered(
            "text.format is not supported: answers by a format are not offered in responses",
            "text.format",
        )
    include = body.get("include")
    if isinstance(include, list) and (
        others := [each for each in include if str(each) not in _INCLUDED]
    ):
        raise _not_offered(
            f"include has {str(others[0])[:60]!r}, which is not supported here", "include"
        )
    items = body.get("input")
    for index, item in enumerate(items[:MAX_MESSAGES] if isinstance(items, list) else ()):
        if isinstance(item, dict):
            _refuse_item(item, f"input[{index}]")


def _refuse_item(item: Mapping[str, Any], where: str) -> None:
    kind = item.get("type")
    if isinstance(kind, str) and kind != "message":
        raise _not_offered(
            f"{where} is of type {kind[:40]!r}, and only messages are supported here",
            f"{where}.type",
        )
    content = item.get("content")
    for index, part in enumerate(content[:MAX_MESSAGES] if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in ("input_text", "output_text", "text"):
            raise _not_offered(
                f"{where}.content[{index}] is of type {kind[:40]!r}, and only text is supported here",
                f"{where}.content[{index}].type",
            )


def _not_offered(message: str, param: str) -> APIError:
    return APIError(400, message, param=param, code="unsupported_parameter")
