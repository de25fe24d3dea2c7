"""Members that were chosen stage by stage become hops: each member once, all layers in order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from neurogrid.fleet.member import Member
from neurogrid.inference.pipeline.selection import joined
from neurogrid.planner import PlannedStage


def member(peer_id: str) -> Member:
    return Member(cast(Any, SimpleNamespace(peer_id=peer_id)), cast(Any, None))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_each_member_once_and_every_layer_once(choice: list[int]) -> None:
    members = [member(str(number)) for number in range(4)]
    chosen = [
        (members[number], PlannedStage(str(number), 2 * at, 2 * at + 2, 10))
        for at, number in enumerate(choice)
    ]
    hops = joined(chosen)
    assert len({id(hop) for hop, _ in hops}) == len(hops)
    layers = [layer for _, stage in hops for layer in range(stage.start, stage.stop)]
    assert layers == list(range(2 * len(choice)))
    assert sum(stage.num_bytes for _, stage in hops) == 10 * len(choice)
    for hop, stage in hops:
        # It was chosen for the first and the last of its layers, so it holds what is between.
        own = [planned for other, planned in chosen if other is hop]
        assert own[0].start <= stage.start < stage.stop == own[-1].stop
