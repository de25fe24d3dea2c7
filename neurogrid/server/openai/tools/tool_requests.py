"""Tools of a chat request, checked; and its messages as a template wants them, those of tools included.

https://platform.openai.com/docs/guides/function-calling.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from neurogrid.errors import ConfigurationError
from neurogrid.model.files.tokenizer import Tokenizer
from neurogrid.model.grammars import check_schema
from neurogrid.server.errors import APIError
from neurogrid.server.openai.tools.call_formats import CallFormat, call_format

__all__ = ["ToolRequest", "read_messages", "read_tools"]

# Objects and lists in each other in the arguments of an earlier call. Templates walk them by recursion.
MAX_ARGUMENTS_DEPTH: Final = 64


@dataclass(frozen=True)
class ToolRequest:
    """The tools of a request.

    Attributes:
        told: for the template; None where the model is told of none.
        parameters: the schemas of those that may be called, by name.
        call_format: how the model calls them.
        must_call: the answer is a call, or several.
        is_named: of the one tool that the request names.
        is_strict: what the model calls has to fit a schema, also where it need not call.
        max_calls: in an answer; None for any number.
    """

    told: Sequence[Mapping[str, Any]] | None = None
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    call_format: CallFormat | None = None
    must_call: bool = False
    is_named: bool = False
    is_strict: bool = False
    max_calls: int | None = None


def read_tools(body: Mapping[str, Any], tokenizer: Tokenizer) -> ToolRequest:
    """The tools of a chat request, whose fields are checked.

    Raises:
        APIError: 400 or 422, with the field.
    """
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    if not tools:
        if choice in (None, "none", "auto"):
            return ToolRequest()
        raise _wrong(422, "tool_choice needs tools, and there are none", "tool_choice")
    parameters: dict[str, Mapping[str, Any]] = {}
    told = []
    for index, tool in enumerate(tools):
        function = tool["function"]
        name, where = function["name"], f"tools[{index}].function"
        if name in parameters:
            raise _wrong(422, f"{where}.name is {name!r}, as that of another tool", f"{where}.name")
        parameters[name] = _parameters(function.get("parameters"), f"{where}.parameters")
        kept = {key: function[key] for key in ("name", "description") if function.get(key)}
        told.append({"type": "function", "function": {**kept, "parameters": parameters[name]}})
    is_strict = any(tool["function"].get("strict") for tool in tools)
    named = choice["function"]["name"] if isinstance(choice, Mapping) else None
    if named is not None and named not in parameters:
        raise _wrong(
            422,
            f"tool_choice names {named!r}, which is none of the tools",
            "tool_choice.function.name",
        )
    if choice == "none":
        return ToolRequest()
    template = tokenizer.chat_template_text(tools=True)
    if "tools" not in template or not tokenizer.template_names("tools", tools=True):
        raise _wrong(
            400,
            "tools are not supported by this model: its chat template does not name them",
            "tools",
            "unsupported_parameter",
        )
    known = call_format(template)
    if known is None:
        raise _wrong(
            400,
            "tools are not supported by this model: its chat template has calls written in a format that is not known "
            "here; tool_choice 'none' is",
            "tools",
            "unsupported_parameter",
        )
    has_one = body.get("parallel_tool_calls") is False or named is not None
    return ToolRequest(
        told=told,
        parameters=parameters if named is None else {named: parameters[named]},
        call_format=known,
        must_call=named is not None or choice == "required",
        is_named=named is not None,
        is_strict=is_strict,
        max_calls=1 if has_one or known.separator is None else None,
    )


def read_messages(
    messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """The messages of a chat request, whose fields are checked, for the template.

    Raises:
        APIError: 400 or 422, with the field of the message.
    """
    return [
        _message(message, f"messages[{index}]", tokenizer) for index, message in enumerate(messages)
    ]


def _message(message: Mapping[str, Any], where: str, tokenizer: Tokenizer) -> dict[str, Any]:
    calls = message.get("tool_calls") or []
    content = message.get("content")
    if content is None:
        content = ""  # it calls tools
    if not isinstance(content, str):
        content = _parts(content)
    # Templates know `system`; `developer` is what OpenAI calls it since.
    role = "system" if message["role"] == "developer" else message["role"]
    told: dict[str, Any] = {"role": role, "content": content}
    if message.get("name"):
        told["name"] = message["name"]
    if role == "tool":
        _require("tool", tokenizer, f"{where} is the answer of a tool", f"{where}.role")
        if not message.get("tool_call_id"):
            raise _wrong(422, f"{where}.tool_call_id is missing", f"{where}.tool_call_id")
        told["tool_call_id"] = message["tool_call_id"]
    if calls:
        if role != "assistant":
            raise _wrong(
                422, f"{where} calls a tool, and is of {role}: only the assistant does", where
            )
        _require("tool_calls", tokenizer, f"{where} calls a tool", f"{where}.tool_calls")
        told["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if role == "assistant" and reasoning:
        told["reasoning_content"] = reasoning
    return told


def _parts(parts: Sequence[Mapping[str, Any]]) -> str | list[dict[str, str]]:
    """The text of a message's parts; or they themselves, where images are among them."""
    if not any(part["type"] == "image_url" for part in parts):
        return "".join(part["text"] for part in parts)
    return [
        {"type": "image"} if part["type"] == "image_url" else {"type": "text", "text": part["text"]}
        for part in parts
    ]


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call["function"]
    param = f"{where}.function.arguments"
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, RecursionError) as exc:
        raise _wrong(422, f"{param} has to be JSON, and is none: {exc}", param) from exc
    if not isinstance(arguments, dict):
        raise _wrong(422, f"{param} has to be a JSON object", param)
    try:
        check_schema(arguments)
    except ConfigurationError as exc:
        raise _wrong(400, f"{param} {exc}", param) from exc
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _require(name: str, tokenizer: Tokenizer, what: str, param: str) -> None:
    if tokenizer.has_chat_template and not tokenizer.template_names(name, tools=True):
        raise _wrong(
            400,
            f"{what}, and tools are not supported by this model: its chat template does not name {name}",
            param,
            "unsupported_parameter",
        )


def _parameters(given: Mapping[str, Any] | None, where: str) -> Mapping[str, Any]:
    """The schema of a tool's arguments, which are an object."""
    if not given:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    try:
        check_schema(given)
    except ConfigurationError as exc:
        raise _wrong(400, f"{where} {exc}", where) from exc
    return {"type": "object", **given}


def _wrong(status: int, message: str, param: str, code: str = "invalid_value") -> APIError:
    return APIError(status, message, param=param, code=code)
