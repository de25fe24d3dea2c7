"""Memory that this process has and does not use: given back to the system.

The C library keeps what is freed for the next that asks. What loading a model took on its way, as casts and codes that
are laid out anew, is much more than anybody asks for afterwards.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import Any, Final

__all__ = ["give_back_memory", "let_go_pages"]

_DONT_NEED: Final[int | None] = getattr(mmap, "MADV_DONTNEED", None)


def give_back_memory() -> None:
    """Give back what is freed. Takes milliseconds; does nothing where the C library cannot."""
    trim = _trim()
    if trim is not None:
        trim(0)


def let_go_pages(view: memoryview) -> None:
    """Count the pages of a mapped file no longer as this process's own; whoever reads them again has them again.

    Args:
        view: of a mapping that is read alone, which lets all of it go; of anything else, which stays as it is.
    """
    pages = view.obj
    if isinstance(pages, mmap.mmap) and view.readonly and _DONT_NEED is not None:
        pages.madvise(_DONT_NEED)


@cache
def _trim() -> Any:
    """glibc's; None where there is another."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
