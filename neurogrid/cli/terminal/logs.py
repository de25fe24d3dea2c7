"""Logs on stderr: lines for people, or one JSON object a line for programs.

A record's own fields, given by `extra=`, stand beside the others in the object.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from importlib import import_module
from typing import Any, Final

from neurogrid.cli.terminal.screen import Screen

__all__ = ["LOG_LEVELS", "JsonFormatter", "ScreenHandler", "set_up_logging"]

LOG_LEVELS: Final = ("debug-all", "debug", "info", "warning", "error")
"""Levels, from the most that is said to the least."""

# What every record has; the rest came by `extra=`.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {
    *("message", "asctime", "taskName")
}
# The libraries underneath, which speak only when `debug-all` is asked for.
_LIBRARIES: Final = ("libp2p", "multiaddr", "transformers", "torch")


class JsonFormatter(logging.Formatter):
    """One JSON object: time (RFC 3339, UTC, milliseconds), level, logger, message, exception, and extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        told: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        taken = _STANDARD | told.keys()
        extra = {name: value for name, value in vars(record).items() if name not in taken}
        try:
            return json.dumps({**told, **extra}, default=str, allow_nan=False)
        except ValueError:  # NaN and infinity, which JSON has not
            return json.dumps({**told, **{name: str(value) for name, value in extra.items()}})


class ScreenHandler(logging.Handler):
    """Hands every record to the screen, which knows where a line can go."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._screen.show(self.format(record))
        except Exception:  # noqa: BLE001  as all handlers do: code that logs is not to fail by it
            self.handleError(record)


def set_up_logging(level: str, *, as_json: bool = False) -> Screen:
    """Logs to stderr, from now on; returns what else is to go there.

    Args:
        level: one of `LOG_LEVELS`. What NeuroGrid says for debugging, and what the libraries say for it, are two.
    """
    with_libraries = level == "debug-all"
    if with_libraries:
        # libp2p takes itself out of the tree when it is imported, and whatever handlers it had away: first that, then
        # ours. What it says meanwhile would be said before anybody sees to it that a stopped terminal holds nobody up.
        import_module("neurogrid.p2p.libp2p.libp2p_host")
    formatter = JsonFormatter() if as_json else _formatter(level)
    screen = Screen(formatter if as_json else None)
    handler = ScreenHandler(screen)
    handler.setFormatter(formatter)
    of_others = "debug" if with_libraries else "info" if level == "debug" else level
    logging.basicConfig(handlers=[handler], level=of_others.upper(), force=True)
    logging.getLogger("neurogrid").setLevel(logging.DEBUG if level == "debug" else logging.NOTSET)
    logging.captureWarnings(as_json)
    # Where loggers outside the tree, without a handler of their own, end up: Python would print what they say bare.
    last_resort: logging.Handler = handler
    if with_libraries:
        logging.getLogger("libp2p").addHandler(handler)
    else:
        last_resort = logging.NullHandler()
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(logging.NOTSET if with_libraries else logging.CRITICAL)
    logging.lastResort = last_resort
    return screen


def _formatter(level: str) -> logging.Formatter:
    if level in ("debug", "debug-all"):
        return logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s")
    return _BriefFormatter("%(levelname).1s %(message)s")


class _BriefFormatter(logging.Formatter):
    """A formatter for a person: a message as it is, with its level in front where they should look at it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's name
        return record.message if record.levelno == logging.INFO else super().formatMessage(record)
