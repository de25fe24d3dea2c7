"""One call of a tool as a JSON object, read as it is written: the name first, then the arguments as they come.

No I/O. It reads characters, and finds where the object ends by itself.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass

__all__ = ["CallObject", "CallText", "JsonValue", "read_json"]

_SPACES = " \t\n\r"


class JsonValue:
    """Finds the end of one JSON value in text that comes in pieces; whether that is valid is not looked at.

    Attributes:
        has_begun: there was any of it, or space before it.
        is_over: the value has ended.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self.is_over = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._is_scalar = False

    def push(self, text: str) -> int:
        """Take text; return how many of its characters belong to the value: all of them until it is over."""
        self.has_begun |= bool(text)
        for index, character in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
                    if self._depth == 0:
                        self.is_over = True
                        return index + 1
            elif self._is_scalar:
                if character in ",}]" or character in _SPACES:
                    self.is_over = True
                    return index
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.is_over = True
                    return index + 1
            elif self._depth == 0 and character not in _SPACES:
                self._is_scalar = True
        return len(text)


class _At(enum.Enum):
    BEGIN = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA = enum.auto()
    END = enum.auto()


_NEXT = {
    (_At.BEGIN, "{"): _At.KEY,
    (_At.COLON, ":"): _At.VALUE,
    (_At.COMMA, ","): _At.KEY,
}


@dataclass(frozen=True, slots=True)
class CallText:
    """Text of a call that became known.

    Attributes:
        name: of the tool, once.
        arguments: what their JSON text grows by.
    """

    name: str | None = None
    arguments: str = ""


class CallObject:
    """A call, read character by character.

    Args:
        arguments_key: what the arguments are called.

    Attributes:
        name: of the tool; None as long as it is not known.
        is_over: the object has ended; what is pushed after it is not its own.
        is_broken: it is no call.
    """

    def __init__(self, arguments_key: str) -> None:
        self.name: str | None = None
        self.is_broken = False
        self._keys = {arguments_key, "arguments", "parameters"}
        self._at = _At.BEGIN
        self._key = ""
        self._value = JsonValue()
        self._read = ""  # of the key or value
        self._waiting = ""  # arguments before the name
        self._is_told = False
        self._has_arguments = False

    @property
    def is_over(self) -> bool:
        return self._at is _At.END

    def push(self, text: str) -> tuple[CallText, str]:
        """Take text in; what became known by it, and what of it comes after the object."""
        grown = ""
        while text and not self.is_over and not self.is_broken:
            character = text[0]
            if self._read:
                text, piece = self._in_value(text)
                grown += piece
            elif character in _SPACES:
                text = text[1:]
            elif self._at is _At.VALUE or (self._at is _At.KEY and character == '"'):
                self._value = JsonValue()
                text, piece = self._in_value(text)
                grown += piece
            elif character == "}" and self._at in (_At.COMMA, _At.KEY):
                grown += self._end()
                text = text[1:]
            elif (self._at, character) in _NEXT:
                self._at = _NEXT[self._at, character]
                text = text[1:]
            else:
                self.is_broken = True
        if self.name is None:
            self._waiting += grown
            return CallText(), text
        if self._is_told:
            return CallText(None, grown), text
        self._is_told = True
        return CallText(self.name, self._waiting + grown), text

    def _in_value(self, text: str) -> tuple[str, str]:
        """Go on in a key or value; what is left of the text, and what the arguments grow by."""
        length = self._value.push(text)
        piece, rest = text[:length], text[length:]
        self._read += piece
        if not self._read:  # a comma where a value should begin
            self.is_broken = True
            return rest, ""
        is_streamed = self._at is _At.VALUE and self._key in self._keys and self._read[0] == "{"
        self._has_arguments |= is_streamed
        if not self._value.is_over:
            return rest, piece if is_streamed else ""
        read, self._read = self._read, ""
        if self._at is _At.KEY:
            self._key, self._at = str(_parsed(read)), _At.COLON
            # A second time: what was told cannot be taken back, and two objects one after the other are no JSON.
            is_name, is_arguments = self._key == "name", self._key in self._keys
            self.is_broken = (is_name and self.name is not None) or (
                is_arguments and self._has_arguments
            )
            return rest, ""
        self._at = _At.COMMA
        return rest, piece if is_streamed else self._value_ended(read)

    def _value_ended(self, read: str) -> str:
        told = _parsed(read)
        if self._key == "name":
            self.name = told if isinstance(told, str) and told else None
            self.is_broken = self.name is None
        elif self._key in self._keys:
            # Some write an object as a string.
            self.is_broken = not isinstance(told, str)
            self._has_arguments = True
            return told if isinstance(told, str) else ""
        return ""

    def _end(self) -> str:
        self._at = _At.END
        self.is_broken = self.name is None
        return "" if self._has_arguments else "{}"


def read_json(text: str) -> object:
    """Read JSON that a model wrote, if an answer can tell it.

    Raises:
        ValueError: it is none; or has half of a surrogate pair, or a number that JSON has not; or is too deep.
    """
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as exc:
        raise ValueError("objects and lists are too deep in each other") from exc
    return value


def _parsed(text: str) -> object:
    try:
        return read_json(text)
    except ValueError:
        return None
