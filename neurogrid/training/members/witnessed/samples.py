"""The batches of a round on this machine: slices that it has, or gets from those that have them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import trio

from neurogrid.errors import RemoteProtocolError, ResponseTimeout
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.transfer import BlobUnavailableError
from neurogrid.training.data.manifest import Manifest, SliceInfo
from neurogrid.training.members.member_blobs import MemberBlobs
from neurogrid.training.members.sources import reach_sources
from neurogrid.training.runs.trainers import cut_batches
from neurogrid.training.trainer import FileRange
from neurogrid.training.wire.runs import SampleRange

__all__ = ["RoundSamples"]

logger = logging.getLogger(__name__)

_FETCH_TIMEOUT: Final = 600.0
# Seconds until those that have slices are asked again.
_RETRY: Final = 3.0


class RoundSamples:
    """Samples of a run, for one member.

    Args:
        host: this peer's.
        leader: its peer id.
        blobs: what comes from other peers.
        manifest: of the data.
        sources: gives the addresses of data nodes, as the leader has named them.
        takers: gives the peer ids of members that may have a slice, by its number.
    """

    def __init__(
        self,
        host: Host,
        leader: str,
        blobs: MemberBlobs,
        manifest: Manifest,
        sources: Callable[[], Sequence[str]],
        takers: Callable[[int], Sequence[str]],
    ) -> None:
        self._host, self._leader, self._blobs = host, leader, blobs
        self._manifest, self._sources, self._takers = manifest, sources, takers

    async def batches(
        self, ranges: Sequence[SampleRange], batch_samples: int, seat: int
    ) -> list[list[FileRange]]:
        """Ranges as batches of so many samples.

        Raises:
            RemoteProtocolError: they are of a slice that the data have not.
            BlobUnavailableError: nobody gave a slice in time.
        """
        numbers = sorted({each.slice for each in ranges})
        if numbers[-1] >= len(self._manifest.slices):
            raise RemoteProtocolError(
                f"a work is about slice {numbers[-1]}, and the data have {len(self._manifest.slices)}"
            )
        infos = {number: self._manifest.slices[number] for number in numbers}
        self._blobs.slices.need_only([info.blob_id for info in infos.values()])
        paths = {number: await self._fetch(number, info, seat) for number, info in infos.items()}
        files = [FileRange(paths[each.slice], each.start, each.stop) for each in ranges]
        return cut_batches(files, batch_samples)

    async def _fetch(self, number: int, info: SliceInfo, seat: int) -> Path:
        slices = self._blobs.slices
        deadline = trio.current_time() + _FETCH_TIMEOUT
        while True:
            nodes = await reach_sources(
                self._host, self._sources(), self._leader, seat, slices.passed_over
            )
            peers = tuple(dict.fromkeys((*self._takers(number), *nodes)))
            left = deadline - trio.current_time()
            try:
                return await slices.fetch(info, peers, max(left, 1.0))
            except (BlobUnavailableError, ResponseTimeout) as exc:
                if left < _RETRY:
                    raise
                logger.warning("%s; asking again", exc)
            await trio.sleep(_RETRY)
