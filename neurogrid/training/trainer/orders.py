"""A child process's own side: it reads orders from stdin and answers on stdout, in frames, until standard input ends.

Also in the middle of an order: when its owner dies, so does it. What it has to say to people goes to stderr.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from neurogrid.errors import NeuroGridError
from neurogrid.training.trainer.errors import TrainerError
from neurogrid.training.trainer.frames import LENGTH_BYTES, pack, parse_length, unpack
from neurogrid.training.trainer.memory import is_out_of_memory

__all__ = ["Program", "serve_orders", "write_frame"]


class Program(Protocol):
    """A program that carries out orders."""

    def opened(self) -> dict[str, Any]:
        """The answer to the first order, which it was made from."""

    def carry_out(self, order: dict[str, Any]) -> dict[str, Any]:
        """An order, and its answer."""


def serve_orders(make: Callable[[dict[str, Any], BinaryIO], Program]) -> None:
    """Carry out orders until standard input ends; then the process does.

    Args:
        make: makes the program of the first order; what it tells before an answer goes into the stream.
    """
    orders = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    # Whatever prints, it is no frame.
    os.dup2(2, 1)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    _be_the_first_to_go()
    program: Program | None = None
    while (order := _read(orders)) is not None:
        try:
            if program is None:
                program = make(order, answers)
                answer = program.opened()
            else:
                answer = program.carry_out(order)
            frame = pack(answer)
        except NeuroGridError as exc:
            frame = pack({"error": type(exc).__name__, "text": str(exc)})
        except (RuntimeError, MemoryError) as exc:
            if program is None or not is_out_of_memory(exc):
                raise
            text = f"there is no memory left to {order['order'].replace('_', ' ')}: {exc}"
            frame = pack({"error": TrainerError.__name__, "text": text})
        _write(answers, frame)
        del frame  # the next order is carried out in the room of it
    # Nothing here is worth the time that torch takes to end.
    os._exit(0)


def write_frame(answers: BinaryIO, told: dict[str, Any]) -> None:
    """Tell the owner something."""
    _write(answers, pack(told))


def _write(answers: BinaryIO, frame: list[bytes | memoryview]) -> None:
    for part in frame:
        answers.write(part)
    answers.flush()


def _read(orders: BufferedReader) -> dict[str, Any] | None:
    """The next order; None where there is none any more."""
    prefix = orders.read(LENGTH_BYTES)
    if len(prefix) < LENGTH_BYTES:
        return None
    length = parse_length(prefix)
    data = orders.read(length)
    if len(data) < length:
        return None
    told, long = unpack(data)
    return told if all(orders.readinto(each) == len(each) for each in long) else None


def _end_with_stdin() -> None:
    """End the process when nobody can order anything any more."""
    poll = select.poll()
    poll.register(0, 0)
    poll.poll()
    os._exit(0)


def _be_the_first_to_go() -> None:
    """Have the system end this process, not its owner, when the machine has no memory left."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
