"""A leader of a chain without processes: the real one, over a network in memory, and members that tell what a test has
them tell, and compute nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
import trio
from safetensors.torch import save

from neurogrid.p2p import TensorMessage
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.memory import open_memory_network
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.transfer import Transfers
from neurogrid.p2p.wire import MessageCode
from neurogrid.training.data.blob_files import PIECE_LIMITS, OfferedFiles
from neurogrid.training.data.blobs import Providers
from neurogrid.training.leading.chains.leader import ChainLeader
from neurogrid.training.leading.chains.rates import StepRates
from neurogrid.training.leading.chains.state import ChainState
from neurogrid.training.leading.facts import RunFacts
from neurogrid.training.leading.round_figures import RoundFigures
from neurogrid.training.runs.machine import Rules, RunMachine
from neurogrid.training.runs.run_file import RunFile, parse_run_file
from neurogrid.training.runs.state import RunState
from neurogrid.training.stages.chain_estimate import ChainNumbers, stage_sizes
from neurogrid.training.stages.holdings import state_pieces
from neurogrid.training.trainer.batches import Batch
from neurogrid.training.wire.runs import (
    Applied,
    Apply,
    Offer,
    Renewed,
    Report,
    RunMessage,
    StageOrder,
    StageReport,
    Start,
    Started,
    Step,
    StepDone,
    run_table,
)

__all__ = ["RUN", "FakeProgress", "Member", "ScriptedChain", "open_chain", "state_piece"]

RUN: Final = bytes(range(16))
NUM_LAYERS: Final = 4
TEXT: Final = """
[model]
config = "model.json"
[data]
path = "text.txt"
sequence_length = 4
[inner]
batch_tokens = 8
[layout]
stages = {stages}
state_every = {state_every}
[checkpoints]
every = 100
[eval]
every = 0
[stop]
steps = {steps}
{more}
"""


def state_piece(text: str) -> bytes:
    """A piece of state that is one, and says something."""
    return save({"weight": torch.tensor(list(text.encode()), dtype=torch.uint8)})


class FakeProgress:
    """What people would see."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.warned: list[str] = []
        self.has_warned = trio.Event()

    def say(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.warned.append(text)
        self.has_warned.set()


class FakeKeeper:
    """What a leader keeps beside the state: here in memory."""

    def __init__(self, figures: RoundFigures) -> None:
        self.figures = figures
        self.told: dict[int, dict[str, float]] = {}
        self.lines: list[dict[str, float]] = []
        self.checkpoints: list[int] = []
        self.seconds = 0.0

    def write(self, entries: Sequence[object]) -> None:
        pass

    async def note(self, round_number: int) -> None:
        for each in self.figures.take(round_number):
            self.lines.append(each | self.told.pop(int(each["round"]), {}))

    def has_checkpoint(self, step: int) -> bool:
        return step in self.checkpoints

    async def write_checkpoint(self, kept: ChainState, state: RunState) -> None:
        self.checkpoints.append(kept.step)


class Member:
    """A worker that is a stage. What is to go otherwise, a test replaces.

    Attributes:
        holds: steps that the state has made that it has; None for none.
        orders: that it was given.
        num_asked, num_started: so often.
        lost: gives the peer id of a member of its order that it cannot reach; empty for nobody.
    """

    def __init__(self, host: Host, folder: Path, leader: str, name: str) -> None:
        self.exchange = Exchange(host, run_table(), role="worker", name=name)
        self.peer_id, self.name, self._leader = host.peer_id, name, leader
        self._folder, self._offered = folder, OfferedFiles()
        self.transfers = Transfers(self.exchange, Providers(self._offered), limits=PIECE_LIMITS)
        self.lost: Callable[[], str] = str
        self.holds: int | None = None
        self.orders: list[StageOrder] = []
        self.num_asked = self.num_started = 0
        self.is_lent = True
        for code, handler in (
            (RunMessage.ASK, self._on_ask),
            (RunMessage.START, lambda message: self.start(message)),
            (RunMessage.RENEW, self._on_renew),
            (RunMessage.STAGE, self._on_order),
            (RunMessage.STEP, self._on_step),
            (RunMessage.APPLY, self._on_apply),
        ):
            self.exchange.on_message(code, handler)
        for code in (RunMessage.TOKENS, RunMessage.LABELS, RunMessage.DISMISS, RunMessage.ORDER):
            self.exchange.on_message(code, lambda message: None)

    @property
    def order(self) -> StageOrder:
        """The last one."""
        return self.orders[-1]

    @property
    def index(self) -> int:
        """Of its stage; each is one member."""
        return self.order.index

    @property
    def is_last(self) -> bool:
        return self.index == len(self.order.peers) - 1

    # What a test may replace

    def done(self, step: int) -> dict[str, Any]:
        """What it tells of a step that it has computed."""
        return {"squared_norm": 1.0, "loss": 2.0 if self.is_last else None}

    async def load(self) -> None:
        """What it does and tells before it is ready for an order."""

    async def compute(self, step: Step) -> None:
        """What it does and tells before it has computed a step."""
        await self.report("working", step.step)

    def pieces(self, step: int) -> dict[str, bytes]:
        """The state after so many steps."""
        names = state_pieces(self.order.bounds, self.index)
        return {name: state_piece(f"{name} after {step}") for name in names}

    def fault(self, apply: Apply) -> str:
        """Why it fails after it has made a step; empty where it does not."""
        return ""

    async def start(self, message: TensorMessage) -> None:
        """What it answers to the leader that begins with it."""
        self.num_started += 1
        start = Start.decode(message.data)
        await self.tell(RunMessage.STARTED, Started(until=60.0).encode(), message.request_id)
        await self.tell(RunMessage.REPORT, Report(RUN, start.seat, state="ready").encode())

    # What it does

    async def tell(self, code: MessageCode, data: bytes, request_id: int = 0) -> None:
        await self.exchange.send(
            self._leader, TensorMessage(code, request_id=request_id, data=data)
        )

    async def report(self, state: str, step: int, **more: Any) -> None:
        """Tell the leader how it stands."""
        told = StageReport(RUN, self.order.chain, state, step, holds=self.holds is not None, **more)
        await self.tell(RunMessage.STAGE_REPORT, told.encode())

    async def _on_ask(self, message: TensorMessage) -> None:
        self.num_asked += 1
        offer = Offer(
            lease=7,
            until=60.0,
            memory=2**40 if self.is_lent else 0,
            storage=2**40,
            cores=1,
            name=self.name,
        )
        await self.tell(RunMessage.OFFER, offer.encode(), message.request_id)

    async def _on_renew(self, message: TensorMessage) -> None:
        await self.tell(RunMessage.RENEWED, Renewed(until=60.0).encode(), message.request_id)

    async def _on_order(self, message: TensorMessage) -> None:
        assert sender_of(message) == self._leader
        self.orders.append(StageOrder.decode(message.data))
        self.holds = self.order.step
        await self.load()
        if lost := self.lost():
            await self.report(
                "failed", self.order.step, reason="a stage cannot be reached", lost=lost
            )
            return
        await self.report("ready", self.order.step)

    async def _on_step(self, message: TensorMessage) -> None:
        step = Step.decode(message.data)
        await self.compute(step)
        told = StepDone(RUN, step.chain, step.step, **self.done(step.step))
        await self.tell(RunMessage.STEP_DONE, told.encode())

    async def _on_apply(self, message: TensorMessage) -> None:
        apply = Apply.decode(message.data)
        self.holds = apply.step + 1
        if reason := self.fault(apply):
            await self.report("failed", self.holds, reason=reason)
            return
        names, blobs = [], []
        if apply.keeps:
            for number, (name, data) in enumerate(self.pieces(self.holds).items()):
                path = self._folder / f"{self.peer_id}-{self.holds}-{number}"
                path.write_bytes(data)
                names.append(name)
                blobs.append(await self._offered.offer(path))
        await self.report("ready", self.holds)
        told = Applied(RUN, apply.chain, apply.step, names=tuple(names), blobs=tuple(blobs))
        await self.tell(RunMessage.APPLIED, told.encode())


@dataclass
class ScriptedChain:
    """A run in stages of one member each, of which nothing has begun yet."""

    leader: ChainLeader
    members: list[Member]
    state: ChainState
    keeper: FakeKeeper
    machine: RunMachine
    folder: Path
    progress: FakeProgress = field(default_factory=FakeProgress)


class _Weights:
    num_layers = NUM_LAYERS
    quantization = ""

    def pieces(self, bounds: Sequence[int], index: int) -> dict[str, bytes]:
        return {}

    def count_asked(self, peers: Iterable[str]) -> None:
        pass

    def num_asked(self, peers: Iterable[str]) -> dict[str, int]:
        return {}


class Slices:
    """Slices of a web server, each of which is held until it is not needed any more.

    Attributes:
        held: those that are; of `fetched`, which are all that were asked for.
    """

    def __init__(self) -> None:
        self.held: set[object] = set()
        self.fetched: list[object] = []

    def need_only(self, infos: Iterable[object]) -> None:
        self.held &= set(infos)

    async def fetch(self, info: object, timeout: float) -> Path:
        self.held.add(info)
        self.fetched.append(info)
        return Path("slice")


class _Reader:
    def read(self, files: object) -> Batch:
        ids = torch.zeros(2, 4, dtype=torch.int64)
        return Batch(ids, ids, 8, "")


def _rules(run: RunFile) -> Rules:
    assert run.stop.steps is not None
    return Rules(1, 1, run.num_batch_samples, 1, projected=False, max_rounds=run.stop.steps)


@asynccontextmanager
async def open_chain(
    folder: Path,
    *,
    members: int = 2,
    stages: int = 2,
    steps: int = 8,
    state_every: int = 4,
    wait: float = 20.0,
    more: str = "",
    sizes: tuple[int, ...] = (1000,),
    begin: Callable[[Member], None] = lambda member: None,
) -> AsyncIterator[ScriptedChain]:
    """A run whose members are here, and not asked yet.

    Args:
        more: of the run file.
        sizes: samples of each slice.
        begin: is given each member, before the leader knows it.
    """
    text = TEXT.format(stages=stages, steps=steps, state_every=state_every, more=more)
    run = parse_run_file(text)
    async with AsyncExitStack() as stack:
        stack.enter_context(trio.fail_after(60))
        network = await stack.enter_async_context(open_memory_network())
        host = await stack.enter_async_context(network.open_host())
        exchange = Exchange(host, run_table(), role="coordinator", name="leader")
        offered = OfferedFiles()
        transfers = Transfers(exchange, Providers(offered), limits=PIECE_LIMITS)
        state = await ChainState.open(folder / "run" / "stages", offered)
        numbers = ChainNumbers((10,) * NUM_LAYERS, (0,) * NUM_LAYERS, 10, 5, 5, 8, 16)
        run_state = RunState(sizes, seed=1)
        machine = RunMachine(_rules(run), run_state)
        keeper, progress = FakeKeeper(RoundFigures(run, 4)), FakeProgress()
        fakes: Any = {
            "weights": _Weights(),
            "keeper": keeper,
            "slices": Slices(),
            "manifest": SimpleNamespace(slices=range(len(sizes)), held_out=()),
            "reader": _Reader(),
            "changes": SimpleNamespace(take=lambda: False),
            "progress": progress,
        }
        leader = ChainLeader(
            host,
            exchange,
            transfers,
            RunFacts(RUN, run, text, "{}", bytes(32), 40, 0),
            machine,
            state=state,
            sizes=stage_sizes(run, numbers),
            numbers=numbers,
            rates=StepRates(run, run_state, partial(_rules)),
            total_steps=steps,
            wait=wait,
            **fakes,
        )
        found = []
        for number in range(members):
            worker = await stack.enter_async_context(network.open_host())
            member = Member(worker, folder, host.peer_id, f"member {number + 1}")
            begin(member)
            await worker.connect(host.addresses[0])
            await member.exchange.open(host.peer_id)
            found.append(member)
        yield ScriptedChain(leader, found, state, keeper, machine, folder, progress)
