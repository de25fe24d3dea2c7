"""Lines in the log that peers cause: some a minute for each peer, and how many more there were.

Knows no messages. Lines at DEBUG are not counted: a user who asks for them wants all.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import trio

__all__ = ["LineWindow", "PeerLog"]

# Seconds, and lines about one peer in them: what somebody reads who looks for the cause.
WINDOW, MAX_LINES = 60.0, 16
MAX_REMEMBERED = 1024


@dataclass
class LineWindow:
    """`WINDOW` seconds, in which so many lines may be written; the others are counted.

    Attributes:
        start: when it began, in seconds.
        num_omitted: lines that were not written.
    """

    start: float
    max_lines: int = MAX_LINES
    num_omitted: int = 0
    _num_lines: int = 0

    def is_over(self, now: float) -> bool:
        """Whether another should begin."""
        return now - self.start >= WINDOW

    def takes_line(self) -> bool:
        """Whether one more line may be written; it is counted either way."""
        if self._num_lines < self.max_lines:
            self._num_lines += 1
            return True
        self.num_omitted += 1
        return False


class PeerLog:
    """Writes at most `MAX_LINES` lines about each peer in `WINDOW` seconds, and counts the rest.

    Args:
        logger: where they go.
        clock: gives seconds.
    """

    def __init__(
        self, logger: logging.Logger, clock: Callable[[], float] = trio.current_time
    ) -> None:
        self._logger = logger
        self._clock = clock
        # The peer whose window began last is the last.
        self._windows: OrderedDict[str, LineWindow] = OrderedDict()

    def log(self, level: int, peer_id: str, text: str, *args: object) -> None:
        """Write a line about a peer, or count it."""
        if level <= logging.DEBUG:
            self._logger.log(level, text, *args)
            return
        if self._window(peer_id).takes_line():
            self._logger.log(level, text, *args)

    def forget(self, peer_id: str) -> None:
        """Tell what was left out of a peer that is gone. Back within the window, it gets no more lines than before."""
        if (window := self._windows.get(peer_id)) is not None:
            self._tell_omitted(peer_id, window)

    def _window(self, peer_id: str) -> LineWindow:
        now = self._clock()
        window = self._windows.get(peer_id)
        if window is None or window.is_over(now):
            if window is not None:
                self._tell_omitted(peer_id, window)
            window = self._windows[peer_id] = LineWindow(now)
            self._windows.move_to_end(peer_id)
            if len(self._windows) > MAX_REMEMBERED:
                self._tell_omitted(*self._windows.popitem(last=False))
        return window

    def _tell_omitted(self, peer_id: str, window: LineWindow) -> None:
        if window.num_omitted:
            self._logger.warning("and %d more such lines about %s", window.num_omitted, peer_id)
            window.num_omitted = 0
