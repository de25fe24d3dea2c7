"""Whatever a worker does at whichever moment, its coordinator goes on, and uses it once it behaves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, cast
from unittest.mock import patch

import pytest
import trio
import trio.testing

from neurogrid import errors
from neurogrid.errors import NeuroGridError, StreamBrokenError
from neurogrid.fleet.placing.fleet import Fleet
from neurogrid.fleet.placing.fleet_plan import FleetPlanning
from neurogrid.fleet.placing.memory_watch import watch_workers
from neurogrid.fleet.placing.placer import Placer
from neurogrid.fleet.remote_worker import Placement, RemoteWorker, Timeouts, TransferReports
from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.fleet.worker_questions import describe_workers
from neurogrid.inference.board.progress import Progress
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.inference.pipeline.remote_v10 import RemoteWorkerV10
from neurogrid.inference.pipeline.selection import Selector
from neurogrid.inference.pipeline.session_trials import SessionTrials
from neurogrid.model.embedded import embedded_model_path
from neurogrid.p2p.trust import NotAdmittedError, Refusal, RefusedError
from neurogrid.p2p.wire import PROTOCOL_V10, ErrorCode, GPUInfo

GIB = 1024**3
# Two descriptions, two configs, eight layers, as much again for what failed, and questions for memory beside.
NUM_CALLS = 20
# Of trio's clock, which does not wait: longer than every pause and deadline on the way.
LONG = 600.0
# What our own code raises for its own reasons, never for what a worker or the network does.
NOT_OF_WORKERS = {
    errors.RequestRefusedError,  # what we answer
    errors.CapacityError,
    errors.NoRouteError,
    errors.ModelError,  # of the coordinator's own files: has tests of its own
    errors.CheckpointError,
    errors.UnsupportedModelError,
    errors.NotFiniteError,  # of averaging, which serving has no part in
    NeuroGridError,
}


def error_of(kind: type[NeuroGridError]) -> NeuroGridError:
    if kind is NotAdmittedError:
        return NotAdmittedError("worker", Refusal.NOT_SPOKEN, "not spoken", refused_by_peer=False)
    if kind is RefusedError:
        return RefusedError(Refusal.TIMED_OUT, "it took too long")
    if issubclass(kind, errors.PeerRefusedError):
        return kind("refused", code=ErrorCode.BUSY, text="busy")
    return kind("it fails")


def kinds(root: type[NeuroGridError] = NeuroGridError) -> Iterator[type[NeuroGridError]]:
    """Every class of error that a worker can bring about."""
    if root not in NOT_OF_WORKERS and root.__module__ in (
        "neurogrid.errors",
        "neurogrid.p2p.trust.refusal",
    ):
        yield root
    for kind in root.__subclasses__():
        yield from kinds(kind)


class Script:
    """Calls are counted; the one of a number fails, with an error, and may cost the connection."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.fleet: Fleet | None = None
        self.connected: dict[str, RemoteWorker] = {}
        self._failures: dict[int, tuple[NeuroGridError, bool]] = {}

    def fail(self, failures: dict[int, tuple[NeuroGridError, bool]]) -> None:
        """From now on calls are counted, and these fail, with an error; some at the end of the connection."""
        self.num_calls, self._failures = 0, failures

    async def call(self, peer_id: str) -> None:
        await trio.sleep(0.01)
        self.num_calls += 1
        if self.num_calls in self._failures:
            error, is_cut = self._failures[self.num_calls]
            if is_cut:
                self.cut(peer_id)
            raise error

    async def ask(self, peer_id: str) -> None:
        """A call that takes a connection."""
        await self.call(peer_id)
        if peer_id not in self.connected:
            raise StreamBrokenError("the connection is gone")

    def cut(self, peer_id: str) -> None:
        assert self.fleet is not None
        if self.connected.pop(peer_id, None) is not None:
            self.fleet.lost(peer_id, "its connection has ended")

    def join(self, peer_id: str) -> None:
        assert self.fleet is not None
        if peer_id not in self.connected:
            self.connected[peer_id] = worker = ScriptedWorker(self, peer_id)
            self.fleet.join(worker)


