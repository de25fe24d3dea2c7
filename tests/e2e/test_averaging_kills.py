"""Members that are killed or stand still in the midst of a round: the others agree, and go on."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import pytest

from tests.e2e.averaging_processes import Crowd, crowd, wait_for

NUM_MEMBERS = 4
GRACE = 2.0


def kill_one(members: Crowd, random: Random, *, the_leader: bool) -> float:
    """Kill one at some point of a round; seconds until the rest had decided a round without it."""
    leader = members.leader
    others = [member for member in members.members if member is not leader]
    lost = leader if the_leader else random.choice(others)
    time.sleep(random.uniform(0.0, 2.0) * leader.outcomes[-1]["seconds"])
    members.members.remove(lost)
    killed_at = lost.kill()
    return (
        max(
            member.outcome_after(killed_at, lambda o: lost.peer_id not in o["contributors"])["at"]
            for member in members.members
        )
        - killed_at
    )


@pytest.mark.parametrize(
    ("seed", "way", "num_members"),
    [(1, "butterfly", 4), (2, "butterfly", 4), (3, "butterfly", 4), (4, "grid", 5)],
)
def test_the_rest_agree_whoever_is_killed(
    tmp_path: Path, seed: int, way: str, num_members: int
) -> None:
    """Those that are killed are known to be gone at once."""
    random = Random(seed)
    with crowd(tmp_path, "--grace", str(GRACE), "--way", way) as members:
        members.assemble(num_members)
        for the_leader in (True, False):
            kill_one(members, random, the_leader=the_leader)
            newcomer = members.start()
            members.settle(members.begin(newcomer))
        assert members.check() > 2
        assert not any(member.all_said("error") for member in members.members)


@pytest.mark.parametrize("the_leader", [True, False], ids=["leader", "member"])
def test_one_that_stands_still_is_gone_on_without(tmp_path: Path, the_leader: bool) -> None:
    """When it goes on, it is told what was decided meanwhile, or that it is no member any more; nothing else."""
    with crowd(tmp_path, "--grace", str(GRACE)) as members:
        members.assemble(NUM_MEMBERS)
        leader = members.leader
        still = leader if the_leader else next(m for m in members.members if m is not leader)
        others = [member for member in members.members if member is not still]
        stopped_at = still.stop()
        for member in others:
            member.outcome_after(stopped_at, lambda o: still.peer_id not in o["contributors"])
        time.sleep(max(0.0, stopped_at + 3 * GRACE - time.monotonic()))
        went_on_at = still.go_on()

        def is_told() -> bool:
            return any(
                said["at"] > went_on_at
                for key in ("round", "dropped")
                for said in still.all_said(key)
            )

        wait_for(is_told, "what it is told")
        members.bring_back(still, went_on_at)
        members.settle(went_on_at)
        members.check()
