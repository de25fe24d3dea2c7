"""A member's part in a run whose model lies in a chain of stages: it is a stage, of one arrangement after another.

    order -> weights and state -> a process of its own -> steps, for as long as the order stands

What a step is, is the matter of `chain_stage`. When something fails, it says so and waits: the leader arranges the
stages anew, and a later order ends what was. Layers and state that the later order wants, too, stay as they are.

Source: protocol_spec/training/stages.md.
"""

from __future__ import annotations

import logging
import shutil
from bisect import bisect_right
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import trio

from neurogrid.errors import (
    CheckpointError,
    NeuroGridError,
    RemoteProtocolError,
    TransportError,
)
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.trust import ANY_ROLE, RUN_ROLES
from neurogrid.p2p.wire import MessageCode, TensorMessage
from neurogrid.renewed_event import RenewedEvent
from neurogrid.temporary import temporary_directory
from neurogrid.training.averaging.reductions import Reductions
from neurogrid.training.data.blob_files import fetch_file_patiently
from neurogrid.training.members.chain_stage import ChainStage, NeighbourLostError
from neurogrid.training.members.failures import one_line, telling_failure
from neurogrid.training.members.member_blobs import MemberBlobs
from neurogrid.training.members.settings import MemberSettings
from neurogrid.training.members.status import PartStatus
from neurogrid.training.runs.run_file import RunFile, parse_kept_run_file
from neurogrid.training.stages.schedule import Progress
from neurogrid.training.stages.stage_process import StageProcess, open_stage_process
from neurogrid.training.stages.stage_settings import StageSettings
from neurogrid.training.wire import training_table
from neurogrid.training.wire.runs import (
    Average,
    Order,
    Report,
    RunMessage,
    StageOrder,
    StageReport,
    Start,
)

__all__ = ["WEIGHTS_PIECE", "ChainPart"]

logger = logging.getLogger(__name__)

WEIGHTS_PIECE: Final = "weights."
"""Prefix of the names of pieces that are weights of the checkpoint, and no state."""

