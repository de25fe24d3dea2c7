"""The blocking face over real libp2p: threads, asyncio, tensors, interrupts, and the end under load."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from neurogrid.errors import (
    ConfigurationError,
    LocalProtocolError,
    NeuroGridError,
    PeerUnreachableError,
    ResponseTimeout,
    StreamBrokenError,
)
from neurogrid.p2p import (
    PROTOCOL_V10,
    PROTOCOL_V11,
    Identity,
    MessageType,
    TensorMessage,
    blocking,
)

DEADLINE = 120.0
VERSIONS = [PROTOCOL_V11, PROTOCOL_V10]
SILENT = 404  # a layer that nobody answers for


@dataclass
class Pair:
    """Two hosts in this process, each with a thread of its own; the client dialled the server."""

    client: blocking.Protocol
    server: blocking.Protocol
    peer_id: str  # the server's


@contextmanager
def connected_pair(version: str = PROTOCOL_V11) -> Iterator[Pair]:
    with blocking.open_host() as server_host, blocking.open_host() as client_host:
        server = blocking.Protocol(server_host, versions=(version,))
        client = blocking.Protocol(client_host, versions=(version,))
        server.on_activation_received(echo)
        peer_id = client_host.connect(server_host.addresses[0])
        assert client.open(peer_id) == version
        yield Pair(client, server, peer_id)


def echo(message: TensorMessage) -> object:
    return None if message.layer_id == SILENT else message.data


def ask(pair: Pair, data: object) -> bytes:
    reply = pair.client.request_activation(pair.peer_id, 0, 0, data, timeout=DEADLINE)
    return bytes(reply.data)


def test_a_host_that_runs_in_a_thread() -> None:
    identity = Identity.generate()
    with (
        blocking.open_host(listen=["/ip4/127.0.0.1/tcp/0"], identity=identity) as host,
        blocking.open_host() as other,
    ):
        assert host.peer_id == identity.peer_id
        assert host.identity is identity
        [address] = host.addresses
        assert address.startswith("/ip4/127.0.0.1/tcp/")
        assert other.connect(address) == host.peer_id
        assert other.connected_peers == {host.peer_id}
        with blocking.fail_after(0.01), pytest.raises(ResponseTimeout):
            other.wait_disconnected(host.peer_id)
        assert other.role_of(host.peer_id) == "any"
        other.disconnect(host.peer_id)
        other.wait_disconnected(host.peer_id)
        assert other.role_of(host.peer_id) is None
        host.wait_disconnected(other.peer_id)
        assert other.connected_peers == frozenset()
        with pytest.raises(PeerUnreachableError):
            blocking.Protocol(other).open(host.peer_id)


def test_the_errors_are_those_of_the_async_api() -> None:
    with (
        pytest.raises(ConfigurationError, match="not a multiaddr"),
        blocking.open_host(listen=["x"]),
    ):
        pytest.fail("was opened")
    with blocking.open_host() as host:
        with pytest.raises(ConfigurationError, match="own address"):
            host.connect(host.addresses[0])
        with pytest.raises(ConfigurationError, match="cannot listen"):
            blocking.open_host(listen=[host.addresses[0].partition("/p2p/")[0]]).__enter__()


@pytest.mark.parametrize("version", VERSIONS)
def test_many_threads_ask_at_once(version: str) -> None:
    def one(number: int) -> bool:
        data = number.to_bytes(4, "big") * 4096
        return ask(pair, data) == data

    with connected_pair(version) as pair, ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(128)))


def test_asyncio_asks() -> None:
    async def main(pair: Pair) -> None:
        calls = [
            asyncio.to_thread(
                pair.client.request_activation,
                pair.peer_id,
                0,
                number,
                bytes([number]),
                timeout=DEADLINE,
            )
            for number in range(32)
        ]
        replies = await asyncio.gather(*calls)
        assert [(reply.seq_id, bytes(reply.data)) for reply in replies] == [
            (number, bytes([number])) for number in range(32)
        ]
        with pytest.raises(ResponseTimeout):
            await asyncio.to_thread(
                pair.client.request_activation, pair.peer_id, SILENT, 0, b"", timeout=0.1
            )

    with connected_pair() as pair:
        asyncio.run(main(pair))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int64", "bool"])
def test_torch_tensors_both_ways(dtype: str) -> None:
    tensor = torch.arange(-60, 60).reshape(2, 3, 20).to(getattr(torch, dtype))

    def double(message: TensorMessage) -> torch.Tensor:
        return read(message) * 2 if dtype != "bool" else ~read(message)

    def read(message: TensorMessage) -> torch.Tensor:
        assert message.envelope is not None
        flat = torch.frombuffer(message.data, dtype=tensor.dtype)
        return flat.reshape(message.envelope.shape)

    with connected_pair() as pair:
        # The layer that `echo` leaves to others.
        pair.server.on_activation_received(
            lambda message: double(message) if message.layer_id == SILENT else None
        )
        reply = pair.client.request_activation(pair.peer_id, SILENT, 0, tensor, timeout=DEADLINE)
        assert reply.envelope is not None
        expected = ~tensor if dtype == "bool" else tensor * 2
        assert torch.equal(read(reply), expected)
        assert read(reply).shape == tensor.shape


@pytest.mark.parametrize("version", VERSIONS)
def test_numpy_arrays_both_ways(version: str) -> None:
    array = np.random.default_rng(3).standard_normal((1, 64, 48)).astype(np.float16)

    def negate(message: TensorMessage) -> np.ndarray | None:
        if message.layer_id != SILENT:
            return None
        return -np.frombuffer(message.data, np.float16).reshape(array.shape)

    with connected_pair(version) as pair:
        pair.server.on_activation_received(negate)
        reply = pair.client.request_activation(pair.peer_id, SILENT, 0, array, timeout=DEADLINE)
        result = np.frombuffer(reply.data, np.float16)
        assert np.array_equal(result.reshape(array.shape), -array)
        if version == PROTOCOL_V11:
            assert reply.envelope is not None
            assert (reply.envelope.dtype, reply.envelope.shape) == ("F16", array.shape)


@pytest.mark.parametrize("version", VERSIONS)
def test_weights_come_in_order(version: str) -> None:
    """Also over 1.0.0, where each chunk has a stream of its own: one is confirmed before the next."""
    come: list[int] = []

    def take(layer_id: int, index: int, total: int, data: memoryview, from_peer: str) -> None:
        come.append(index)
        if index == total - 1:
            pair.server.send_weights_ack(from_peer, layer_id)

    with connected_pair(version) as pair:
        pair.server.on_weights_received(take)
        pair.client.send_weights(pair.peer_id, 1, bytes(20 * 1024 * 1024))
        pair.client.wait_for_weights_ack(pair.peer_id, 1, timeout=DEADLINE)
    assert come == list(range(20))


def test_a_sender_does_not_outrun_a_handler_and_does_not_wait_for_ever() -> None:
    """A handler that does not return gives no credit back; `fail_after` ends the call that waits for it."""
    goes_on = threading.Event()

    def wait(layer_id: int, index: int, total: int, data: memoryview) -> None:
        goes_on.wait(DEADLINE)

    with connected_pair() as pair:
        pair.server.on_weights_received(wait)
        with blocking.fail_after(1.0), pytest.raises(ResponseTimeout):
            pair.client.send_weights(pair.peer_id, 1, bytes(256 * 1024 * 1024))
        goes_on.set()
        assert ask(pair, b"still whole") == b"still whole"


def test_counters_are_a_copy() -> None:
    with connected_pair() as pair:
        ask(pair, b"abc")
        before = pair.client.counters
        ask(pair, b"abc")
        sent = [
            counters.snapshot()[pair.peer_id]["sent"]["activation"].num_messages
            for counters in (before, pair.client.counters)
        ]
    assert sent == [1, 2]


def test_two_protocols_on_one_host_are_an_error() -> None:
    with blocking.open_host() as host:
        blocking.Protocol(host)
        with pytest.raises(LocalProtocolError):
            blocking.Protocol(host)


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
def test_an_interrupt_ends_the_call_and_nothing_else() -> None:
    main_thread = threading.get_ident()
    asked = threading.Event()

    def interrupt() -> None:
        assert asked.wait(DEADLINE)  # so that the call has begun
        signal.pthread_kill(main_thread, signal.SIGINT)

    with connected_pair() as pair:
        pair.server.on_message(MessageType.ACTIVATION, lambda _: asked.set())
        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            pair.client.request_activation(pair.peer_id, SILENT, 0, b"", timeout=DEADLINE)
        assert time.monotonic() - started < DEADLINE / 2
        interrupter.join()
        assert ask(pair, b"after") == b"after"


def test_closing_under_load_ends_every_call() -> None:
    """Threads that ask as fast as they can see the end as an error of ours, and no thread stays."""
    outcomes: Counter[str] = Counter()
    lock = threading.Lock()
    busy = threading.Semaphore(0)

    def ask_until_the_end(number: int) -> None:
        data = bytes([number]) * 100_000
        try:
            while True:
                assert ask(pair, data) == data
                busy.release()
        except NeuroGridError as exc:
            with lock:
                outcomes[type(exc).__name__] += 1

    with ThreadPoolExecutor(12) as pool:
        with ExitStack() as stack:
            pair = stack.enter_context(connected_pair())
            calls = [pool.submit(ask_until_the_end, number) for number in range(12)]
            for _ in range(48):
                assert busy.acquire(timeout=DEADLINE)
        for call in calls:
            call.result(DEADLINE)
    assert outcomes.total() == 12
    assert set(outcomes) <= {StreamBrokenError.__name__, LocalProtocolError.__name__}
    assert not [thread for thread in threading.enumerate() if thread.name == "neurogrid host"]


def test_calls_after_the_end_say_so() -> None:
    with connected_pair() as pair:
        pass
    with pytest.raises(LocalProtocolError, match="was closed"):
        ask(pair, b"")
    with pytest.raises(LocalProtocolError, match="was closed"):
        pair.client.host.connect("/ip4/127.0.0.1/tcp/1")
    with pytest.raises(LocalProtocolError, match="was closed"):
        blocking.Protocol(pair.client.host)


SCRIPT = """
import signal
import sys
import threading
import time
from neurogrid.p2p import blocking