class ScriptedHost:
    """What a placer asks of its host."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def addresses_of(self, peer_id: str) -> tuple[str, ...]:
        return (f"/memory/1/p2p/{peer_id}",)

    def is_connected(self, peer_id: str) -> bool:
        return peer_id in self._script.connected

    async def connect_any(self, addresses: Sequence[str]) -> str:
        peer_id = addresses[0].rpartition("/")[2]
        await self._script.call(peer_id)
        self._script.join(peer_id)
        return peer_id


class ScriptedWorker(RemoteWorkerV10):
    """A worker without sessions that does what it is asked, but for what the script says."""

    def __init__(self, script: Script, peer_id: str) -> None:
        super().__init__(cast(Any, None), peer_id, Timeouts())
        self._script = script

    @property
    def shown(self) -> str:
        return f"{self.peer_id} (192.0.2.1)"

    async def describe(self, *, assumed_bytes: int) -> WorkerInfo:
        await self._script.ask(self.peer_id)
        return WorkerInfo(self.peer_id, "a device", GIB, PROTOCOL_V10, True, ())

    async def memory(self) -> GPUInfo:
        await self._script.ask(self.peer_id)
        return GPUInfo(name="a device", total_bytes=GIB, used_bytes=0)

    async def configure(self, config: object) -> None:
        await self._script.ask(self.peer_id)

    async def place(self, placement: Placement, reports: TransferReports) -> None:
        for blob in placement.blobs.values():
            await self._script.ask(self.peer_id)
            reports.sent(blob.num_bytes)


@cache
def model() -> LoadedModel:
    return LoadedModel.load(embedded_model_path(), name=None, max_seq_len=64, dtype="float32")


def fleet_of(script: Script, *, num_stages: int) -> Fleet:
    loaded = model()
    placer = Placer(
        loaded,
        cast(Any, ScriptedHost(script)),
        None,
        max_sessions=1,
        skip_weight_transfer=False,
    )
    return Fleet(
        FleetPlanning(loaded.size(num_sessions=1), num_stages=num_stages),
        placer,
        partial(describe_workers, model=loaded, assumed_bytes=GIB),
        SessionTrials(loaded.ends.hidden_size, loaded.dtype, loaded.max_seq_len),
        Progress(),
        script.cut,
    )


async def in_place(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What `trio.to_thread.run_sync` does, without a thread: a clock that jumps does not wait for one."""
    await trio.lowlevel.checkpoint()
    return call(*args)


def run(script: Script, test: Callable[[Fleet], Awaitable[None]]) -> None:
    """A fleet of two workers that is ready, and mended while `test` runs."""

    async def main() -> None:
        fleet = fleet_of(script, num_stages=2)
        script.fleet = fleet
        script.connected = {name: ScriptedWorker(script, name) for name in ("one", "two")}
        await fleet.enlist(list(script.connected.values()))
        await fleet.start()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.mend)
            nursery.start_soon(watch_workers, fleet, Progress())
            await test(fleet)
            nursery.cancel_scope.cancel()

    with patch.object(trio.to_thread, "run_sync", in_place):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("when", ["connected", "at its end", "after it"])
def test_no_failure_of_a_worker_ends_its_coordinator(kind: type[NeuroGridError], when: str) -> None:
    """Both are lost at once and come back, and one of their calls fails: each of them, one after the other.

    It fails on a connection that stays or ends with it, or is the first one after a connection was lost.
    """
    for at in range(1, NUM_CALLS + 1):
        script = Script()

        async def test(fleet: Fleet, script: Script = script, at: int = at) -> None:
            cut = {at: (StreamBrokenError("lost"), True)}
            failures = {at: (error_of(kind), when == "at its end")}
            script.fail(
                {**cut, at + 1: (error_of(kind), False)} if when == "after it" else failures
            )
            for peer_id in ("one", "two"):
                script.cut(peer_id)
            selector = Selector(fleet)
            assert selector.why_not_ready is not None
            with trio.fail_after(LONG):
                while script.num_calls < at or selector.why_not_ready or len(fleet.holdings) < 2:
                    for peer_id in ("one", "two"):  # they keep dialling, as workers do
                        script.join(peer_id)
                    await trio.sleep(1)

        run(script, test)


