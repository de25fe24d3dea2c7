"""Delays before the next attempt: longer each time, and never over for all hosts at the same moment.

The delay doubles with each failure, up to a bound. Of each, half is fixed and half is drawn, so that many hosts that
lost the same peer in the same second do not all come back in the same second.

Source: M. Brooker, "Exponential Backoff And Jitter" (there "equal jitter").
"""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["Backoff"]


@dataclass(frozen=True)
class Backoff:
    """The delays after failures.

    Attributes:
        first: seconds after the first failure, at most.
        largest: seconds that no delay exceeds.
    """

    first: float = 1.0
    largest: float = 30.0

    def delay(self, num_failures: int, draw: random.Random) -> float:
        """Seconds to wait after so many failures in a row (1 or more), drawn with `draw`."""
        # 2**60 seconds are above any bound, and still a float.
        longest = min(self.largest, self.first * 2.0 ** min(num_failures - 1, 60))
        return longest * (0.5 + 0.5 * draw.random())
