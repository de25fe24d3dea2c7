"""Two real processes, this one and `two_process_peer`: every use of the named API, over both versions.

The peer runs once on trio and once with the blocking face; what it saw comes back on its standard output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import numpy as np
import pytest
import trio
from opentelemetry import trace

from neurogrid.errors import ResponseTimeout
from neurogrid.p2p import (
    PROTOCOL_V10,
    PROTOCOL_V11,
    GPUInfo,
    MessageType,
    ModelConfig,
    Protocol,
    TensorMessage,
    TraceContext,
    deserialize_config,
    open_host,
    serialize_config,
)
from tests.e2e.two_process_peer import GPU, HELD, LAYERS, REVERSED, SILENT, TRACED, digest

DEADLINE = 120.0
OTHER = 9  # a layer that the peer answers with a message of its own
CHUNK = 1024 * 1024
TRACE_ID = bytes.fromhex("0af7651916cd43dd8448eb211c80319c")
SPAN_ID = bytes.fromhex("b7ad6b7169203331")


class OtherProcess:
    """The peer's process: its address, and what it reports."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        self.address = address
        self._reports: Queue[dict[str, Any]] = Queue()
        self._passed: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._reports.put(json.loads(line))

    def next(self, kind: str, sender: str) -> dict[str, Any]:
        """The next report of this kind about a message of `sender`, without these two; blocks."""
        while True:
            try:
                found = self._reports.get(timeout=DEADLINE)
            except Empty:
                pytest.fail(f"the peer reported no {kind}, but {self._passed}")
            if (found.pop("kind"), found.pop("sender")) == (kind, sender):
                return found
            self._passed.append(found)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        status = self.process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        assert status == 0


@contextmanager
def start_peer(face: str, version: str) -> Iterator[OtherProcess]:
    versions = [PROTOCOL_V10] if version == PROTOCOL_V10 else [PROTOCOL_V11, PROTOCOL_V10]
    arguments = ["-m", "tests.e2e.two_process_peer", "--face", face, "--versions", *versions]
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ,
    )
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address, "the peer did not start"
        peer = OtherProcess(process, address)
        yield peer
        peer.end()
    finally:
        process.kill()
        process.wait(DEADLINE)
        process.stdout.close()


@pytest.fixture(
    scope="module",
    params=[
        ("trio", PROTOCOL_V11),
        ("trio", PROTOCOL_V10),
        ("blocking", PROTOCOL_V11),
        ("blocking", PROTOCOL_V10),
    ],
    ids=lambda param: f"{param[0]}-{param[1].rpartition('/')[2]}",
)
def other(request: pytest.FixtureRequest) -> Iterator[tuple[OtherProcess, str]]:
    """A peer and the version that it speaks with us."""
    face, version = request.param
    with start_peer(face, version) as peer:
        yield peer, version


class Session:
    """This side of a test: a host that is connected to the other process."""

    def __init__(self, protocol: Protocol, peer_id: str, other: OtherProcess, version: str) -> None:
        self.protocol = protocol
        self.peer_id = peer_id
        self.version = version
        self._other = other

    async def reported(self, kind: str) -> dict[str, Any]:
        """What the peer says that it got from us next, of this kind."""
        next_report = partial(self._other.next, kind, self.protocol.host.peer_id)
        return await trio.to_thread.run_sync(next_report)


Scenario = Callable[[Session], Awaitable[None]]


@asynccontextmanager
async def connected(other: OtherProcess, version: str) -> AsyncIterator[Session]:
    with trio.fail_after(2 * DEADLINE):
        async with open_host() as host:
            protocol = Protocol(host)
            peer_id = await host.connect(other.address)
            assert host.connected_peers == {peer_id}
            assert peer_id == other.address.rpartition("/")[2]
            assert await protocol.open(peer_id) == version
            yield Session(protocol, peer_id, other, version)


def run(other: tuple[OtherProcess, str], scenario: Scenario) -> None:
    async def main() -> None:
        async with connected(*other) as session:
            await scenario(session)

    trio.run(main)


def test_an_activation_and_its_response(other: tuple[OtherProcess, str]) -> None:
    async def scenario(session: Session) -> None:
        protocol, peer_id = session.protocol, session.peer_id
        await protocol.send_activation(peer_id, OTHER, 7, 12345, b"abc")
        reply = await protocol.wait_for_response(peer_id, 12345, timeout=DEADLINE)
        assert bytes(reply.data) == b"cba"
        assert (reply.msg_type, reply.request_id) == (MessageType.RESPONSE, 12345)
        assert (reply.layer_id, reply.seq_id, reply.from_peer) == (OTHER, 7, peer_id)
        got = await session.reported("activation")
        assert (got["request_id"], got["digest"]) == (12345, digest(b"abc"))
        assert (got["type"], got["trace_on_wire"]) == ("ACTIVATION", None)

    run(other, scenario)


