"""The claim on a worker: who has it, for what, and until when. Pure: times are given.

A coordinator that is served has the worker until its connection ends. What takes longer than a connection, as
training does, has it until a time, which its owner puts off by claiming it again.
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
    """

    owner: str
    purpose: str = SERVING
    until: float | None = None

    def holds(self, now: float, *, is_connected: bool) -> bool:
        """Whether the owner still has the worker, given whether it is connected."""
        return is_connected if self.until is None else now < self.until

    def allows(self, other: Claim, now: float, *, is_connected: bool) -> bool:
        """Whether another claim may follow: its owner's own for the same purpose, or any once this one is over."""
        is_renewed = (self.owner, self.purpose) == (other.owner, other.purpose)
        return is_renewed or not self.holds(now, is_connected=is_connected)
