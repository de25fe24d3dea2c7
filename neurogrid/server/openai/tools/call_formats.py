# ruff: noqa: RUF001  # DeepSeek writes its marks with a wide bar.
"""Formats in which models write calls of tools, and what they think before they answer, recognised by the template.

A checkpoint's chat template has what its model was taught in its text: the marks before and after a call. A template
that is told of tools and whose marks are none of these is refused, as its calls would come out as text.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

__all__ = ["CallFormat", "Style", "Thinking", "call_format", "thinking_of"]


class Style(enum.Enum):
    """Style of a call, between its marks."""

    OBJECT = enum.auto()
    """A JSON object with the tool's name and its arguments."""
    NAMED = enum.auto()
    """The name, a mark, and the arguments as a JSON object."""
    TAGGED = enum.auto()
    """`<function=NAME>`, and each argument between `<parameter=KEY>` and `</parameter>`."""


@dataclass(frozen=True)
class CallFormat:
    """A format of calls.

    Attributes:
        name: what people call it.
        marks: alternatives; a template is of this format where all strings of one of them stand in its text.
        style: what a call is.
        begin, end: of all calls together.
        call_begin, call_end: of each.
        name_end: between the name and the arguments, where these are not one object.
        separator: between two calls; None where an answer has only one.
        arguments_key: what the arguments are called in an object.
        id_length: characters of a call's id, where the template insists; 0 for ids as OpenAI has them.
    """

    name: str
    marks: tuple[tuple[str, ...], ...]
    style: Style = Style.OBJECT
    begin: str = ""
    call_begin: str = ""
    name_end: str = ""
    call_end: str = ""
    separator: str | None = "\n"
    end: str = ""
    arguments_key: str = "arguments"
    id_length: int = 0

    @property
    def trigger(self) -> str:
        """The text that says that a call begins; empty where the answer itself is a call."""
        return (self.begin or self.call_begin).rstrip().removesuffix("[")

    @property
    def frame_marks(self) -> tuple[str, ...]:
        """All that may stand between calls, without spaces."""
        marks = (self.trigger, self.begin, self.call_begin, self.call_end, self.end)
        own = {mark.strip() for mark in marks} | {"[", "]", ",", ";"}
        return tuple(sorted(own - {""}, key=len, reverse=True))


# The first that fits is it.
_FORMATS: Final = (
    CallFormat(
        "qwen3_coder",
        (("<tool_call>", "<function=", "<parameter="),),
        Style.TAGGED,
        call_begin="<tool_call>\n",
        call_end="</tool_call>",
    ),
    CallFormat(
        "hermes",
        (("<tool_call>", "</tool_call>"),),
        call_begin="<tool_call>\n",
        call_end="\n</tool_call>",
    ),
    CallFormat(
        "mistral",
        (("[TOOL_CALLS]", "[ARGS]"),),
        Style.NAMED,
        call_begin="[TOOL_CALLS]",
        name_end="[ARGS]",
        separator="",
        id_length=9,
    ),
    CallFormat(
        "mistral_list",
        (("[TOOL_CALLS]",),),
        begin="[TOOL_CALLS][",
        separator=", ",
        end="]",
        id_length=9,
    ),
    CallFormat(
        "deepseek_v3",
        (("<｜tool▁calls▁begin｜>", "```json"),),
        Style.NAMED,
        begin="<｜tool▁calls▁begin｜>",
        call_begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        name_end="\n```json\n",
        call_end="\n```<｜tool▁call▁end｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    CallFormat(
        "deepseek_v31",
        (("<｜tool▁calls▁begin｜>",),),
        Style.NAMED,
        begin="<｜tool▁calls▁begin｜>",
        call_begin="<｜tool▁call▁begin｜>",
        name_end="<｜tool▁sep｜>",
        call_end="<｜tool▁call▁end｜>",
        separator="",
        end="<｜tool▁calls▁end｜>",
    ),
    CallFormat(
        "phi4_mini",
        (("<|tool_call|>", "<|/tool_call|>"),),
        begin="<|tool_call|>[",
        separator=", ",
        end="]<|/tool_call|>",
    ),
    CallFormat(
        "granite",
        (("<|tool_call|>",),),
        begin="<|tool_call|>[",
        separator=", ",
        end="]",
    ),
    CallFormat(
        "llama3",
        (("<|python_tag|>",), ('{"name": function name, "parameters": ',)),
        separator=None,
        arguments_key="parameters",
    ),
)
PYTHON_TAG: Final = "<|python_tag|>"


def call_format(template: str) -> CallFormat | None:
    """The format of a chat template, by its text; None where it is none of these."""
    for known in _FORMATS:
        if any(all(mark in template for mark in marks) for marks in known.marks):
            return known
    return None


@dataclass(frozen=True)
class Thinking:
    """The marks around what a model thinks before it answers.

    Attributes:
        is_open: the prompt ends within it.
    """

    begin: str
    end: str
    is_open: bool = False


_THINKING: Final = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def thinking_of(template: str, prompt: str) -> Thinking | None:
    """Marks around thoughts that a template has; None where its model does not think, or has done so already.

    Args:
        prompt: the conversation that the template made, up to where the answer begins.
    """
    for begin, end in _THINKING:
        if end in template:
            tail = prompt.rstrip()
            if tail.endswith(end):  # it has thought: the template says so for it
                return None
            return Thinking(begin, end, is_open=tail.endswith(begin))
    return None
