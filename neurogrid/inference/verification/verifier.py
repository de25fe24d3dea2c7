"""The verification of one coordinator: sessions are drawn and recorded, and computed again when they are over.

    verification = Verification(...)
    nursery.start_soon(verification.run)
    recording = verification.recording(adapter)         # of a generation that begins; None for one that is not drawn
    recording.opened(pipeline, prior)                    # each time that it has a session
    recording.ended(is_kept=...)

One record at a time, after the fact: no token waits for it. Another worker that holds the same layers computes them
again, or else the coordinator. What differs goes to `judging`; a worker that is named there is excluded
(`Roster.exclude`), and sessions that went through it go on with others, as after any loss.

T = tokens, D = hidden size.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from typing import Final, cast

import torch
import trio

from neurogrid.errors import NeuroGridError, NoRouteError
from neurogrid.fleet.member import Member
from neurogrid.fleet.placing.fleet import Fleet
from neurogrid.fleet.step_times import StepTimes
from neurogrid.inference.board.progress import Progress
from neurogrid.inference.pipeline.chain import AskedAlone
from neurogrid.inference.pipeline.pipeline_stage import PipelineStage
from neurogrid.inference.pipeline.routing import Routing
from neurogrid.inference.pipeline.session import PipelineSession
from neurogrid.inference.pipeline.session_worker import Prior, SessionWorker
from neurogrid.inference.verification.bands import differing_rows
from neurogrid.inference.verification.computing import OwnLayers, as_travelled, compute_on
from neurogrid.inference.verification.judging import (
    OWN,
    Findings,
    Need,
    OwnFindings,
    Verdict,
    judge,
)
from neurogrid.inference.verification.records import RecordRoom, SegmentRecord, SessionRecord
from neurogrid.inference.verification.suspicion import Suspicion
from neurogrid.model.adapters import AdapterSource
from neurogrid.planner import name_range

__all__ = ["Recording", "Verification"]

logger = logging.getLogger(__name__)

# Nobody who knows what was drawn before knows what is drawn next.
_CHANCE: Final = secrets.SystemRandom()
# Records that wait for their turn; what comes when there are as many is not verified.
MAX_WAITING: Final = 64
# Records that are verified, and stay for a session that goes on from theirs.
MAX_KEPT: Final = 64
# Between warnings that something was not verified; all of it is counted. Seconds.
WARNING_INTERVAL: Final = 60.0
# Room on the workers is for those who wait for tokens: how long to wait for some, and between looks. Seconds.
ROOM_PATIENCE: Final = 5.0
ROOM_INTERVAL: Final = 0.25

Reserve = Callable[[int], "AbstractAsyncContextManager[bool]"]
"""Takes room for a session of so many tokens while the block lasts; gives False where there was none in time."""


class Verification:
    """See above.

    Args:
        reserve: takes room on the workers.
        open_own: the coordinator's own computation, opened when it is first needed.
        coordinator_id: its peer id: a stage in its own process is not verified.
        max_piece: tokens that go to a stage at once; None where those of a session cannot be cut.
        greatest: difference of rows that is no difference (`bands`), by the wire that activations travel in.
        suspicion: what it thinks of its workers.
    """

    def __init__(
        self,
        fleet: Fleet,
        routing: Routing,
        reserve: Reserve,
        open_own: Callable[[], AbstractAsyncContextManager[OwnLayers]],
        *,
        coordinator_id: str,
        max_piece: int | None,
        greatest: Callable[[str], float],
        suspicion: Suspicion,
        progress: Progress | None = None,
        chance: Callable[[], float] = _CHANCE.random,
    ) -> None:
        self.suspicion = suspicion
        self._fleet = fleet
        self._routing = routing
        # To ask one worker at a time, without a watch, so that nobody is judged by how fast it is.
        self._asking = Routing(routing.protocol, "star")
        self._asking.wire = routing.wire
        self._reserve = reserve
        self._open_own = open_own
        self._own: OwnLayers | None = None
        self._coordinator_id = coordinator_id
        self._max_piece = max_piece
        self._greatest = greatest
        self._progress = progress or Progress()
        self._chance = chance
        self._room = RecordRoom(on_shortage=self._forget_oldest)
        self._kept: OrderedDict[int, SessionRecord] = OrderedDict()
        self._send, self._receive = trio.open_memory_channel[SessionRecord](MAX_WAITING)
        self._num_under_way = 0
        self._warns_at = -math.inf

    # ------------------------------------------------------------------ for a generation

    def recording(self, adapter: AdapterSource | None) -> Recording | None:
        """The recording of a generation that begins; None for one that is not drawn."""
        return Recording(self, adapter) if self.suspicion.draws(self._chance()) else None

    def has_record(self, session_id: int) -> bool:
        """Whether a session that goes on from this one, which is kept, can be verified."""
        return session_id in self._kept

    def new_record(
        self, pipeline: PipelineSession, prior: Prior | None, adapter: AdapterSource | None
    ) -> SessionRecord | None:
        """Begin to record a session; None for one whose first tokens are not known."""
        num_known = prior.num_tokens if prior is not None else 0
        before = self._kept.get(prior.session_id) if prior is not None else None
        known = before.segments if before is not None else ()
        chains = [
            chain
            for chain in pipeline.chains
            if any(item.peer_id != self._coordinator_id for item in chain.stages)
        ]
        olds = [next((s for s in known if _goes_on(s, chain.stages)), None) for chain in chains]
        if num_known and (before is None or None in olds):
            return None
        segments = []
        for chain, old in zip(chains, olds, strict=True):
            segment = old.beginning(num_known) if old else SegmentRecord(chain.stages, self._room)
            chain.observe = segment.sent
            segments.append(segment)
        if prior is not None and not prior.stays_open:
            self._forget(prior.session_id)
        return SessionRecord(
            pipeline.session_id, tuple(segments), adapter, num_known, self._routing.distrusted
        )

    def hand_in(self, record: SessionRecord, *, is_kept: bool) -> None:
        """A session is over: verify it when its turn comes.

        Args:
            is_kept: another may go on from it.
        """
        if num_left_out := max((each.num_left_out for each in record.segments), default=0):
            # Also where that is all of it.
            self._not_verified(num_left_out, "there was no room to keep more of what is verified")
        if not any(_new_steps(segment, record) for segment in record.segments):
            record.close()
            return
        try:
            self._send.send_nowait(record)
        except trio.WouldBlock:
            why = f"{MAX_WAITING} sessions wait to be verified already"
            self._not_verified(_most_steps(record), why)
            record.close()
            return
        self._num_under_way += 1
        if is_kept and record.distrusted == self._routing.distrusted:
            self._kept[record.session_id] = record
            while len(self._kept) > MAX_KEPT:
                self._forget(next(iter(self._kept)))

    def _forget_oldest(self) -> bool:
        if not self._kept:
            return False
        self._forget(next(iter(self._kept)))
        return True

    def _forget(self, session_id: int) -> None:
        record = self._kept.pop(session_id, None)
        if record is not None and record.is_done:
            record.close()

    # ------------------------------------------------------------------ verifying

    @property
    def num_waiting(self) -> int:
        """Sessions that are over and not verified yet."""
        return self._num_under_way

    async def run(self) -> None:
        """Verify what is handed in; runs as long as the coordinator."""
        logger.info(
            "verifying %.3g %% of the sessions: another worker computes them again where one holds the same layers, "
            "this machine where none does, and whenever two differ",
            100 * self.suspicion.share,
        )
        async with AsyncExitStack() as stack:
            async for record in self._receive:
                try:
                    for segment in record.segments:
                        await self._verify(record, segment, stack)
                except NeuroGridError as exc:
                    self._not_verified(_most_steps(record), str(exc))
                finally:
                    self._num_under_way -= 1
                    record.is_done = True
                    if record.session_id not in self._kept:
                        record.close()

    def _not_verified(self, num_steps: int, why: str) -> None:
        self._progress.steps_unverified(num_steps)
        now = trio.current_time()
        # Under load that may be so of each.
        if now >= self._warns_at:
            self._warns_at = now + WARNING_INTERVAL
            logger.warning("%d steps of a session were not verified: %s", num_steps, why)

    async def _verify(
        self, record: SessionRecord, segment: SegmentRecord, stack: AsyncExitStack
    ) -> None:
        steps = _new_steps(segment, record)
        if not steps:
            return
        work = _Work(self, record, segment, stack)
        verdict, rows = await work.verdict()
        differing = [start for start, stop in steps if rows.intersection(range(start, stop))]
        self._progress.steps_verified(len(steps), len(differing))
        for peer_id in sorted(verdict.wrong):
            self._name(peer_id, work.said_of(peer_id, len(differing), len(steps)))
        if verdict.suspects:
            self._suspect(verdict.suspects, segment)
        elif not verdict.wrong and len(segment.stages) == 1:
            peer_id = segment.stages[0].peer_id
            if self.suspicion.found_right(peer_id, len(steps)):
                logger.warning("worker %s is no suspect any more: it was right for long", peer_id)
        if self._routing.distrusted != self.suspicion.suspects:
            self._routing.distrusted = self.suspicion.suspects
            # Sessions go another way now: what was recorded on the old one does not go on.
            for session_id in list(self._kept):
                self._forget(session_id)

    def _name(self, peer_id: str, why: str) -> None:
        self.suspicion.found_wrong(peer_id)
        logger.error(
            "worker %s %s: it is excluded until the coordinator is started again", peer_id, why
        )
        self._progress.found_wrong(peer_id, why)
        self._fleet.exclude(peer_id, f"it {why}")

    def _suspect(self, peer_ids: frozenset[str], segment: SegmentRecord) -> None:
        new = self.suspicion.suspect(peer_ids)
        names = " and ".join(item.name for item in segment.stages if item.peer_id in peer_ids)
        text = (
            f"one of {names} computed wrong, and each is right when it is asked again: all sessions are verified, and "
            "go by way of the coordinator there, until it is found or they were right for long"
        )
        logger.warning("%s", text)
        for peer_id in sorted(new):
            self._progress.suspected(
                peer_id,
                "is one of several of which one computed wrong: all that it computes is verified",
            )

    # ------------------------------------------------------------------ computing again

    def another(self, item: PipelineStage, avoid: Sequence[str]) -> Member | None:
        """The least busy worker that holds these layers, and is none of those; None where there is none."""
        layers = range(item.stage.start, item.stage.stop)
        holders = [
            member
            for member in self._fleet.holders(layers)
            if member.peer_id not in avoid
            and member.peer_id not in self.suspicion.suspects
            and member.peer_id != self._coordinator_id
            and not (member.is_leaving or member.times.is_slow)
            and not isinstance(member.worker, AskedAlone)
        ]
        if not holders or self.suspicion.is_own(self._chance()):
            return None
        return min(holders, key=lambda member: member.num_sessions)

    async def ask(
        self,
        member: Member,
        item: PipelineStage,
        hidden_BTD: torch.Tensor,
        adapter: AdapterSource | None,
    ) -> torch.Tensor:
        """Have a member compute [1, T, D] in the layers of a stage; [1, T, D].

        Raises:
            NoRouteError: it failed, or has no room for it.
        """
        stage = replace(item.stage, peer_id=member.peer_id)
        asked = PipelineStage(stage, cast(SessionWorker, member.worker), StepTimes())
        await self._fleet.trials.give_way([member.peer_id])
        async with self._reserve(hidden_BTD.shape[1]) as has_room:
            if not has_room:
                raise NoRouteError(f"there is no room on {asked.name}", layers=(), peer_id=None)
            member.num_sessions += 1
            try:
                return await compute_on(
                    asked, self._asking, hidden_BTD, max_piece=self._max_piece, adapter=adapter
                )
            finally:
                member.num_sessions -= 1

    async def compute_here(
        self,
        item: PipelineStage,
        hidden_BTD: torch.Tensor,
        adapter: AdapterSource | None,
        stack: AsyncExitStack,
    ) -> torch.Tensor:
        """Compute the layers of a stage here, on [1, T, D]; input and result as they would have travelled."""
        if self._own is None:
            self._own = await stack.enter_async_context(self._open_own())
        layers = range(item.stage.start, item.stage.stop)
        wire = self._routing.wire
        result_BTD = await self._own.compute(layers, as_travelled(hidden_BTD, wire), adapter)
        return as_travelled(result_BTD, wire)

    def member(self, peer_id: str) -> Member | None:
        """The member of this peer id, if it is there."""
        return self._fleet.member(peer_id)

    def differing(
        self, item: PipelineStage, seen_BTD: torch.Tensor, right_BTD: torch.Tensor
    ) -> frozenset[int]:
        """The rows that differ by more than two honest workers do."""
        # 1.0.0 has one type for all that travels.
        wire = "F16" if isinstance(item.worker, AskedAlone) else self._routing.wire
        return differing_rows(seen_BTD, right_BTD, greatest=self._greatest(wire))


class _Work:
    """One record being verified: what was computed again, and by whom."""

    def __init__(
        self,
        verification: Verification,
        record: SessionRecord,
        segment: SegmentRecord,
        stack: AsyncExitStack,
    ) -> None:
        self._verification = verification
        self._segment = segment
        self._adapter = record.adapter
        self._stack = stack
        self._inputs_BTD, self._seen_BTD = segment.rows()
        self._verifiers: list[str] = []
        # What went into each stage and what left it, by others, and by the coordinator itself.
        self._others: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._right: list[tuple[torch.Tensor, torch.Tensor]] = []

    async def verdict(self) -> tuple[Verdict, frozenset[int]]:
        """Judge the record; return the verdict, and the rows of the record that are wrong."""
        stages = self._segment.stages
        await self._compute_again()
        computed_BTD = self._others[-1][1]
        rows = self._differing(stages[-1], self._seen_BTD, computed_BTD)
        findings = Findings(
            tuple(item.peer_id for item in stages), tuple(self._verifiers), agrees=not rows
        )
        while isinstance(outcome := judge(findings), Need):
            if outcome is Need.OWN:
                await self._compute_own()
                rows = self._differing(stages[-1], self._seen_BTD, self._right[-1][1])
                findings = replace(
                    findings, own=OwnFindings(is_right=not rows, verifiers=self._of_verifiers())
                )
            else:
                findings = replace(findings, again=await self._ask_again())
        return outcome, rows

    def said_of(self, peer_id: str, num_differing: int, num_steps: int) -> str:
        """Fault of a worker, in words that go on from its name."""
        item = next((s for s in self._segment.stages if s.peer_id == peer_id), None)
        if item is None:
            return "computed wrong where it was to verify another"
        layers = name_range(range(item.stage.start, item.stage.stop))
        return f"computed {layers} wrong in {num_differing} of {num_steps} steps that were verified"

    async def _compute_again(self) -> None:
        hidden_BTD = self._inputs_BTD
        recorded = [item.peer_id for item in self._segment.stages]
        for item in self._segment.stages:
            result_BTD: torch.Tensor | None = None
            verifier = OWN
            other = self._verification.another(item, recorded)
            if other is not None:
                try:
                    result_BTD = await self._verification.ask(
                        other, item, hidden_BTD, self._adapter
                    )
                    verifier = other.peer_id
                except NeuroGridError as exc:
                    logger.debug("computed here in place of %s: %s", other.peer_id, exc)
            if result_BTD is None:
                result_BTD = await self._here(item, hidden_BTD)
            self._verifiers.append(verifier)
            self._others.append((hidden_BTD, result_BTD))
            hidden_BTD = result_BTD

    async def _compute_own(self) -> None:
        hidden_BTD = self._inputs_BTD
        is_own = True
        for item, verifier, other in zip(
            self._segment.stages, self._verifiers, self._others, strict=True
        ):
            # What the coordinator has computed of its own results need not be computed twice.
            is_own = is_own and verifier == OWN
            result_BTD = other[1] if is_own else await self._here(item, hidden_BTD)
            self._right.append((hidden_BTD, result_BTD))
            hidden_BTD = result_BTD

    async def _here(self, item: PipelineStage, hidden_BTD: torch.Tensor) -> torch.Tensor:
        return await self._verification.compute_here(item, hidden_BTD, self._adapter, self._stack)

    def _of_verifiers(self) -> tuple[bool | None, ...]:
        """Check each verifier's result up to the first that is wrong, behind which inputs are wrong, too.

        Returns:
            Whether each is right; None for the coordinator itself, and for those behind the first that is wrong.
        """
        found: list[bool | None] = []
        for item, verifier, other, right in zip(
            self._segment.stages, self._verifiers, self._others, self._right, strict=True
        ):
            if verifier == OWN or False in found:
                found.append(None)
            else:
                found.append(not self._differing(item, other[1], right[1]))
        return tuple(found)

    async def _ask_again(self) -> tuple[bool | None, ...]:
        """Ask each worker again, with the inputs that it should have had.

        Returns:
            Whether each is right now; None for one that is gone, or did not answer.
        """
        found: list[bool | None] = []
        for item, (inputs_BTD, right_BTD) in zip(self._segment.stages, self._right, strict=True):
            member = self._verification.member(item.peer_id)
            if member is None or member.worker is not item.worker:
                found.append(None)
                continue
            try:
                again_BTD = await self._verification.ask(member, item, inputs_BTD, self._adapter)
                found.append(not self._differing(item, again_BTD, right_BTD))
            except NeuroGridError as exc:
                logger.debug("could not ask %s again: %s", item.peer_id, exc)
                found.append(None)
        return tuple(found)

    def _differing(
        self, item: PipelineStage, seen_BTD: torch.Tensor, right_BTD: torch.Tensor
    ) -> frozenset[int]:
        return self._verification.differing(item, seen_BTD, right_BTD)


class Recording:
    """The sessions of one generation that was drawn, one after the other. Made by `Verification.recording`."""

    def __init__(self, verification: Verification, adapter: AdapterSource | None) -> None:
        self._verification = verification
        self._adapter = adapter
        self._record: SessionRecord | None = None

    def may_begin_with(self, session_id: int) -> bool:
        """Whether it may go on from a kept session: only from one that is recorded, too."""
        return self._verification.has_record(session_id)

    def opened(self, pipeline: PipelineSession, prior: Prior | None) -> None:
        """Begin the record of a session of the generation: its first, or one in place of one that a worker failed."""
        self.ended(is_kept=False)
        self._record = self._verification.new_record(pipeline, prior, self._adapter)

    def ended(self, *, is_kept: bool) -> None:
        """Hand in the record of the session, if there is one; `is_kept`: it is over, and another may go on from it."""
        record, self._record = self._record, None
        if record is not None:
            self._verification.hand_in(record, is_kept=is_kept)


def _goes_on(segment: SegmentRecord, stages: Sequence[PipelineStage]) -> bool:
    """Whether stages are those of a record, on the same workers."""
    return [(s.stage.start, s.stage.stop, s.peer_id) for s in segment.stages] == [
        (s.stage.start, s.stage.stop, s.peer_id) for s in stages
    ]


def _new_steps(segment: SegmentRecord, record: SessionRecord) -> list[tuple[int, int]]:
    return [bounds for bounds in segment.bounds() if bounds[1] > record.num_known]


def _most_steps(record: SessionRecord) -> int:
    return max((len(_new_steps(segment, record)) for segment in record.segments), default=0)
