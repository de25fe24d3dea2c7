"""A message read from a model's text as it grows: what it thinks, what it answers, and the tools that it calls.

Text that could be the beginning of a mark is held back until that is known. What looks like a call and is none is text
like other text, and ends before a stop string in it. An answer that is not streamed is read in the same way, so that
both are the same. No I/O.
"""

from __future__ import annotations

import enum
import json
import re
import secrets
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from neurogrid.server.openai.answer_writer import (
    CallPiece,
    FinishReason,
    Piece,
    WrittenToken,
    held_back,
)
from neurogrid.server.openai.tools.call_formats import PYTHON_TAG, CallFormat, Style, Thinking
from neurogrid.server.openai.tools.call_object import CallObject, CallText, JsonValue, read_json

__all__ = ["MessageForm", "MessageReader"]

# Of a tool's name: more is no name.
MAX_NAME_CHARS: Final = 128
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


@dataclass(frozen=True)
class MessageForm:
    """The form of a request's answers.

    Attributes:
        call_format: how calls are written; None where there are none.
        tools: the parameters of each, by name.
        thinking: None where the model has none.
        max_calls: the answer ends after so many; None for any number.
        is_forced: the request names the one tool, so that its call is no reason for the answer to end.
    """

    call_format: CallFormat | None = None
    tools: Mapping[str, Mapping[str, Any]] | None = None
    thinking: Thinking | None = None
    max_calls: int | None = None
    is_forced: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that a model may write as special tokens, which are no text otherwise."""
        marks: set[str] = set()
        if self.thinking is not None:
            marks |= {self.thinking.begin, self.thinking.end}
        if (known := self.call_format) is not None:
            whole = (known.begin, known.call_begin, known.name_end, known.call_end, known.end)
            marks |= {mark for text in whole for mark in MARKS.findall(text)}
            marks |= {PYTHON_TAG} if not known.trigger else set()
        return tuple(sorted(marks))


MARKS: Final = re.compile(r"<[|｜/a-z][^<>]*>|\[/?[A-Z_]+\]")  # noqa: RUF001
"""Pattern of the parts of a format's text that may be one special token each."""


class _At(enum.Enum):
    START = enum.auto()
    THINKING = enum.auto()
    TEXT = enum.auto()
    FRAME = enum.auto()
    NAME = enum.auto()
    OBJECT = enum.auto()
    ARGUMENTS = enum.auto()
    TAGGED = enum.auto()
    PLAIN = enum.auto()


