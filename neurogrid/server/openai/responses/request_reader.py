"""Reader of the JSON of `/v1/responses`, which is translated into a chat; that is checked and read as others are.

What this API has and is not there is refused by name, in one table. Nothing is stored here: a response is the answer to
its request, and whoever goes on from it sends what was said.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.server.errors import APIError
from neurogrid.server.openai.image_parts import require_sight
from neurogrid.server.openai.request_reader import CompletionRequest, read_chat
from neurogrid.server.openai.request_schemas import MAX_MESSAGES
from neurogrid.server.openai.responses.schemas import RESPONSE_REQUEST
from neurogrid.server.schema_check import check, is_one_of

__all__ = ["read_response"]

_NOT_STORED: Final = "nothing is stored here; send the whole conversation as input"
# By field: the values that change nothing, and what is missing.
_NOT_OFFERED: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
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
_ITEMS: Final = frozenset({"message", "function_call", "function_call_output", "reasoning"})
_FIELDS: Final = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "user",
    "parallel_tool_calls",
    "enable_thinking",
)


async def read_response(
    body: Mapping[str, Any], model: LoadedModel, adapters: Collection[str]
) -> CompletionRequest:
    """The request of `/v1/responses`.

    Raises:
        APIError: 400, 404 or 422, with the field.
    """
    _refuse(body, model)
    check(body, RESPONSE_REQUEST)
    given = body["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = _messages(items)
    if body.get("instructions"):
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    fields = {name: body[name] for name in _FIELDS if body.get(name) is not None}
    fields |= {"messages": messages, "max_completion_tokens": body.get("max_output_tokens")}
    if effort := (body.get("reasoning") or {}).get("effort"):
        fields["reasoning_effort"] = effort
    if body.get("tools"):
        fields["tools"] = [_tool(tool) for tool in body["tools"]]
    if (choice := body.get("tool_choice")) is not None:
        is_named = isinstance(choice, dict)
        fields["tool_choice"] = _named(choice["name"]) if is_named else choice
    if (wanted := (body.get("text") or {}).get("format")) is not None:
        fields["response_format"] = _format(wanted)
    request = await read_chat(fields, model, adapters)
    return replace(request, include_usage=True)


def _messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Items as the messages of a chat: what the assistant thought and called stands in its message."""
    messages: list[dict[str, Any]] = []
    thought = ""
    for item in items:
        kind = item.get("type")
        if kind == "reasoning":
            thought += "".join(part["text"] for part in item.get("content") or ())
            continue
        if kind == "function_call_output":
            told = {"role": "tool", "tool_call_id": item["call_id"]}
            messages.append({**told, "content": _content(item["output"])})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": item["role"], "content": _content(item["content"])})
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thought
        thought = ""
    return messages


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _format(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """`text.format` as `response_format`, whose schema stands one object further in."""
    if wanted["type"] != "json_schema":
        return {"type": wanted["type"]}
    given = {name: value for name, value in wanted.items() if name != "type"}
    return {"type": "json_schema", "json_schema": {"name": "format", **given}}


def _content(content: str | list[Mapping[str, str]]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if all("text" in part for part in content):
        return "".join(part["text"] for part in content)
    return [
        {"type": "text", "text": part["text"]}
        if part["type"] != "input_image"
        else {"type": "image_url", "image_url": {"url": part["image_url"]}}
        for part in content
    ]


def _refuse(body: Mapping[str, Any], model: LoadedModel) -> None:
    """Refuse what would change the answer and is not there. `body` is not checked yet."""
    for name, (harmless, reason) in _NOT_OFFERED.items():
        if not is_one_of(body.get(name), harmless):
            raise _not_offered(f"{name} is not supported: {reason}", name)
    tools = body.get("tools")
    for index, tool in enumerate(tools[:MAX_MESSAGES] if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise _not_offered(
                f"tools[{index}] is of type {kind[:40]!r}, and only functions are supported here",
                f"tools[{index}].type",
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
            _refuse_item(item, f"input[{index}]", model)


def _refuse_item(item: Mapping[str, Any], where: str, model: LoadedModel) -> None:
    kind = item.get("type")
    if isinstance(kind, str) and kind not in _ITEMS:
        raise _not_offered(
            f"{where} is of type {kind[:40]!r}, which is not supported here",
            f"{where}.type",
        )
    content = None if kind == "reasoning" else item.get("content")
    for index, part in enumerate(content[:MAX_MESSAGES] if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "input_image":
            part_name = f"{where}.content[{index}]"
            require_sight(model, part_name, f"{part_name}.type")
        if kind == "input_image" and part.get("file_id") is not None:
            raise _not_offered(
                f"{where}.content[{index}] is a file (file_id), and none are kept here: send image_url, a data: URL",
                f"{where}.content[{index}].file_id",
            )
        if isinstance(kind, str) and kind not in (
            "input_text",
            "output_text",
            "text",
            "input_image",
        ):
            raise _not_offered(
                f"{where}.content[{index}] is of type {kind[:40]!r}, and only text and images are supported here",
                f"{where}.content[{index}].type",
            )


def _not_offered(message: str, param: str) -> APIError:
    return APIError(400, message, param=param, code="unsupported_parameter")
