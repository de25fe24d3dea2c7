"""A member's part in a run whose model lies in a chain of stages: it is a stage, of one arrangement after another.

    order -> weights and state -> a process of its own -> steps, for as long as the order stands

In a step it computes the micro-batches in the order of its schedule; what each operation needs comes from the stage
beside it or from the leader, and waits in an inbox until then. What it gives is sent while the next is computed. When
something fails, it says so and waits: the leader arranges the stages anew, and a later order ends what was.

Source: protocol_spec/training/stages.md.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import trio

from neurogrid.errors import NeuroGridError, RemoteProtocolError, TransportError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.wire import MessageCode, TensorMessage
from neurogrid.renewed_event import RenewedEvent
from neurogrid.temporary import temporary_directory
from neurogrid.training.data.blob_files import fetch_file
from neurogrid.training.members.member_blobs import MemberBlobs
from neurogrid.training.members.settings import MemberSettings
from neurogrid.training.members.status import PartStatus
from neurogrid.training.runs.run_file import RunFile, parse_run_file
from neurogrid.training.stages.inbox import StageInbox, sources_of
from neurogrid.training.stages.schedule import Operation, forward_only, one_forward_one_backward
from neurogrid.training.stages.stage_process import (
    PlainTensor,
    StageProcess,
    open_stage_process,
)
from neurogrid.training.stages.stage_settings import StageSettings
from neurogrid.training.wire.runs import (
    Applied,
    Apply,
    Order,
    Report,
    RunMessage,
    StageOrder,
    StageReport,
    StageTensor,
    Start,
    Step,
    StepDone,
    session_of,
)

__all__ = ["WEIGHTS_PIECE", "ChainPart"]

logger = logging.getLogger(__name__)

WEIGHTS_PIECE: Final = "weights."
"""What the names of pieces begin with that are weights of the checkpoint, and no state."""

_FETCH_TIMEOUT: Final = 600.0
_DIAL_TIMEOUT: Final = 30.0
_SEND_TIMEOUT: Final = 120.0
_MAX_REASON_CHARS: Final = 200
# The one that is made, and one that comes while it is.
_MAX_STEPS: Final = 2
# Of the gradient of tied embeddings, in one message: 32 MiB.
_TIED_ELEMENTS: Final = 8 * 1024**2
_ACTIVATIONS: Final = {"float32": "F32", "bfloat16": "BF16"}


class ChainPart:
    """A member's part in one run in stages. Keep `run` running.

    Args:
        host: this peer's.
        exchange: of runs.
        leader: the peer id of the leader of the run.
        start: what it has been told to begin with.
        blobs: what comes from other peers, and what they may fetch.
        settings: what may be used.
        tell: is called whenever a report has changed.
    """

    def __init__(
        self,
        host: Host,
        exchange: Exchange,
        leader: str,
        start: Start,
        blobs: MemberBlobs,
        settings: MemberSettings,
        tell: Callable[[], None],
    ) -> None:
        self.leader = leader
        self._host, self._exchange, self._start = host, exchange, start
        self._blobs, self._settings, self._tell = blobs, settings, tell
        self._run_file: RunFile = parse_run_file(start.run_file)
        self._is_dismissed = False
        self._order: StageOrder | None = None
        self._stage: _Stage | None = None
        self._changed = RenewedEvent()
        self._fetched: dict[bytes, Path] = {}
        self._kept: list[Path] = []
        self._stage_report: StageReport | None = None
        self._report = Report(
            run=start.run, seat=start.seat, state="ready", group_addresses=host.addresses[:16]
        )

    @property
    def run_id(self) -> bytes:
        """Of the run, 16 bytes."""
        return self._start.run

    @property
    def is_dismissed(self) -> bool:
        """Whether the leader has said that it needs this member no more."""
        return self._is_dismissed

    def reports(self) -> list[tuple[MessageCode, bytes]]:
        """What the leader is told, again and again."""
        told: list[tuple[MessageCode, bytes]] = [(RunMessage.REPORT, self._report.encode())]
        if self._stage_report is not None:
            told.append((RunMessage.STAGE_REPORT, self._stage_report.encode()))
        return told

    def status(self) -> PartStatus:
        """How the member stands, for people."""
        report, stage = self._stage_report, self._stage
        return PartStatus(
            run=self._run_file.name,
            leader=self.leader,
            seat=self._report.seat,
            state=self._report.state,
            reason=self._report.reason,
            round=report.step if report is not None else 0,
            batches_done=stage.num_done if stage is not None else 0,
            batches=stage.num_operations if stage is not None else 0,
            tokens_per_second=None,
            loss=stage.loss if stage is not None else None,
            num_samples=0,
            memory_bytes=report.memory_bytes if report is not None else 0,
            micro_batch=0,
            held_slices=0,
            sent_bytes=0,
            received_bytes=0,
        )

    def take(self, order: Order) -> None:
        """Works are for members that hold a whole model: there are none here."""
        logger.debug("an order of work for a stage, of run %s", order.run.hex())

    def take_message(self, message: TensorMessage) -> None:
        """A message of a chain, whichever.

        Raises:
            RemoteProtocolError: it is none that its sender may send now.
        """
        code, sender = message.msg_type, sender_of(message)
        if code is RunMessage.STAGE:
            order = StageOrder.decode(message.data)
            if sender == self.leader and order.run == self.run_id:
                self._take_order(order)
        elif self._stage is not None:
            try:
                self._stage.take(code, sender, message)
            except RemoteProtocolError as exc:
                # What was refused does not come again: the step cannot be ended.
                self._stage.fail(exc)
                raise

    def _take_order(self, order: StageOrder) -> None:
        if order.peers[order.index] != self._host.peer_id:
            raise RemoteProtocolError("a stage's order for another peer")
        if self._order is None or order.chain > self._order.chain:
            self._order = order
            self._changed.set()

    def dismiss(self) -> None:
        """The leader needs this member no more."""
        self._is_dismissed = True
        self._changed.set()

    async def run(self) -> None:
        """Take part until the run ends."""
        with temporary_directory("neurogrid-stage-") as directory:
            async with open_stage_process(threads=self._settings.threads) as process:
                await self._take_part(process, directory)

    async def _take_part(self, process: StageProcess, directory: Path) -> None:
        while not self._is_dismissed:
            order = self._order
            if order is None:
                await self._changed.wait()
                continue
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._be_a_stage, order, process, directory)
                while self._order is order and not self._is_dismissed:
                    await self._changed.wait()
                nursery.cancel_scope.cancel()

    async def _be_a_stage(self, order: StageOrder, process: StageProcess, directory: Path) -> None:
        """Follow an order, until this is cancelled or something fails."""
        self._note("loading", order, order.step)
        try:
            with unwrap_errors():
                await self._follow(order, process, directory)
        except (NeuroGridError, OSError, trio.TooSlowError) as exc:
            logger.warning("stage %d of chain %d has failed: %s", order.index, order.chain, exc)
            report = self._stage_report
            if report is None or report.state != "failed":
                self._note("failed", order, self._step_of(order), reason=_line(exc) or "too slow")
        finally:
            self._stage = None

    def _step_of(self, order: StageOrder) -> int:
        report = self._stage_report
        return report.step if report is not None and report.chain == order.chain else order.step

    async def _follow(self, order: StageOrder, process: StageProcess, directory: Path) -> None:
        pieces = await self._fetch(order, directory)
        settings = self._settings
        told = StageSettings(
            config=self._start.config,
            start=order.bounds[order.index],
            stop=order.bounds[order.index + 1],
            inner=self._run_file.inner,
            adapter=self._run_file.adapter,
            total_steps=self._start.total_steps or 1,
            seed=self._run_file.seed,
            device=settings.device,
            threads=settings.threads,
            memory_limit=settings.memory,
            recompute=self._run_file.layout.recompute,
            quantization=order.quantization,
        )
        weights = [path for name, path in pieces.items() if name.startswith(WEIGHTS_PIECE)]
        state = {n: path for n, path in pieces.items() if not n.startswith(WEIGHTS_PIECE)}
        activations = _ACTIVATIONS[self._run_file.layout.activations]
        await process.open(told, weights=weights, pieces=state, activations=activations)
        self._stage = _Stage(self, order, process, directory)
        await self._reach_neighbours(order)
        self._note("ready", order, order.step, memory_bytes=process.memory_bytes)
        await self._stage.run()

    async def _fetch(self, order: StageOrder, directory: Path) -> dict[str, Path]:
        """The pieces of an order as files; those that an earlier one had are here."""
        wanted = dict(zip(order.names, order.blobs, strict=True))
        for blob_id in self._fetched.keys() - set(wanted.values()):
            self._fetched.pop(blob_id).unlink(missing_ok=True)
        peers = [peer for peer in (self.leader, *order.providers) if peer != self._host.peer_id]
        for blob_id in dict.fromkeys(wanted.values()):
            if blob_id not in self._fetched:
                path = directory / "pieces" / blob_id.hex()
                await fetch_file(
                    self._blobs.transfers, blob_id, peers, path, timeout=_FETCH_TIMEOUT
                )
                self._fetched[blob_id] = path
        return {name: self._fetched[blob_id] for name, blob_id in wanted.items()}

    async def _reach_neighbours(self, order: StageOrder) -> None:
        """Have a stream to the next stage, and as the first one of several to the last."""
        wanted = {order.index + 1}
        if order.index == 0:
            wanted.add(len(order.peers) - 1)
        for index in sorted(wanted):
            if not order.index < index < len(order.peers):
                continue
            peer_id, address = order.peers[index], order.addresses[index]
            try:
                with trio.fail_after(_DIAL_TIMEOUT):
                    if not self._host.is_connected(peer_id) and address:
                        await self._host.connect_any([address])
                    await self._exchange.open(peer_id)
            except (TransportError, trio.TooSlowError) as exc:
                self._note("failed", order, order.step, reason=_line(exc), lost=peer_id)
                raise TransportError(f"the stage after this one cannot be reached: {exc}") from exc

    def _note(self, state: str, order: StageOrder, step: int, **more: Any) -> None:
        self._stage_report = StageReport(self.run_id, order.chain, state, step, **more)
        known = {"loading": "starting", "ready": "ready", "working": "training"}
        self._report = replace(
            self._report,
            # A stage that has failed is there for the next order.
            state=known.get(state, "waiting"),
            reason=self._stage_report.reason,
            memory_bytes=self._stage_report.memory_bytes,
            group_addresses=self._host.addresses[:16],
        )
        self._tell()


class _Stage:
    """A stage of one chain while its process runs."""

    def __init__(
        self, part: ChainPart, order: StageOrder, process: StageProcess, directory: Path
    ) -> None:
        self._part, self._order, self._process = part, order, process
        self._directory = directory / f"chain-{order.chain}"
        self._exchange = part._exchange
        self._index, self._num_stages = order.index, len(order.peers)
        self._session = session_of(order.run)
        self._steps: deque[Step] = deque()
        self._apply: Apply | None = None
        sources = sources_of(self._index, order.peers, part.leader)
        self._inbox = StageInbox(session_of(order.run), order.chain, order.step, sources)
        self._came = RenewedEvent()
        self._fault: NeuroGridError | None = None
        self._waited = 0.0
        self.loss: float | None = None
        self.num_done = self.num_operations = 0

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
        else:
            self._inbox.put(sender, StageTensor.of(message))
        self._came.set()

    def fail(self, fault: NeuroGridError) -> None:
        """Have the stage fail where it waits next."""
        self._fault = fault
        self._came.set()

    async def _wait(self) -> None:
        """Wait until something has come."""
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

    def _is_meant(self, sender: str, told: Step | Apply) -> bool:
        """Whether it is of this chain; what is of one that is over is dropped.

        Raises:
            RemoteProtocolError: it is not the leader who says it.
        """
        if (told.run, told.chain) != (self._order.run, self._order.chain):
            return False
        if sender != self._part.leader:
            raise RemoteProtocolError("steps are the leader's to order")
        return True

    async def _tensor(self, code: RunMessage, number: int) -> PlainTensor:
        began = trio.current_time()
        while (tensor := self._inbox.take(code, number)) is None:
            await self._wait()
        self._waited += trio.current_time() - began
        return PlainTensor(tensor.dtype, tensor.shape, tensor.data)

    # What is done

    async def run(self) -> None:
        """Make one step after the other, until this is cancelled."""
        async with trio.open_nursery() as nursery:
            outboxes: dict[str, trio.MemorySendChannel[StageTensor]] = {}
            for peer_id in {self._order.peers[i] for i in self._receivers()}:
                # As many as can be under way: whoever computes never waits for the network.
                sender, receiver = trio.open_memory_channel[StageTensor](math.inf)
                outboxes[peer_id] = sender
                nursery.start_soon(self._send_all, peer_id, receiver)
            self._outboxes = outboxes
            while True:
                while not self._steps:
                    await self._wait()
                await self._make(self._steps.popleft())

    def _receivers(self) -> set[int]:
        last = self._num_stages - 1
        ends = {0: last, last: 0}
        beside = {self._index - 1, self._index + 1, ends.get(self._index, -1)} - {self._index}
        return {index for index in beside if 0 <= index <= last}

    async def _send_all(
        self, peer_id: str, receiver: trio.MemoryReceiveChannel[StageTensor]
    ) -> None:
        async for tensor in receiver:
            try:
                with trio.fail_after(_SEND_TIMEOUT):
                    await self._exchange.send(peer_id, tensor.message())
            except (TransportError, trio.TooSlowError) as exc:
                note = _line(exc) or f"nothing was taken within {_SEND_TIMEOUT:g} s"
                self._part._note("failed", self._order, self._step, reason=note, lost=peer_id)
                raise TransportError(f"a stage beside this one takes nothing: {note}") from exc

    def _give(self, index: int, code: RunMessage, number: int, tensor: PlainTensor) -> None:
        """Send a tensor to another stage while this one goes on."""
        self._outboxes[self._order.peers[index]].send_nowait(
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
        self._part._note(
            "working", self._order, self._step, memory_bytes=self._process.memory_bytes
        )
        began, self._waited, self.num_done = trio.current_time(), 0.0, 0
        if step.is_evaluation:
            operations = forward_only(step.micro_batches)
        else:
            operations = one_forward_one_backward(self._index, self._num_stages, step.micro_batches)
        self.num_operations = len(operations)
        losses = [await self._do(operation, step) for operation in operations]
        squared_norm = 0.0
        if not step.is_evaluation:
            if self._process.is_tied and self._num_stages > 1:
                await self._share_tied()
            squared_norm = await self._process.squared_norm()
        loss: float | None = None
        if self._is_last:
            loss = math.fsum(each for each in losses if each is not None)
            if not step.is_evaluation:
                self.loss = loss
        fault = ""
        if not math.isfinite(squared_norm):
            fault, squared_norm = "a gradient", 0.0
        if loss is not None and not math.isfinite(loss):
            fault, squared_norm, loss = "the loss", 0.0, None
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
            ).encode(),
        )
        if not step.is_evaluation:
            await self._end_step()

    @property
    def _is_last(self) -> bool:
        return self._index == self._num_stages - 1

    async def _do(self, operation: Operation, step: Step) -> float | None:
        """One operation; what it adds to the loss."""
        number = operation.number
        loss: float | None = None
        if operation.is_backward:
            gradient = None
            if not self._is_last:
                gradient = await self._tensor(RunMessage.GRADIENT, number)
            result = await self._process.backward(number, gradient)
            if result is not None:
                self._give(self._index - 1, RunMessage.GRADIENT, number, result)
        else:
            code = RunMessage.TOKENS if self._index == 0 else RunMessage.HIDDEN
            given = await self._tensor(code, number)
            labels = await self._tensor(RunMessage.LABELS, number) if self._is_last else None
            loss = await self._forward(number, given, labels, step)
        self.num_done += 1
        return loss

    async def _forward(
        self, number: int, given: PlainTensor, labels: PlainTensor | None, step: Step
    ) -> float | None:
        result: PlainTensor | float
        if step.is_evaluation:
            result = await self._process.evaluate(given, labels)
        elif labels is None:
            result = await self._process.forward(number, self._step, given)
        else:
            result = await self._process.forward_loss(
                number, self._step, given, labels, step.labels
            )
        if isinstance(result, PlainTensor):
            self._give(self._index + 1, RunMessage.HIDDEN, number, result)
            return None
        return result

    async def _share_tied(self) -> None:
        """Give the other end this one's part of the gradient of tied embeddings, and take that one's in."""
        if self._index not in (0, self._num_stages - 1):
            return
        other = self._num_stages - 1 if self._index == 0 else 0
        start, num_elements = 0, 1
        while start < num_elements:
            own, num_elements = await self._process.tied_gradient(start, _TIED_ELEMENTS)
            column = PlainTensor(own.dtype, (*own.shape, 1), own.data)
            self._give(other, RunMessage.TIED, start, column)
            start += own.shape[0]
        start = 0
        while start < num_elements:
            theirs = await self._tensor(RunMessage.TIED, start)
            num = min(_TIED_ELEMENTS, num_elements - start)
            if theirs.shape != (num, 1):
                raise RemoteProtocolError(
                    f"elements of a gradient of shape {list(theirs.shape)}, and [{num}, 1] are due"
                )
            await self._process.add_tied_gradient(theirs._replace(shape=(num,)))
            start += num

    async def _end_step(self) -> None:
        while (apply := self._apply) is None:
            await self._wait()
        self._apply = None
        await self._process.apply(self._step, apply.norm, is_applied=apply.is_applied)
        names: Sequence[str] = ()
        blobs: Sequence[bytes] = ()
        if apply.keeps:
            names, blobs = await self._keep()
        done = self._step
        self._inbox.advance()
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

    async def _keep(self) -> tuple[list[str], list[bytes]]:
        """Write the state and offer it, in the place of the one before."""
        directory = self._directory / f"step-{self._step + 1}"
        files = await self._process.save(directory)
        offered = self._part._blobs.offered
        blobs = [await offered.offer(path) for path in files.values()]
        part = self._part
        for path in part._kept:
            offered.withdraw(path)
            path.unlink(missing_ok=True)
        part._kept = list(files.values())
        return list(files), blobs

    async def _tell(self, code: RunMessage, data: bytes) -> None:
        with trio.fail_after(_SEND_TIMEOUT):
            await self._exchange.send(self._part.leader, TensorMessage(code, data=data))


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:_MAX_REASON_CHARS]
