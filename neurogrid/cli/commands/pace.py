"""Pace of tokens: the time to the first, and the rate of those after it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

__all__ = ["Pace"]


@dataclass
class Pace:
    """Pace of one generation, counted from when this is made. `tick` is called with each token."""

    started: float = field(default_factory=time.perf_counter)
    num_tokens: int = 0
    first: float | None = None
    last: float = 0.0

    def tick(self) -> None:
        """One more token is there."""
        self.last = time.perf_counter()
        if self.first is None:
            self.first = self.last
        self.num_tokens += 1

    def __str__(self) -> str:
        if self.first is None:
            return f"no token: the model ended at once after {time.perf_counter() - self.started:.2f} s"
        text = f"time to first token {self.first - self.started:.2f} s"
        if self.num_tokens > 1:
            text += f", {(self.num_tokens - 1) / (self.last - self.first):.1f} tokens/s"
        return text
