"""Values for the model's chat template in a request: how the conversation ends, and variables of the template's own.

As in vLLM, a variable that the template does not name is taken and changes nothing. OpenAI's `reasoning_effort` is
refused where the template has none, as models of theirs do that do not reason; and so is `enable_thinking`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from neurogrid.model.files.tokenizer import TEMPLATE_ARGUMENTS, ChatEnding, Tokenizer
from neurogrid.server.errors import APIError

__all__ = ["MAX_VARIABLES_BYTES", "MAX_VARIABLES_DEPTH", "read_ending", "read_variables"]

# Of `chat_template_kwargs`, written as JSON: a page of instructions, or a list of documents.
MAX_VARIABLES_BYTES = 64 * 1024
# Objects and lists in each other: templates look into a few, and walk them by recursion.
MAX_VARIABLES_DEPTH = 8


def read_ending(body: Mapping[str, Any]) -> ChatEnding:
    """Ending of the conversation of a chat request, whose fields are checked.

    Raises:
        APIError: 422, it cannot end so.
    """
    if not body.get("continue_final_message"):
        return ChatEnding.OPEN if body.get("add_generation_prompt") is False else ChatEnding.ANSWER
    if body.get("add_generation_prompt"):
        raise _contradiction(
            "continue_final_message and add_generation_prompt cannot both be true: the last message goes on, or "
            "another one begins",
            "continue_final_message",
        )
    if (role := body["messages"][-1]["role"]) != "assistant":
        raise _contradiction(
            f"continue_final_message needs a last message of the assistant, and it is of {role}",
            "continue_final_message",
        )
    return ChatEnding.CONTINUED


def read_variables(body: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, object]:
    """The variables that a chat request, whose fields are checked, gives to the template.

    Raises:
        APIError: 400 or 422, with the field.
    """
    variables: dict[str, object] = dict(body.get("chat_template_kwargs") or {})
    _check_variables(variables)
    given = {
        name: body[name]
        for name in ("reasoning_effort", "enable_thinking")
        if body.get(name) is not None
    }
    for name, value in given.items():
        if tokenizer.template_names(name):
            if variables.setdefault(name, value) != value:
                raise _contradiction(f"{name} and chat_template_kwargs.{name} differ", name)
        elif value not in ("none", False) and tokenizer.has_chat_template:
            raise APIError(
                400,
                f"{name} is not supported by this model: its chat template does not name it",
                param=name,
                code="unsupported_parameter",
            )
    if given.get("reasoning_effort") == "none" and tokenizer.template_names("enable_thinking"):
        variables.setdefault("enable_thinking", False)
    return variables


def _check_variables(variables: Mapping[str, object]) -> None:
    param = "chat_template_kwargs"
    for name in variables:
        if name in TEMPLATE_ARGUMENTS:
            raise APIError(
                400,
                f"{param} may not have {name!r}, which is no variable of templates",
                param=param,
                code="unsupported_parameter",
            )
    too_long = f"may have {MAX_VARIABLES_BYTES:,} B as JSON, and has more"
    num_values = 0
    level: list[Any] = [variables]
    for _ in range(MAX_VARIABLES_DEPTH):
        inner: list[Any] = []
        for holder in level:
            # Each value has a byte or more: what is far too long is not walked through, nor written, to its end.
            if (num_values := num_values + len(holder)) > MAX_VARIABLES_BYTES:
                raise _wrong(too_long)
            values = holder.values() if isinstance(holder, Mapping) else holder
            inner += [value for value in values if isinstance(value, dict | list)]
        level = inner
    if level:
        raise _wrong(f"may be {MAX_VARIABLES_DEPTH} objects and lists deep, and is deeper")
    if len(json.dumps(variables, ensure_ascii=False).encode()) > MAX_VARIABLES_BYTES:
        raise _wrong(too_long)


def _wrong(what: str) -> APIError:
    name = "chat_template_kwargs"
    return APIError(400, f"{name} {what}", param=name, code="invalid_value")


def _contradiction(message: str, param: str) -> APIError:
    return APIError(422, message, param=param, code="invalid_value")
