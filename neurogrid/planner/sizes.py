"""Numbers of bytes for people."""

from __future__ import annotations

__all__ = ["format_bytes"]


def format_bytes(num_bytes: float) -> str:
    """Bytes for people, in powers of 1,000: `12.3 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
