"""A worker's side of a run: what its leader asks, takes, orders and ends.

Source: protocol_spec/training/runs.md.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import platform
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import trio

from neurogrid import __version__
from neurogrid.errors import NeuroGridError, RequestRefusedError, TransportError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.node.roles import Table, authorise
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.transfer import Transfers
from neurogrid.p2p.trust import COORDINATOR, RUN_ROLES
from neurogrid.p2p.wire import ErrorCode, MessageCode, MessageType, TensorMessage
from neurogrid.renewed_event import RenewedEvent
from neurogrid.training.data.blob_files import PIECE_LIMITS, OfferedFiles
from neurogrid.training.data.blobs import SliceCache
from neurogrid.training.data.handing_on import HandingOn
from neurogrid.training.data.own_slices import OwnSlices
from neurogrid.training.members.chain_part import ChainPart
from neurogrid.training.members.failures import one_line
from neurogrid.training.members.member_blobs import MemberBlobs
from neurogrid.training.members.obedience import Obedience, refuse_other_run
from neurogrid.training.members.participation import KeepModel, Participation
from neurogrid.training.members.settings import MemberSettings
from neurogrid.training.members.status import PartStatus
from neurogrid.training.members.witnessed import WitnessedPart
from neurogrid.training.runs.resources import LEASE_SECONDS, LeaseTable, Need, Resources
from neurogrid.training.runs.run_file import RunFileError, parse_kept_run_file
from neurogrid.training.wire.runs import (
    Appoint,
    Ask,
    Claim,
    Dismiss,
    Offer,
    Order,
    Renew,
    Renewed,
    Report,
    RunMessage,
    Start,
    Started,
    run_table,
)

__all__ = ["MEMBER_TAKES", "MemberService", "versions"]

logger = logging.getLogger(__name__)

_LEADERS: Final = frozenset({COORDINATOR})
_ALL: Final = _LEADERS | RUN_ROLES

MEMBER_TAKES: Final[Table] = {
    RunMessage.ASK: _LEADERS,
    RunMessage.START: _LEADERS,
    RunMessage.RENEW: _LEADERS,
    RunMessage.ORDER: _LEADERS,
    RunMessage.DISMISS: _LEADERS,
    RunMessage.STAGE: _LEADERS,
    RunMessage.STEP: _LEADERS,
    RunMessage.TOKENS: _LEADERS,
    RunMessage.LABELS: _LEADERS,
    RunMessage.APPLY: _LEADERS,
    RunMessage.AVERAGE: _LEADERS,
    RunMessage.COMMIT: _LEADERS,
    RunMessage.EPOCH: _LEADERS,
    RunMessage.COMMITMENT: RUN_ROLES,
    RunMessage.EVIDENCE: _LEADERS,
    RunMessage.APPOINT: _LEADERS,
    RunMessage.CLAIM: _LEADERS,
    RunMessage.HIDDEN: RUN_ROLES,
    RunMessage.GRADIENT: RUN_ROLES,
    RunMessage.TIED: RUN_ROLES,
    MessageType.TRANSFER_REQUEST: _ALL,
    MessageType.TRANSFER_OFFER: _ALL,
    MessageType.WEIGHTS: _ALL,
}
"""The roles that a member takes each message from."""

_OF_CHAINS: Final = (
    RunMessage.STAGE,
    RunMessage.STEP,
    RunMessage.TOKENS,
    RunMessage.LABELS,
    RunMessage.HIDDEN,
    RunMessage.GRADIENT,
    RunMessage.TIED,
    RunMessage.APPLY,
    RunMessage.AVERAGE,
    RunMessage.COMMIT,
)

_OF_WITNESSED: Final = (RunMessage.EPOCH, RunMessage.COMMITMENT, RunMessage.EVIDENCE)

Part = Participation | ChainPart | WitnessedPart
"""This machine's part in a run: it holds the whole model, or a stage."""

