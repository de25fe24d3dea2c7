"""Who was refused, once each, and not more lines than somebody reads: strangers must not fill the log."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

import trio

from neurogrid.p2p.trust.limits import MAX_LOG_LINES

__all__ = ["RefusalLog"]

# Seconds until the same peer is named for the same reason again.
REPEAT_AFTER = 3600.0
WINDOW = 60.0
MAX_REMEMBERED = 1024


class RefusalLog:
    """Writes lines, warnings by default, each peer and reason once an hour, at most `MAX_LOG_LINES` a minute.

    Args:
        logger: where they go.
        clock: gives seconds.
    """

    def __init__(
        self, logger: logging.Logger, clock: Callable[[], float] = trio.current_time
    ) -> None:
        self._logger = logger
        self._clock = clock
        self._named: OrderedDict[tuple[str, int], float] = OrderedDict()
        self._window_start = clock()
        self._num_lines = 0
        self._num_omitted = 0

    def refused(
        self, peer_id: str, reason: int, text: str, *, level: int = logging.WARNING
    ) -> None:
        """Note that a peer was refused."""
        now = self._clock()
        if now - self._window_start >= WINDOW:
            self._window_start, self._num_lines = now, 0
            if self._num_omitted:
                self._logger.warning("and %d more refusals", self._num_omitted)
                self._num_omitted = 0
        key = (peer_id, reason)
        if now - self._named.get(key, -REPEAT_AFTER) < REPEAT_AFTER:
            return
        if self._num_lines >= MAX_LOG_LINES:
            self._num_omitted += 1
            return
        self._num_lines += 1
        self._named[key] = now
        self._named.move_to_end(key)
        if len(self._named) > MAX_REMEMBERED:
            self._named.popitem(last=False)
        self._logger.log(level, "refused %s: %s", peer_id, text)
