"""A member of a stage of one chain: what it computes in a step, and what it does with the others of its stage.

    micro-batches forward and backward -> gradients of the stage -> what is tied -> StepDone ... Apply -> Applied

It computes its micro-batches in the order of its schedule; what each operation needs comes from a member of the stage
beside it or from the leader, and waits in an inbox until then. What it gives is sent while the next is computed.

Source: protocol_spec/training/stages.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import trio
from torch import Tensor

from neurogrid.errors import (
    NeuroGridError,
    RemoteProtocolError,
    TooLargeForPeerError,
    TransportError,
)
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.streams.tracing import layers_name
from neurogrid.p2p.wire import TensorMessage
from neurogrid.renewed_event import RenewedEvent
from neurogrid.training.averaging.reductions import Reductions
from neurogrid.training.data.blob_files import OfferedFiles
from neurogrid.training.members.chain_rounds import ChainRounds, Reach
from neurogrid.training.members.failures import one_line
from neurogrid.training.runs.round_trace import MAX_STEP_PARTS, Timeline, step_trace
from neurogrid.training.runs.run_file import RunFile
from neurogrid.training.stages.inbox import StageInbox, sources_of, takers_of_tied
from neurogrid.training.stages.reduction_plans import WEIGHTS_REDUCTION, reduction_plan
from neurogrid.training.stages.routing import lanes_of
from neurogrid.training.stages.schedule import (
    Operation,
    Progress,
    forward_only,
    one_forward_one_backward,
    progress_of,
    window_of,
)
from neurogrid.training.stages.stage_process import PlainTensor, StageProcess
from neurogrid.training.wire.runs import (
    Applied,
    Apply,
    Average,
    Commit,
    Committed,
    RunMessage,
    StageOrder,
    StageTensor,
    Step,
    StepDone,
    session_of,
)

__all__ = ["ChainStage", "NeighbourLostError"]

_SEND_TIMEOUT: Final = 120.0
# Of a reduction, beside the time in which its vector comes at the pace that slices have, too: whether a step stands
# still is its leader's to see.
_REDUCE_TIMEOUT: Final = 600.0
_SENT_PER_SECOND: Final = 64 * 1024
_CODECS: Final = {"float32": "f32", "bfloat16": "bf16"}
# The one that is made, and one that comes while it is.
_MAX_STEPS: Final = 2
# Of the gradient of tied embeddings, in one message: 32 MiB.
_TIED_ELEMENTS: Final = 8 * 1024**2


class NeighbourLostError(TransportError):
    """A member that tensors go to or come from cannot be reached.

    Attributes:
        lost: its peer id.
    """

    def __init__(self, text: str, lost: str) -> None:
        super().__init__(text)
        self.lost = lost


class ChainStage:
    """A member of a stage of one chain, while its process has the layers. Keep `run` running.

    Args:
        order: by which it is that.
        index: of its stage.
        own: the peer id of this member.
        leader: that of the leader of the run.
        run_file: of the run.
        process: with the layers.
        exchange: of runs.
        reductions: of the members of the stage.
        offered: files that others may fetch.
        directory: for the state, as it is kept.
        kept: the files of the state that was kept last.
        note: is called with "working" and "ready".
        reach: of members of other replicas.

    Attributes:
        contacts: peer ids of all that tensors go to or come from, the leader left out.
        loss: of the last step, at the last stage; None while there was none.
        num_done, num_operations: of the step that is under way.
    """

    def __init__(
        self,
        order: StageOrder,
        index: int,
        *,
        own: str,
        leader: str,
        run_file: RunFile,
        process: StageProcess,
        exchange: Exchange,
        reductions: Reductions,
        offered: OfferedFiles,
        directory: Path,
        kept: list[Path],
        note: Callable[[str], None],
        reach: Reach,
    ) -> None:
        self._order, self._index, self._stages = order, index, order.stages
        self._own, self._leader, self._run_file = own, leader, run_file
        self._process, self._exchange, self._reductions = process, exchange, reductions
        self._offered, self._directory, self._kept, self._note = offered, directory, kept, note
        self._lane = self._stages[index].index(own)
        self._session = session_of(order.run)
        self._steps: deque[Step] = deque()
        self._apply: Apply | None = None
        self._has_subspace = run_file.layout.subspace > 0
        self._sources = sources_of(
            self._stages,
            own,
            leader,
            has_subspace=self._has_subspace,
            is_tied=process.is_tied,
        )
        self._rounds = ChainRounds(
            order,
            own=own,
            outer=run_file.outer,
            process=process,
            reductions=reductions,
            reach=reach,
        )
        self._inbox = StageInbox(session_of(order.run), order.chain, order.step, self._sources)
        self._came = RenewedEvent()
        self._fault: NeuroGridError | None = None
        self._waited = 0.0
        self._digest = b""
        self._outboxes: dict[str, trio.MemorySendChannel[StageTensor]] = {}
        senders = {peer for peers in self._sources.values() for peer in peers}
        self.contacts = frozenset({*self._takers(), *senders, *self._stages[index]} - {leader, own})
        self.loss: float | None = None
        self.num_done = self.num_operations = 0
        self._operations: Sequence[Operation] = ()
        bounds = order.bounds[index : index + 2]
        self._timeline = Timeline(
            {
                "neurogrid.run": run_file.name,
                "neurogrid.chain": order.chain,
                "neurogrid.stage": index + 1,
                "neurogrid.layers": layers_name(*bounds),
            },
            max_parts=MAX_STEP_PARTS,
        )

    @property
    def progress(self) -> Progress:
        """Progress with the step that is under way, or was last."""
        return progress_of(self._operations, self.num_done)

    def _takers(self) -> set[str]:
        """Peer ids of the members that this one sends tensors to."""
        last = len(self._stages) - 1
        beside = [i for i in (self._index - 1, self._index + 1) if 0 <= i <= last]
        found = {peer for i in beside for peer in self._stages[i]}
        if last and self._process.is_tied and self._index in (0, last):
            found |= set(takers_of_tied(self._stages, self._own))
        return found

    # What comes

    def take(self, code: object, sender: str, message: TensorMessage) -> None:
        """A message of a chain: of an older one it is dropped.

        Raises:
            RemoteProtocolError: its sender may not send it, or not now.
        """
        if code is RunMessage.STEP:
            self._take_step(sender, Step.decode(message.data))
        elif code is RunMessage.APPLY:
            self._take_apply(sender, Apply.decode(message.data))
        elif code is RunMessage.AVERAGE:
            if self._is_meant(sender, average := Average.decode(message.data)):
                self._rounds.take_average(average)
        elif code is RunMessage.COMMIT:
            if self._is_meant(sender, commit := Commit.decode(message.data)):
                self._rounds.take_commit(commit)
        else:
            self._inbox.put(sender, StageTensor.of(message))
        self._came.set()

    def fail(self, fault: NeuroGridError) -> None:
        """Have the stage fail where it waits next."""
        self._fault = fault
        self._came.set()

    async def _wait(self) -> None:
        """Wait until something has come."""
        if self._fault is None:  # else what was refused meanwhile is what is waited for
            await self._came.wait()
        if self._fault is not None:
            raise self._fault

    def _take_step(self, sender: str, step: Step) -> None:
        if self._is_meant(sender, step):
            if len(self._steps) >= _MAX_STEPS:
                raise RemoteProtocolError("steps come faster than they can be made")
            self._steps.append(step)

    def _take_apply(self, sender: str, apply: Apply) -> None:
        if self._is_meant(sender, apply):
            if apply.step != self._step or self._apply is not None:
                raise RemoteProtocolError(f"nothing of step {apply.step} is to be applied here")
            self._apply = apply

    def _is_meant(self, sender: str, told: Step | Apply | Average | Commit) -> bool:
        """Whether it is of this chain; what is of one that is over is dropped.

        Raises:
            RemoteProtocolError: it is not the leader who says it.
        """
        if (told.run, told.chain) != (self._order.run, self._order.chain):
            return False
        if sender != self._leader:
            raise RemoteProtocolError("steps are the leader's to order")
        return True

    async def _tensor(self, code: RunMessage, number: int, sender: str) -> PlainTensor:
        began = trio.current_time()
        tensor = self._inbox.take(code, number, sender)
        if tensor is None:
            with self._timeline.during("training.wait") as told:
                told["neurogrid.message"] = code.name.lower()
                if code is not RunMessage.TIED:
                    told["neurogrid.micro_batch"] = number
                while (tensor := self._inbox.take(code, number, sender)) is None:
                    await self._wait()
        self._waited += trio.current_time() - began
        return PlainTensor(tensor.dtype, tensor.shape, tensor.data)

    # What is done

    async def run(self) -> None:
        """Make one step after the other, until this is cancelled."""
        async with trio.open_nursery() as nursery:
            for peer_id in self._takers():
                # As many as can be under way: whoever computes never waits for the network.
                sender, receiver = trio.open_memory_channel[StageTensor](math.inf)
                self._outboxes[peer_id] = sender
                nursery.start_soon(self._send_all, peer_id, receiver)
            while True:
                while not self._steps and not self._rounds.is_due:
                    await self._wait()
                if self._rounds.is_due:
                    await self._go_round()
                else:
                    await self._make(self._steps.popleft())

    async def _send_all(
        self, peer_id: str, receiver: trio.MemoryReceiveChannel[StageTensor]
    ) -> None:
        async for tensor in receiver:
            try:
                with trio.fail_after(_SEND_TIMEOUT):
                    await self._exchange.send(peer_id, tensor.message())
            except (TransportError, TooLargeForPeerError, trio.TooSlowError) as exc:
                said = one_line(exc, f"nothing was taken within {_SEND_TIMEOUT:g} s")
                raise NeighbourLostError(f"a stage takes nothing: {said}", peer_id) from exc

    def _give(self, peer_id: str, code: RunMessage, number: int, tensor: PlainTensor) -> None:
        """Send a tensor to a member of another stage while this one goes on."""
        self._outboxes[peer_id].send_nowait(
            StageTensor(
                code,
                self._session,
                self._order.chain,
                self._step,
                number,
                tensor.dtype,
                tensor.shape,
                tensor.data,
            )
        )

    @property
    def _step(self) -> int:
        """The step that is under way, or next."""
        return self._inbox.step

    async def _make(self, step: Step) -> None:
        if step.step != self._step:
            raise RemoteProtocolError(f"step {step.step} is ordered, and {self._step} is next here")
        numbers = self._numbers(step)
        self._inbox.begin(step.micro_batches)
        self._timeline.begin()
        began, self._waited, self.num_done, self._digest = trio.current_time(), 0.0, 0, b""
        if step.is_evaluation:
            operations = forward_only(numbers)
        else:
            window = window_of(self._index, list(map(len, self._stages)))
            operations = one_forward_one_backward(numbers, window)
        self._operations, self.num_operations = operations, len(operations)
        self._note("working")
        losses = [await self._do(operation, step) for operation in operations]
        is_finite = True
        if not step.is_evaluation and self._num_members > 1:
            ready_at = trio.current_time()
            with self._timeline.during("training.average"):
                is_finite = await self._add_up()
            self._waited += trio.current_time() - ready_at
        squared_norm = 0.0
        if not step.is_evaluation:
            if self._process.is_tied and len(self._stages) > 1:
                with self._timeline.during("training.tied"):
                    await self._share_tied()
            squared_norm = await self._process.squared_norm()
        loss: float | None = None
        if self._is_last:
            loss = math.fsum(each for each in losses if each is not None)
            # Of several members each has a part of it.
            if not step.is_evaluation and self._num_members == 1:
                self.loss = loss
        fault = ""
        if not is_finite or not math.isfinite(squared_norm):
            fault, squared_norm = "a gradient", 0.0
        if loss is not None and not math.isfinite(loss):
            fault, squared_norm, loss = "the loss", 0.0, None
        if step.is_evaluation:
            # Before the leader hears of it, and orders what comes under the same number.
            self._inbox.end_evaluation()
        seconds = trio.current_time() - began
        await self._tell(
            RunMessage.STEP_DONE,
            StepDone(
                run=self._order.run,
                chain=self._order.chain,
                step=self._step,
                squared_norm=squared_norm,
                not_finite=fault,
                loss=loss,
                seconds=max(seconds - self._waited, 0.0),
                waited=self._waited,
                digest=self._digest,
            ).encode(),
        )
        if step.is_evaluation:
            self._note("ready")
        else:
            await self._end_step()

    def _numbers(self, step: Step) -> list[int]:
        """The micro-batches of a step that go through this member.

        Raises:
            RemoteProtocolError: the routes are none of this chain.
        """
        num_stages = len(self._stages)
        if step.routes and len(step.routes) != step.micro_batches * num_stages:
            raise RemoteProtocolError(
                f"{len(step.routes)} bytes of routes for {step.micro_batches} micro-batches through {num_stages} stages"
            )
        self._routes = [lanes_of(step.routes, n, num_stages) for n in range(step.micro_batches)]
        for route in self._routes:
            if any(lane >= len(peers) for lane, peers in zip(route, self._stages, strict=True)):
                raise RemoteProtocolError(f"no member of a stage is where route {route} leads to")
        return [n for n, route in enumerate(self._routes) if route[self._index] == self._lane]

    def _peer(self, number: int, index: int) -> str:
        """The member of another stage that a micro-batch goes through."""
        return self._stages[index][self._routes[number][index]]

    @property
    def _num_members(self) -> int:
        """Number of members of this stage."""
        return len(self._stages[self._index])

    async def _add_up(self) -> bool:
        """Have the gradients of all members of the stage; whether those of this one were finite."""
        codec = _CODECS[self._run_file.layout.gradients]

        async def reduce(number: int, own: Tensor, mean: Tensor) -> None:
            self._digest = await self._reduce(number, own, mean, codec)

        return await self._process.average(
            "gradients", reduce, num_members=self._num_members, chain=self._order.chain
        )

    async def _average_weights(self, done: int) -> None:
        """Have a part of the weights that all members of the stage have, where that is due after a step."""
        every = self._run_file.layout.weights_every
        if not every or done % every or self._num_members == 1:
            return

        async def reduce(number: int, own: Tensor, mean: Tensor) -> None:
            await self._reduce(WEIGHTS_REDUCTION + number, own, mean, "f32")

        await self._process.average(
            "weights",
            reduce,
            num_members=self._num_members,
            chain=self._order.chain,
            turn=done // every,
        )

    async def _reduce(self, number: int, own: Tensor, mean: Tensor, codec: str) -> bytes:
        """The digest of a mean over the members of this stage, which is written."""
        addresses = dict(zip(self._order.peers, self._order.addresses, strict=True))
        members = self._stages[self._index]
        plan = reduction_plan(
            self._order.run,
            self._order.chain,
            self._step,
            self._index,
            number,
            members=members,
            reducers=[peer for peer in members if addresses[peer]],
            num_elements=len(own),
            codec=codec,
        )
        timeout = _REDUCE_TIMEOUT + own.nbytes / _SENT_PER_SECOND
        result = await self._reductions.reduce(plan, own, timeout=timeout, out=mean)
        assert result is not None  # of a member there is one
        return result.digest

    @property
    def _is_last(self) -> bool:
        return self._index == len(self._stages) - 1

    async def _do(self, operation: Operation, step: Step) -> float | None:
        """One operation; what it adds to the loss."""
        number = operation.number
        loss: float | None = None
        if operation.is_backward:
            gradient = None
            if not self._is_last:
                sender = self._peer(number, self._index + 1)
                gradient = await self._tensor(RunMessage.GRADIENT, number, sender)
            with self._timeline.during("training.backward", {"neurogrid.micro_batch": number}):
                result = await self._process.backward(number, gradient)
            if result is not None:
                self._give(self._peer(number, self._index - 1), RunMessage.GRADIENT, number, result)
        else:
            is_first = self._index == 0
            code = RunMessage.TOKENS if is_first else RunMessage.HIDDEN
            sender = self._leader if is_first else self._peer(number, self._index - 1)
            given, labels, tokens = await self._tensor(code, number, sender), None, None
            if self._has_subspace and not is_first:
                tokens = await self._tensor(RunMessage.TOKENS, number, self._leader)
            if self._is_last:
                labels = await self._tensor(RunMessage.LABELS, number, self._leader)
            with self._timeline.during("training.forward", {"neurogrid.micro_batch": number}):
                loss = await self._forward(number, given, labels, step, tokens)
        self.num_done += 1
        return loss

    async def _forward(
        self,
        number: int,
        given: PlainTensor,
        labels: PlainTensor | None,
        step: Step,
        tokens: PlainTensor | None,
    ) -> float | None:
        result: PlainTensor | float
        if step.is_evaluation:
            result = await self._process.evaluate(given, labels, tokens)
        elif labels is None:
            result = await self._process.forward(number, self._step, given, tokens)
        else:
            result = await self._process.forward_loss(
                number, self._step, given, labels, step.labels, tokens
            )
        if isinstance(result, PlainTensor):
            self._give(self._peer(number, self._index + 1), RunMessage.HIDDEN, number, result)
            return None
        return result

    async def _share_tied(self) -> None:
        """Give the other end this one's part of the gradient of tied embeddings, and take that one's in."""
        if RunMessage.TIED not in self._sources:
            return
        (sender,) = self._sources[RunMessage.TIED]
        takers = takers_of_tied(self._stages, self._own)
        start, num_elements = 0, 1
        while start < num_elements:
            own, num_elements = await self._process.tied_gradient(start, _TIED_ELEMENTS)
            column = PlainTensor(own.dtype, (*own.shape, 1), own.data)
            for taker in takers:
                self._give(taker, RunMessage.TIED, start, column)
            start += own.shape[0]
        start = 0
        while start < num_elements:
            theirs = await self._tensor(RunMessage.TIED, start, sender)
            num = min(_TIED_ELEMENTS, num_elements - start)
            if theirs.shape != (num, 1):
                raise RemoteProtocolError(
                    f"elements of a gradient of shape {list(theirs.shape)}, and [{num}, 1] are due"
                )
            await self._process.add_tied_gradient(theirs._replace(shape=(num,)))
            start += num

    async def _end_step(self) -> None:
        # The others are at it, and the leader has to have heard of all.
        with self._timeline.during("training.wait", {"neurogrid.message": "apply"}):
            while (apply := self._apply) is None:
                await self._wait()
        self._apply = None
        with self._timeline.during("training.apply"):
            await self._process.apply(
                self._step,
                apply.norm,
                is_applied=apply.is_applied,
                rate=apply.rate,
                clip=apply.clip,
            )
            await self._average_weights(self._step + 1)
        names: Sequence[str] = ()
        blobs: Sequence[bytes] = ()
        if apply.keeps:
            with self._timeline.during("training.save"):
                names, blobs = await self._keep(self._step + 1)
        done = self._step
        self._inbox.advance()
        self._note("ready")
        await self._tell(
            RunMessage.APPLIED,
            Applied(
                run=self._order.run,
                chain=self._order.chain,
                step=done,
                memory_bytes=self._process.memory_bytes,
                names=tuple(names),
                blobs=tuple(blobs),
            ).encode(),
        )
        ids = step_trace(self._order.run, self._order.chain, done)
        self._timeline.end(ids, "training.stage", {"neurogrid.step": done + 1})

    async def _go_round(self) -> None:
        """Do what is due of a round of several replicas, an attempt or the outer step, and tell the leader."""
        averaged = await self._rounds.average(self._step)
        if averaged is not None:
            await self._tell(RunMessage.AVERAGED, averaged.encode())
        if (commit := await self._rounds.commit()) is None:
            return
        names: Sequence[str] = ()
        blobs: Sequence[bytes] = ()
        if commit.keeps:
            names, blobs = await self._keep(commit.step)
        self._inbox.advance(commit.step)
        self._note("ready")
        committed = Committed(
            run=self._order.run,
            chain=self._order.chain,
            attempt=commit.attempt,
            memory_bytes=self._process.memory_bytes,
            names=tuple(names),
            blobs=tuple(blobs),
        )
        await self._tell(RunMessage.COMMITTED, committed.encode())

    async def _keep(self, step: int) -> tuple[list[str], list[bytes]]:
        """Write the state after a step and offer it, in the place of the one before."""
        directory = self._directory / f"step-{step}"
        files = await self._process.save(directory)
        blobs = [await self._offered.offer(path) for path in files.values()]
        for path in self._kept:
            self._offered.withdraw(path)
            path.unlink(missing_ok=True)
        self._kept[:] = files.values()
        return list(files), blobs

    async def _tell(self, code: RunMessage, data: bytes) -> None:
        with trio.fail_after(_SEND_TIMEOUT):
            await self._exchange.send(self._leader, TensorMessage(code, data=data))
