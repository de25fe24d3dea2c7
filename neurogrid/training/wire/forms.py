"""Forms of entries that the messages of training have, and those of serving have not."""

from __future__ import annotations

from neurogrid.p2p.wire.forms import Form

__all__ = ["number"]


def number(smallest: float, largest: float) -> Form:
    """A finite number from `smallest` to `largest`; a float here."""
    # What is not a number is neither at least nor at most anything.
    return Form(
        f"a number from {smallest:g} to {largest:g}",
        lambda value: type(value) in (int, float) and smallest <= value <= largest,
        read=float,
        write=float,
        absent=0.0,
    )
