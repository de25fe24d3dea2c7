"""The log of refused peers, once each, and not more lines than somebody reads: strangers must not fill the log."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

import trio

from neurogrid.p2p.peer_log import LineWindow
from neurogrid.p2p.trust.limits import MAX_LOG_LINES

__all__ = ["RefusalLog"]

# Seconds until the same peer is named for the same reason again.
REPEAT_AFTER = 3600.0
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
        self._window = LineWindow(clock(), MAX_LOG_LINES)

    def refused(
        self, peer_id: str, reason: int, text: str, *, level: int = logging.WARNING
    ) -> None:
        """Note that a peer was refused."""
        now = self._clock()
        if self._window.is_over(now):
            if self._window.num_omitted:
                self._logger.warning("and %d more refusals", self._window.num_omitted)
            self._window = LineWindow(now, MAX_LOG_LINES)
        key = (peer_id, reason)
        if now - self._named.get(key, -REPEAT_AFTER) < REPEAT_AFTER:
            return
        if not self._window.takes_line():
            return
        self._named[key] = now
        self._named.move_to_end(key)
        if len(self._named) > MAX_REMEMBERED:
            self._named.popitem(last=False)
        self._logger.log(level, "refused %s: %s", peer_id, text)