class MessageReader:
    """Reads one answer.

    Attributes:
        is_over: the answer has as many calls as it may have, or a stop string; nothing is pushed any more.
    """

    def __init__(self, form: MessageForm) -> None:
        self.is_over = False
        self._form = form
        self._format = form.call_format
        self._at = _At.START
        if form.thinking is None:
            self._at = _At.TEXT
        elif form.thinking.is_open:
            self._at = _At.THINKING
        self._length = 0  # characters that were taken in
        self._buffer = ""  # the last of them
        self._stops: list[int] = []  # where stop strings begin, in order
        self._end: int | None = None  # the one before which the answer ends
        self._tokens: tuple[WrittenToken, ...] = ()  # of text of which it is not known what it is
        self._raw = ""  # since the mark of a call of which nothing was told
        self._num_calls = 0
        self._is_told = False  # of the call under way
        self._strips = form.thinking is not None  # spaces that come next
        self._last_name = ""
        self._object = CallObject("")
        self._value = JsonValue()
        self._steps = {
            _At.START: self._start,
            _At.THINKING: self._thinking,
            _At.TEXT: self._in_text,
            _At.FRAME: self._in_frame,
            _At.NAME: self._in_name,
            _At.OBJECT: self._in_object,
            _At.ARGUMENTS: self._in_arguments,
            _At.TAGGED: self._in_tags,
            _At.PLAIN: self._plain,
        }
        # What came of a push.
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[CallPiece] = []

    def push(self, piece: Piece) -> Piece:
        """Take in what the text grows by; what the message grows by."""
        is_last = piece.finish_reason is not None
        self._buffer += piece.text
        self._length += len(piece.text)
        for stop in piece.stops:
            insort(self._stops, stop)
        self._text, self._reasoning, self._calls = [], [], []
        while not self.is_over and self._steps[self._at](is_last):
            pass
        reason: FinishReason | None = piece.finish_reason
        if is_last and not self.is_over:
            self._finish(is_cut=reason == "length")
        if self.is_over:
            reason = "stop"
        if reason == "stop" and self._num_calls and not self._form.is_forced:
            reason = "tool_calls"
        return replace(
            piece,
            text="".join(self._text),
            tokens=self._known_tokens(piece.tokens, is_last=reason is not None),
            reasoning="".join(self._reasoning),
            calls=tuple(self._calls),
            finish_reason=reason,
            stops=(),
        )

    def _known_tokens(
        self, more: tuple[WrittenToken, ...], *, is_last: bool
    ) -> tuple[WrittenToken, ...]:
        """The tokens of what is known; others wait, since a stop string may turn out to stand before them."""
        tokens, self._tokens = (*self._tokens, *more), ()
        end = self._end
        if end is None:
            if is_last:
                return tokens
            # What was pushed since, and of which nothing was told.
            waiting = self._buffer if self._is_told else self._raw + self._buffer
            end = self._length - len(waiting)
            del self._stops[: bisect_left(self._stops, end)]
            if end == self._length:
                return tokens
        # By halves: each time that a token comes, all of a long call between tags wait here.
        at = bisect_left(tokens, end, key=_offset_of)
        if self._end is None:
            self._tokens = tokens[at:]
        return tokens[:at]

    # -------------------------------------------------------------- steps: whether there is more to do

    def _start(self, is_last: bool) -> bool:
        thinking = self._form.thinking
        assert thinking is not None
        begun = self._buffer.lstrip()
        if begun.startswith(thinking.begin):
            self._buffer, self._at = begun[len(thinking.begin) :], _At.THINKING
            return True
        if thinking.begin.startswith(begun) and not is_last:
            return False
        self._at, self._strips = _At.TEXT, False
        return True

    def _thinking(self, is_last: bool) -> bool:
        assert self._form.thinking is not None
        end = self._form.thinking.end
        if self._strips:
            self._buffer = self._buffer.lstrip()
            self._strips = not self._buffer
        before, mark, after = self._buffer.partition(end)
        if mark:
            self._reasoning.append(before.rstrip())
            self._buffer, self._at, self._strips = after, _At.TEXT, True
            return True
        self._reasoning.append(self._take(0 if is_last else self._num_held(end)))
        return False

    def _in_text(self, is_last: bool) -> bool:
        if self._strips:
            self._buffer = self._buffer.lstrip()
            self._strips = not self._buffer
            if self._strips:
                return False
        if self._format is None:
            self._at = _At.PLAIN
            return True
        if not self._format.trigger:
            return self._answer_or_call(is_last)
        before, mark, after = self._buffer.partition(self._format.trigger)
        if not (mark or is_last):
            before = before[: len(before) - held_back(before, (self._format.trigger,))]
        if self._is_ended_in(before):
            return False
        if mark:
            self._tell_text(before.rstrip())
            self._buffer, self._raw = after, before[len(before.rstrip()) :] + mark
            is_named = self._format.style is Style.NAMED and not self._format.begin
            self._at = _At.NAME if is_named else _At.FRAME
            return True
        self._tell_text(self._take(0 if is_last else self._num_held(self._format.trigger)))
        return False

    def _answer_or_call(self, is_last: bool) -> bool:
        """Tell a call from text, in a format without a mark, in which the whole answer is a call."""
        begun = self._buffer.lstrip()
        if self._is_ended_in(self._buffer[: len(self._buffer) - len(begun)]):
            return False
        if begun.startswith((PYTHON_TAG, "{")):
            self._raw = self._buffer[: len(self._buffer) - len(begun)]
            if begun.startswith(PYTHON_TAG):
                self._raw, begun = self._raw + PYTHON_TAG, begun[len(PYTHON_TAG) :]
            self._buffer, self._at = begun, _At.FRAME
            return True
        if PYTHON_TAG.startswith(begun) and not is_last:
            return False
        self._at = _At.PLAIN
        return True

    def _in_frame(self, is_last: bool) -> bool:
        known = self._format
        assert known is not None
        buffer = self._buffer.lstrip()
        self._pass_frame(len(self._buffer) - len(buffer))
        if not buffer:
            return False
        if known.style is Style.TAGGED and buffer.startswith(_FUNCTION):
            self._consume(len(_FUNCTION))
            self._at = _At.NAME
            return True
        if known.style is Style.OBJECT and buffer[0] == "{":
            self._object, self._at = CallObject(known.arguments_key), _At.OBJECT
            return True
        marks = (*known.frame_marks, _FUNCTION)
        if not is_last and any(mark.startswith(buffer) and mark != buffer for mark in marks):
            return False
        for mark in known.frame_marks:
            if buffer.startswith(mark):
                begins = mark in (known.trigger, known.call_begin.strip())
                self._pass_frame(len(mark), begins=begins)
                if known.style is Style.NAMED and mark == known.call_begin.strip():
                    self._at = _At.NAME
                return True
        self._no_call()
        return True

    def _in_name(self, is_last: bool) -> bool:
        known = self._format
        assert known is not None
        end = known.name_end.strip() if known.style is Style.NAMED else ">"
        found = re.search(f"{re.escape(end)}|(?={{)", self._buffer)
        if found is None:
            if len(self._buffer) > MAX_NAME_CHARS:
                self._no_call()
                return True
            return False
        name = self._buffer[: found.start()].strip()
        if not name:
            self._no_call()
            return True
        self._consume(found.end())
        self._tell(CallText(name))
        self._value = JsonValue()
        self._at = _At.ARGUMENTS if known.style is Style.NAMED else _At.TAGGED
        return True

    def _in_arguments(self, is_last: bool) -> bool:
        if not self._value.has_begun:
            self._buffer = self._buffer.lstrip()
        length = self._value.push(self._buffer)
        self._tell(CallText(None, self._buffer[:length]))
        self._buffer = self._buffer[length:]
        if self._value.is_over:
            self._call_ended()
        return self._value.is_over

    def _in_object(self, is_last: bool) -> bool:
        assert self._format is not None
        told, rest = self._object.push(self._buffer)
        is_unknown = told.name is not None and told.name not in (self._form.tools or {})
        if (self._object.is_broken and not self._is_told) or (
            is_unknown and not self._format.trigger
        ):
            self._no_call()
            return True
        self._consume(len(self._buffer) - len(rest))
        self._tell(told)
        if self._object.is_broken or self._object.is_over:
            self._call_ended()
        return bool(rest)

    def _in_tags(self, is_last: bool) -> bool:
        body, mark, after = self._buffer.partition(_FUNCTION_END)
        if not mark:
            return False
        self._buffer = after
        self._tell(CallText(None, self._arguments(body)))
        self._call_ended()
        return True

    def _plain(self, is_last: bool) -> bool:
        if not self._is_ended_in(self._buffer):
            self._tell_text(self._take(0))
        return False

    # -------------------------------------------------------------- what is told

    def _finish(self, *, is_cut: bool) -> None:
        """Tell what was held back, as there is no more; a call that was cut is not to look whole."""
        if self._at in (_At.FRAME, _At.NAME, _At.OBJECT):
            if not self._is_told and (self._at is not _At.FRAME or self._raw.strip()):
                self._buffer, self._raw = self._raw + self._buffer, ""
                self._plain(True)
        elif self._at is _At.TAGGED:
            arguments = self._arguments(self._buffer)
            self._tell(CallText(None, arguments.removesuffix("}") if is_cut else arguments))
        elif self._buffer:
            self._plain(True)

    def _is_ended_in(self, text: str) -> bool:
        """Whether the answer ends in this text, with which the buffer begins, or right behind it; then tell that."""
        start = self._length - len(self._buffer)
        at = bisect_left(self._stops, start)
        if at == len(self._stops) or self._stops[at] > start + len(text):
            return False
        self._end, self.is_over = self._stops[at], True
        self._tell_text(text[: self._end - start])
        return True

    def _tell_text(self, text: str) -> None:
        if text:
            self._text.append(text)

    def _tell(self, told: CallText) -> None:
        if told.name is not None:
            length = self._format.id_length if self._format is not None else 0
            call_id = secrets.token_hex(12)
            call_id = call_id[:length] if length else f"call_{call_id}"
            self._is_told, self._raw, self._last_name = True, "", told.name
            self._calls.append(CallPiece(self._num_calls, call_id, told.name, told.arguments))
            self._num_calls += 1
        elif told.arguments:
            self._calls.append(CallPiece(self._num_calls - 1, arguments=told.arguments))

    def _call_ended(self) -> None:
        self._at, self._is_told, self._raw = _At.FRAME, False, ""
        if self._form.max_calls is not None and self._num_calls >= self._form.max_calls:
            self.is_over = True

    def _no_call(self) -> None:
        """Tell as text what was taken for a call."""
        assert self._format is not None
        self._at = _At.TEXT if self._format.trigger else _At.PLAIN
        raw, self._raw = self._raw, ""
        self._buffer = raw + self._buffer
        if not self._is_ended_in(raw):
            self._buffer = self._buffer[len(raw) :]
            self._tell_text(raw)

    def _arguments(self, body: str) -> str:
        """Read a call's arguments from tags: each value as the tool's schema has it, a text where it says nothing."""
        schema = (self._form.tools or {}).get(self._last_name) or {}
        properties = schema.get("properties") or {}
        arguments = {
            key.strip(): _typed(value, properties.get(key.strip()))
            for key, value in _between_tags(body)
        }
        return json.dumps(arguments, ensure_ascii=False)

    # -------------------------------------------------------------- the buffer

    def _pass_frame(self, length: int, *, begins: bool = False) -> None:
        """Go on over a mark or spaces; they are text again only where a call had begun and came to nothing."""
        if self._raw or begins:
            self._consume(length)
        else:
            self._buffer = self._buffer[length:]

    def _consume(self, length: int) -> None:
        """Go on in the buffer by what may turn out to be no call."""
        self._raw += self._buffer[:length]
        self._buffer = self._buffer[length:]

    def _take(self, num_held: int) -> str:
        end = len(self._buffer) - num_held
        taken, self._buffer = self._buffer[:end], self._buffer[end:]
        return taken

    def _num_held(self, mark: str) -> int:
        """Number of characters at the buffer's end that could belong to `mark`, or are space before it."""
        num_held = held_back(self._buffer, (mark,))
        given = self._buffer[: len(self._buffer) - num_held]
        return len(self._buffer) - len(given.rstrip())


