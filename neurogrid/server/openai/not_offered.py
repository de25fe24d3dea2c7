"""Features of OpenAI's API and of other servers that this one lacks: refused by name, before anything else is checked.

A value that changes nothing is taken, so that clients that always send it are served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.server.errors import APIError
from neurogrid.server.openai.image_parts import require_sight
from neurogrid.server.openai.request_schemas import MAX_MESSAGES
from neurogrid.server.schema_check import is_one_of

__all__ = ["NOT_IN_CHATS", "NOT_IN_TEXTS", "refuse_fields", "refuse_messages"]

# By field: the values that change nothing.
_COMMON: Final[Mapping[str, tuple[object, ...]]] = {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "web_search_options": (None,),
    "verbosity": (None, "medium"),
    # Of other servers.
    "use_beam_search": (None, False),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "grammar": (None, ""),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
    "prompt_logprobs": (None,),
    "thinking_token_budget": (None,),
}
NOT_IN_CHATS: Final[Mapping[str, tuple[object, ...]]] = {
    **_COMMON,
    "best_of": (None, 1),
    "chat_template": (None,),
    "documents": (None, []),
    "suffix": (None, ""),
    "echo": (None, False),
    "add_special_tokens": (None, False),
}
# Without messages there is no template that they could say anything to.
NOT_IN_TEXTS: Final[Mapping[str, tuple[object, ...]]] = {
    **_COMMON,
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "prompt_embeds": (None,),
    "add_special_tokens": (None, True),
    "reasoning_effort": (None, "none"),
    "enable_thinking": (None, False),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
}
# A field that changes nothing where another one says that no tool is to be called.
_CHOICES: Final = {"tools": "tool_choice", "functions": "function_call"}
# Names of the parts of a message, by their type.
_PARTS: Final = {
    "image_url": "an image",
    "image": "an image",
    "input_image": "an image",
    "image_embeds": "an image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "a video",
    "video": "a video",
    "file": "a file",
    "input_file": "a file",
}


def refuse_fields(
    body: Mapping[str, object], not_offered: Mapping[str, tuple[object, ...]]
) -> None:
    """Refuse fields that would change the answer and are not there. `body` is not checked yet.

    Args:
        not_offered: `NOT_IN_CHATS` or `NOT_IN_TEXTS`.

    Raises:
        APIError: 400, with the field.
    """
    for name, harmless in not_offered.items():
        if is_one_of(body.get(name), harmless):
            continue
        if name in _CHOICES and body.get(_CHOICES[name]) == "none":
            continue
        raise _not_offered(f"{name} is not supported here", name)


def refuse_messages(messages: object, model: LoadedModel) -> None:
    """Refuse messages that are neither text nor images that `model` takes, or of functions as they were before tools.

    They are not checked yet.

    Raises:
        APIError: 400, with the field of the message.
    """
    for index, message in enumerate(messages[:MAX_MESSAGES] if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            _check_message(message, f"messages[{index}]", model)


def _check_message(message: Mapping[str, object], where: str, model: LoadedModel) -> None:
    if message.get("role") == "function":
        raise _not_offered(
            f"{where} is the answer of a function (role 'function'), and only those of tools are supported here",
            f"{where}.role",
        )
    if message.get("function_call") not in (None, []):
        raise _not_offered(
            f"{where} calls a function (function_call), and only tool_calls are supported here",
            f"{where}.function_call",
        )
    if message.get("audio") is not None:
        raise _not_offered(f"{where} is audio, and only text is supported here", f"{where}.audio")
    content = message.get("content")
    for index, part in enumerate(content[:MAX_MESSAGES] if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        part_name = f"{where}.content[{index}]"
        if kind == "image_url":
            require_sight(model, part_name, f"{part_name}.type")
        elif isinstance(kind, str) and kind != "text":
            what = _PARTS.get(kind, "no text")
            raise _not_offered(
                f"{part_name} is {what} (type {kind[:40]!r}), and only text and image_url are supported here",
                f"{part_name}.type",
            )


def _not_offered(message: str, param: str) -> APIError:
    return APIError(400, message, param=param, code="unsupported_parameter")
