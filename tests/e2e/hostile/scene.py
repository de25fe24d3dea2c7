"""The stage of every test here: a victim that serves, an honest peer that asks it, a hostile peer with raw streams.

All three are hosts of this process: on loopback, or where it is about 1.0.0 in memory, where no silence takes time;
what 1.0.0 is over TCP, the peers in other languages show (tests/e2e/interop). After the hostile peer has done its
worst, `run` lets go of it, asks once more on behalf of the honest one, and looks whether anything of the hostile one
is left in the victim's tables.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from neurogrid.p2p import (
    PROTOCOL_V10,
    PROTOCOL_V11,
    Host,
    Protocol,
    TensorMessage,
    open_host,
)
from neurogrid.p2p.memory import open_memory_network
from neurogrid.p2p.streams.bounds import DEFAULT_BOUNDS, Bounds
from neurogrid.p2p.wire import DEFAULT_LIMITS, Limits
from tests.e2e.hostile.raw_peer import RawPeer

__all__ = [
    "DEADLINE",
    "GATED_LAYER",
    "VERSIONS",
    "Scene",
    "clock_of",
    "hosts_of",
    "leftovers",
    "run",
    "settled",
    "until",
]

# For what takes a second on an idle machine: machines are shared, and slow at times.
DEADLINE = 60.0
VERSIONS = [PROTOCOL_V11, PROTOCOL_V10]
# Activations of this layer are answered when the scene's gate is opened.
GATED_LAYER = 99


@dataclass
class Scene:
    """Who is there. `hostile` is connected to the victim, and so is `honest`."""

    victim: Protocol
    honest: Protocol
    hostile: RawPeer
    gate: trio.Event = field(default_factory=trio.Event)
    served: list[TensorMessage] = field(default_factory=list)
    """Activations that the victim was given, in order."""

    @property
    def victim_id(self) -> str:
        return self.victim.host.peer_id

    @property
    def hostile_id(self) -> str:
        return self.hostile.host.peer_id

    async def check_honest(self, data: bytes = b"a tensor") -> None:
        """The honest peer asks and is answered rightly."""
        with trio.fail_after(DEADLINE):
            answer = await self.honest.request_activation(
                self.victim_id, 3, 0, data, timeout=DEADLINE
            )
            assert bytes(answer.data) == data[::-1]
            assert await self.honest.request_layer_status(self.victim_id, timeout=DEADLINE) == (1,)

    async def serve(self, message: TensorMessage) -> bytes:
        self.served.append(message)
        if message.layer_id == GATED_LAYER:
            await self.gate.wait()
        return bytes(message.data)[::-1]


Scenario = Callable[[Scene], Awaitable[None]]


def run(
    scenario: Scenario,
    *,
    version: str = PROTOCOL_V11,
    bounds: Bounds = DEFAULT_BOUNDS,
    limits: Limits = DEFAULT_LIMITS,
) -> None:
    """Run a scenario against a victim with these bounds; the honest peer speaks `version` alone."""

    async def main() -> None:
        async with open_scene(version=version, bounds=bounds, limits=limits) as scene:
            await scenario(scene)
            await scene.check_honest()
            await scene.hostile.leave()
            await settled(scene.victim)
            await scene.check_honest(bytes(range(256)) * 1024)

    trio.run(main, clock=clock_of(version))


def clock_of(version: str) -> trio.abc.Clock | None:
    """None is the usual one."""
    return MockClock(autojump_threshold=0) if version == PROTOCOL_V10 else None


@asynccontextmanager
async def hosts_of(version: str, count: int) -> AsyncIterator[list[Host]]:
    """Hosts on loopback or in memory."""
    async with AsyncExitStack() as stack:
        new_host: Callable[[], AbstractAsyncContextManager[Host]] = open_host
        if version == PROTOCOL_V10:
            new_host = (await stack.enter_async_context(open_memory_network())).open_host
        yield [await stack.enter_async_context(new_host()) for _ in range(count)]


@asynccontextmanager
async def open_scene(
    *, version: str = PROTOCOL_V11, bounds: Bounds = DEFAULT_BOUNDS, limits: Limits = DEFAULT_LIMITS
) -> AsyncIterator[Scene]:
    with trio.fail_after(DEADLINE):
        async with hosts_of(version, 3) as (victim_host, honest_host, host):
            victim = Protocol(victim_host, role="worker", bounds=bounds, limits=limits)
            honest = Protocol(honest_host, role="coordinator", versions=(version,))
            address = victim_host.addresses[0]
            await honest_host.connect(address)
            await host.connect(address)
            scene = Scene(victim, honest, RawPeer(host, victim_host.peer_id))
            victim.on_activation_received(scene.serve)
            victim.on_layer_request_received(lambda layer_ids, from_peer: (1,))
            await scene.check_honest()
            yield scene


def leftovers(protocol: Protocol) -> dict[str, Any]:
    """What a protocol's tables hold of peers that are gone, and of work that should be done.

    By name of the table; an empty dict is as it should be. Knows the internals, so that tests need not.
    """
    connected = protocol.host.connected_peers
    dispatcher, oneshot = protocol._dispatcher, protocol._oneshot
    tables: dict[str, Any] = {
        "waiters": len(dispatcher.pending),
        "peers that are awaited": set(dispatcher.pending._peers) - connected,
        "jobs that run": dispatcher.serving.num_running,
        "jobs that wait": dict(dispatcher.serving._waiting),
        "bytes held": protocol._budget.held_bytes,
        "1.1.0 streams": set(protocol._streams) - connected,
        "counts of 1.1.0 streams": set(protocol._running) - connected,
        "counts of 1.0.0 streams": set(oneshot._num_streams) - connected,
        "peers that used 1.0.0": oneshot._served - connected,
        "peers that have 1.0.0 alone": protocol._v10_alone - connected,
        "locks to open with": set(protocol._opening) - connected,
    }
    return {name: content for name, content in tables.items() if content}


async def settled(protocol: Protocol) -> None:
    """Wait until nothing is left over: peers' ends take a moment to get there."""
    with trio.move_on_after(DEADLINE / 3):
        await until(lambda: not leftovers(protocol))
    if left := leftovers(protocol):
        pytest.fail(f"left over: {left}")


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that nobody tells of."""
    with trio.fail_after(DEADLINE):
        while not condition():
            await trio.sleep(0.01)