_HEARTBEAT: Final = 1.0
# Seconds that a member has to end after it was dismissed, and to keep what was trained.
_FAREWELL: Final = 30.0
# Between two reports, where something changes all the time.
_SMALLEST_PAUSE: Final = 0.05
_LIBRARIES: Final = ("torch", "transformers", "tokenizers", "safetensors")


def versions() -> tuple[tuple[str, str], ...]:
    """Versions of the software that this machine computes with: members that differ may get other bits."""
    found = [("neurogrid", __version__), ("python", platform.python_version())]
    for name in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append((name, importlib.metadata.version(name)))
    return tuple(found)


def _check(start: Start) -> None:
    """See that a run can be begun by what its leader says of it.

    Raises:
        RequestRefusedError: this version knows no such run.
    """
    try:
        parse_kept_run_file(start.run_file)
        if not isinstance(json.loads(start.config), dict):
            raise ValueError("it is no object")
    except RunFileError as exc:
        reason = str(exc)
    except (ValueError, RecursionError) as exc:
        reason = f"the config is none: {exc}"
    else:
        return
    raise RequestRefusedError(
        f"NeuroGrid {__version__} does not know such a run: {reason}", code=ErrorCode.CONFIG_INVALID
    )


class MemberService:
    """Lends this machine to runs, one at a time. Keep `run` running.

    Args:
        host: this peer's.
        settings: what may be used.
        directory: for slices, private to this process where the settings name none.
        keep: takes each model that was trained; None for nobody.

    Raises:
        ConfigurationError: a directory of the settings is not there.
    """

    def __init__(
        self,
        host: Host,
        settings: MemberSettings,
        directory: Path,
        *,
        keep: KeepModel | None = None,
    ) -> None:
        self._host, self._settings, self._keep = host, settings, keep
        self.exchange = Exchange(host, run_table(), role="worker", name=settings.name)
        authorise(self.exchange, MEMBER_TAKES)
        offered = OfferedFiles()
        given = HandingOn(offered)
        transfers = Transfers(self.exchange, given, limits=PIECE_LIMITS)
        own = OwnSlices(settings.data)
        slices = SliceCache(transfers, directory, settings.storage, own=own)
        self._blobs = MemberBlobs(transfers, slices, own, offered)
        given.slices += [own, slices]
        self._leases = LeaseTable(
            Resources(settings.memory, settings.storage, settings.cores, settings.gpu),
            price=settings.price,
        )
        self._part: Part | None = None
        self._obedience: Obedience | None = None
        self._scope: trio.CancelScope | None = None
        self._starting: tuple[str, Start] | None = None
        self._refusal = ""  # the last that was said
        self._came = RenewedEvent()
        self._report_changed = RenewedEvent()
        # Reports that the leader has, as far as is known.
        self._told: list[tuple[MessageCode, bytes]] = []
        for code, handler in (
            (RunMessage.ASK, self._on_ask),
            (RunMessage.START, self._on_start),
            (RunMessage.RENEW, self._on_renew),
            (RunMessage.APPOINT, self._on_appoint),
            (RunMessage.CLAIM, self._on_claim),
        ):
            self.exchange.on_message(code, handler)
        self.exchange.on_message(RunMessage.ORDER, self._on_order)
        self.exchange.on_message(RunMessage.DISMISS, self._on_dismiss)
        for code in _OF_CHAINS:
            self.exchange.on_message(code, self._on_chain_message)
        for code in _OF_WITNESSED:
            self.exchange.on_message(code, self._on_witnessed_message)
        self.exchange.on_peer_opened(lambda peer_id, hello: self._tell_anew())

    @property
    def part(self) -> Part | None:
        """The run that this machine takes part in."""
        return self._part

    def status(self) -> PartStatus | None:
        """Status of this machine in the run that it takes part in; None while there is none."""
        return self._part.status() if self._part is not None else None

    async def run(self) -> None:
        """Take part in one run after another."""
        while True:
            while self._starting is None:
                await self._came.wait()
            (leader, start), self._starting = self._starting, None
            await self._take_part(leader, start)

    async def _take_part(self, leader: str, start: Start) -> None:
        part: Part | None = None
        # Of the part before: until now its leader may have fetched them for a checkpoint.
        self._blobs.offered.withdraw_all()
        with trio.CancelScope() as self._scope, unwrap_errors():
            async with trio.open_nursery() as nursery:
                try:
                    part = self._part = self._make_part(leader, start)
                    nursery.start_soon(self._report, part)
                    if self._obedience is not None:
                        nursery.start_soon(self._obedience.keep_near)
                    logger.info("takes part in run %s of %s", start.run.hex(), leader)
                    await part.run()
                    logger.info("run %s is over", start.run.hex())
                except NeuroGridError as exc:
                    logger.error("this machine takes no part in run %s: %s", start.run.hex(), exc)
                    # A leader that has heard may ask anew at once.
                    self._part = None
                    self._leases.release(leader if part is None else part.leader, start.run)
                    if part is None:
                        await self._tell_failed(leader, start, exc)
                if part is not None:
                    self._told = []  # what was on its way goes with the task that sent it
                    await self._tell(part)
                nursery.cancel_scope.cancel()
        self._part, self._obedience, self._scope = None, None, None

    def _make_part(self, leader: str, start: Start) -> Part:
        tell, run = self._report_changed.set, parse_kept_run_file(start.run_file)
        if run.is_witnessed:
            return WitnessedPart(
                self._host,
                self.exchange,
                leader,
                start,
                self._blobs,
                self._settings,
                tell,
                self._keep,
            )
        if run.is_chain:
            return ChainPart(
                self._host, self.exchange, leader, start, self._blobs, self._settings, tell
            )
        part = Participation(
            self._host, leader, start, self._blobs, self._settings, tell, self._keep
        )

        def led_by(old: str, new: str) -> None:
            part.leader = new
            self._leases.hand_over(old, new, start.run)
            tell()

        self._obedience = Obedience(
            self.exchange, start.run, leader, lambda: part.incarnation, led_by
        )
        return part

    # What the leader asks

    async def _on_ask(self, message: TensorMessage) -> None:
        ask = Ask.decode(message.data)
        need = Need(ask.memory, ask.storage, ask.cores, ask.gpu, ask.price)
        now = trio.current_time()
        try:
            lease = self._leases.offer(sender_of(message), ask.run, need, now)
        except RequestRefusedError as exc:
            self._note_refusal(f"{sender_of(message)} is offered nothing: {exc}")
            raise
        self._refusal = ""
        has = self._leases.resources
        offer = Offer(
            lease=lease.number,
            until=lease.until - now,
            memory=has.memory,
            storage=has.storage,
            cores=has.cores,
            gpu=has.gpu,
            price=self._settings.price,
            versions=versions(),
            name=self._settings.name,
        )
        await self._answer(message, RunMessage.OFFER, offer.encode())

    async def _on_start(self, message: TensorMessage) -> None:
        start, leader = Start.decode(message.data), sender_of(message)
        _check(start)
        self._leases.take(leader, start.run, start.lease, trio.current_time())
        part = self._part
        # One that was dismissed is at its end, and is told to begin anew.
        goes_on = part is not None and not part.is_dismissed
        if part is None or not goes_on or (part.run_id, part.leader) != (start.run, leader):
            self._starting = leader, start
            if self._scope is not None:
                self._scope.cancel()  # of another run, whose lease had ended, or at its end
            self._came.set()
        await self._answer(message, RunMessage.STARTED, Started(until=LEASE_SECONDS).encode())

    async def _on_renew(self, message: TensorMessage) -> None:
        renew = Renew.decode(message.data)
        self._leases.renew(sender_of(message), renew.run, renew.lease, trio.current_time())
        await self._answer(message, RunMessage.RENEWED, Renewed(until=LEASE_SECONDS).encode())

    def _on_order(self, message: TensorMessage) -> None:
        order, part = Order.decode(message.data), self._part
        if part is None or part.run_id != order.run or not self._obeys(message, part, order.term):
            logger.debug(
                "an order of %s for a run that has no part of this machine", order.run.hex()
            )
            return
        part.take(order)

    def _obeys(self, message: TensorMessage, part: Part, term: int) -> bool:
        if self._obedience is None:
            return part.leader == sender_of(message)
        return self._obedience.obeys(sender_of(message), term)

    async def _on_appoint(self, message: TensorMessage) -> None:
        appoint = Appoint.decode(message.data)
        await self._obedience_in(appoint.run).take_appoint(message, appoint)

    async def _on_claim(self, message: TensorMessage) -> None:
        claim = Claim.decode(message.data)
        await self._obedience_in(claim.run).take_claim(message, claim)

    def _obedience_in(self, run: bytes) -> Obedience:
        if self._obedience is None or self._part is None or self._part.run_id != run:
            raise refuse_other_run()
        return self._obedience

    def _on_dismiss(self, message: TensorMessage) -> None:
        dismiss, part = Dismiss.decode(message.data), self._part
        self._leases.release(sender_of(message), dismiss.run)
        if part is not None and (part.leader, part.run_id) == (sender_of(message), dismiss.run):
            logger.info("the leader needs this machine no more: %s", dismiss.reason)
            part.dismiss()
            if self._scope is not None:
                self._scope.deadline = trio.current_time() + _FAREWELL

    def _on_chain_message(self, message: TensorMessage) -> None:
        if self._part is not None:
            self._part.take_message(message)

    def _on_witnessed_message(self, message: TensorMessage) -> None:
        if isinstance(self._part, WitnessedPart):
            self._part.take_message(message)

    def _note_refusal(self, text: str) -> None:
        """Say why nothing is offered: once, as leaders ask again and again."""
        if text != self._refusal:
            self._refusal = text
            logger.warning(text)

    async def _answer(self, message: TensorMessage, code: MessageCode, data: bytes) -> None:
        await self.exchange.send(
            sender_of(message), TensorMessage(code, request_id=message.request_id, data=data)
        )

    # What the leader is told

    async def _report(self, part: Part) -> None:
        """Tell what has changed when it changes, and all of it with each heartbeat."""
        while True:
            all_at = trio.current_time() + _HEARTBEAT
            self._told = []
            while trio.current_time() < all_at:
                changed = self._report_changed.next
                await self._tell(part)
                await trio.sleep(_SMALLEST_PAUSE)
                with trio.move_on_at(all_at):
                    await changed.wait()

    def _tell_anew(self) -> None:
        """Have a leader that may be another process told all."""
        self._told = []
        self._report_changed.set()

    async def _tell(self, part: Part) -> None:
        reports, told = part.reports(), self._told
        await self._tell_leader(part.leader, [each for each in reports if each not in told])
        if self._told is told:  # else the leader is another one since
            self._told = reports

    async def _tell_failed(self, leader: str, start: Start, error: NeuroGridError) -> None:
        """Tell a leader why there is no part in its run."""
        reason = one_line(error, type(error).__name__)
        report = Report(run=start.run, seat=start.seat, state="failed", reason=reason)
        await self._tell_leader(leader, [(RunMessage.REPORT, report.encode())])

    async def _tell_leader(self, leader: str, told: Sequence[tuple[MessageCode, bytes]]) -> None:
        if not self._host.is_connected(leader):
            return  # the connection is kept elsewhere
        with trio.move_on_after(10 * _HEARTBEAT):
            try:
                for code, data in told:
                    await self.exchange.send(leader, TensorMessage(code, data=data))
            except TransportError as exc:
                logger.debug("the leader cannot be told: %s", exc)
