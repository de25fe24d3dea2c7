"""A stage of a chain: what it takes, what it computes, and what it ends by."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trio

from neurogrid.errors import RemoteProtocolError, TooLargeForPeerError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p import TensorMessage
from neurogrid.training.data.blob_files import OfferedFiles
from neurogrid.training.members.chain_stage import ChainStage, NeighbourLostError
from neurogrid.training.runs.run_file import parse_run_file
from neurogrid.training.stages.stage_process import PlainTensor
from neurogrid.training.wire.runs import RunMessage, StageOrder, StageTensor, Step, session_of

RUN = bytes(range(16))
CHAIN = 5
PEERS = ("a", "b", "c")
RUN_FILE = parse_run_file(
    '[model]\nconfig = "x"\n[data]\npath = "x"\n[layout]\nstages = 3\n[stop]\nsteps = 4\n'
)
HIDDEN = PlainTensor("F32", (1, 2, 1), bytes(8))


class FakeProcess:
    """A process with layers, which does what a test has it do, and notes what it was asked for."""

    def __init__(self, *, is_tied: bool = False) -> None:
        self.is_tied, self.memory_bytes = is_tied, 0
        self.asked: list[tuple[str, int]] = []
        self.begun, self.goes_on = trio.Event(), trio.Event()
        self.goes_on.set()

    async def forward(self, number: int, *given: object) -> PlainTensor:
        await self._compute("forward", number)
        return HIDDEN

    async def forward_loss(self, number: int, *given: object) -> float:
        await self._compute("forward", number)
        return 1.0

    async def backward(self, number: int, gradient: object) -> PlainTensor:
        await self._compute("backward", number)
        return HIDDEN

    async def squared_norm(self) -> float:
        return 1.0

    async def _compute(self, what: str, number: int) -> None:
        self.asked.append((what, number))
        self.begun.set()
        await self.goes_on.wait()


class FakeExchange:
    """Where all that a stage sends ends."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, object]] = []

    async def send(self, peer_id: str, message: TensorMessage) -> None:
        await trio.lowlevel.checkpoint()
        self.sent.append((peer_id, message.msg_type))


def stage_of(index: int, process: FakeProcess, exchange: Any = None, **more: Any) -> ChainStage:
    """A stage of three, each of which is one member."""
    given: dict[str, Any] = {
        "own": PEERS[index],
        "leader": "leader",
        "run_file": RUN_FILE,
        "process": process,
        "exchange": exchange or FakeExchange(),
        "reductions": None,
        "offered": OfferedFiles(),
        "directory": Path("nowhere"),
        "kept": [],
        "note": lambda state: None,
        "reach": None,
        **more,
    }
    order = StageOrder(RUN, CHAIN, 0, index, PEERS, ("", "", ""), (0, 1, 2, 4))
    return ChainStage(order, index, **given)


def tensor(code: RunMessage, number: int) -> TensorMessage:
    dtype, shape = (
        ("F32", (1, 2, 1)) if code in (RunMessage.HIDDEN, RunMessage.GRADIENT) else ("I32", (1, 2))
    )
    return StageTensor(code, session_of(RUN), CHAIN, 0, number, dtype, shape, bytes(8)).message()


def begin(stage: ChainStage, num_micro_batches: int) -> None:
    """Order a step."""
    step = Step(RUN, CHAIN, 0, num_micro_batches, 2)
    stage.take(RunMessage.STEP, "leader", TensorMessage(RunMessage.STEP, data=step.encode()))


async def test_a_tensor_that_is_refused_while_the_stage_computes_ends_it() -> None:
    """It does not come again, so nothing is waited for: with it the leader hears why."""
    process = FakeProcess()
    process.goes_on = trio.Event()
    stage = stage_of(2, process)

    async def refuse() -> None:
        await process.begun.wait()
        stage.fail(RemoteProtocolError("hidden 1 is no hidden state"))
        process.goes_on.set()

    async def run() -> None:
        with trio.fail_after(5), unwrap_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(refuse)
                await stage.run()

    begin(stage, 2)
    stage.take(RunMessage.HIDDEN, "b", tensor(RunMessage.HIDDEN, 0))
    for number in range(2):
        stage.take(RunMessage.LABELS, "leader", tensor(RunMessage.LABELS, number))
    with pytest.raises(RemoteProtocolError, match="hidden 1 is no hidden state"):
        await run()
    assert ("forward", 1) not in process.asked


@pytest.mark.parametrize("is_tied", [True, False])
def test_ends_are_in_contact_where_something_is_tied(is_tied: bool) -> None:
    """A member that it does not reach ends a stage only where it has to send that member something."""
    first, middle, last = (
        stage_of(index, FakeProcess(is_tied=is_tied)).contacts for index in range(3)
    )
    assert first == ({"b", "c"} if is_tied else {"b"})
    assert middle == {"a", "c"}
    assert last == ({"a", "b"} if is_tied else {"b"})


async def test_a_neighbour_that_takes_too_little_is_lost() -> None:
    """How much it takes is its own word: the leader hears that it is the cause, and not the one that sends."""

    class Full(FakeExchange):
        async def send(self, peer_id: str, message: TensorMessage) -> None:
            raise TooLargeForPeerError("8 B are more than it accepts in one message")

    stage = stage_of(0, FakeProcess(), Full())
    begin(stage, 1)
    stage.take(RunMessage.TOKENS, "leader", tensor(RunMessage.TOKENS, 0))

    async def run() -> None:
        with trio.fail_after(5), unwrap_errors():
            await stage.run()

    with pytest.raises(NeighbourLostError, match="more than it accepts") as raised:
        await run()
    assert raised.value.lost == "b"


async def test_a_long_vector_has_time_to_come_by_a_slow_line() -> None:
    """Of 2 GB, a line of 20 Mbit/s takes 15 minutes: a member that sends as fast as it can is none that is lost."""
    timeouts = []

    class FakeReductions:
        async def reduce(self, plan: object, own: object, *, timeout: float, out: object) -> Any:
            await trio.lowlevel.checkpoint()
            timeouts.append(timeout)
            return SimpleNamespace(digest=bytes(32))

    stage = stage_of(0, FakeProcess(), reductions=FakeReductions())
    long = torch.empty(1).expand(500_000_000)
    await stage._reduce(0, long, long, "f32")
    assert timeouts[0] > 2 * 15 * 60
