"""Plans of a fleet: the coordinator's own stage, and what is worth changing when members join or drift."""

from __future__ import annotations

from dataclasses import replace

import pytest

from neurogrid.errors import CapacityError
from neurogrid.fleet.placing.fleet_plan import FleetPlanning
from neurogrid.fleet.speeds.drift import with_drifts
from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.planner import LayerSize, ModelSize, PeerSpeed, PlannedStage

SIZE = ModelSize(tuple(LayerSize(100) for _ in range(8)))
SPEED = PeerSpeed(1000.0)
HERE = "here"


def info(peer_id: str, free_bytes: int = 10_000, speed: PeerSpeed | None = SPEED) -> WorkerInfo:
    return WorkerInfo(
        peer_id=peer_id,
        name=f"device of {peer_id}",
        free_bytes=free_bytes,
        protocol_id="",
        memory_known=True,
        held_layers=(),
        speed=speed,
    )


def spans(stages: tuple[PlannedStage, ...]) -> list[tuple[str, int, int]]:
    return [(stage.peer_id, stage.start, stage.stop) for stage in stages]


def test_so_many_layers_here_and_the_others_elsewhere() -> None:
    planning = FleetPlanning(SIZE, local_id=HERE, num_local_layers=3)
    plan = planning.first([info("a"), info("b"), info(HERE, 0)])
    assert spans(plan.stages) == [(HERE, 0, 3), ("a", 3, 8)]
    assert plan.stages[0].num_bytes == 300
    # Nobody stands by for what is here.
    assert [(r.peer_id, r.start, r.stop) for r in plan.replicas] == [("b", 3, 8)]
    again = planning.again(plan, [info("b"), info(HERE, 0)])
    assert spans(again.stages) == [(HERE, 0, 3), ("b", 3, 8)]
    assert again.generation == plan.generation + 1


def test_what_a_worker_holds_counts_behind_the_stage_here() -> None:
    planning = FleetPlanning(SIZE, num_stages=3, local_id=HERE, num_local_layers=2)
    holder = replace(info("a"), model_layers=frozenset({5, 6, 7}))
    plan = planning.first([holder, info("b"), info(HERE)])
    assert spans(plan.stages) == [(HERE, 0, 2), ("b", 2, 5), ("a", 5, 8)]


def test_all_layers_here_need_no_worker() -> None:
    planning = FleetPlanning(SIZE, local_id=HERE, num_local_layers=8)
    plan = planning.first([info(HERE)])
    assert spans(plan.stages) == [(HERE, 0, 8)]
    assert planning.replicas(plan.stages, [info(HERE), info("a")]) == ()
    assert planning.better(plan, [info(HERE), info("a")], kept={}) is None


def test_a_stage_here_that_the_plan_chose_stands_by_for_nobody() -> None:
    planning = FleetPlanning(SIZE, local_id=HERE)
    plan = planning.first([info("a"), info(HERE, 20_000)])
    assert spans(plan.stages) == [("a", 0, 8)]
    assert plan.replicas == ()
    with pytest.raises(CapacityError):
        planning.first([info("a", 300), info(HERE, 300)])


def test_who_joins_is_used_where_that_is_worth_it() -> None:
    planning = FleetPlanning(SIZE, num_stages=2)
    plan = planning.first([info("a"), info("b")])
    assert planning.better(plan, [info("a"), info("b"), info("c")], kept={}) is None
    fast = info("c", speed=PeerSpeed(10_000.0))
    better = planning.better(plan, [info("a"), info("b"), fast], kept={})
    assert better is not None
    assert "c" in {stage.peer_id for stage in better.stages}


def test_layers_of_running_sessions_are_kept_beside_the_new_ones() -> None:
    planning = FleetPlanning(SIZE, num_stages=2)
    # Room for six layers each.
    members = [info("a", 670), info("b", 670)]
    plan = planning.first(members)
    assert spans(plan.stages) == [("a", 0, 4), ("b", 4, 8)]
    slow = [members[0], replace(members[1], speed=PeerSpeed(300.0))]
    better = planning.better(plan, slow, kept={"a": range(4), "b": range(4, 8)})
    assert better is not None
    assert better.stages[0] == PlannedStage("a", 0, 6, 600)
    assert planning.fits(members[0], range(6))
    assert not planning.fits(members[0], range(7))


def test_a_member_that_drifted_gets_fewer_layers_though_others_of_its_name_did_not() -> None:
    planning = FleetPlanning(SIZE, num_stages=2)
    members = [replace(info(peer_id), name="cpu") for peer_id in ("a", "b")]
    plan = planning.first(members)
    assert spans(plan.stages) == [("a", 0, 4), ("b", 4, 8)]
    # What differs by less than this between devices of one name is noise, where they say it of themselves.
    drifted = with_drifts(members, {"b": 2.1})
    better = planning.better(plan, drifted, kept={})
    assert better is not None
    assert [stop - start for peer, start, stop in spans(better.stages) if peer == "b"] == [2]
    # The same is known of it where a plan has to be made.
    assert planning.first(drifted).stages == better.stages
