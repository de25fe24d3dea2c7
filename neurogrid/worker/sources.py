"""Fetch a layer's bytes from workers that have them, before the coordinator has to send them.

The peers that an offer names are dialled and asked, one after the other; the coordinator sends what does not come. A
peer that sent a wrong chunk is not asked again, one that cannot be reached not for a while.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

import trio

from neurogrid.errors import (
    CapacityError,
    ConfigurationError,
    NeuroGridError,
    PeerRefusedError,
    RemoteProtocolError,
    TransportError,
)
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.transfer import MemoryStore, OfferedBlob, StoredBlob, Transfers
from neurogrid.p2p.transfer.passed_over import PassedOver

__all__ = ["BlobSources"]

logger = logging.getLogger(__name__)

# A worker nearby answers in milliseconds; the coordinator is there all the while. Seconds.
CONNECT_TIMEOUT: Final = 10.0
OFFER_TIMEOUT: Final = 30.0


class BlobSources:
    """The workers that one worker fetches from."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._passed_over = PassedOver()

    async def fetch(
        self, transfers: Transfers, offered: OfferedBlob, store: MemoryStore
    ) -> StoredBlob | None:
        """The offered blob from the peers that the offer names; None if none of them gave all of it.

        What came stays in `store` for a while, so that the rest alone is taken from elsewhere.
        """
        for peer_id, addresses in _by_peer(offered.sources).items():
            if peer_id == self._host.peer_id or peer_id in self._passed_over:
                continue
            try:
                await self._connect(peer_id, addresses)
                fetched = await transfers.fetch_blob(
                    peer_id,
                    offered.info.blob_id,
                    store=store,
                    max_bytes=offered.info.num_bytes,
                    offer_timeout=OFFER_TIMEOUT,
                )
            except CapacityError as exc:
                logger.warning("layer %d is not fetched: %s", offered.layer_id, exc)
                return None
            except (
                ConfigurationError,
                PeerRefusedError,
                RemoteProtocolError,
                TransportError,
            ) as exc:
                self._blame(peer_id, offered, exc)
            else:
                logger.debug("fetched layer %d from %s", offered.layer_id, peer_id)
                return fetched.blob
        return None

    async def _connect(self, peer_id: str, addresses: list[str]) -> None:
        if self._host.is_connected(peer_id):
            return
        with trio.move_on_after(CONNECT_TIMEOUT) as scope:
            await self._host.connect_any(addresses)
        if scope.cancelled_caught:
            raise TransportError(f"it was not reached within {CONNECT_TIMEOUT:g} s")

    def _blame(self, peer_id: str, offered: OfferedBlob, error: NeuroGridError) -> None:
        lasts = self._passed_over.blame(peer_id, error)
        if not lasts:
            # It has dropped the blob; others it may have.
            logger.info("%s has layer %d no longer", peer_id, offered.layer_id)
            return
        logger.warning(
            "layer %d did not come from %s, the coordinator is to send what is missing; %s: %s",
            offered.layer_id,
            peer_id,
            "that peer is not asked again"
            if lasts == float("inf")
            else f"it is not asked for {lasts:g} s",
            error,
        )


def _by_peer(addresses: Iterable[str]) -> dict[str, list[str]]:
    """Full multiaddrs by the peer that they end in, in their order."""
    found: dict[str, list[str]] = {}
    for address in addresses:
        found.setdefault(address.rpartition("/p2p/")[2], []).append(address)
    return found
