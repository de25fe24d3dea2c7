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
        self._needed: list[bytes] = []

    async def batches(
        self,
        ranges: Sequence[SampleRange],
        batch_samples: int,
        seat: int,
        *,
        timeout: float = _FETCH_TIMEOUT,
    ) -> list[list[FileRange]]:
        """Ranges as batches of so many samples.

        Args:
            timeout: seconds for each slice.

        Raises:
            RemoteProtocolError: they are of a slice that the data have not.
            BlobUnavailableError, ResponseTimeout: nobody gave a slice in time.
        """
        infos = self._infos(ranges)
        self._needed = [info.blob_id for info in infos.values()]
        self._blobs.slices.need_only(self._needed)
        paths = {n: await self._fetch(n, info, seat, timeout) for n, info in infos.items()}
        files = [FileRange(paths[each.slice], each.start, each.stop) for each in ranges]
        return cut_batches(files, batch_samples)

    async def gather(self, ranges: Sequence[SampleRange], seat: int) -> None:
        """Have the slices of ranges on the disk, for `batches` a little later. Raises: as of that."""
        for number, info in self._infos(ranges).items():
            await self._fetch(number, info, seat, _FETCH_TIMEOUT)
            # It may go if those of a round have no room beside it.
            self._blobs.slices.need_only(self._needed)

    def _infos(self, ranges: Sequence[SampleRange]) -> dict[int, SliceInfo]:
        numbers = sorted({each.slice for each in ranges})
        if numbers[-1] >= len(self._manifest.slices):
            raise RemoteProtocolError(
                f"a work is about slice {numbers[-1]}, and the data have {len(self._manifest.slices)}"
            )
        return {number: self._manifest.slices[number] for number in numbers}

    async def _fetch(self, number: int, info: SliceInfo, seat: int, timeout: float) -> Path:
        slices = self._blobs.slices
        deadline = trio.current_time() + timeout
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