# For a piece of the state, and of the weights, which all members have from the leader at once.
_STATE_TIMEOUT: Final = 600.0
_WEIGHTS_TIMEOUT: Final = 3600.0
_DIAL_TIMEOUT: Final = 30.0
# Seconds between two looks at whether somebody has dialled.
_MOMENT: Final = 0.1
# Seconds that another member of the stage may be ahead of this one with its micro-batches.
_EARLY_TIMEOUT: Final = 600.0
# Between two looks at how far the step is, for the leader to show.
_PROGRESS_SECONDS: Final = 0.5
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
        self._run_file: RunFile = parse_kept_run_file(start.run_file)
        self._is_dismissed = False
        self._order: StageOrder | None = None
        self._stage: ChainStage | None = None
        self._changed = RenewedEvent()
        self._fetched: dict[bytes, Path] = {}
        self._kept: list[Path] = []
        self._stage_report: StageReport | None = None
        self._report = Report(
            run=start.run, seat=start.seat, state="ready", group_addresses=host.addresses[:16]
        )

    @property
    def run_id(self) -> bytes:
        """Id of the run, 16 bytes."""
        return self._start.run

    @property
    def is_dismissed(self) -> bool:
        """Whether the leader has said that it needs this member no more."""
        return self._is_dismissed

    def reports(self) -> list[tuple[MessageCode, bytes]]:
        """Reports to the leader, which are sent again and again."""
        told: list[tuple[MessageCode, bytes]] = [(RunMessage.REPORT, self._report.encode())]
        if (report := self._stage_report) is not None:
            progress = self._progress()
            now = replace(
                report,
                micro_batches=progress.micro_batches,
                done=progress.done,
                under_way=progress.under_way,
            )
            told.append((RunMessage.STAGE_REPORT, now.encode()))
        return told

    def _progress(self) -> Progress:
        """Progress with the step under way; an empty one where none is."""
        report, stage = self._stage_report, self._stage
        is_working = report is not None and report.state == "working"
        return stage.progress if is_working and stage is not None else Progress()

    def status(self) -> PartStatus:
        """Status of the member in the run, for people."""
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
                # What was refused does not come again: the step cannot be ended. Of others nothing is waited for.
                if sender == self.leader or sender in self._stage.contacts:
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
        """Take part until the run ends.

        Raises:
            NeuroGridError: this machine cannot; the report says why.
        """
        with telling_failure(self._fail):
            await self._run()

    def _fail(self, error: NeuroGridError) -> None:
        reason = one_line(error, type(error).__name__)
        self._report = replace(self._report, state="failed", reason=reason)
        self._stage_report = None
        self._tell()

    async def _run(self) -> None:
        with temporary_directory("neurogrid-stage-") as directory:
            async with (
                open_stage_process(threads=self._settings.threads) as process,
                aclosing(Exchange(self._host, training_table())) as exchange,
            ):
                self._reductions = Reductions(
                    exchange,
                    admit=self._is_worker if self._has_replicas else self._is_beside,
                    early_timeout=_EARLY_TIMEOUT,
                )
                await self._take_part(process, directory)

    def _is_beside(self, peer_id: str) -> bool:
        """Whether a peer is in this member's stage."""
        order = self._order
        return order is not None and any(
            peer_id in stage and self._host.peer_id in stage for stage in order.stages
        )

    @property
    def _has_replicas(self) -> bool:
        return self._run_file.layout.replicas > 1

    def _is_worker(self, peer_id: str) -> bool:
        """Whether a peer may be in an attempt at a round, which this member may hear of later."""
        return self._host.role_of(peer_id) in (ANY_ROLE, *RUN_ROLES)

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
            logger.warning("member %d of chain %d has failed: %s", order.index, order.chain, exc)
            await process.settle()
            self._note(
                "failed",
                order,
                process.step,
                reason=one_line(exc, "too slow"),
                lost=exc.lost if isinstance(exc, NeighbourLostError) else "",
            )
        finally:
            self._stage = None

    async def _follow(self, order: StageOrder, process: StageProcess, directory: Path) -> None:
        settings, layout = self._settings, self._run_file.layout
        stages = order.stages
        index = next(i for i, members in enumerate(stages) if self._host.peer_id in members)
        told = StageSettings(
            config=self._start.config,
            start=order.bounds[index],
            stop=order.bounds[index + 1],
            inner=self._run_file.inner,
            adapter=self._run_file.adapter,
            total_steps=self._start.total_steps or 1,
            seed=self._run_file.seed,
            device=settings.device,
            threads=settings.threads,
            memory_limit=settings.memory,
            recompute=layout.recompute,
            quantization=order.quantization,
            power_sgd=layout.power_sgd,
            subspace=layout.subspace,
            outer_lr=self._run_file.outer.lr if self._has_replicas else 0.0,
            outer_momentum=self._run_file.outer.momentum if self._has_replicas else 0.0,
        )
        await process.settle()
        await self._remove_unkept(directory)
        is_given = any(not name.startswith(WEIGHTS_PIECE) for name in order.names)
        if not is_given and process.is_at(told, order.step):
            await process.forget()
        elif not is_given and order.step:
            raise CheckpointError(
                f"the state after step {order.step} is to be here, and the order gives none: it is not"
            )
        else:
            # Those that hold the state may not know that they are to give it.
            await self._reach(order, order.index, frozenset(order.providers), dials_all=True)
            pieces = await self._fetch(order, directory)
            weights = [path for name, path in pieces.items() if name.startswith(WEIGHTS_PIECE)]
            state = {n: path for n, path in pieces.items() if not n.startswith(WEIGHTS_PIECE)}
            await process.open(
                told,
                step=order.step,
                weights=weights,
                pieces=state,
                activations=_ACTIVATIONS[layout.activations],
            )
        self._stage = stage = ChainStage(
            order,
            index,
            own=self._host.peer_id,
            leader=self.leader,
            run_file=self._run_file,
            process=process,
            exchange=self._exchange,
            reductions=self._reductions,
            offered=self._blobs.offered,
            directory=directory / f"chain-{order.chain}",
            kept=self._kept,
            note=lambda state: self._note(
                state, order, process.step, memory_bytes=process.memory_bytes
            ),
            reach=lambda average, contacts: self._reach(
                average, average.peers.index(self._host.peer_id), contacts
            ),
        )
        if not order.is_preparation:
            await self._reach(order, order.index, stage.contacts)
        self._note("ready", order, process.step, memory_bytes=process.memory_bytes)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell_progress)
            await stage.run()

    async def _remove_unkept(self, directory: Path) -> None:
        """Remove states that a step has written in vain: it was broken off on the way, or the disk was full."""
        kept = {path.parent for path in self._kept}
        for folder in directory.glob("chain-*/step-*"):
            if folder not in kept:
                for path in folder.iterdir():
                    self._blobs.offered.withdraw(path)
                await trio.to_thread.run_sync(shutil.rmtree, folder, True)

    async def _tell_progress(self) -> None:
        """Have the leader told how far the step is, whenever that has changed."""
        told = Progress()
        while True:
            await trio.sleep(_PROGRESS_SECONDS)
            if (now := self._progress()) != told:
                told = now
                self._tell()

    async def _fetch(self, order: StageOrder, directory: Path) -> dict[str, Path]:
        """The pieces of an order as files; those that an earlier one had are here."""
        wanted = dict(zip(order.names, order.blobs, strict=True))
        for blob_id in self._fetched.keys() - set(wanted.values()):
            self._fetched.pop(blob_id).unlink(missing_ok=True)
        for name, blob_id in wanted.items():
            if blob_id not in self._fetched:
                peers = [*self._providers(order, name), self.leader]
                path = directory / "pieces" / blob_id.hex()
                is_weights = name.startswith(WEIGHTS_PIECE)
                timeout = _WEIGHTS_TIMEOUT if is_weights else _STATE_TIMEOUT
                # One that serves many at once is busy for some of them.
                await fetch_file_patiently(
                    self._blobs.transfers, blob_id, peers, path, timeout=timeout
                )
                self._fetched[blob_id] = path
        return {name: self._fetched[blob_id] for name, blob_id in wanted.items()}

    def _providers(self, order: StageOrder, name: str) -> list[str]:
        """Other members that provide a piece of state: those of its stage; none for weights, which the leader gives."""
        if name.startswith(WEIGHTS_PIECE):
            return []
        kind, _, number = name.partition(".")
        last = len(order.stages) - 1
        index = last if kind == "last" else 0
        if kind == "layer" and number.isdecimal():
            index = min(bisect_right(order.bounds, int(number)) - 1, last)
        stage = order.stages[index]
        return [peer for peer in order.providers if peer in stage and peer != self._host.peer_id]

    async def _reach(
        self,
        told: StageOrder | Average,
        index: int,
        contacts: frozenset[str],
        *,
        dials_all: bool = False,
    ) -> None:
        """Have a stream to members of the chain, or of other replicas.

        Args:
            told: by which there are these.
            index: of this member among its peers.
            contacts: peer ids.
            dials_all: whether this member dials those that are to dial it, too.
        """
        for peer_id, address in zip(told.peers, told.addresses, strict=True):
            if peer_id not in contacts or peer_id == self._host.peer_id:
                continue
            own = told.addresses[index]
            # Of two that can be dialled, the later one is.
            is_later = told.peers.index(peer_id) > index
            dials = address and (dials_all or is_later or not own)
            try:
                with trio.fail_after(_DIAL_TIMEOUT):
                    if dials and not self._host.is_connected(peer_id):
                        await self._host.connect_any([address])
                    while not self._host.is_connected(peer_id):
                        await trio.sleep(_MOMENT)
                    await self._exchange.open(peer_id)
            except (TransportError, trio.TooSlowError) as exc:
                said = one_line(exc, f"there was no connection within {_DIAL_TIMEOUT:g} s")
                raise NeighbourLostError(f"a stage cannot be reached: {said}", peer_id) from exc

    def _note(
        self, state: str, order: StageOrder, step: int | None, *, reason: str = "", **more: Any
    ) -> None:
        """Tell the leader how this member stands.

        Args:
            step: how many steps the state has made; None where it is not whole, or not here.
        """
        is_held = step is not None and state != "loading"
        self._stage_report = StageReport(
            self.run_id,
            order.chain,
            state,
            order.step if step is None else step,
            reason=reason,
            holds=is_held,
            **more,
        )
        known = {"loading": "starting", "ready": "ready", "working": "training"}
        is_between_steps = state == "ready" and self._report.state == "training"
        self._report = replace(
            self._report,
            # A stage that has failed is there for the next order.
            state="training" if is_between_steps else known.get(state, "waiting"),
            reason=self._stage_report.reason,
            memory_bytes=self._stage_report.memory_bytes,
            group_addresses=self._host.addresses[:16],
        )
        self._tell()
