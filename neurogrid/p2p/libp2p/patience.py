"""Time for which a silent peer is waited for: one number, for the links over TCP and over QUIC."""

from __future__ import annotations

from typing import Final

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.link.limits import LinkLimits
from neurogrid.p2p.quic.limits import QuicLimits

__all__ = ["MIN_KEEP_ALIVE", "link_limits", "quic_limits"]

# Seconds. A peer that computes in Python answers nothing for some hundreds of milliseconds.
MIN_KEEP_ALIVE: Final = 1.0


def link_limits(keep_alive: float | None) -> LinkLimits:
    """The limits of a link over TCP on which a peer is lost after so many seconds of silence; None is the default.

    Raises:
        ConfigurationError: less than `MIN_KEEP_ALIVE`.
    """
    if keep_alive is None:
        return LinkLimits()
    interval = _interval(keep_alive)
    return LinkLimits(ping_interval=interval, ping_timeout=keep_alive - interval)


def quic_limits(keep_alive: float | None) -> QuicLimits:
    """The same over QUIC."""
    if keep_alive is None:
        return QuicLimits()
    return QuicLimits(idle_timeout=keep_alive, ping_interval=_interval(keep_alive))


def _interval(keep_alive: float) -> float:
    if not keep_alive >= MIN_KEEP_ALIVE:
        raise ConfigurationError(
            f"a peer cannot be given up after {keep_alive:g} s: at least {MIN_KEEP_ALIVE:g} s"
        )
    return keep_alive / 4