def test_a_request_is_an_activation_and_its_response(other: tuple[OtherProcess, str]) -> None:
    async def scenario(session: Session) -> None:
        reply = await session.protocol.request_activation(
            session.peer_id, REVERSED, 0, b"abc", timeout=DEADLINE
        )
        assert bytes(reply.data) == b"cba"

    run(other, scenario)


def test_a_response_that_does_not_come_is_a_timeout(other: tuple[OtherProcess, str]) -> None:
    """Alone: a call that was under way beside it, and those that come after it, get their answers."""

    async def scenario(session: Session) -> None:
        protocol, peer_id = session.protocol, session.peer_id
        replies: list[TensorMessage] = []

        async def ask_for_what_is_held() -> None:
            reply = await protocol.request_activation(peer_id, HELD, 0, b"held", timeout=DEADLINE)
            replies.append(reply)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_for_what_is_held)
            await session.reported("activation")
            started = trio.current_time()
            with pytest.raises(ResponseTimeout, match="RESPONSE"):
                await protocol.request_activation(peer_id, SILENT, 0, b"", timeout=0.5)
            assert 0.4 < trio.current_time() - started < DEADLINE
            await protocol.send_activation(peer_id, SILENT, 0, 77, b"")
            with pytest.raises(ResponseTimeout):
                await protocol.wait_for_response(peer_id, 77, timeout=0.1)
            assert replies == []
            # This lets go what is held.
            after = await protocol.request_activation(peer_id, OTHER, 0, b"after", timeout=DEADLINE)
            assert bytes(after.data) == b"retfa"
        assert [bytes(reply.data) for reply in replies] == [b"dleh"]
        assert protocol.host.connected_peers == {peer_id}

    run(other, scenario)


def test_three_mebibytes_of_weights_in_three_chunks(other: tuple[OtherProcess, str]) -> None:
    async def scenario(session: Session) -> None:
        data = np.random.default_rng(1).bytes(3 * CHUNK)
        await session.protocol.send_weights(session.peer_id, 11, data)
        await session.protocol.wait_for_weights_ack(session.peer_id, 11, timeout=DEADLINE)
        chunks = [await session.reported("chunk") for _ in range(3)]
        assert chunks == [
            {
                "layer_id": 11,
                "index": index,
                "total": 3,
                "digest": digest(data[index * CHUNK : (index + 1) * CHUNK]),
            }
            for index in range(3)
        ]

    run(other, scenario)


def test_layer_status_and_layer_request(other: tuple[OtherProcess, str]) -> None:
    async def scenario(session: Session) -> None:
        protocol, peer_id = session.protocol, session.peer_id
        assert await protocol.request_layer_status(peer_id, timeout=DEADLINE) == LAYERS
        assert await session.reported("layer_request") == {"layer_ids": []}

        told, heard = trio.open_memory_channel[tuple[tuple[int, ...], str]](1)
        protocol.on_layer_status_received(lambda ids, peer: told.send_nowait((ids, peer)))
        await protocol.send_layer_request(peer_id, [1, 2])
        assert await session.reported("layer_request") == {"layer_ids": [1, 2]}
        assert await heard.receive() == (LAYERS, peer_id)

        await protocol.send_layer_status(peer_id, [7, 8])
        assert await session.reported("layer_status") == {"layer_ids": [7, 8]}

    run(other, scenario)


def test_a_model_config_and_its_sender(other: tuple[OtherProcess, str]) -> None:
    async def scenario(session: Session) -> None:
        config = ModelConfig(
            model_name="örtlich/klein",
            hidden_size=64,
            intermediate_size=128,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            vocab_size=256,
            max_seq_len=512,
            rms_norm_eps=1e-6,
        )
        await session.protocol.send_model_config(session.peer_id, serialize_config(config))
        got = await session.reported("model_config")  # of this sender
        assert deserialize_config(got["config"].encode()) == config

    run(other, scenario)


