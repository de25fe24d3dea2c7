"""A claim on a worker: who has it, for what, and until when. Pure: times are given.

A coordinator that is served has the worker until its connection ends, and shares it with others that are. What takes
longer than a connection, as training does, has it until a time, which its owner puts off by claiming it again, and
shares it with nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["SERVING", "Claim"]

SERVING: Final = "serving"


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker that is somebody's.

    Attributes:
        owner: peer id.
        purpose: what the worker does for it.
        until: a time of the clock that `holds` is asked with; None for as long as the owner is connected.
        is_shared: whether others may have the worker, too, if they share it.
    """

    owner: str
    purpose: str = SERVING
    until: float | None = None
    is_shared: bool = False

    def holds(self, now: float, *, is_connected: bool) -> bool:
        """Whether the owner still has the worker, given whether it is connected."""
        return is_connected if self.until is None else now < self.until

    def allows(self, other: Claim, now: float, *, is_connected: bool) -> bool:
        """Whether there may be another claim: its owner's own for the same purpose, one that shares the worker as this
        one does, or any once this one is over.
        """
        is_renewed = (self.owner, self.purpose) == (other.owner, other.purpose)
        is_beside = self.is_shared and other.is_shared and self.owner != other.owner
        return is_renewed or is_beside or not self.holds(now, is_connected=is_connected)
