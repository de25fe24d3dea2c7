"""Bytes of a stream, taken where they arrive, in the task that reads the connection: no turn of a reader's task.

For `Stream.receive_each` and what implements it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import TypeAlias

__all__ = ["Intake", "Piece", "feed"]

Piece: TypeAlias = bytes | bytearray | memoryview


class Intake(ABC):
    """Takes bytes in order, as pieces that others own or in memory of its own. Nothing here may block."""

    @abstractmethod
    def take(self, data: Piece) -> bool:
        """Take the next bytes, of which no view may be kept; False ends `receive_each`."""

    @abstractmethod
    def memory(self) -> memoryview | None:
        """Return memory to write the next bytes to (format "B", writable, not empty); None to be given them by `take`.

        Asked for before anything is taken, and after each `take` and `filled` that returned True.
        """

    @abstractmethod
    def filled(self, num_bytes: int) -> bool:
        """The first `num_bytes` of `memory` were written, at least one; False ends `receive_each`.

        That may be told when all of it is; but where reading stops before, be it cancelled, it is told how much.
        """


async def feed(
    intake: Intake,
    receive_some: Callable[[], Awaitable[Piece]],
    receive_into: Callable[[memoryview], Awaitable[int]],
) -> bool:
    """Give an intake what comes until it wants no more; False at the end. For streams that are read by a task."""
    while True:
        memory = intake.memory()
        if memory is not None:
            num_bytes = await receive_into(memory)
            goes_on = bool(num_bytes) and intake.filled(num_bytes)
        else:
            data = await receive_some()
            num_bytes = len(data)
            goes_on = bool(num_bytes) and intake.take(data)
        if not num_bytes:
            return False
        if not goes_on:
            return True
