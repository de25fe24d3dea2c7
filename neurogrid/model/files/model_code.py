"""Calls into transformers on a config or on tensors that it may not like: kept quiet, and their errors."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging

__all__ = ["MODEL_CODE_ERRORS", "one_line", "quiet_transformers"]

# What code of transformers raises on a config or on tensors that it does not like; which of them
# differs between families and versions.
MODEL_CODE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars and reports off stderr: we raise what they would say."""
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    _set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        _set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()


def _set_verbosity(level: int) -> None:
    # Where it is not so already: logging forgets then for each of thousands of loggers what it has found out.
    if transformers_logging.get_verbosity() != level:
        transformers_logging.set_verbosity(level)


def one_line(exc: Exception) -> str:
    """Return the text of `exc`, without line breaks and not too long."""
    return " ".join(str(exc).split())[:300]
