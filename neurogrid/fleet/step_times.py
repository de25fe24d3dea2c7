"""Times that one worker takes for a step, as far as its coordinator has seen them.

Robust as retransmission timers are (RFC 6298): a smoothed mean, and how far off it usually is. Decode, prefill and few
tokens, as proposed ones are, are known apart: a token costs less in company. Pure: data in, data out; what is done
about a slow worker is not known here.

Units: seconds; one "layer" is one token through one layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

__all__ = ["StepTimes"]

# Of what is new, the part that goes into the mean and into the deviation (RFC 6298).
MEAN_GAIN: Final = 1 / 8
DEVIATION_GAIN: Final = 1 / 4
# Usual deviations above the mean that are still to be expected (RFC 6298).
NUM_DEVIATIONS: Final = 4
# Steps without which nothing is expected: the first ones choose kernels and fill pools.
MIN_STEPS: Final = 4
# A step of so many tokens costs more for each than a prompt's.
FEW_TOKENS: Final = 32
# Latest decode steps that are kept one by one.
NUM_RECENT: Final = 512
# Those of which the typical one is shown to people.
NUM_SHOWN: Final = 64


@dataclass(slots=True)
class _Smoothed:
    """A mean and a deviation."""

    num_seen: int = 0
    mean: float = 0.0
    deviation: float = 0.0

    def add(self, seconds: float) -> None:
        self.num_seen += 1
        if self.num_seen == 1:
            self.mean, self.deviation = seconds, seconds / 2
            return
        self.deviation += DEVIATION_GAIN * (abs(seconds - self.mean) - self.deviation)
        self.mean += MEAN_GAIN * (seconds - self.mean)

    @property
    def upper(self) -> float:
        return self.mean + NUM_DEVIATIONS * self.deviation


class StepTimes:
    """The steps of one worker.

    Attributes:
        is_slow: whether it kept a session waiting so long that this left, and has not proved quick since.
        suspicion: what it does, or does not do, that keeps a step waiting, in words; empty if it does not.
    """

    def __init__(self) -> None:
        self.is_slow = False
        self.suspicion = ""
        self._decode = _Smoothed()
        self._few = _Smoothed()
        self._prefill = _Smoothed()
        self._recent: deque[tuple[int, float]] = deque(maxlen=NUM_RECENT)
        self._latest: deque[float] = deque(maxlen=NUM_SHOWN)

    def observe(
        self, num_tokens: int, num_layers: int, seconds: float, *, computed: float | None = None
    ) -> None:
        """A step of so many tokens through so many layers took that long.

        Args:
            computed: seconds of these in which the worker was at it, as it says: without the way there and back, and
                without other sessions' turns; None where it does not say.
        """
        if not self.is_slow:
            self.suspicion = ""
        each = seconds / (num_tokens * num_layers)
        if num_tokens == 1:
            self._decode.add(each)
            self._latest.append(each)
            if computed is not None:
                self._recent.append((num_layers, computed))
        elif num_tokens <= FEW_TOKENS:
            self._few.add(each)
        else:
            self._prefill.add(each)

    def expected(self, num_tokens: int, num_layers: int) -> float | None:
        """Seconds that such a step takes at most, as a rule; None as long as that is not known.

        A prefill of few tokens costs more for each than a long one: what is not known of it is taken from decode.
        """
        if self._decode.num_seen < MIN_STEPS:
            return None
        one = self._decode.upper
        if num_tokens == 1:
            return num_layers * one
        company = self._few if num_tokens <= FEW_TOKENS else self._prefill
        each = company.upper if company.num_seen else one
        return num_layers * (one + num_tokens * each)

    @property
    def recent(self) -> Sequence[tuple[int, float]]:
        """Decoded tokens of late: the layers that each went through, and the seconds that the worker was at it."""
        return tuple(self._recent)

    def typical_step(self, num_layers: int) -> float | None:
        """Seconds that a decoded token takes through so many layers: the median of late; None before the first."""
        return num_layers * median(self._latest) if self._latest else None

    def last_step(self, num_layers: int) -> float | None:
        """Seconds that the last decoded token took through so many layers; None before the first."""
        return num_layers * self._latest[-1] if self._latest else None

    def forget_recent(self) -> None:
        """Judge anew: what was seen so far is of another time."""
        self._recent.clear()
