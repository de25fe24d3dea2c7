"""Configs of strangers: proven in a child process, or refused with the limit that they came to."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
import trio
from stage_families import RECOMPUTED, SMALL

from neurogrid.assembly.worker import Worker
from neurogrid.errors import CheckpointError, PeerRefusedError, UnsupportedModelError
from neurogrid.fork_server import fork_server
from neurogrid.model.confined import ConfinedProcess, ConfinementError
from neurogrid.model.embedded import embedded_model_path
from neurogrid.model.files import config
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.config import build_config, model_config_message
from neurogrid.model.proof import proof
from neurogrid.model.proof.proof import Proving, prove
from neurogrid.node.roles import WORKER_TAKES, authorise
from neurogrid.node.torch_thread import TorchThread
from neurogrid.p2p.memory import MemoryNetwork, open_memory_network
from neurogrid.p2p.tensor.protocol import Protocol, new_request_id
from neurogrid.p2p.wire import (
    PROTOCOL_V11,
    ErrorCode,
    MessageType,
    TensorMessage,
    serialize_config,
)
from neurogrid.worker.settings import WorkerSettings
from neurogrid.worker.state import WorkerState

SECONDS = 120.0
# 60 bytes that ask for minutes, and some that ask for gigabytes.
ENDLESS = {"model_type": "jamba", "num_hidden_layers": 1024}
WIDE = {
    "model_type": "xmod",
    "is_decoder": True,
    "languages": [f"l{number}" for number in range(20_000)],
}


@pytest.fixture(autouse=True)
def _no_memory_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_kept", {})


def one_layer() -> dict[str, Any]:
    """A config that is quickly proven."""
    return tf.LlamaConfig(**{**SMALL, "num_hidden_layers": 1}).to_dict()


def processes() -> set[str]:
    """Children of the fork server that run; one that renders templates may be kept from before."""
    pid = fork_server()._pid
    return set(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_what_is_proven_there_is_what_is_proven_here(dtype: str | None) -> None:
    assert Proving(one_layer(), dtype).result(seconds=SECONDS) == prove(one_layer(), dtype)


def test_bounds_of_rows_come_through() -> None:
    config = RECOMPUTED["phi3-longrope"]()
    there = Proving(config.to_dict(), "float32").result(seconds=SECONDS)
    assert there.traits.row_bounds == (16,)
    assert there.traits.recompute_at == 17


def test_what_takes_too_long_is_given_up() -> None:
    with pytest.raises(ConfinementError, match=r"config is refused, .*longer than 0\.2 s"):
        Proving(ENDLESS, "float32").result(seconds=0.2)


def test_what_takes_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "MAX_BYTES", 20 * 1024**2)
    with pytest.raises(ConfinementError, match=r"config is refused, .*20 MiB of memory"):
        Proving(WIDE, "float32").result(seconds=SECONDS)


def test_an_answer_is_kept_and_giving_up_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = tf.MambaConfig().to_dict()
    first = Proving(one_layer(), None).result(seconds=SECONDS)
    with pytest.raises(UnsupportedModelError) as error:
        Proving(refused, "float32").result(seconds=SECONDS)
    with pytest.raises(ConfinementError):
        Proving(ENDLESS, None).result(seconds=0.1)

    def call(self: ConfinedProcess, argument: object, *, seconds: float) -> None:
        raise ConfinementError("it was tried again")

    monkeypatch.setattr(ConfinedProcess, "call", call)
    assert Proving(one_layer(), None).result(seconds=SECONDS) == first
    with pytest.raises(UnsupportedModelError) as again:
        Proving(refused, "float32").result(seconds=SECONDS)
    assert str(again.value) == str(error.value)
    with pytest.raises(ConfinementError, match="tried again"):
        Proving(ENDLESS, None).result(seconds=SECONDS)


def test_what_was_wrong_with_the_machine_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A config is written to a temporary directory, whose disk may be full for a while."""

    def no_directory(prefix: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", prefix)

    def call(self: ConfinedProcess, argument: Mapping[str, Any], *, seconds: float) -> None:
        prove(argument["config"], argument["dtype"])

    with monkeypatch.context() as full:
        full.setattr(config, "temporary_directory", no_directory)
        full.setattr(ConfinedProcess, "call", call)
        with pytest.raises(CheckpointError, match=r"No space left on device.*; make room there"):
            Proving(one_layer(), None).result(seconds=SECONDS)
    assert Proving(one_layer(), None).result(seconds=SECONDS).costs


@asynccontextmanager
async def worker_on(network: MemoryNetwork) -> AsyncIterator[str]:
    """The address of a worker."""
    with TorchThread() as torch_thread:
        async with network.open_host() as host:
            protocol = Protocol(host, role="worker", versions=(PROTOCOL_V11,))
            authorise(protocol, WORKER_TAKES)
            state = WorkerState(WorkerSettings(), protocol, torch.device("cpu"), torch_thread)
            Worker(state, protocol, name="a worker", machine="here").start()
            yield host.addresses[0]


async def send_config(network: MemoryNetwork, address: str, config: dict[str, Any]) -> None:
    """As a coordinator that comes for this alone."""
    like = Checkpoint.open(embedded_model_path()).config
    message = model_config_message(
        build_config(like), like, model_name="m", max_seq_len=64, dtype=torch.float32
    )
    object.__setattr__(message, "checkpoint_config", config)
    async with network.open_host() as host:
        protocol = Protocol(host, role="coordinator", versions=(PROTOCOL_V11,))
        await host.connect(address)
        peer_id = address.rpartition("/")[2]
        await protocol.open(peer_id)
        asked = TensorMessage(
            msg_type=MessageType.MODEL_CONFIG,
            request_id=new_request_id(),
            data=serialize_config(message),
        )
        await protocol.request(peer_id, asked, MessageType.CONFIG_ACK, timeout=SECONDS)


async def until(holds: Callable[[], bool]) -> None:
    with trio.fail_after(SECONDS):
        while not holds():
            await trio.sleep(0.01)


async def test_a_worker_says_that_it_gave_a_config_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neurogrid.worker.layers.PEER_SECONDS", 0.2)
    before = processes()
    async with open_memory_network() as network, worker_on(network) as address:
        with pytest.raises(PeerRefusedError, match=r"longer than 0\.2 s") as error:
            await send_config(network, address, ENDLESS)
        assert error.value.code == ErrorCode.LIMIT_EXCEEDED
        # It is there for the next.
        monkeypatch.undo()
        await send_config(network, address, one_layer())
        await until(lambda: processes() <= before)


async def test_a_config_is_tried_no_longer_than_its_sender_is_there() -> None:
    before = processes()
    async with open_memory_network() as network, worker_on(network) as address:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_config, network, address, ENDLESS)
            await until(lambda: len(processes() - before) == 1)
            nursery.cancel_scope.cancel()
        await until(lambda: processes() <= before)
        await send_config(network, address, one_layer())
