"""Blobs of a member: those that come from other peers, and those that these may fetch."""

from __future__ import annotations

from dataclasses import dataclass

from neurogrid.p2p.transfer import Transfers
from neurogrid.training.data.blob_files import OfferedFiles
from neurogrid.training.data.blobs import SliceCache
from neurogrid.training.data.own_slices import OwnSlices

__all__ = ["MemberBlobs"]


@dataclass(frozen=True, slots=True)
class MemberBlobs:
    """Blobs that come from other peers, and those that these may fetch here.

    Attributes:
        transfers: of the protocol of runs.
        slices: on this machine's disk.
        own: those of them that its owner has put there.
        offered: files of this member's own.
    """

    transfers: Transfers
    slices: SliceCache
    own: OwnSlices
    offered: OfferedFiles
