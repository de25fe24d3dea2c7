"""Spans of time as people type them: a number and its unit."""

from __future__ import annotations

import argparse
import math
from typing import Final

__all__ = ["DEFAULT_IDLE_AFTER", "duration", "idle_after"]

DEFAULT_IDLE_AFTER: Final = "5m"
"""Time after which an idle model may give way; as in Ollama."""

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MAX_DURATION: Final = 3650 * 86_400  # seconds; who asks for more has mistyped


def duration(text: str) -> float:
    """An argparse type: seconds, from a number and its unit (30m, 24h, 7d)."""
    number, unit = text.strip()[:-1], text.strip()[-1:].lower()
    try:
        value = float(number) * _SECONDS[unit]
    except (ValueError, KeyError, OverflowError) as exc:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time span: try 30m, 24h or 7d (s, m, h, d)"
        ) from exc
    if not 1 <= value <= MAX_DURATION:
        raise argparse.ArgumentTypeError(f"{text} is not between 1s and 3650d")
    return value


def idle_after(text: str) -> float:
    """An argparse type: seconds, from a number and its unit; infinite for never."""
    return math.inf if text == "never" else duration(text)
