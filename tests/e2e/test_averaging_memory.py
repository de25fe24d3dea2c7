"""What a member of a group holds beside its own vector."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.averaging_processes import crowd, wait_for

NUM_BYTES = 64 * 1024 * 1024
NUM_ROUNDS = 6


@pytest.mark.parametrize("codec", ["f32", "int8"])
def test_after_a_round_a_member_holds_little_more_than_its_outcome(
    tmp_path: Path, codec: str
) -> None:
    """Of the last round the result, for those that come for it; of those before it, nothing."""
    args = ("--min-members", "4", "--codec", codec, "--result-codec", codec, "--pause", "0.1")
    with crowd(tmp_path, *args, num_elements=NUM_BYTES // 4) as members:
        peers = [members.start() for _ in range(4)]
        before = [int(peer.hear("ready")["memory"]) for peer in peers]
        for peer in peers:
            members.begin(peer)
        wait_for(lambda: all(len(peer.outcomes) >= NUM_ROUNDS for peer in peers), "rounds", 120)
        for peer, memory in zip(peers, before, strict=True):
            # It is let go of when all have it, which a slow machine may show a round later.
            assert min(o["memory"] for o in peer.outcomes[-3:]) - memory < 2.5 * NUM_BYTES
