"""The weights that all members have when an epoch begins, as the leader has them: whole, and in pieces for others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch
import trio
from torch import Tensor

from neurogrid.errors import CheckpointError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.transfer import Transfers
from neurogrid.p2p.transfer.passed_over import PassedOver
from neurogrid.training.data.blob_files import OfferedFiles, fetch_file_patiently
from neurogrid.training.runs.outer_state import digest_of
from neurogrid.training.runs.weight_pieces import check_pieces, read_piece, write_pieces

__all__ = ["CommonWeights"]

_AT_ONCE: Final = 2


class CommonWeights:
    """Weights after a round.

    Args:
        weights: float32 [num_elements].
        round_number: that they are of.
        offered: files that members may fetch.
        directory: for pieces.

    Attributes:
        common: as given; replaced where they are fetched.
        round: that they are of.
        names, blobs: of their pieces, in order; none before `offer`.
        digest: of all.
    """

    def __init__(
        self,
        weights: Tensor,
        round_number: int,
        offered: OfferedFiles,
        directory: Path,
    ) -> None:
        self.common, self.round = weights, round_number
        self._offered, self._directory = offered, directory
        self._files: list[Path] = []
        self._passed_over = PassedOver()
        self.names: tuple[str, ...] = ()
        self.blobs: tuple[bytes, ...] = ()
        self.digest = digest_of(weights)

    def state_dict(self) -> dict[str, Tensor]:
        """The vectors by name, for a checkpoint."""
        return {"theta0": self.common.clone()}

    async def offer(self) -> None:
        """Let members fetch the pieces of these weights, and no others any more.

        Raises:
            CheckpointError: they cannot be written. There are none then.
        """
        self._withdraw()
        folder = self._directory / f"round-{self.round}"
        files, self.blobs = await self._offered.offer_written(
            folder, partial(write_pieces, self.common, folder)
        )
        self._files, self.names = list(files.values()), tuple(files)

    async def fetch(
        self,
        transfers: Transfers,
        names: Sequence[str],
        blobs: Sequence[bytes],
        peers: Sequence[str],
        *,
        round_number: int,
        digest: bytes,
        timeout: float,
    ) -> None:
        """Take over the weights that members have after a round, each piece from another of them first.

        Args:
            timeout: seconds for each piece.

        Raises:
            CheckpointError: the pieces are not those weights: nothing was taken over. Or these are here, and cannot be
                offered to members.
            NeuroGridError: a piece is not to be had.
        """
        check_pieces(names, self.common.numel())
        vector = torch.empty_like(self.common)
        folder, limiter = self._directory / "fetched", trio.CapacityLimiter(_AT_ONCE)

        async def fetch_one(number: int, name: str, blob_id: bytes) -> None:
            turn = number % len(peers)
            async with limiter:
                path = folder / name
                order = [*peers[turn:], *peers[:turn]]
                await fetch_file_patiently(
                    transfers, blob_id, order, path, timeout=timeout, passed_over=self._passed_over
                )
                await trio.to_thread.run_sync(read_piece, name, path, vector)
                path.unlink()

        with unwrap_errors():
            async with trio.open_nursery() as nursery:
                for number, (name, blob_id) in enumerate(zip(names, blobs, strict=True)):
                    nursery.start_soon(fetch_one, number, name, blob_id)
        if await trio.to_thread.run_sync(digest_of, vector) != digest:
            raise CheckpointError("the pieces together are not the weights that most members have")
        self.common, self.round, self.digest = vector, round_number, digest
        await self.offer()

    def _withdraw(self) -> None:
        for path in self._files:
            self._offered.withdraw(path)
            path.unlink(missing_ok=True)
        self._files, self.names, self.blobs = [], (), ()