def _offset_of(token: WrittenToken) -> int:
    return token.offset


def _between_tags(body: str) -> Iterator[tuple[str, str]]:
    """Names and values of arguments, in one pass: a model may write tags without an end as long as it likes."""
    at = 0
    while (begin := body.find(_PARAMETER, at)) >= 0:
        begin += len(_PARAMETER)
        name_end = body.find(">", begin)
        end = body.find(_PARAMETER_END, name_end)
        if name_end < 0 or end < 0:
            return
        name = body[begin:name_end]
        if not name or "\n" in name:
            at = begin + name.rfind("\n") + 1
            continue
        yield name, body[name_end + 1 : end].removeprefix("\n").removesuffix("\n")
        at = end + len(_PARAMETER_END)


def _typed(text: str, schema: object) -> object:
    """A value that a model wrote without quotes, as `schema` has it: a text where it may be one and is nothing else."""
    if not isinstance(schema, Mapping):
        return text
    types = _types_of(schema)
    if types == {"string"} or text in (schema.get("enum") or ()):
        return text
    try:
        value = read_json(text)
    except ValueError:
        return text
    is_other = types is None or "string" not in types or not types.isdisjoint(_names_of(value))
    return value if is_other else text


def _types_of(schema: Mapping[str, Any]) -> set[str] | None:
    """The types that a value may be of, by their names in JSON schemas; None where nothing is said."""
    told = schema.get("type")
    if isinstance(told, str | list):
        return {told} if isinstance(told, str) else set(map(str, told))
    options = schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(options, list):
        return None
    types: set[str] = set()
    for option in options:
        own = _types_of(option) if isinstance(option, Mapping) else None
        if own is None:
            return None
        types |= own
    return types


def _names_of(value: object) -> tuple[str, ...]:
    """The types in JSON schemas that a value is of."""
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int():
            return ("integer", "number")
        case float():
            return ("number", "integer") if value.is_integer() else ("number",)
        case str():
            return ("string",)
        case list():
            return ("array",)
    return ("object",)