def interrupt():
    # As a signal that comes in the moment before the wait: the call that waits does not see it.
    time.sleep(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)


server = blocking.open_host()
host = server.__enter__()
protocol = blocking.Protocol(host)
protocol.on_activation_received(lambda message: None)
client = blocking.open_host()
with client as client_host:
    caller = blocking.Protocol(client_host)
    peer_id = client_host.connect(host.addresses[0])
    caller.open(peer_id)
    if "elsewhere" in sys.argv:
        threading.Thread(target=interrupt).start()
    print("waiting", flush=True)
    if "wait" in sys.argv:
        caller.request_activation(peer_id, 0, 0, b"", timeout=3600)
print("left", flush=True)
"""


def start_script(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_script_ends_although_it_left_a_host_open() -> None:
    output, errors = start_script().communicate(timeout=DEADLINE)
    assert (output, errors) == ("waiting\nleft\n", "")


def test_what_libp2p_says_is_not_printed_unless_somebody_asks() -> None:
    # As it does of a peer that goes while it is asked who it is, and of a script that is left at once.
    script = """
import logging
from neurogrid.p2p import blocking
with blocking.open_host():
    logging.getLogger("libp2p.host.basic_host").error("failed to open a stream")
"""
    environ = {name: value for name, value in os.environ.items() if name != "LIBP2P_DEBUG"}
    for asked, is_printed in ({}, False), ({"LIBP2P_DEBUG": "WARNING"}, True):
        ended = subprocess.run(
            [sys.executable, "-c", script],
            env=environ | asked,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=True,
        )
        assert ("failed to open a stream" in ended.stderr) is is_printed, ended.stderr
        assert is_printed or not ended.stderr


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
def test_ctrl_c_ends_a_script() -> None:
    process = start_script("wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=DEADLINE)
    assert output == ""
    assert errors.endswith("KeyboardInterrupt\n")
    assert process.returncode == -signal.SIGINT


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
def test_ctrl_c_that_the_wait_does_not_see_ends_a_script() -> None:
    process = start_script("wait", "elsewhere")
    output, errors = process.communicate(timeout=DEADLINE)
    assert output == "waiting\n"
    assert errors.endswith("KeyboardInterrupt\n")
    assert process.returncode == -signal.SIGINT
