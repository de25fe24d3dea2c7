"""`neurogrid train`, and a line in asked.txt for each blob that a leader gives a member: its id, and the member's.

Run as a program with the arguments of `neurogrid train`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from neurogrid.cli.commands.main import main
from neurogrid.p2p.transfer import BlobSource
from neurogrid.training.leading.data import LeaderSlices

_provide = LeaderSlices.provide


async def provide(slices: LeaderSlices, peer_id: str, blob_id: bytes) -> BlobSource | None:
    """The same, and a line that it was given."""
    source = await _provide(slices, peer_id, blob_id)
    if source is not None:
        with Path("asked.txt").open("a") as file:
            file.write(f"{blob_id.hex()} {peer_id}\n")
    return source


if __name__ == "__main__":
    # In its place for this program alone: what is counted is the leader as it is.
    LeaderSlices.provide = provide  # type: ignore[method-assign, assignment]
    sys.exit(main(["train", *sys.argv[1:]]))
