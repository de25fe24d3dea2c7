"""The workers of one coordinator: what each of them holds, and who is chosen for a session.

    fleet = Fleet(size, placer, ...)
    await fleet.enlist(workers)             # plan
    await fleet.start()                     # place; sessions can be opened from here on
    nursery.start_soon(fleet.mend)          # for as long as the coordinator runs
    with await fleet.select(timeout=60.0) as selection: ...

A member is ready once it has confirmed every layer that was placed on it, and sessions go through ready members alone.
When one is lost, another that holds the same layers takes its place (a replica); where there is none,
the layers are planned anew over whoever is there, so that as few bytes as possible have to be sent. Members that are
left over become replicas. Whoever comes back is a new member that happens to hold layers: those are not sent again.

Nothing here knows tokens or caches: a session whose member is lost finds out by its own error, and asks for others.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import trio

from neurogrid.errors import (
    CapacityError,
    ConfigurationError,
    ModelError,
    NoRouteError,
    PeerRefusedError,
    RemoteProtocolError,
    TransportError,
)
from neurogrid.exception_groups import unwrap_errors
from neurogrid.inference.describing import capacities, far_links
from neurogrid.inference.member import Member, Selection, joined
from neurogrid.inference.placing import RECONNECT_TIMEOUT, WORKER_FAILURES, Placer, name_range
from neurogrid.inference.planner import ModelSize, Plan, PlannedStage, make_plan, make_replicas
from neurogrid.inference.progress import Progress, WorkerInfo
from neurogrid.inference.remote_worker import RemoteWorker, TransferReports
from neurogrid.p2p.wire import ErrorCode

__all__ = ["Fleet"]

logger = logging.getLogger(__name__)

# A worker that refused its layers is asked again after that, or after what it says. Seconds.
RETRY_DELAY = 5.0
# Seconds to wait for a worker's connection to come back while others might have its layers.
MEND_PATIENCE = 3.0
# Codes that say: this worker no longer has what was placed on it.
PLACE_AGAIN = frozenset(
    {ErrorCode.CONFIG_REQUIRED, ErrorCode.BUSY, ErrorCode.LAYER_NOT_HELD, ErrorCode.SHUTTING_DOWN}
)


class Fleet:
    """The members and the plan. Used from one trio thread.

    Args:
        size: of the model, for the planner.
        describe: asks workers what they have.
        num_stages: that many stages; None for the fewest that fit.
        with_replicas: whether members that are left over get layers, too.

    Attributes:
        plan: the current one.
    """

    def __init__(
        self,
        size: ModelSize,
        placer: Placer,
        describe: Callable[[Sequence[RemoteWorker]], Awaitable[list[WorkerInfo]]],
        progress: Progress,
        *,
        num_stages: int | None = None,
        with_replicas: bool = True,
    ) -> None:
        self.plan = Plan(())
        self._size = size
        self._placer = placer
        self._describe = describe
        self._progress = progress
        self._num_stages = num_stages
        self._with_replicas = with_replicas
        self._members: dict[str, Member] = {}
        self._joining: list[RemoteWorker] = []
        self._changed = trio.Event()
        self._why_not = "no layer was placed yet"
        self._replicating: trio.CancelScope | None = None

    # ------------------------------------------------------------------ the beginning

    async def enlist(self, workers: Sequence[RemoteWorker]) -> None:
        """Ask the first workers what they have, and plan over them; nothing is sent yet.

        Raises:
            CapacityError: the layers do not fit the workers.
            NoRouteError: one did not say what it has.
        """
        for worker, info in zip(workers, await self._describe(workers), strict=True):
            self._members[worker.peer_id] = Member(worker, info)
        self._plan_anew()

    async def start(self) -> None:
        """Place every stage of the plan. A worker that fails is left out, if the others can do without it.

        Raises:
            ModelError: a layer is missing at a worker, and may not be sent.
            NoRouteError: a worker failed, and the model does not fit the others.
        """
        while failures := await self._place_stages(self.plan.stages, RECONNECT_TIMEOUT):
            for error in failures:
                logger.warning("%s", error)
                self.lost(error.peer_id or "", str(error))
            try:
                self._plan_anew()
            except (CapacityError, ConfigurationError):
                raise failures[0] from failures[0].__cause__
        self._progress.ready()
        await self._placer.save_hashes()
        self._notify()

    def _plan_anew(self) -> None:
        self.plan = self._make_plan()
        self._progress.planned(self.plan, list(self.infos.values()), len(self._size.layers))

    def _make_plan(self) -> Plan:
        now = trio.current_time()
        infos = [
            member.current_info
            for member in self._members.values()
            if not (member.is_leaving or member.is_cut or member.rests_until > now)
        ]
        count = self._num_stages
        with self._timed_planning():
            plan = make_plan(
                self._size,
                capacities(infos, len(self._size.layers)),
                far_links(infos),
                num_stages=min(count, len(infos)) if count and self.plan.stages else count,
                generation=self.plan.generation + 1,
            )
        return plan if self._with_replicas else replace(plan, replicas=())

    @contextmanager
    def _timed_planning(self) -> Iterator[None]:
        started, error = time.perf_counter(), ""
        try:
            yield
        except (CapacityError, ConfigurationError) as exc:
            error = str(exc)
            raise
        finally:
            self._progress.plan_made(time.perf_counter() - started, error)

    # ------------------------------------------------------------------ who is chosen for a session

    @property
    def members(self) -> tuple[Member, ...]:
        """Everybody who is there, as they came."""
        return tuple(self._members.values())

    @property
    def infos(self) -> dict[str, WorkerInfo]:
        """What the members said of themselves when they joined, by peer id."""
        return {m.peer_id: m.info for m in self._members.values()}

    @property
    def holdings(self) -> dict[str, range]:
        """The layers that each member is ready for, by peer id; those that hold none are left out."""
        return {m.peer_id: m.layers for m in self._members.values() if m.layers}

    @property
    def num_ready(self) -> int:
        """Members that hold layers, or stand by and know the model."""
        return sum(bool(m.layers) or m.is_configured for m in self._members.values())

    @property
    def why_not_ready(self) -> str | None:
        """Which layers no member is ready for at this moment, and why; None where a session can be opened."""
        if self._find_selection(()) is not None:
            return None
        holes = [name_range(range(stage.start, stage.stop)) for stage in self._holes()]
        missing = f"no worker is ready for {', '.join(holes)}: " if holes else ""
        return missing + self._why_not

    def num_sessions(self, peer_id: str) -> int:
        """Sessions that go through a member now."""
        return self._members[peer_id].num_sessions if peer_id in self._members else 0

    async def select(self, *, timeout: float, avoid: Collection[str] = ()) -> Selection:
        """The least busy ready holder of each stage; waits until every stage has one.

        Args:
            timeout: seconds.
            avoid: peers to go around, as far as others hold what they do.

        Raises:
            NoRouteError: a stage had none in time; says why.
        """
        with trio.CancelScope(deadline=trio.current_time() + timeout):
            return await self._wait_selection(avoid)
        raise self._nobody_ready(timeout)

    def _nobody_ready(self, timeout: float) -> NoRouteError:
        holes = [range(stage.start, stage.stop) for stage in self._holes()]
        return NoRouteError(
            f"no worker was ready for {', '.join(map(name_range, holes))} within {timeout:g} s: "
            f"{self._why_not}",
            layers=[layer for hole in holes for layer in hole],
        )

    async def _wait_selection(self, avoid: Collection[str]) -> Selection:
        while (found := self._find_selection(avoid)) is None:
            await self._changed.wait()
        return found

    def has_alternative(self, peer_id: str, layers: range) -> bool:
        """Whether somebody else, who is quick and means to stay, is ready for these layers."""
        return any(
            member.holds(layers)
            and not (member.is_leaving or member.times.is_slow)
            and member.peer_id != peer_id
            for member in self._members.values()
        )

    def should_leave(self, selection: Selection) -> bool:
        """Whether a session would do well to move: a member of its own wants to go, is slow, or is gone."""
        return any(
            self._members.get(member.peer_id) is not member
            or (
                (member.is_leaving or member.times.is_slow)
                and self.has_alternative(member.peer_id, layers)
            )
            for member, layers in selection.hops
        )

    def _find_selection(self, avoid: Collection[str]) -> Selection | None:
        chosen: list[tuple[Member, PlannedStage]] = []
        for stage in self.plan.stages:
            holders = self._holders(range(stage.start, stage.stop))
            if not holders:
                return None
            best = min(
                holders,
                key=lambda member: (
                    member.peer_id in avoid,
                    member.times.is_slow,
                    member.is_leaving,
                    member.num_sessions,
                    member.peer_id != stage.peer_id,
                ),
            )
            chosen.append((best, stage))
        return Selection(joined(chosen)) if chosen else None

    def _holders(self, layers: range) -> list[Member]:
        return [member for member in self._members.values() if member.holds(layers)]

    def _holes(self) -> list[PlannedStage]:
        """Stages that nobody holds who means to stay."""
        return [
            stage
            for stage in self.plan.stages
            if all(m.is_leaving for m in self._holders(range(stage.start, stage.stop)))
        ]

    # ------------------------------------------------------------------ what happens to members

    def join(self, worker: RemoteWorker) -> None:
        """A worker is there, for the first time or again."""
        self._joining.append(worker)
        self._notify()

    def lost(self, peer_id: str, reason: str) -> None:
        """A worker is gone, or has dropped what was placed on it.

        While it is given layers, a lost connection is for those who give them to mend.
        """
        member = self._members.get(peer_id)
        if member is not None and member.is_placing:
            member.is_cut = True
            return
        if member is None:
            return
        logger.debug("lost worker %s: %s", peer_id, reason)
        self._progress.lost(peer_id, member.layers, reason)
        self._placer.lost(peer_id)
        del self._members[peer_id]
        self.plan = replace(self.plan, stages=tuple(map(self._as_held, self.plan.stages)))
        self._notify()

    def leave(self, peer_id: str) -> None:
        """A worker wants to go: it gets no new session where another can have it."""
        member = self._members.get(peer_id)
        if member is not None and not member.is_leaving:
            member.is_leaving = True
            logger.debug("worker %s is about to end", peer_id)
            self._notify()

    def failed(self, error: NoRouteError) -> bool:
        """A session's step failed on a member; returns whether that member is out of the choice by now.

        It is if it cannot be reached, or no longer has its layers, or was found slow. Any other failure is the
        session's business: it goes around that member, if it can.
        """
        member = self._members.get(error.peer_id or "")
        cause = error.__cause__
        if member is None:
            return True
        if isinstance(cause, TransportError):
            self.lost(member.peer_id, str(cause))
            return True
        code = cause.code if isinstance(cause, PeerRefusedError) else None
        if code == ErrorCode.PEER_UNREACHABLE and error.unreachable_from is None:
            self.lost(
                member.peer_id, str(cause)
            )  # its predecessor says so, and it does not answer us either
            return True
        if code in PLACE_AGAIN:
            self._forget_placement(member)
            return True
        return member.times.is_slow

    def _forget_placement(self, member: Member) -> None:
        member.layers = range(0)
        member.is_configured = False
        self._notify()

    def is_member(self, peer_id: str) -> bool:
        """Whether this worker is there."""
        return peer_id in self._members

    def changed(self) -> None:
        """A member is slow, or quick again."""
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # ------------------------------------------------------------------ mending

    async def mend(self) -> None:
        """Keep every layer on a ready member, and use whoever is left over; runs until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                changed = self._changed
                for worker in self._take_joining():
                    nursery.start_soon(self._welcome, worker)
                for member in self._unprepared():
                    member.is_preparing = True
                    nursery.start_soon(self._prepare, member)
                if self._holes():
                    if self._replicating is not None:
                        self._replicating.cancel()
                    await self._fill_holes()
                elif self._with_replicas and self._replicating is None:
                    spare = self._next_replica()
                    if spare is not None:
                        self._replicating = trio.CancelScope()
                        nursery.start_soon(self._replicate, *spare, self._replicating)
                with trio.move_on_after(self._seconds_to_wait()):
                    await changed.wait()

    def _take_joining(self) -> list[RemoteWorker]:
        joining, self._joining = self._joining, []
        return joining

    async def _welcome(self, worker: RemoteWorker) -> None:
        try:
            (info,) = await self._describe([worker])
        except (NoRouteError, RemoteProtocolError) as exc:
            logger.warning("%s", exc)
            return
        self._members[worker.peer_id] = Member(worker, info)
        self._progress.joined(info)
        self._notify()

    def _unprepared(self) -> list[Member]:
        """Members that stand by and do not know the model yet: to check its config takes them a second."""
        now = trio.current_time()
        return [
            member
            for member in self._members.values()
            if not (member.is_configured or member.is_preparing or member.rests_until > now)
        ]

    async def _prepare(self, member: Member) -> None:
        try:
            async with member.lock:
                await self._configure(member)
        except WORKER_FAILURES as exc:
            logger.warning("worker %s did not take the model's config: %s", member.peer_id, exc)
            member.rest(getattr(exc, "retry_after", None) or RETRY_DELAY)
        finally:
            member.is_preparing = False
            self._notify()

    async def _fill_holes(self) -> None:
        """Plan anew over whoever is there, and place what is missing."""
        holes = self._holes()
        try:
            plan = self._make_plan()
        except (CapacityError, ConfigurationError) as exc:
            if not any(
                member.rests_until > trio.current_time() for member in self._members.values()
            ):
                self._why_not = str(exc)
            return
        self._progress.mending([range(hole.start, hole.stop) for hole in holes])
        self.plan = plan
        try:
            failures = await self._place_stages(plan.stages, MEND_PATIENCE)
        except ModelError as exc:  # a file has changed, or must not be sent
            logger.error("cannot place the layers: %s", exc)
            self._why_not = str(exc)
            return
        for failure in failures:
            logger.warning("%s", failure)
            self._why_not = str(failure)
            self._rest(failure)
        if not failures:
            self._progress.mended(self.plan)
        self._notify()

    def _rest(self, failure: NoRouteError) -> None:
        """A worker did not take its layers: it is gone, or is left alone for a while."""
        member = self._members.get(failure.peer_id or "")
        if member is None:
            return
        if isinstance(failure.__cause__, TransportError):
            self.lost(member.peer_id, str(failure))
            return
        retry_after = getattr(failure.__cause__, "retry_after", None)
        self._forget_placement(member)
        member.rest(retry_after or RETRY_DELAY)

    def _next_replica(self) -> tuple[Member, range] | None:
        """A member that holds nothing, and what it should."""
        now = trio.current_time()
        spare = {
            member.peer_id
            for member in self._members.values()
            if not member.layers and not member.is_leaving and member.rests_until <= now
        }
        if not spare:
            return None
        infos = [member.current_info for member in self._members.values()]
        stages = list(map(self._as_held, self.plan.stages))
        peers = capacities(infos, len(self._size.layers))
        for replica in make_replicas(self._size, peers, stages):
            if replica.peer_id in spare:
                return self._members[replica.peer_id], range(replica.start, replica.stop)
        return None

    def _as_held(self, stage: PlannedStage) -> PlannedStage:
        """The stage, on a member that holds it now; as it is, if nobody does."""
        peer_ids = [member.peer_id for member in self._holders(range(stage.start, stage.stop))]
        if not peer_ids or stage.peer_id in peer_ids:
            return stage
        return replace(stage, peer_id=peer_ids[0])

    async def _replicate(self, member: Member, layers: range, scope: trio.CancelScope) -> None:
        try:
            with scope:
                await self._place(member, layers)
                self._progress.replicated(member.peer_id, layers)
        except NoRouteError as exc:
            logger.warning("no replica of %s: %s", name_range(layers), exc)
            self._rest(exc)
        except ModelError as exc:
            logger.warning("no replica of %s: %s", name_range(layers), exc)
            member.rest(math.inf)
        finally:
            self._replicating = None
            self._notify()

    def _seconds_to_wait(self) -> float:
        """Until a member that rests may be asked again."""
        now = trio.current_time()
        resting = [m.rests_until - now for m in self._members.values() if m.rests_until > now]
        return min(resting, default=math.inf)

    # ------------------------------------------------------------------ placing

    async def _place_stages(
        self, stages: Sequence[PlannedStage], patience: float
    ) -> list[NoRouteError]:
        """Bring every stage to its member, all at once; returns what went wrong."""
        failures: list[NoRouteError] = []

        async def place(member: Member, layers: range) -> None:
            try:
                await self._place(member, layers, patience=patience)
            except NoRouteError as exc:
                failures.append(exc)

        with unwrap_errors():
            async with trio.open_nursery() as nursery:
                for stage in stages:
                    member, layers = (
                        self._members.get(stage.peer_id),
                        range(stage.start, stage.stop),
                    )
                    if member is None:
                        failures.append(_lost_before(stage.peer_id, layers))
                    elif not member.holds(layers):
                        nursery.start_soon(place, member, layers)
        return failures

    async def _configure(self, member: Member) -> None:
        if not member.is_configured:
            await self._placer.configure(member.worker)
            member.is_configured = True

    async def _place(
        self, member: Member, layers: range, *, patience: float = MEND_PATIENCE
    ) -> None:
        """Bring layers to a member; when its connection breaks, wait `patience` seconds for another.

        Raises:
            NoRouteError: it did not get ready; names it, and says why.
        """
        peer_id, progress = member.peer_id, self._progress
        progress.transfer_planned(peer_id, self._placer.num_bytes(layers))
        reports = TransferReports(
            sent=partial(progress.transferred, peer_id),
            held=partial(progress.already_held, peer_id),
            passed_on=partial(progress.passed_on, peer_id),
        )
        async with member.lock:
            member.layers = range(0)  # its sessions end with the new assignment
            member.assigned = layers
            member.is_placing = True
            try:
                await self._placer.place(
                    member.worker,
                    layers,
                    reports,
                    is_configured=member.is_configured,
                    patience=patience,
                )
                member.is_configured = True
                member.is_cut = False
            finally:
                member.is_placing = False
                if member.is_cut:
                    self.lost(peer_id, "its connection broke while it got its layers")
        if self._members.get(peer_id) is not member:
            raise _lost_before(peer_id, layers)
        member.layers = layers
        self._notify()


def _lost_before(peer_id: str, layers: range) -> NoRouteError:
    text = f"worker {peer_id} was lost before it had {name_range(layers)}"
    return NoRouteError(text, layers=layers, peer_id=peer_id)
