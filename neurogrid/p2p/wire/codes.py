"""Messages of one protocol as a table: the codes, and what the codec, the streams and the exchange do with each.

The codes of a protocol are an enum whose members have `Traits` beside their number; a `MessageTable` is what of them
may stand on the streams of one protocol id, and how large. Nothing else below the handlers knows which messages a
protocol has. What they mean, and which roles may send them, is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import Self

__all__ = ["Answers", "MessageCode", "MessageTable", "Traits"]


class Answers(Enum):
    """The key that an answer without a request id is matched by; one that has an id is matched by it."""

    REQUEST = auto()  # by nothing else
    LAYER = auto()  # the layer in its header
    PEER = auto()  # it speaks of its sender, whichever request asked


@dataclass(frozen=True, slots=True)
class Traits:
    """One row of the table.

    Attributes:
        limit: the field of the protocol's limits that bounds its Data.
        is_request: it asks for an answer: its request id is never 0.
        answers: set where it is an answer: it goes to the task that waits for it, and to handlers if none does.
        is_credited: it needs credit, as bulk that waits for a handler does. Answers never do.
        is_last: all other messages that wait for the writer of a stream pass it.
        is_tensor: its Data is an envelope.
        traces: the code of the message that this one is with a trace context, in a header that has room for it.
    """

    limit: str = "control"
    is_request: bool = False
    answers: Answers | None = None
    is_credited: bool = False
    is_last: bool = False
    is_tensor: bool = False
    traces: int | None = None


class MessageCode(IntEnum):
    """The base of a protocol's codes: `class Code(MessageCode, limits=...)`, with members `NAME = number, Traits(...)`.

    Attributes:
        traits: its row.
        max_data: the largest Data in bytes by the limits of the class.
        kind: the message without regard to whether a trace goes with it.
        traced: the same with a trace context, or None if there is none.
    """

    traits: Traits
    max_data: int
    kind: Self
    traced: Self | None

    def __new__(cls, number: int, traits: Traits = Traits()) -> Self:
        code = int.__new__(cls, number)
        code._value_ = number
        code.traits = traits
        return code

    def __init_subclass__(cls, *, limits: object) -> None:
        for code in cls:
            code.max_data = getattr(limits, code.traits.limit)
            code.kind, code.traced = code, None
        for code in cls:
            if code.traits.traces is not None:
                code.kind = cls(code.traits.traces)
                code.kind.traced = code


class MessageTable:
    """The messages of one protocol id.

    Args:
        codes: the messages; those of a protocol of long-lived streams are its own and `OF_THE_STREAM`.
        limits: has a field for each `Traits.limit`, in bytes; those of the codes' class count for what it lacks.

    Attributes:
        protocol_id: the protocol id.
        by_number: its messages by their code.
        max_legacy: the largest Data in bytes of a message with the legacy header, or None where there is none.

    Raises:
        ValueError: two messages have one number.
    """

    def __init__(
        self,
        protocol_id: str,
        codes: Iterable[MessageCode],
        limits: object,
        *,
        max_legacy: int | None = None,
    ) -> None:
        codes = tuple(codes)
        self.protocol_id = protocol_id
        self.by_number: Mapping[int, MessageCode] = {int(code): code for code in codes}
        if len(self.by_number) < len(codes):
            raise ValueError(f"two messages of {protocol_id} have one number")
        self.max_legacy = max_legacy
        self._max_data: dict[MessageCode | None, int] = {
            code: getattr(limits, code.traits.limit, code.max_data) for code in codes
        }
        if max_legacy is not None:
            self._max_data[None] = max_legacy

    @property
    def largest_data(self) -> int:
        """The largest of the bounds, in bytes: what a Hello announces."""
        return max(self._max_data.values())

    def max_data(self, code: MessageCode | None) -> int:
        """The largest Data in bytes that is accepted with this code; None is the legacy header."""
        return self._max_data[code]
