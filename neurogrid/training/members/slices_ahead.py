"""Slices of works that are not at hand yet: fetched while another is trained, so that a slow line holds up nobody."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from neurogrid.errors import NeuroGridError
from neurogrid.renewed_event import RenewedEvent
from neurogrid.training.data.blobs import SliceCache
from neurogrid.training.data.manifest import SliceInfo

__all__ = ["fetch_ahead"]

logger = logging.getLogger(__name__)

# Seconds for one slice; what is not here by then is asked for again.
_TIMEOUT: Final = 600.0


async def fetch_ahead(
    slices: SliceCache,
    needed: Callable[[], Sequence[SliceInfo]],
    sources: Callable[[], Awaitable[Sequence[str]]],
    changed: RenewedEvent,
) -> None:
    """Fetch slices into the cache before they are needed, until cancelled.

    What cannot be fetched, or does not fit beside what is needed now, is left to whoever needs it: that one says so.

    Args:
        needed: gives those that are going to be needed, in this order.
        sources: gives peers that may have them.
        changed: is set when there may be others, and from time to time.
    """
    while True:
        event = changed.next  # of what changes from here on
        missing = next((info for info in needed() if not slices.holds(info.blob_id)), None)
        if missing is not None:
            try:
                await slices.fetch(missing, await sources(), _TIMEOUT)
                continue
            except (NeuroGridError, OSError) as exc:
                logger.info("a slice was not fetched ahead: %s", exc)
        await event.wait()