def test_gpu_info(other: tuple[OtherProcess, str]) -> None:
    async def scenario(session: Session) -> None:
        protocol, peer_id = session.protocol, session.peer_id
        assert await protocol.request_gpu_info(peer_id, timeout=DEADLINE) == GPU

        told, heard = trio.open_memory_channel[tuple[GPUInfo, str]](1)
        protocol.on_gpu_info_received(lambda info, peer: told.send_nowait((info, peer)))
        await protocol.send_gpu_info_request(peer_id)
        assert await heard.receive() == (GPU, peer_id)

        ours = GPUInfo(total_bytes=2**40, used_bytes=0, name="ours")
        await protocol.send_gpu_info(peer_id, ours)
        assert GPUInfo(**await session.reported("gpu_info")) == ours

    run(other, scenario)


def test_a_tensor_of_a_megabyte(other: tuple[OtherProcess, str]) -> None:
    array = np.random.default_rng(2).standard_normal((1, 500, 1000)).astype(np.float16)
    assert array.nbytes == 1_000_000

    async def scenario(session: Session) -> None:
        protocol, peer_id = session.protocol, session.peer_id
        await protocol.send_tensor(peer_id, 5, 1000, array.tobytes())
        got = await session.reported("tensor")
        assert got == {"layer_id": 5, "seq_id": 1000, "digest": digest(array.tobytes())}

        reply = await protocol.request_activation(peer_id, REVERSED, 0, array, timeout=DEADLINE)
        assert bytes(reply.data) == array.tobytes()[::-1]

    run(other, scenario)


@pytest.mark.parametrize("with_envelope", [True, False], ids=["array", "bytes"])
def test_a_trace_goes_there_and_back(
    other: tuple[OtherProcess, str], *, with_envelope: bool
) -> None:
    """With an active context, and nothing of OpenTelemetry but its API, on both ends."""
    span = trace.NonRecordingSpan(
        trace.SpanContext(
            trace_id=int.from_bytes(TRACE_ID, "big"),
            span_id=int.from_bytes(SPAN_ID, "big"),
            is_remote=False,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        )
    )
    array = np.arange(6, dtype=np.float16)

    async def scenario(session: Session) -> None:
        with trace.use_span(span):
            reply = await session.protocol.request_activation(
                session.peer_id,
                REVERSED,
                0,
                array if with_envelope else array.tobytes(),
                timeout=DEADLINE,
            )
        got = await session.reported("activation")
        assert got["type"] == "TRACED_ACTIVATION"
        assert got["trace_on_wire"] == got["active_trace"] == TRACE_ID.hex()
        assert reply.msg_type is MessageType.TRACED_RESPONSE
        assert reply.trace_context is not None
        assert reply.trace_context.trace_id == TRACE_ID
        assert reply.trace_context.flags == trace.TraceFlags.SAMPLED
        assert bytes(reply.data) == array.tobytes()[::-1]

        # Outside of it nothing is traced.
        reply = await session.protocol.request_activation(
            session.peer_id, REVERSED, 0, b"", timeout=DEADLINE
        )
        assert (await session.reported("activation"))["type"] == "ACTIVATION"
        assert reply.msg_type is MessageType.RESPONSE

    run(other, scenario)


def test_a_trace_of_ones_own_goes_there_and_back(other: tuple[OtherProcess, str]) -> None:
    context = TraceContext(trace_id=TRACE_ID, span_id=SPAN_ID, flags=1)

    async def scenario(session: Session) -> None:
        protocol, peer_id = session.protocol, session.peer_id
        await protocol.send_traced_activation(peer_id, TRACED, 3, 12346, b"ab", context)
        reply = await protocol.wait_for_response(peer_id, 12346, timeout=DEADLINE)
        assert (await session.reported("activation"))["trace_on_wire"] == TRACE_ID.hex()
        assert reply.msg_type is MessageType.TRACED_RESPONSE
        assert reply.trace_context == context
        assert bytes(reply.data) == b"ba"

        await protocol.send_traced_activation(peer_id, TRACED, 3, 12347, b"ab", None)
        reply = await protocol.wait_for_response(peer_id, 12347, timeout=DEADLINE)
        assert (reply.msg_type, reply.trace_context) == (MessageType.TRACED_RESPONSE, None)

    run(other, scenario)


def test_a_response_that_nobody_waits_for(other: tuple[OtherProcess, str]) -> None:
    async def scenario(session: Session) -> None:
        await session.protocol.send_response(session.peer_id, 0, 0, 4711, b"")
        assert await session.reported("response") == {"request_id": 4711}

    run(other, scenario)
