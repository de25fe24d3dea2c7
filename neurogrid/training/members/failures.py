"""Failures of a member, as it tells its leader of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from neurogrid.errors import ConfigurationError, NeuroGridError

__all__ = ["one_line", "telling_failure"]

_MAX_REASON_CHARS: Final = 200


def one_line(error: BaseException, otherwise: str = "") -> str:
    """Text of an error in one line, as a report has room for it; `otherwise` where that is empty."""
    return " ".join(str(error).split())[:_MAX_REASON_CHARS] or otherwise


@contextmanager
def telling_failure(tell: Callable[[NeuroGridError], None]) -> Iterator[None]:
    """Tell of the error by which a part in a run ends, be it one of the machine, as a full disk.

    Raises:
        NeuroGridError: the error that was told.
    """
    try:
        yield
    except NeuroGridError as exc:
        tell(exc)
        raise
    except OSError as exc:
        error = ConfigurationError(f"this machine cannot keep what the run needs: {exc}")
        tell(error)
        raise error from exc
