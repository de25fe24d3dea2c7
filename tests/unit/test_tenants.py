"""Coordinators that share a worker: a whole one in memory with real models. Neither sees what is the other's, and its
memory is promised once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
import trio
import trio.testing
from worker_scene import DEADLINE, MAX_LENGTH, Model, Peer, Scene, make_model

from neurogrid.assembly.worker import Worker
from neurogrid.errors import NeuroGridError, PeerRefusedError
from neurogrid.node.torch_thread import TorchThread
from neurogrid.p2p import PROTOCOL_V10, PROTOCOL_V11, Protocol
from neurogrid.p2p.exchange.routes import sign_route
from neurogrid.p2p.memory import open_memory_network
from neurogrid.p2p.transfer import send_blob
from neurogrid.p2p.wire import (
    Assign,
    ErrorCode,
    GPUInfo,
    LayerIds,
    MessageType,
    Route,
    SessionClose,
    SessionOpen,
    SessionQuery,
    TensorMessage,
    serialize_config,
)
from neurogrid.worker.claim import Claim
from neurogrid.worker.held_model import HeldLayer
from neurogrid.worker.room import UNUSED_SECONDS
from neurogrid.worker.settings import WorkerSettings
from neurogrid.worker.state import MAX_TENANTS, WorkerState
from neurogrid.worker.tenant import Tenant

IDLE_AFTER = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def mock_clock() -> trio.testing.MockClock:
    """A clock that stands still but for the test: threads take the time that they take."""
    return trio.testing.MockClock()


class Shared(Scene):
    """A worker, hosts that are connected to it, and its state."""

    state: WorkerState

    def needed(self, num_sessions: int = 4) -> int:
        """Bytes of the assignment that `Peer.bring` makes, or of one for so many sessions."""
        held = self.state.models[0]
        return held.needed_bytes(0, 1, num_tokens=MAX_LENGTH, num_sessions=num_sessions)


@asynccontextmanager
async def shared(**settings: object) -> AsyncIterator[Shared]:
    chosen = WorkerSettings(**{"idle_after": IDLE_AFTER, **settings})  # type: ignore[arg-type]
    with trio.fail_after(10 * DEADLINE), TorchThread() as torch_thread:
        async with AsyncExitStack() as stack:
            network = await stack.enter_async_context(open_memory_network())
            host = await stack.enter_async_context(network.open_host())
            versions = (PROTOCOL_V11, PROTOCOL_V10)
            protocol = Protocol(host, role="worker", versions=versions)
            state = WorkerState(chosen, protocol, torch.device("cpu"), torch_thread)
            Worker(state, protocol, name="test", machine="test").start()
            scene = Shared(network, protocol, stack)
            scene.state = state
            yield scene


async def memory_of(peer: Peer) -> GPUInfo:
    reply = await peer.ask(MessageType.GPU_INFO_REQUEST, b"", MessageType.GPU_INFO)
    return GPUInfo.decode(reply.data)


async def free_for(peer: Peer) -> int:
    info = await memory_of(peer)
    return info.total_bytes - info.used_bytes


async def configure(peer: Peer, model: Model) -> None:
    await peer.ask(MessageType.MODEL_CONFIG, serialize_config(model[0]), MessageType.CONFIG_ACK)


async def assign(peer: Peer, num_sessions: int = 4, stop: int = 1) -> None:
    wanted = Assign(0, stop, MAX_LENGTH, num_sessions, "F32")
    await peer.ask(MessageType.ASSIGN, wanted, MessageType.ASSIGN_ACK)


def other_model(model: Model) -> Model:
    """The same layers, of another config."""
    config = replace(
        model[0],
        model_name="other",
        checkpoint_config={**(model[0].checkpoint_config or {}), "rms_norm_eps": 1e-5},
    )
    return config, model[1]


async def test_sessions_of_two_coordinators_are_not_each_others(model: Model) -> None:
    async with shared() as scene:
        ann, bob = await scene.peer(), await scene.peer()
        await ann.bring(model)
        await bob.bring(other_model(model))
        for peer in (ann, bob):
            await peer.open_session(7)  # the same id
        theirs = await ann.extend(7, 3)
        await bob.extend(7, 5)
        assert (await ann.length_of(7), await bob.length_of(7)) == (3, 5)
        # What only one has, the other cannot query, extend, begin with or close.
        await ann.open_session(8)
        await ann.extend(8, 2)
        assert await bob.refused(MessageType.SESSION_QUERY, SessionQuery(8)) is (
            ErrorCode.SESSION_UNKNOWN
        )
        with pytest.raises(PeerRefusedError) as refused:
            await bob.extend(8, 1, position=2)
        assert refused.value.code == ErrorCode.UNAUTHORIZED
        prior = SessionOpen(9, 0, 1, MAX_LENGTH, prior=8, prior_length=2)
        assert await bob.refused(MessageType.SESSION_OPEN, prior) is ErrorCode.SESSION_UNKNOWN
        for session_id in (8, 10):
            await bob.ask(
                MessageType.SESSION_CLOSE, SessionClose(session_id), MessageType.SESSION_ACK
            )
        assert await ann.length_of(8) == 2
        await ann.open_session(10)  # closed by another, it may still be opened
        # One ends, and begins anew: the other goes on.
        await configure(bob, model)
        assert await ann.length_of(7) == 3
        again = await ann.extend(7, 3, position=3)
        assert theirs.envelope is not None
        assert again.envelope is not None
        assert await bob.refused(MessageType.SESSION_QUERY, SessionQuery(7)) is (
            ErrorCode.SESSION_UNKNOWN
        )


async def test_what_one_is_told_of_another(model: Model) -> None:
    """Layers in memory are its own; who never came is told of those that are kept."""
    async with shared() as scene:
        ann, bob = await scene.peer(), await scene.peer()
        await ann.bring(model)
        await configure(bob, model)
        held = await bob.ask(
            MessageType.LAYER_REQUEST, LayerIds(()).encode(), MessageType.LAYER_STATUS
        )
        assert LayerIds.decode(held.data).ids == ()
        await ann.protocol.host.disconnect(ann.worker_id)
        while scene.state.tenants.keys() != {bob.protocol.host.peer_id}:
            await trio.sleep(0.01)
        stranger = await scene.peer()
        held = await stranger.ask(
            MessageType.LAYER_REQUEST, LayerIds(()).encode(), MessageType.LAYER_STATUS
        )
        assert LayerIds.decode(held.data).ids == (0,)


async def test_memory_is_promised_once(model: Model) -> None:
    async with shared(memory_limit=10**9) as scene:
        ann, bob = await scene.peer(), await scene.peer()
        await ann.bring(model)
        needed = scene.needed()
    async with shared(memory_limit=2 * needed - 1) as scene:
        ann, bob = await scene.peer(), await scene.peer()
        for peer in (ann, bob):
            await configure(peer, model)
            assert await free_for(peer) == 2 * needed - 1  # both plan with all of it
        results: list[str] = []
        codes: list[tuple[int, bool]] = []

        async def ask(peer: Peer) -> None:
            try:
                await assign(peer)
                results.append("")
            except PeerRefusedError as exc:
                results.append(exc.text)
                codes.append((exc.code, bool(exc.retry_after)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, ann)
            nursery.start_soon(ask, bob)
        assert codes == [(ErrorCode.OUT_OF_MEMORY, True)]
        refused = max(results)
        assert sorted(results) == ["", refused]
        assert f"{needed:,} B are needed for layer 0 with 4 sessions of {MAX_LENGTH}" in refused
        assert f"this worker has {needed - 1:,} B" in refused
        assert f"1 other coordinator holds {needed:,} B of its {2 * needed - 1:,} B" in refused

        loser = ann if await free_for(ann) == needed - 1 else bob
        assert await free_for(loser) == needed - 1
        await assign(loser, num_sessions=1)  # it plans with less
        assert scene.state.room.promised_bytes <= 2 * needed - 1


async def test_who_is_idle_gives_way_and_is_told(
    model: Model,
    mock_clock: trio.testing.MockClock,
) -> None:
    async with shared(memory_limit=10**9) as scene:
        await (await scene.peer()).bring(model)
        needed = scene.needed()
    async with shared(memory_limit=needed + 1000) as scene:
        ann, bob = await scene.peer(), await scene.peer()
        await ann.bring(model)
        await ann.open_session(7)
        await ann.extend(7, 2)
        await configure(bob, other_model(model))
        with pytest.raises(PeerRefusedError, match="gives way in 60 s if it stays idle"):
            await assign(bob)
        mock_clock.jump(IDLE_AFTER + 1)
        assert await free_for(bob) == needed + 1000
        announced: list[TensorMessage] = []
        ann.protocol.on_message(MessageType.GPU_INFO, announced.append)
        await assign(bob)
        assert scene.state.num_given_way == 1
        assert [len(held.held) for held in scene.state.models] == [0, 0]
        with pytest.raises(PeerRefusedError) as refused:
            await ann.extend(7, 1, position=2)
        assert refused.value.code == ErrorCode.SESSION_UNKNOWN
        with pytest.raises(PeerRefusedError, match="another coordinator has its memory") as refused:
            await ann.open_session(8)
        assert refused.value.code == ErrorCode.LAYER_NOT_HELD
        (message,) = announced
        info = GPUInfo.decode(message.data)
        assert (message.request_id, info.total_bytes - info.used_bytes) == (0, 1000)
        # Who got it has its layers to come, and is safe; once they are here and nobody asks for anything, not for long.
        mock_clock.jump(IDLE_AFTER + 1)
        with pytest.raises(PeerRefusedError, match="1 other coordinator holds"):
            await assign(ann)
        await send_blob(bob.protocol, bob.worker_id, model[1], layer_id=0)
        promise = dict(scene.state.room)[bob.protocol.host.peer_id]
        while promise.safe_until > trio.current_time() + UNUSED_SECONDS:
            await trio.lowlevel.checkpoint()  # Ready comes after the last layer's acknowledgement
        with pytest.raises(PeerRefusedError, match=f"in {UNUSED_SECONDS:.0f} s if it stays idle"):
            await assign(ann)
        mock_clock.jump(UNUSED_SECONDS + 1)
        await assign(ann)
        await send_blob(ann.protocol, ann.worker_id, model[1], layer_id=0)
        await ann.open_session(8)
        await ann.extend(8, 2)


async def test_an_assignment_of_a_connection_that_has_ended_is_none_of_the_next(
    model: Model,
) -> None:
    """It waited for its turn meanwhile, as behind a layer that is loaded."""
    async with shared() as scene:
        ann = await scene.peer()
        own_id = ann.protocol.host.peer_id
        await configure(ann, model)
        before = scene.state.tenants[own_id]
        async with before.lock:
            late = Assign(0, 1, MAX_LENGTH, 4, "F32").encode()
            await ann.protocol.send(
                ann.worker_id, TensorMessage(MessageType.ASSIGN, request_id=1, data=late)
            )
            while not before.lock.statistics().tasks_waiting:
                await trio.sleep(0.01)
            await ann.protocol.host.disconnect(ann.worker_id)
            while own_id in scene.state.tenants or ann.protocol.hello_of(ann.worker_id):
                await trio.sleep(0.01)
            await ann.protocol.host.connect(scene.worker.host.addresses[0])
            await configure(ann, model)
            await assign(ann, num_sessions=3)
        while before.lock.locked():
            await trio.sleep(0.01)
        now = scene.state.tenants[own_id]
        assert now is not before
        assert now.assignment is not None
        assert now.assignment.max_sessions == 3
        assert scene.state.room.promised(own_id) == scene.needed(3)


class HeldBytes:
    """A model whose layers are so many bytes each, as memory is counted."""

    def __init__(self, *layers: int) -> None:
        self.held = {number: HeldLayer(b"", is_own=False) for number in range(len(layers))}
        self._layers = layers

    @property
    def held_bytes(self) -> int:
        return sum(self._layers[number] for number in self.held)

    def keep_only(self, start: int, stop: int) -> None:
        self.held = {number: self.held[number] for number in self.held if start <= number < stop}


class SlowThread:
    """A torch thread that computes for others first."""

    async def run(self, call: Callable[[], object]) -> object:
        await trio.sleep(1)
        return call()


def test_layers_that_are_assigned_again_meanwhile_are_not_dropped_for_another() -> None:
    """Ann's assignment takes what nobody was promised: a model that is kept, and Bob's, who comes back for a part."""

    async def main() -> None:
        state = WorkerState(
            WorkerSettings(memory_limit=100),
            cast(Any, None),
            torch.device("cpu"),
            cast(Any, SlowThread()),
        )
        kept, its = HeldBytes(30), HeldBytes(10, 50)
        ann = Tenant(Claim("ann", is_shared=True))
        bob = Tenant(Claim("bob", is_shared=True), model=cast(Any, its))
        state.kept = [cast(Any, kept)]
        state.tenants = {"ann": ann, "bob": bob}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(state.promise, ann, 90, keeps_beside=False, purpose=""))
            await trio.sleep(0.5)  # what was kept is dropped
            await state.promise(bob, 10, keeps_beside=False, purpose="")
            await state.run_torch(its.keep_only, 0, 1)
        assert not kept.held
        assert set(its.held) == {0}

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_ids_that_could_not_be_told_apart_on_the_way_are_refused(model: Model) -> None:
    """Of sessions that a third worker hands on to this one, or that this one hands on, the id is all that is said."""
    async with shared() as scene:
        ann, eve = await scene.peer(), await scene.peer()
        before, behind = await scene.peer(), await scene.peer()
        for peer in (ann, eve):
            await peer.bring(model)

        def routed(peer: Peer, session_id: int, *workers: str) -> SessionOpen:
            """A layer each; this worker has that of its place."""
            route = Route(session_id, 4_000_000_000, workers, (0, 1, 2))
            start = workers.index(peer.worker_id)
            signed = sign_route(route, peer.protocol.host.identity)
            return SessionOpen(session_id, start, start + 1, MAX_LENGTH, route=signed)

        def from_before(peer: Peer, session_id: int) -> SessionOpen:
            return routed(peer, session_id, before.protocol.host.peer_id, peer.worker_id)

        def to_behind(peer: Peer, session_id: int) -> SessionOpen:
            return routed(peer, session_id, peer.worker_id, behind.protocol.host.peer_id)

        for peer in (ann, eve):
            await assign(peer, stop=2)
            for layer_id in (0, 1):
                blob = model[1].replace(b"model.layers.0.", f"model.layers.{layer_id}.".encode())
                await send_blob(peer.protocol, peer.worker_id, blob, layer_id=layer_id)
        await ann.ask(MessageType.SESSION_OPEN, from_before(ann, 7), MessageType.SESSION_ACK)
        assert await eve.refused(MessageType.SESSION_OPEN, from_before(eve, 7)) is (
            ErrorCode.PROTOCOL_VIOLATION
        )
        await eve.ask(MessageType.SESSION_OPEN, from_before(eve, 8), MessageType.SESSION_ACK)
        await behind.protocol.open(behind.worker_id)
        await ann.ask(MessageType.SESSION_OPEN, to_behind(ann, 9), MessageType.SESSION_ACK)
        assert await eve.refused(MessageType.SESSION_OPEN, to_behind(eve, 9)) is (
            ErrorCode.PROTOCOL_VIOLATION
        )
        await eve.open_session(9)  # whose results come back to itself
        await ann.ask(MessageType.SESSION_CLOSE, SessionClose(9), MessageType.SESSION_ACK)
        await eve.ask(MessageType.SESSION_CLOSE, SessionClose(9), MessageType.SESSION_ACK)


async def test_there_are_only_so_many(model: Model) -> None:
    async with shared() as scene:
        peers = [await scene.peer() for _ in range(MAX_TENANTS + 1)]
        for peer in peers[:-1]:
            await configure(peer, model)
        with pytest.raises(PeerRefusedError, match="serves 8 coordinators already") as refused:
            await configure(peers[-1], model)
        assert refused.value.code == ErrorCode.BUSY
        await peers[0].protocol.host.disconnect(peers[0].worker_id)
        while len(scene.state.tenants) == MAX_TENANTS:
            await trio.sleep(0.01)
        await configure(peers[-1], model)


async def test_a_peer_of_1_0_0_shares_with_nobody(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    """It agrees on no memory: it waits for the others to go, and they for it."""
    async with shared() as scene:
        bob = await scene.peer()
        older = await scene.peer(versions=(PROTOCOL_V10,))
        config = TensorMessage(MessageType.MODEL_CONFIG, data=serialize_config(model[0]))
        await configure(bob, model)
        with suppress(NeuroGridError):  # its stream is reset
            await older.protocol.send(older.worker_id, config)
        while "one of the two does not share it" not in caplog.text:
            await trio.sleep(0.01)
        assert scene.state.tenants.keys() == {bob.protocol.host.peer_id}
        await bob.protocol.host.disconnect(bob.worker_id)
        while scene.state.tenants:
            await trio.sleep(0.01)
        await older.protocol.send(older.worker_id, config)
        while scene.state.tenants.keys() != {older.protocol.host.peer_id}:
            await trio.sleep(0.01)
        eve = await scene.peer()
        with pytest.raises(PeerRefusedError, match="one of the two does not share it") as refused:
            await configure(eve, model)
        assert refused.value.code == ErrorCode.BUSY
        assert await eve.refused(MessageType.SESSION_OPEN, SessionOpen(7, 0, 1, MAX_LENGTH)) is (
            ErrorCode.BUSY
        )
