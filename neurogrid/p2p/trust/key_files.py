"""Files that hold a secret: nobody but their owner may have rights on them."""

from __future__ import annotations

import stat
from pathlib import Path

from neurogrid.errors import ConfigurationError

__all__ = ["check_owner_alone"]


def check_owner_alone(path: Path, what_it_does: str) -> None:
    """Refuse a file that others than its owner can read or write. A pipe, as the shell's `<(...)`, is nobody else's.

    Args:
        what_it_does: why that matters, as "which makes members".

    Raises:
        ConfigurationError: they can.
        OSError: there is no such file.
    """
    mode = path.stat().st_mode
    if stat.S_ISREG(mode) and mode & 0o077:
        raise ConfigurationError(
            f"others than its owner can read or write {path}, {what_it_does}: its mode is "
            f"{stat.S_IMODE(mode):04o} and has to be 0600: chmod 600 {path}"
        )