def test_a_worker_that_came_back_is_left_alone_for_what_failed_before() -> None:
    """A step that failed on the connection before is told when the worker has another."""
    script = Script()

    async def test(fleet: Fleet) -> None:
        selector = Selector(fleet)
        selection = await selector.select(timeout=LONG)
        error = errors.NoRouteError("silent", layers=(0,), peer_id="one")
        error.__cause__ = StreamBrokenError("no answer")
        assert selector.failed(error, selection)
        assert "one" not in script.connected
        script.join("one")
        with trio.fail_after(LONG):
            while fleet.member("one") is None:
                await fleet.change.wait()
        member = fleet.member("one")
        assert selector.failed(error, selection)
        assert fleet.member("one") is member
        assert "one" in script.connected

    run(script, test)


class CutWorker(ScriptedWorker):
    """One whose connection breaks while it gets its layers, and comes back at once.

    Attributes:
        refuses: what it then says to the layers, once.
    """

    refuses: NeuroGridError | None = None
    num_placed = 0

    async def place(self, placement: Placement, reports: TransferReports) -> None:
        self.num_placed += 1
        if self.num_placed == 1:
            self._script.cut(self.peer_id)
            raise StreamBrokenError("lost")
        refusal, self.refuses = self.refuses, None
        if refusal is not None:
            raise refusal
        await super().place(placement, reports)


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_worker_that_was_cut_off_while_it_got_its_layers_goes_on_as_it_was(
    is_refused: bool,
) -> None:
    """It is here again, and dials nobody any more: it is a member still, also where it does not take its layers yet."""
    script = Script()

    async def main() -> None:
        fleet = fleet_of(script, num_stages=2)
        script.fleet = fleet
        cut = CutWorker(script, "one")
        script.connected = {"one": cut, "two": ScriptedWorker(script, "two")}
        await fleet.enlist(list(script.connected.values()))
        async with trio.open_nursery() as nursery:
            if is_refused:
                cut.num_placed = 1  # the first time goes well
                await fleet.start()
                cut.num_placed, cut.refuses = 0, error_of(errors.PeerRefusedError)
                member = fleet.member("one")
                assert member is not None
                fleet.forget_placement(member)
            else:
                await fleet.start()
            member = fleet.member("one")
            nursery.start_soon(fleet.mend)
            selector = Selector(fleet)
            with trio.move_on_after(LONG):
                await trio.sleep(60)
                while selector.why_not_ready:
                    await trio.sleep(1)
            assert selector.why_not_ready is None
            assert fleet.member("one") is member
            assert cut.num_placed == 2 + is_refused
            nursery.cancel_scope.cancel()

    with patch.object(trio.to_thread, "run_sync", in_place):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


class FleetingWorker(ScriptedWorker):
    """One whose connection is another by the time that it has said what it has."""

    async def describe(self, *, assumed_bytes: int) -> WorkerInfo:
        info = await super().describe(assumed_bytes=assumed_bytes)
        self._script.cut(self.peer_id)
        self._script.join(self.peer_id)
        return info


def test_a_worker_that_comes_back_while_it_is_welcomed_is_not_forgotten() -> None:
    script = Script()

    async def test(fleet: Fleet) -> None:
        script.connected["three"] = worker = FleetingWorker(script, "three")
        fleet.join(worker)
        with trio.move_on_after(LONG):
            while fleet.member("three") is None:
                await trio.sleep(1)
        member = fleet.member("three")
        assert member is not None
        assert member.worker is script.connected["three"]

    run(script, test)


class OddWorker(ScriptedWorker):
    """One that says nothing, or nonsense, of what it has."""

    def __init__(self, script: Script, peer_id: str, error: NeuroGridError | None) -> None:
        super().__init__(script, peer_id)
        self._error = error

    async def describe(self, *, assumed_bytes: int) -> WorkerInfo:
        if self._error is not None:
            raise self._error
        await trio.sleep_forever()


