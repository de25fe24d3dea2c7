"""The weights of one member of a witnessed run: what a round makes of them, and pieces for those that join."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import torch
import trio
from torch import Tensor

from neurogrid.errors import CheckpointError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.transfer.passed_over import PassedOver
from neurogrid.training.averaging.parts import Layout
from neurogrid.training.data.blob_files import fetch_file_patiently
from neurogrid.training.members.member_blobs import MemberBlobs
from neurogrid.training.optimizers.distro import Coefficients, Distro
from neurogrid.training.runs.outer_state import digest_of
from neurogrid.training.runs.run_file import DistroSection
from neurogrid.training.runs.weight_pieces import check_pieces, read_piece, write_pieces

__all__ = ["OwnWeights", "TakenBack"]

TakenBack: TypeAlias = tuple[Sequence[Coefficients], Sequence[Coefficients], float]
"""Results of a round that were applied, those of them that stay, and its learning rate."""

logger = logging.getLogger(__name__)

# Pieces that are fetched at once.
_AT_ONCE: Final = 2


class OwnWeights:
    """Weights and momentum of a member, and the step that is under way.

    Args:
        layout: of the trained parameters.
        weights: float32 [num_elements], where the trainer has them: written to after each round.
        section: of the run file.
        blobs: what comes from other peers, and what they may fetch.
        directory: for pieces.

    Attributes:
        distro: the optimiser.
        step: rounds that are in the weights; None while they are nobody else's.
        digest: of the weights; empty while they are nobody else's.
        names, blobs: pieces that others may fetch.
    """

    def __init__(
        self,
        layout: Layout,
        weights: Tensor,
        section: DistroSection,
        blobs: MemberBlobs,
        directory: Path,
    ) -> None:
        self.distro = Distro(
            weights,
            layout.shapes,
            top_k=section.top_k,
            max_side=section.chunk,
            decay=section.decay,
            one_bit=section.one_bit,
        )
        self._weights, self._blobs, self._directory = weights, blobs, directory
        self._before: Tensor | None = None
        self._lr = 0.0
        self._offered: list[Path] = []
        self._passed_over = PassedOver()
        self.step: int | None = None
        self.digest = b""
        self.names: tuple[str, ...] = ()
        self.blobs: tuple[bytes, ...] = ()

    # A round

    @property
    def is_under_way(self) -> bool:
        """Whether a step of this member is neither in the weights nor taken back."""
        return self._before is not None

    def encode(self, gradient: Tensor, lr: float) -> Coefficients:
        """Begin a step: take in a gradient, float32 [num_elements], and return the coefficients to send. Blocks."""
        (momentum,) = self.distro.own_vectors()
        before = momentum.clone()
        coefficients = self.distro.encode(gradient, lr)
        self._before, self._lr = before, lr
        return coefficients

    def momenta(self) -> tuple[Tensor, Tensor, Tensor]:
        """Momenta of the step under way, as a claim names them: before it, with its gradient, without what is sent."""
        assert self._before is not None  # a step is under way
        (momentum,) = self.distro.own_vectors()
        return self._before, momentum.clone(), self.distro.remaining()

    def forget_momentum(self) -> None:
        """Have the momentum of a member that has computed nothing yet; no step is under way."""
        self.distro.load_own([torch.zeros_like(self.distro.theta)])

    def take_back(self) -> None:
        """Have the step under way undone, so that its samples may be trained on again, by anybody."""
        if self._before is not None:
            self.distro.roll_back()
            self.distro.load_own([self._before])
            self._before = None

    def apply(
        self,
        results: Sequence[Coefficients],
        lr: float,
        *,
        has_own: bool,
        then: Sequence[TakenBack] = (),
    ) -> None:
        """Apply what was agreed on, in this order. Blocks.

        Args:
            lr: of the round.
            has_own: whether this member's own result is in it.
            then: what leaves the weights afterwards, in this order.

        Raises:
            ValueError, NotFiniteError: a result is none of this configuration.
        """
        mean = self.distro.mean(results)
        if has_own:
            self.distro.commit(mean)
            self._before = None
        else:
            self.take_back()
            self.distro.apply(mean, lr)
        for applied, left, rate in then:
            self.distro.take_back(applied, left, rate)
        self._weights.copy_(self.distro.theta)
        assert self.step is not None
        self.step += 1
        self.digest = digest_of(self.distro.theta)

    # Pieces

    async def offer(self) -> None:
        """Let others fetch the weights as they are.

        Raises:
            CheckpointError: they cannot be written. Nobody fetches them then.
        """
        self.withdraw()
        folder = self._directory / f"step-{self.step}"
        files, self.blobs = await self._blobs.offered.offer_written(
            folder, partial(write_pieces, self.distro.theta, folder)
        )
        self._offered, self.names = list(files.values()), tuple(files)

    def withdraw(self) -> None:
        """Let nobody fetch pieces any more."""
        for path in self._offered:
            self._blobs.offered.withdraw(path)
            path.unlink(missing_ok=True)
        self._offered, self.names, self.blobs = [], (), ()

    async def fetch(
        self,
        names: Sequence[str],
        blobs: Sequence[bytes],
        providers: Sequence[str],
        leader: str,
        *,
        step: int,
        digest: bytes,
        first: int,
        timeout: float,
    ) -> dict[str, int]:
        """Take over weights in pieces, and offer these to others as they come.

        Args:
            providers: peer ids of members that have all pieces, in any order; each piece is asked of another one first.
            leader: its peer id, which is asked last.
            step, digest: of the weights.
            first: which provider the first piece is asked of.
            timeout: seconds for each piece.

        Returns:
            How many pieces came from whom.

        Raises:
            CheckpointError: they are not those weights. Nothing was taken over.
            NeuroGridError: a piece is not to be had.
        """
        check_pieces(names, self.distro.theta.numel())
        self.withdraw()
        vector = torch.empty_like(self.distro.theta)
        folder = self._directory / f"step-{step}"
        limiter = trio.CapacityLimiter(_AT_ONCE)
        came: dict[str, int] = {}

        async def fetch_one(number: int, name: str, blob_id: bytes) -> None:
            async with limiter:
                turn = (first + number) % len(providers) if providers else 0
                peers = [*providers[turn:], *providers[:turn], leader]
                path = folder / name
                peer = await fetch_file_patiently(
                    self._blobs.transfers,
                    blob_id,
                    peers,
                    path,
                    timeout=timeout,
                    passed_over=self._passed_over,
                )
                came[peer] = came.get(peer, 0) + 1
                await trio.to_thread.run_sync(read_piece, name, path, vector)
                await self._blobs.offered.offer(path)
                self._offered.append(path)

        with unwrap_errors():
            async with trio.open_nursery() as nursery:
                for number, (name, blob_id) in enumerate(zip(names, blobs, strict=True)):
                    nursery.start_soon(fetch_one, number, name, blob_id)
        if await trio.to_thread.run_sync(digest_of, vector) != digest:
            self.withdraw()
            raise CheckpointError("the pieces together are not the weights that they were to be")
        self.take_back()
        self.distro.load([vector])
        self._weights.copy_(vector)
        self.step, self.digest = step, digest
        self.names, self.blobs = tuple(names), tuple(blobs)
        return came
