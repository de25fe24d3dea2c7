"""Pings that ask whether the peer is there, and how far away: whatever comes answers the first, pongs the second."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

import trio

from neurogrid.p2p.link.limits import LinkLimits
from neurogrid.p2p.link.yamux import Yamux

__all__ = ["KeepAlive"]

# Seconds between the first pings: the shortest round trip is wanted, and both sides are busy at the beginning.
EARLY_PINGS = (0.1, 0.2, 0.4, 0.8)


class KeepAlive:
    """Watches over one connection. The reader tells it what it hears.

    Args:
        core: what pings, and learns the round trip.
        limits: intervals and timeouts.
        kick: called to have a ping sent.
        give_up: called with the reason when the peer is silent for too long.
    """

    def __init__(
        self,
        core: Yamux,
        limits: LinkLimits,
        *,
        kick: Callable[[], None],
        give_up: Callable[[str], None],
    ) -> None:
        self._core = core
        self._limits = limits
        self._kick = kick
        self._give_up = give_up
        self._num_heard = 0  # times that bytes came
        self._heard = trio.Event()
        self._ping = 0
        self._pinged_at = 0.0

    def heard(self) -> None:
        """Bytes came."""
        self._num_heard += 1
        self._heard.set()

    def pong_received(self, value: int) -> None:
        """A ping was answered."""
        if value == self._ping % 2**32:
            taken = max(time.monotonic() - self._pinged_at, 1e-6)
            # The shortest, as it were: a longer one has mostly waited behind data, here or there. A way that
            # has really become longer is believed little by little.
            windows = self._core.windows
            windows.round_trip = min(taken, 1.25 * (windows.round_trip or taken))

    async def run(self) -> None:
        """Ping for ever; also reset the streams that only we have closed."""
        limits = self._limits
        num_sweeps = round(limits.half_closed_timeout / limits.ping_interval)
        for self._ping in count(1):
            heard = self._num_heard
            self._pinged_at = time.monotonic()
            self._core.ping(self._ping % 2**32)
            self._kick()
            if self._ping <= len(EARLY_PINGS):
                await trio.sleep(EARLY_PINGS[self._ping - 1])
                continue
            await trio.sleep(limits.ping_interval)
            self._core.sweep(num_sweeps)
            if self._num_heard == heard:
                self._heard = trio.Event()
                with trio.move_on_after(limits.ping_timeout) as scope:
                    await self._heard.wait()
                if scope.cancelled_caught:
                    self._give_up(f"no sign of life from the peer for {limits.ping_timeout:g} s")
