"""Promises of memory: what is announced and never sent costs the victim next to nothing, and the others no room."""

from __future__ import annotations

from pathlib import Path

import pytest

from neurogrid.p2p import PROTOCOL_V10, PROTOCOL_V11, MessageType
from neurogrid.p2p.streams.bounds import Bounds
from neurogrid.p2p.wire import ErrorCode
from tests.e2e.hostile.raw_peer import header
from tests.e2e.hostile.scene import VERSIONS, Scene, run, until

MIB = 1024**2
LARGEST = 256 * MIB


def resident_bytes() -> int:
    """Memory of this process, all three hosts included."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("sent", [0, 1, 100_000])
def test_256_mib_announced_on_many_streams(version: str, sent: int) -> None:
    async def scenario(scene: Scene) -> None:
        before = resident_bytes()
        streams = [await scene.hostile.open_v11() for _ in range(4)]
        streams += [await scene.hostile.open(PROTOCOL_V10) for _ in range(100)]
        for stream in streams:
            await stream.say(header(MessageType.ACTIVATION, LARGEST), bytes(sent))
        held = scene.victim._budget._held
        await until(lambda: held[scene.hostile_id] >= 4 * LARGEST)
        # The others have room, for what is large too.
        await scene.check_honest(bytes(8 * MIB))
        # What one peer has announced is no more than one peer may.
        assert held[scene.hostile_id] == 4 * LARGEST
        assert resident_bytes() - before < 300 * MIB

    run(scenario, version=version)


def test_promises_do_not_hold_room_for_ever() -> None:
    """Of four streams that announce, the silent ones are given up, and the fifth message gets their room."""
    bounds = Bounds(
        silence_timeout=1.0, room_timeout=30.0, max_bytes_per_peer=4 * MIB, max_bytes=8 * MIB
    )

    async def scenario(scene: Scene) -> None:
        silent = [await scene.hostile.open(PROTOCOL_V11) for _ in range(4)]
        for stream in silent:
            await stream.say_hello()
            await stream.say(header(MessageType.ACTIVATION, MIB), b"x")
        patient = await scene.hostile.say_v10(header(MessageType.ACTIVATION, MIB), bytes(MIB))
        for stream in silent:
            await stream.ended(ErrorCode.DEADLINE_EXCEEDED)
        await patient.end_in_any_way()
        await until(lambda: len(scene.served) == 2)

    run(scenario, version=PROTOCOL_V10, bounds=bounds)


def test_no_room_in_time() -> None:
    """A message that finds none for too long is refused as BUSY, and its stream ends."""
    bounds = Bounds(
        silence_timeout=30.0, room_timeout=0.5, max_bytes_per_peer=MIB, max_bytes=8 * MIB
    )

    async def scenario(scene: Scene) -> None:
        first = await scene.hostile.open_v11()
        await first.say(header(MessageType.ACTIVATION, MIB), b"x")
        await until(lambda: scene.victim._budget.held_bytes == MIB)
        second = await scene.hostile.open_v11()
        await second.say(header(MessageType.ACTIVATION, MIB), b"x")
        await second.ended(ErrorCode.BUSY)
        await scene.check_honest(bytes(MIB))

    run(scenario, version=PROTOCOL_V11, bounds=bounds)


def test_a_peer_that_goes_while_it_waits_for_room() -> None:
    """Its reader does not wait on for room that nobody needs."""
    bounds = Bounds(room_timeout=10_000.0, max_bytes_per_peer=4 * MIB, max_bytes=8 * MIB)

    async def scenario(scene: Scene) -> None:
        with scene.victim._budget.hold("others", 8 * MIB):
            stream = await scene.hostile.open_v11()
            await stream.say(header(MessageType.ACTIVATION, MIB), b"x")
            await scene.check_honest()
            await scene.hostile.leave()
            await until(lambda: scene.hostile_id not in scene.victim._running)

    run(scenario, bounds=bounds)
