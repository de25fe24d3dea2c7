"""The memory that models of one process plan with: what others hold or are to hold is nobody else's."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import pytest

from neurogrid.assembly.memory_sharing import MemoryShare, MemorySharing
from neurogrid.errors import CapacityError
from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.fleet.worker_questions import capacities
from neurogrid.planner import (
    LayerSize,
    ModelSize,
    PeerSpeed,
    Plan,
    PlannedStage,
    SharedLayer,
    SharedModel,
    make_plan,
    taken_bytes,
)

NONE = (0, 0, 0, 0)


def model(name: str, fixed: int = 100, session: int = 10, sessions: int = 4) -> SharedModel:
    return SharedModel(name, (SharedLayer(fixed, session),) * 4, max_sessions=sessions)


def worker(peer_id: str, free_bytes: int) -> WorkerInfo:
    return WorkerInfo(peer_id, "a worker", free_bytes, "", True, ())


def free(infos: list[WorkerInfo]) -> dict[str, int]:
    return {info.peer_id: info.free_bytes for info in infos}


def test_room_is_left_for_those_that_are_to_be_opened() -> None:
    sharing = MemorySharing(gives_way=True)
    for name in ("a", "b"):
        sharing.expect(model(name))
    share = sharing.share(model("a"))
    infos = [worker("w", 1100)]
    share.divide(infos, own_id="me", free_here=None, beside_bytes=NONE)
    assert share.num_sessions == 2
    assert free(share.limited(infos)) == {"w": 1100 - taken_bytes(480, 0)}
    plan = Plan((PlannedStage("w", 0, 4, 480),))
    with share.holding(lambda: plan):
        assert sharing.held() == {"a": {"w": taken_bytes(480, 0)}}
        other = sharing.share(model("b"))
        # As a worker that serves several tells it: what is left beside the others.
        left = 1100 - taken_bytes(480, 0)
        infos_of_b = [worker("w", left)]
        other.divide(infos_of_b, own_id="other", free_here=None, beside_bytes=NONE)
        assert other.num_sessions == 2
        assert free(other.limited(infos_of_b)) == {"w": left}
        # Nobody waits any more: what the other one holds is all that is taken.
        with other.holding(lambda: replace(plan, stages=(PlannedStage("w", 0, 4, 400),))):
            assert free(share.limited(infos)) == {"w": 1100 - taken_bytes(400, 0)}
    assert sharing.held() == {}


@pytest.mark.parametrize("gives_way", [False, True])
def test_what_is_kept_for_the_last_is_divided_once(gives_way: bool) -> None:
    sharing, each = MemorySharing(gives_way=gives_way), taken_bytes(440, 0)
    for name in "abc":
        sharing.expect(model(name))
    left = 3 * each + 10
    with ExitStack() as stack:
        for name in "abc":
            share, infos = sharing.share(model(name)), [worker("w", left)]
            share.divide(infos, own_id=name, free_here=None, beside_bytes=NONE)
            assert share.num_sessions == 1
            left -= each
            # What the others need is left to them.
            num_waiting = "cba".index(name)
            assert free(share.limited(infos)) == {"w": left + each - num_waiting * each}
            stack.enter_context(share.holding(lambda: Plan((PlannedStage("w", 0, 4, 440),))))


def test_a_model_goes_to_a_worker_that_computes_for_no_other() -> None:
    """Both have room for both models: of two that are as fast, the one that is idle."""
    sharing = MemorySharing(gives_way=True)
    layers = tuple(LayerSize(weight_bytes=100, cache_bytes=10) for _ in range(4))
    speed = PeerSpeed(1e9, 1e-5)
    infos = [replace(worker(peer, 5000), speed=speed) for peer in ("v", "w")]

    def planned(share: MemoryShare) -> Plan:
        peers = capacities(share.limited(infos), len(layers))
        return make_plan(ModelSize(layers), peers)

    first, second, third = (sharing.share(model(name)) for name in "abc")
    a = planned(first)
    (one,) = a.stages
    with first.holding(lambda: a):
        b = planned(second)
        (other,) = b.stages
        assert {one.peer_id, other.peer_id} == {"v", "w"}
        assert [each.peer_id for each in planned(first).stages] == [one.peer_id]
        with second.holding(lambda: b):
            (last,) = planned(third).stages
            assert last.peer_id in ("v", "w")


def test_who_does_not_fit_beside_the_first_is_left_out_or_an_error() -> None:
    for gives_way in (True, False):
        sharing = MemorySharing(gives_way=gives_way)
        for name in ("a", "b"):
            sharing.expect(model(name))
        share, infos = sharing.share(model("a")), [worker("w", 700)]
        if not gives_way:
            with pytest.raises(CapacityError, match="a needs 490 B and b needs 490 B"):
                share.divide(infos, own_id="me", free_here=None, beside_bytes=NONE)
            continue
        share.divide(infos, own_id="me", free_here=None, beside_bytes=NONE)
        assert share.num_sessions == 4
        with share.holding(lambda: Plan((PlannedStage("w", 0, 4, 560),))):
            other = sharing.share(model("b"))
            with pytest.raises(CapacityError, match=r"\(a has 624 B already\)"):
                other.divide([worker("w", 76)], own_id="other", free_here=None, beside_bytes=NONE)


def test_this_machine_is_one_whoever_computes_here() -> None:
    sharing = MemorySharing(gives_way=True)
    share = sharing.share(model("a"))
    share.divide([], own_id="a-here", free_here=2000, beside_bytes=NONE)
    assert share.local_bytes == 2000
    with share.holding(lambda: Plan((PlannedStage("a-here", 0, 4, 560),))):
        other = sharing.share(model("b"))
        # It says that all is free: caches are set aside there, and not filled yet.
        other.divide([], own_id="b-here", free_here=2000, beside_bytes=NONE)
        assert other.local_bytes == 2000 - taken_bytes(560, 0)
        third = sharing.share(model("c", fixed=400))
        with pytest.raises(CapacityError, match="c needs"):
            third.divide([], own_id="c-here", free_here=2000, beside_bytes=NONE)


def test_workers_that_are_started_here_share_by_what_each_model_needs() -> None:
    sharing = MemorySharing(gives_way=True)
    sharing.expect(model("b", fixed=300, session=0))
    share = sharing.share(model("a", fixed=100, session=0))
    assert share.workers_here(4000) == 1000
    with share.holding(lambda: Plan(())):
        assert sharing.share(model("b", fixed=300, session=0)).workers_here(4000) == 3000
