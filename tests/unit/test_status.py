"""What a status board says, told as a coordinator tells it; and the bus, the rates and the group beneath."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import trio
import trio.testing

from neurogrid.errors import CapacityError
from neurogrid.fleet.board.fleet_board import SHOW_LOST
from neurogrid.fleet.board.status import Health, Phase, Role
from neurogrid.fleet.step_times import StepTimes
from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.inference.board.progress import Progress, ProgressTee
from neurogrid.inference.board.status_board import StatusBoard
from neurogrid.node.events import MAX_SUBSCRIBERS, MAX_UNREAD, EventBus, EventKind
from neurogrid.node.rates import RateWindow, TotalRate
from neurogrid.p2p.exchange.counters import Direction, TrafficCounters
from neurogrid.p2p.wire import MessageType
from neurogrid.planner import PeerSpeed, Plan, PlannedStage

GIB = 1024**3


@dataclass
class FakeMember:
    peer_id: str
    info: WorkerInfo
    layers: range = range(0)
    assigned: range = range(0)
    num_sessions: int = 0
    is_placing: bool = False
    is_leaving: bool = False
    is_resting: bool = False
    times: StepTimes = field(default_factory=StepTimes)


@dataclass
class FakeFleet:
    plan: Plan = field(default_factory=lambda: Plan(()))
    members: list[FakeMember] = field(default_factory=list)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def info(peer_id: str) -> WorkerInfo:
    return WorkerInfo(
        peer_id=peer_id,
        name=f"device of {peer_id}",
        free_bytes=6 * GIB,
        protocol_id="/neurogrid/tensor/1.1.0",
        memory_known=True,
        held_layers=(),
        speed=PeerSpeed(2e9, 1e-6),
        latency=0.002,
        total_bytes=8 * GIB,
        device_kind="cpu",
        flops=10**11,
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fleet() -> FakeFleet:
    members = [FakeMember(name, info(name)) for name in ("first", "second", "third")]
    plan = Plan((PlannedStage("first", 0, 4, GIB), PlannedStage("second", 4, 8, GIB)))
    return FakeFleet(plan, members)


@pytest.fixture
def counters() -> TrafficCounters:
    return TrafficCounters()


@pytest.fixture
def board(clock: Clock, fleet: FakeFleet, counters: TrafficCounters) -> StatusBoard:
    """A board whose cluster is ready: two stages, and a third worker with nothing."""
    board = StatusBoard(clock=clock, wall_clock=clock)
    board.listening("coordinator", ["/ip4/127.0.0.1/tcp/9000/p2p/coordinator"])
    board.model_read("toy", 8)
    board.waiting(3, 3)
    board.formed(fleet, counters)
    board.planned(fleet.plan, [member.info for member in fleet.members], 8)
    for member, layers in zip(fleet.members, (range(4), range(4, 8)), strict=False):
        member.layers = member.assigned = layers
    board.ready()
    return board


def test_it_begins_with_the_model() -> None:
    status = StatusBoard().status()
    assert (status.phase, status.peers, status.stages, status.model) == (Phase.READING, {}, (), "")
    json.dumps(status.to_json())


def test_waiting_says_for_how_many() -> None:
    board = StatusBoard()
    board.waiting(1, 2)
    status = board.status()
    assert (status.phase, status.workers_found, status.workers_wanted) == (Phase.WAITING, 1, 2)
    assert "1 of 2" in status.phase_text


def test_roles_stages_and_memory(board: StatusBoard, fleet: FakeFleet) -> None:
    status = board.status()
    assert [peer.role for peer in status.peers.values()] == [Role.STAGE, Role.STAGE, Role.SPARE]
    assert [stage.peer_id for stage in status.stages] == ["first", "second"]
    assert status.phase is Phase.READY
    first = status.peers["first"]
    assert (first.stage, first.layers_held, first.memory_used_bytes) == (1, range(4), 2 * GIB)
    assert (first.memory_stage_bytes, first.flops, first.read_bytes_per_second) == (GIB, 1e11, 2e9)
    assert status.loaded_layers == tuple(range(8))
    fleet.members[2].layers = fleet.members[2].assigned = range(4)
    status = board.status()
    assert status.peers["third"].role is Role.REPLICA
    assert status.stages[0].replicas == ("third",)


def test_who_keeps_steps_waiting_is_suspected_and_waited_for_where_nobody_else_is(
    board: StatusBoard, fleet: FakeFleet
) -> None:
    fleet.members[0].times.suspicion = "does not answer"
    status = board.status()
    assert [peer.health for peer in status.peers.values()][:2] == [Health.SUSPECTED, Health.READY]
    assert status.peers["first"].suspicion == "does not answer"
    assert status.phase_text == "waiting for …first, which does not answer"
    fleet.members[2].layers = range(4)  # who can take over
    status = board.status()
    assert (status.peers["first"].health, status.phase_text) == (Health.SUSPECTED, "")
    fleet.members[0].times.observe(1, 4, 0.1)
    assert board.status().peers["first"].health is Health.READY


def test_a_worker_that_says_anew_what_it_has(board: StatusBoard) -> None:
    board.described(replace(info("first"), free_bytes=GIB, latency=0.5))
    first = board.status().peers["first"]
    assert (first.memory_free_bytes, first.latency) == (GIB, 0.5)


def test_a_stage_tells_what_a_step_takes(board: StatusBoard, fleet: FakeFleet) -> None:
    first = board.status().peers["first"]
    assert (first.step_seconds, first.last_step_seconds) == (None, None)
    fleet.members[0].times.observe(100, 4, 9.0)  # a prompt is no step of decoding
    for seconds in (0.004, 0.008, 0.1):
        fleet.members[0].times.observe(1, 4, seconds)
    first = board.status().peers["first"]
    assert first.step_seconds == pytest.approx(0.008)
    assert first.last_step_seconds == pytest.approx(0.1)
    # With other layers, what it takes for one counts.
    fleet.members[0].layers = range(2)
    assert board.status().peers["first"].step_seconds == pytest.approx(0.004)


def test_a_transfer_has_a_rate_and_an_end(
    board: StatusBoard, fleet: FakeFleet, clock: Clock
) -> None:
    fleet.members[0].is_placing = True
    board.transfer_planned("first", 1000)
    board.already_held("first", 200)
    for _ in range(4):
        clock.now += 1.0
        board.transferred("first", 100)
    peer = board.status().peers["first"]
    assert peer.health is Health.RECEIVING
    assert peer.transfer is not None
    assert (peer.transfer.sent_bytes, peer.transfer.cached_bytes) == (400, 200)
    assert peer.transfer.bytes_per_second == pytest.approx(100, rel=0.3)
    assert peer.transfer.remaining_seconds == pytest.approx(4, rel=0.3)
    board.passed_on("first", 400)
    done = board.status().peers["first"].transfer
    assert done is not None
    assert (done.is_done, done.remaining_seconds, done.from_workers_bytes) == (True, 0.0, 400)


def test_a_better_plan_and_why_are_told_and_nobody_is_kept_waiting(
    board: StatusBoard, fleet: FakeFleet
) -> None:
    board.drifted("second", 3.14)
    board.improved(fleet.plan)
    board.drifted("second", 1.0)
    status = board.status()
    assert status.phase is Phase.READY
    drift, plan, end = status.events[-3:]
    assert (drift.kind, drift.severity, drift.peer_id) == ("drifted", "warning", "second")
    assert "second computes 3.1 times slower than it said" in drift.text
    assert (plan.kind, plan.severity) == ("planned", "good")
    assert "layers 0 to 3 on …first, layers 4 to 7 on …second" in plan.text
    assert (end.severity, end.text[-34:]) == ("good", " computes as fast as it said again")


def test_nobody_is_told_of_a_transfer_to_who_is_gone(board: StatusBoard) -> None:
    board.transferred("nobody", 5)
    board.already_held("nobody", 5)
    board.passed_on("nobody", 5)


def test_a_lost_stage_is_mended(board: StatusBoard, fleet: FakeFleet, clock: Clock) -> None:
    board.lost("second", range(4, 8), "its connection has ended")
    gone = fleet.members.pop(1)
    status = board.status()
    assert status.phase is Phase.MENDING
    assert status.peers["second"].health is Health.LOST
    assert status.peers["second"].stage == 2
    assert status.loaded_layers == (0, 1, 2, 3)
    assert status.failures[-1].recovered_at is None
    board.mending([range(4, 8)])
    clock.now += 3.0
    fleet.plan = Plan((fleet.plan.stages[0], PlannedStage("third", 4, 8, GIB)))
    fleet.members[1].layers = range(4, 8)
    board.mended(fleet.plan)
    status = board.status()
    failure = status.failures[-1]
    assert status.phase is Phase.READY
    assert (failure.at, failure.recovered_at) == (100.0, 103.0)
    assert "layers 4 to 7 on …third" in failure.action
    kinds = [event.kind for event in status.events[-3:]]
    assert kinds == [EventKind.WORKER_LOST, EventKind.MENDING, EventKind.MENDED]
    # It is shown for a while, and not for longer; who comes back is shown once.
    clock.now += SHOW_LOST
    assert "second" not in board.status().peers
    fleet.members.append(gone)
    board.joined(gone.info)
    assert board.status().peers["second"].health is Health.READY


def test_one_that_stood_by_takes_over_at_once(board: StatusBoard, fleet: FakeFleet) -> None:
    fleet.members[2].layers = range(4, 8)
    board.lost("second", range(4, 8), "killed")
    failure = board.status().failures[-1]
    assert failure.recovered_at == failure.at
    assert failure.action.startswith("…third stood by")


def test_losses_that_stop_nothing(board: StatusBoard) -> None:
    board.lost("third", range(0), "killed")
    assert "nothing to do" in board.status().failures[-1].action


def test_many_losses_take_bounded_memory(board: StatusBoard, fleet: FakeFleet) -> None:
    for number in range(200):
        fleet.members.append(FakeMember(f"peer{number}", info(f"peer{number}")))
        board.lost(f"peer{number}", range(0), "x" * 10_000)
        fleet.members.pop()
    status = board.status()
    assert len(status.failures) <= 32
    assert len(status.peers) <= 3 + 16
    assert all(len(event.text) <= 500 for event in status.events)


def test_a_generation_and_its_figures(board: StatusBoard, clock: Clock) -> None:
    board.generation_queued(1, 7)
    assert board.status().num_waiting == 1
    clock.now += 0.25
    board.generation_opened(1)
    assert (board.status().num_running, board.status().num_waiting) == (1, 0)
    clock.now += 0.25
    for _ in range(21):
        board.token_generated(1)
        clock.now += 0.1
    status = board.status()
    request = status.requests[-1]
    assert request.time_to_first_token == pytest.approx(0.5)
    assert request.waited_seconds == pytest.approx(0.25)
    assert request.tokens_per_second == pytest.approx(10)
    assert status.tokens_per_second == pytest.approx(10, rel=0.3)
    assert sum(status.tokens_history) >= 15  # the second that has not ended is left out
    board.generation_rerouted(1, "lost layers", 1.5)
    board.generation_ended(1, "")
    board.generation_queued(2, 3)
    board.generation_ended(2, "no route")
    status = board.status()
    assert (status.num_requests, status.num_failed, status.num_tokens) == (2, 1, 21)
    assert [request.error for request in status.requests] == ["", "no route"]
    assert status.requests[0].num_reroutes == 1
    clock.now += 60.0
    assert board.status().tokens_per_second == 0


def test_links_follow_the_counters(
    board: StatusBoard, counters: TrafficCounters, clock: Clock
) -> None:
    board.status()
    for _ in range(20):
        clock.now += 0.1
        counters.add(Direction.SENT, "first", MessageType.ACTIVATION, 500)
        counters.add(Direction.RECEIVED, "second", MessageType.RESPONSE, 600)
        counters.add(Direction.SENT, "third", MessageType.WEIGHTS, 1000)
        links = {(link.source, link.target): link for link in board.status().links}
    assert links["coordinator", "first"].bytes_per_second == pytest.approx(5000)
    assert links["coordinator", "first"].activations_per_second == pytest.approx(10)
    # It was not counted here: what went into the chain went on to the next.
    assert links["first", "second"].bytes_per_second == pytest.approx(5000)
    assert not links["first", "second"].is_counted
    assert links["second", "coordinator"].bytes_per_second == pytest.approx(6000)
    assert links["coordinator", "third"].weight_bytes_per_second == pytest.approx(10_000)
    assert links["coordinator", "second"].activations_per_second == 0


def test_a_stage_of_the_coordinator_itself(
    board: StatusBoard, fleet: FakeFleet, counters: TrafficCounters, clock: Clock
) -> None:
    fleet.members[0] = FakeMember("coordinator", info("coordinator"), range(4))
    fleet.plan = Plan((PlannedStage("coordinator", 0, 4, GIB), PlannedStage("second", 4, 8, GIB)))
    board.status()
    for _ in range(20):
        clock.now += 0.1
        counters.add(Direction.SENT, "second", MessageType.ACTIVATION, 500)
        counters.add(Direction.RECEIVED, "second", MessageType.RESPONSE, 600)
        status = board.status()
    links = {(link.source, link.target): link for link in status.links}
    assert len(links) == len(status.links)
    assert ("coordinator", "coordinator") not in links
    assert links["coordinator", "second"].bytes_per_second == pytest.approx(5000)
    assert links["second", "coordinator"].bytes_per_second == pytest.approx(6000)


def test_everything_is_json(board: StatusBoard, fleet: FakeFleet) -> None:
    board.transfer_planned("first", 10)
    board.lost("second", range(4, 8), "killed")
    fleet.members.pop(1)
    data: Any = json.loads(json.dumps(board.status().to_json()))
    assert data["peers"]["first"]["layers_held"] == {"start": 0, "stop": 4}
    assert data["phase"] == "mending"
    assert data["events"][-1]["kind"] == "worker_lost"


def test_a_group_tells_everybody_everything() -> None:
    told: list[tuple[str, str]] = []
    methods = [name for name in dir(Progress) if not name.startswith("_")]
    assert len(methods) > 15

    class Listener(Progress):
        def __init__(self, name: str) -> None:
            self.name = name

        def __getattribute__(self, name: str) -> Any:
            if name in methods:
                return lambda *args: told.append((self.name, name))
            return super().__getattribute__(name)

    group = ProgressTee(Listener("a"), Listener("b"))
    for name in methods:
        num_args = len(inspect.signature(getattr(Progress, name)).parameters) - 1
        getattr(group, name)(*range(num_args))
    assert told == [(listener, name) for name in methods for listener in ("a", "b")]


def test_a_slow_subscriber_is_told_what_it_missed() -> None:
    bus = EventBus()
    with bus.subscribe() as slow, bus.subscribe() as other:
        for number in range(MAX_UNREAD + 10):
            bus.publish(EventKind.WORKING, str(number))
        note, *events = slow.take()
        assert note.kind is EventKind.DROPPED
        assert "10 older events" in note.text
        assert [event.text for event in events] == [str(n) for n in range(10, MAX_UNREAD + 10)]
        assert slow.take() == []
        assert len(other.take()) == MAX_UNREAD + 1
    bus.publish(EventKind.READY, "nobody listens")
    assert bus.last[-1].text == "nobody listens"


def test_too_many_subscribers_are_refused() -> None:
    bus = EventBus()
    with bus.subscribe():
        subscriptions = [bus.subscribe() for _ in range(MAX_SUBSCRIBERS - 1)]
        for subscription in subscriptions:
            subscription.__enter__()
        with pytest.raises(CapacityError), bus.subscribe():
            pass
        for subscription in subscriptions:
            subscription.__exit__(None, None, None)
        with bus.subscribe():
            pass


def test_a_subscriber_waits() -> None:
    async def main() -> None:
        bus = EventBus()
        with bus.subscribe() as subscription:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(subscription.wait)
                await trio.testing.wait_all_tasks_blocked()
                bus.publish(EventKind.READY, "now")
            assert [event.text for event in subscription.take()] == ["now"]

    trio.run(main)


def test_a_window_counts_a_short_burst_by_its_own_length() -> None:
    window = RateWindow(seconds=5.0, bucket=0.5)
    for step in range(10):
        window.add(1000 + step * 0.1)
    assert window.rate(1001.0) == pytest.approx(10)
    assert window.rate(1004.0) < 4
    assert window.rate(1020.0) == 0
    assert sum(window.history(1003.0, 8)) * 0.5 == 10


def test_a_total_that_begins_anew_has_no_rate() -> None:
    rate = TotalRate(seconds=3.0)
    assert rate.update(0.0, 50) == 0
    assert rate.update(1.0, 150) == 100
    assert rate.update(2.0, 10) == 0


def test_machines_are_named_beside_their_peer_ids(board: StatusBoard, fleet: FakeFleet) -> None:
    known = [replace(member.info, machine="box", address="192.168.1.7") for member in fleet.members]
    for member, told in zip(fleet.members, known, strict=True):
        member.info = told
    board.planned(fleet.plan, known, 8)
    board.named("desk")
    board.joined(replace(info("fourth"), machine="cellar", address="192.168.1.9"))
    board.drifted("second", 3.0)
    board.lost("first", range(4), "it is silent")
    status = board.status()
    assert status.machine == "desk"
    second = status.peers["second"]
    assert (second.machine, second.address) == ("box", "192.168.1.7")
    assert status.peers["first"].machine == "box"  # also of one that is lost
    joined, drifted, lost = (event.text for event in status.events[-3:])
    assert joined.startswith("Worker cellar …fourth (192.168.1.9) joined: ")
    assert drifted.startswith("Worker box …second ")
    assert lost.startswith("Lost worker box …first (192.168.1.7) with layers 0 to 3: ")
    data = status.to_json()
    assert data["machine"] == "desk"
    assert '"machine": "box", "address": "192.168.1.7"' in json.dumps(data["peers"])
