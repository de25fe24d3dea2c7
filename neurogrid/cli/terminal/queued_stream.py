"""A stream whose writers never wait: for the stderr of commands that serve others while their terminal may be stopped.

Ctrl-S stops a terminal, and so does a pipe that is read no more: the next write then waits for as long as it likes,
and with it everything else in that thread. Here a thread of its own writes. What it has not written yet is bounded;
beyond that lines are dropped, and how many is said when the terminal takes something again.
"""

from __future__ import annotations

import io
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, TextIO

__all__ = ["QueuedStream"]

# Some thousand lines, or some hundred looks of a panel.
MAX_WAITING_BYTES: Final = 256 * 1024


class QueuedStream(io.TextIOBase):
    """Takes what is written to `stream`, in any thread, and writes it from its own.

    Args:
        stream: a file with a descriptor; nobody else writes to it meanwhile.
        says_lost: the line that says that so many lines were dropped.
    """

    def __init__(self, stream: TextIO, says_lost: Callable[[int], str]) -> None:
        self._stream = stream
        self._descriptor = stream.fileno()
        self._says_lost = says_lost
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()  # the first of them is being written
        self._num_bytes = 0
        self._num_lost = 0
        self._is_over = False
        # A daemon: a write that waits for ever is not to keep the process.
        self._thread = threading.Thread(target=self._run, name="stderr", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def finish(self, timeout: float) -> bool:
        """Wait until everything is written, for so many seconds at most; whether it is, or nobody reads it any more.

        If it is not, later writes to this stream do not wait either.
        """
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def is_behind(self) -> bool:
        """Whether something waits."""
        return bool(self._waiting)

    # As a text file.

    @property
    def encoding(self) -> str:  # type: ignore[override]  # an attribute there
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Take `text`; all of it is dropped where too much waits already."""
        data = text.encode(self.encoding, "backslashreplace")
        with self._changed:
            # What was lost is said before anything that comes after it.
            if self._num_lost or self._num_bytes + len(data) > MAX_WAITING_BYTES:
                self._num_lost += text.count("\n")
            else:
                self._put(data)
            self._changed.notify_all()
        return len(text)

    def _put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._num_bytes += len(data)

    def _run(self) -> None:
        while (data := self._next()) is not None:
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:  # nobody reads it any more, and nobody will
                data = b""
            with self._changed:
                self._num_bytes -= len(self._waiting.popleft())

    def _next(self) -> bytes | None:
        """Wait for what is to be written next; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._num_lost or self._is_over)
            if not self._waiting and self._num_lost:
                num_lost, self._num_lost = self._num_lost, 0
                self._put(self._says_lost(num_lost).encode(self.encoding, "backslashreplace"))
            return self._waiting[0] if self._waiting else None
