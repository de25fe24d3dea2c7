"""Progress of a coordinator as lines: the plan, the transfer, what failed and what was done about it.

All of it goes to stderr, readable without colour. On a terminal what takes a while moves; on a pipe it is lines, too,
and where programs read them, objects.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from rich.status import Status

from neurogrid.cli.terminal.screen import Screen
from neurogrid.cli.terminal.transfer_view import TransferView, format_bytes
from neurogrid.fleet.speeds.drift import how_fast
from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.inference.board.progress import Progress
from neurogrid.p2p.hosts.machine import PeerNames
from neurogrid.planner import Plan, name_range

__all__ = ["JoinLine", "TerminalProgress", "format_bytes"]


class JoinLine(Progress):
    """Says how a worker joins, and nothing else.

    Attributes:
        invite: gives what to say of it, from our peer id and addresses, and whether the line is for a terminal;
            None where nobody joins.
    """

    def __init__(self, screen: Screen) -> None:
        self._say = screen.say
        self._is_terminal = screen.is_terminal
        self.invite: Callable[[str, Sequence[str], bool], str] | None = None

    def listening(self, peer_id: str, addresses: Sequence[str]) -> None:
        if self.invite is not None:
            # As it is to be typed elsewhere: one line, however narrow the terminal.
            line = self.invite(peer_id, addresses, self._is_terminal)
            self._say(
                line,
                whole=True,
                event="listening",
                peer_id=peer_id,
                addresses=list(addresses),
            )


class TerminalProgress(JoinLine):
    """Says all of it; a context manager, so that what moves is always taken down."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(screen)
        self._screen = screen
        self._model_name = "the model"
        self._own_id = ""
        self._is_alone = False
        self._names = PeerNames()
        screen.with_names = self._names.beside_ids
        self._status: Status | None = None
        self._transfers: TransferView | None = None
        self._sent = 0
        self._held = 0
        self._passed_on = 0
        self._started: float | None = None
        self._finished = 0.0

    def __enter__(self) -> TerminalProgress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Take down what moves."""
        self._stop_status()
        self._stop_transfers()

    def model_read(self, name: str, num_layers: int) -> None:
        self._model_name = name

    def listening(self, peer_id: str, addresses: Sequence[str]) -> None:
        self._stop_status()
        self._own_id = peer_id
        super().listening(peer_id, addresses)

    def working(self, what: str) -> None:
        self._stop_status()
        if self._screen.is_live:
            self._status = self._screen.spinner(what)
            self._status.start()
        else:
            self._say(what, event="working")

    def waiting(self, found: int, wanted: int) -> None:
        if found < wanted:
            self.working(f"waiting for workers: {found} of {wanted} found")

    def explained(self, table: str) -> None:
        self._stop_status()
        for line in table.splitlines():
            self._say(line, event="explained")

    def planned(self, plan: Plan, workers: Sequence[WorkerInfo], num_layers: int) -> None:
        self._stop_status()
        for worker in workers:
            self._names.note(worker.peer_id, worker.machine, worker.address)
        self._is_alone = [worker.peer_id for worker in workers] == [self._own_id]
        if self._is_alone:
            self._planned_alone(plan, workers[0], num_layers)
            return
        by_peer = {worker.peer_id: worker for worker in workers}
        stages = plan.stages
        self._say(
            f"plan: {self._model_name}, {num_layers} layers in {len(stages)} stage"
            f"{'s' if len(stages) != 1 else ''}",
            event="planned",
            num_layers=num_layers,
            num_stages=len(stages),
        )
        for number, stage in enumerate(stages, 1):
            worker = by_peer[stage.peer_id]
            layers = f"{stage.start}-{stage.stop - 1}"
            assumed = "" if worker.memory_known else " (assumed)"
            self._say(
                f"  stage {number}  layers {layers:<7} {format_bytes(stage.num_bytes):>9}  "
                f"on {worker.label}  {worker.name}, "
                f"{format_bytes(worker.free_bytes)} free{assumed}",
                event="stage",
                stage=number,
                layers=layers,
                num_bytes=stage.num_bytes,
                peer_id=stage.peer_id,
                machine=worker.machine,
            )
        used = {stage.peer_id for stage in stages}
        for worker in workers:
            if worker.peer_id not in used:
                replica = plan.replica_of(worker.peer_id)
                purpose = (
                    f"to stand by, layers {replica.start}-{replica.stop - 1}"
                    if replica is not None
                    else "without layers"
                )
                self._say(
                    f"  {purpose}: {worker.label}  {worker.name}, "
                    f"{format_bytes(worker.free_bytes)} free",
                    event="left_over",
                    peer_id=worker.peer_id,
                )
        self._stop_transfers()  # of a plan that came to nothing
        console = self._screen.console if self._screen.is_live else None
        self._transfers = TransferView(self._say, console)

    def _planned_alone(self, plan: Plan, own: WorkerInfo, num_layers: int) -> None:
        """One line for a machine on which there is nothing to place and nothing to send."""
        num_bytes = sum(stage.num_bytes for stage in plan.stages)
        self._say(
            f"{self._model_name}, {num_layers} layers in {format_bytes(num_bytes)}, on {own.name}, "
            f"{format_bytes(own.free_bytes)} free",
            event="planned",
            num_layers=num_layers,
            num_stages=len(plan.stages),
        )

    def transfer_planned(self, peer_id: str, num_bytes: int) -> None:
        if (
            self._transfers is not None
        ):  # later ones, of replicas and after losses, show by their result
            self._transfers.plan(peer_id, self._names.in_full(peer_id), num_bytes)

    def transfer_begun(self, peer_id: str) -> None:
        if self._transfers is not None:
            self._started = self._started or time.monotonic()
            self._transfers.begin(peer_id)

    def transfer_stalled(self, peer_id: str, seconds: float) -> None:
        self._say(
            f"nothing has come to worker {self._names.of(peer_id)} for {seconds:g} s, and it lacks layers",
            level=logging.WARNING,
            event="stalled",
            peer_id=peer_id,
        )

    def transfer_resumed(self, peer_id: str, seconds: float) -> None:
        self._say(
            f"the transfer to worker {self._names.of(peer_id)} goes on after {seconds:.0f} s",
            event="resumed",
            peer_id=peer_id,
        )

    def transferred(self, peer_id: str, num_bytes: int) -> None:
        if self._transfers is None:
            return
        self._sent += num_bytes
        self._finished = time.monotonic()
        self._transfers.came(peer_id, num_bytes)

    def passed_on(self, peer_id: str, num_bytes: int) -> None:
        if self._transfers is not None:
            self._passed_on += num_bytes
            self._transfers.came(peer_id, num_bytes)

    def already_held(self, peer_id: str, num_bytes: int) -> None:
        if self._transfers is not None:
            self._held += num_bytes
            self._transfers.was_there(peer_id, num_bytes)

    def ready(self) -> None:
        self._stop_transfers()
        if self._is_alone:
            return
        held = f", {format_bytes(self._passed_on)} from worker to worker" if self._passed_on else ""
        held += f", {format_bytes(self._held)} were there already" if self._held else ""
        text = "nothing to send"
        if self._started is not None and self._sent:
            seconds = max(self._finished - self._started, 1e-9)
            rate = format_bytes(self._sent / seconds)
            text = f"{format_bytes(self._sent)} sent in {seconds:.1f} s ({rate}/s)"
        self._say(
            f"weights: {text}{held}",
            event="ready",
            sent_bytes=self._sent,
            passed_on_bytes=self._passed_on,
            held_bytes=self._held,
        )

    def joined(self, worker: WorkerInfo) -> None:
        self._names.note(worker.peer_id, worker.machine, worker.address)
        self._say(
            f"worker {worker.label} joined: {worker.name}, {format_bytes(worker.free_bytes)} free",
            event="joined",
            peer_id=worker.peer_id,
            machine=worker.machine,
        )

    def lost(self, peer_id: str, layers: range, reason: str) -> None:
        held = f" with {name_range(layers)}" if layers else ""
        self._say(
            f"lost worker {self._names.in_full(peer_id)}{held}: {reason}",
            level=logging.WARNING,
            event="lost",
            peer_id=peer_id,
            reason=reason,
        )

    def mending(self, missing: Sequence[range]) -> None:
        self._say(f"placing {', '.join(map(name_range, missing))} anew", event="mending")

    def mended(self, plan: Plan) -> None:
        self._say(f"all layers are placed again: {_where(plan, self._names)}", event="mended")

    def drifted(self, peer_id: str, slowness: float) -> None:
        self._say(
            f"worker {self._names.of(peer_id)} {how_fast(slowness)}",
            event="drifted",
            peer_id=peer_id,
            slowness=slowness,
        )

    def improved(self, plan: Plan) -> None:
        self._say(
            f"a better plan is in place for new sessions: {_where(plan, self._names)}",
            event="improved",
        )

    def replicated(self, peer_id: str, layers: range) -> None:
        self._say(
            f"worker {self._names.of(peer_id)} stands by with {name_range(layers)}",
            event="replicated",
            peer_id=peer_id,
        )

    def _stop_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _stop_transfers(self) -> None:
        if self._transfers is not None:
            self._transfers.stop()
            self._transfers = None


def _where(plan: Plan, names: PeerNames) -> str:
    return ", ".join(
        f"{stage.start}-{stage.stop - 1} on {names.of(stage.peer_id)}" for stage in plan.stages
    )