@pytest.mark.parametrize(
    "error", [None, errors.RemoteProtocolError("GPUInfo: more is used than there is")]
)
@pytest.mark.parametrize(("num_stages", "starts"), [(1, True), (2, False)])
def test_one_odd_worker_is_named_and_left_out_at_the_start(
    caplog: pytest.LogCaptureFixture, error: NeuroGridError | None, num_stages: int, starts: bool
) -> None:
    script = Script()

    async def main() -> None:
        loaded = model()
        fleet = fleet_of(script, num_stages=num_stages)
        good, odd = ScriptedWorker(script, "good"), OddWorker(script, "odd", error)
        script.connected = {"good": good}
        if not starts:
            with pytest.raises(errors.NoRouteError, match="1 of 2 workers said what they have"):
                await fleet.enlist([odd, good])
            return
        await fleet.enlist([odd, good])
        assert list(fleet.infos) == ["good"]
        assert fleet.plan.stages[0].stop == len(loaded.costs)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("worker odd (192.0.2.1) did not describe itself: ")
    assert warning.endswith("; it is left out")
    assert ("more than 30 s" if error is None else "GPUInfo") in warning


def test_a_start_fails_where_no_worker_says_what_it_has() -> None:
    script = Script()

    async def main() -> None:
        odd = OddWorker(script, "odd", None)
        with pytest.raises(errors.NoRouteError, match=r"worker odd .* more than 30 s"):
            await fleet_of(script, num_stages=1).enlist([odd])

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


class SharedWorker(ScriptedWorker):
    """One whose memory others use by the time that it is to hold something."""

    free = 0

    async def memory(self) -> GPUInfo:
        await self._script.ask(self.peer_id)
        return GPUInfo(name="a device", total_bytes=GIB, used_bytes=GIB - self.free)

    async def place(self, placement: Placement, reports: TransferReports) -> None:
        if not self.free:
            text = "others hold it"
            raise errors.PeerRefusedError(text, code=ErrorCode.OUT_OF_MEMORY, text=text)
        await super().place(placement, reports)


def test_a_worker_whose_memory_others_got_meanwhile_is_planned_with_as_it_is_now() -> None:
    script = Script()

    async def main() -> None:
        fleet = fleet_of(script, num_stages=1)
        script.fleet = fleet
        workers = {name: SharedWorker(script, name) for name in ("one", "two")}
        script.connected = dict(workers)
        await fleet.enlist(list(workers.values()))
        ((chosen, other),) = [
            (stage.peer_id, (workers.keys() - {stage.peer_id}).pop()) for stage in fleet.plan.stages
        ]
        workers[other].free = GIB
        await fleet.start()
        assert [stage.peer_id for stage in fleet.plan.stages] == [other]
        member = fleet.member(chosen)
        assert member is not None  # its connection stays, and it may have room again
        assert member.is_short
        assert member.info.free_bytes == 0

    with patch.object(trio.to_thread, "run_sync", in_place):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_start_says_what_the_worker_said_where_there_is_no_room_at_all() -> None:
    script = Script()

    async def main() -> None:
        fleet = fleet_of(script, num_stages=1)
        script.fleet = fleet
        shared = SharedWorker(script, "shared")
        script.connected = {"shared": shared}
        await fleet.enlist([shared])
        with pytest.raises(errors.NoRouteError, match=r"did not get ready .* others hold it"):
            await fleet.start()

    with patch.object(trio.to_thread, "run_sync", in_place):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_layers_that_gave_way_are_placed_again_once_there_is_room() -> None:
    script = Script()

    async def main() -> None:
        fleet = fleet_of(script, num_stages=1)
        script.fleet = fleet
        shared = SharedWorker(script, "shared")
        shared.free = GIB
        script.connected = {"shared": shared}
        await fleet.enlist([shared])
        await fleet.start()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.mend)
            selector = Selector(fleet)
            selection = await selector.select(timeout=1)
            # Another one got its memory: that alone moves nothing, the next session does.
            shared.free = 0
            fleet.said_memory("shared", GPUInfo(name="", total_bytes=GIB, used_bytes=GIB))
            await trio.sleep(100)
            assert selector.why_not_ready is None
            refused = errors.NoRouteError("no", layers=(0,), peer_id="shared")
            text = "others have it"
            refused.__cause__ = errors.PeerRefusedError(
                text, code=ErrorCode.LAYER_NOT_HELD, text=text
            )
            assert selector.failed(refused, selection)
            with pytest.raises(errors.NoRouteError, match="no worker was ready"):
                await selector.select(timeout=30)
            shared.free = GIB
            await selector.select(timeout=10)
            await trio.sleep(1)
            assert not cast(Any, fleet.member("shared")).is_short
            nursery.cancel_scope.cancel()

    with patch.object(trio.to_thread, "run_sync", in_place):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
