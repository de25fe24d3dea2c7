"""The workers of one coordinator: planned over, given their layers, and kept whole.

    fleet = Fleet(planning, placer, ...)
    await fleet.enlist(workers)             # plan
    await fleet.start()                     # place; sessions can be opened from here on
    nursery.start_soon(fleet.mend)          # for as long as the coordinator runs

When a member is lost and no replica holds what it held, the layers are planned anew over the members left, so that as
few bytes as possible have to be sent. Members that are left over become replicas. A worker that comes back is a new
member that happens to hold layers: those are not sent again.

Nothing here knows tokens or caches: a session whose member is lost finds out by its own error, and asks for others.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import trio

from neurogrid.errors import (
    CapacityError,
    ConfigurationError,
    ModelError,
    NeuroGridError,
    NoRouteError,
    TransportError,
)
from neurogrid.fleet.member import Member
from neurogrid.fleet.placing.assigner import Assigner
from neurogrid.fleet.placing.fleet_plan import FleetPlanning
from neurogrid.fleet.placing.placer import RECONNECT_TIMEOUT, Placer
from neurogrid.fleet.progress import FleetProgress
from neurogrid.fleet.remote_worker import RemoteWorker
from neurogrid.fleet.roster import Roster
from neurogrid.fleet.speeds.speed_watch import SpeedWatch
from neurogrid.fleet.speeds.trials import Trials
from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.p2p.wire import ErrorCode, GPUInfo
from neurogrid.planner import Plan, name_range

__all__ = ["Fleet"]

logger = logging.getLogger(__name__)

# A worker that refused its layers is asked again after that, or after what it says. Seconds.
RETRY_DELAY = 5.0
# And for what memory it has, while layers are missing. Seconds.
ASK_TIMEOUT = 2.0
# Seconds to wait for a worker's connection to come back while others might have its layers.
MEND_PATIENCE = 3.0
# After a better plan could not be put in place for want of room beside running sessions, or was given up. Seconds.
IMPROVE_DELAY = 30.0


class Fleet(Roster):
    """A roster that keeps itself whole.

    Args:
        describe: asks workers what they have.
        disconnect: closes the connection to a worker that failed, if there is one: a worker that is alive comes back.

    Attributes:
        planning: what is asked of every plan; may be changed until `start`.
        limited: gives the infos of workers with the memory that may be planned with; all of it, unless somebody else
            here plans with the same workers.
        trials: of members that were found slow and have nothing to compute.
    """

    def __init__(
        self,
        planning: FleetPlanning,
        placer: Placer,
        describe: Callable[[Sequence[RemoteWorker]], Awaitable[list[WorkerInfo]]],
        trials: Trials,
        progress: FleetProgress,
        disconnect: Callable[[str], None],
    ) -> None:
        super().__init__(progress, on_lost=placer.lost, on_given_up=disconnect)
        self.planning = planning
        self._placer = placer
        self.describe = describe
        self.limited: Callable[[Sequence[WorkerInfo]], list[WorkerInfo]] = list
        self._assigner = Assigner(self, placer, progress)
        self._joining: list[RemoteWorker] = []
        # Workers that are there and are no members yet: they have not said what they have.
        self._strangers: dict[str, RemoteWorker] = {}
        # Brings layers to members though none is missing; gives way as soon as one is.
        self._extra: trio.CancelScope | None = None
        # Trio's time at which a better plan is looked for.
        self._improve_at = math.inf
        # And at which members that had too little memory are asked again what they have.
        self._ask_at = math.inf
        self.trials = trials
        self._speeds = SpeedWatch(trials, progress, on_news=self._look_for_better)

    # ------------------------------------------------------------------ the beginning

    async def enlist(self, workers: Sequence[RemoteWorker]) -> None:
        """Ask the first workers what they have, and plan over those that say it; nothing is sent yet.

        Raises:
            CapacityError: the layers do not fit the workers.
            NoRouteError: none of them says what it has, or too few do for the stages that were asked for.
        """
        infos = {info.peer_id: info for info in await self.describe(workers)}
        for worker in workers:
            if worker.peer_id in infos:
                self.add(Member(worker, infos[worker.peer_id]))
        try:
            with self._timed_planning():
                plan = self.planning.first(self._usable())
        except CapacityError as exc:
            used = sum(max(info.total_bytes - info.free_bytes, 0) for info in infos.values())
            if not used:
                raise
            raise CapacityError(
                f"{exc} (other coordinators or programs have {used:,} B of the workers' memory)",
                needed=exc.needed,
                available=exc.available,
            ) from exc
        except ConfigurationError as exc:
            if len(infos) == len(workers):
                raise
            raise NoRouteError(
                f"{len(infos)} of {len(workers)} workers said what they have: {exc}"
            ) from exc
        self._use(plan)

    async def start(self) -> None:
        """Place every stage of the plan. A worker that fails is left out, if the others can do without it.

        Raises:
            ModelError: a layer is missing at a worker, and may not be sent.
            NoRouteError: a worker failed, and the model does not fit the others.
        """
        while failures := await self._assigner.stages(self.plan.stages, patience=RECONNECT_TIMEOUT):
            for error in failures:
                logger.warning("%s", error)
                member = self.member(error.peer_id or "")
                if member is not None and not await self._is_fuller(member, error):
                    self.give_up(member, str(error))
            try:
                self._use(self._plan_again())
            except (CapacityError, ConfigurationError):
                raise failures[0] from failures[0].__cause__
        self._progress.ready()
        await self._placer.save_hashes()
        self.changed()

    def _plan_again(self) -> Plan:
        with self._timed_planning():
            return self.planning.again(self.plan, self._usable())

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

    def _use(self, plan: Plan) -> None:
        self.plan = plan
        self._progress.planned(plan, list(self.infos.values()), len(self.planning.size.layers))

    def _usable(self) -> list[WorkerInfo]:
        """Return the infos of the members that may get a stage now."""
        now = trio.current_time()
        infos = [
            member.current_info
            for member in self.members
            if not (member.is_leaving or member.is_cut or member.rests_until > now)
        ]
        return self._speeds.applied(self.limited(infos))

    # ------------------------------------------------------------------ workers that others use, too

    async def _is_fuller(self, member: Member, failure: NoRouteError) -> bool:
        """Whether a member refused its layers for want of memory, and says that it has less than was planned with."""
        if getattr(failure.__cause__, "code", None) != ErrorCode.OUT_OF_MEMORY:
            return False
        member.is_short = True
        before = member.info.free_bytes
        await self._ask_memory(member)
        return member.info.free_bytes < before

    async def _ask_short(self) -> None:
        """Ask those that had too little what they have now; who does not answer soon has what it said last."""
        with trio.move_on_after(ASK_TIMEOUT):
            async with trio.open_nursery() as nursery:
                for member in self.members:
                    if member.is_short and not member.is_placing:
                        nursery.start_soon(self._ask_memory, member)

    async def _ask_memory(self, member: Member) -> None:
        try:
            member.has_memory(await member.worker.memory())
        except NeuroGridError as exc:
            logger.debug("worker %s does not say what memory it has: %s", member.peer_id, exc)

    def said_memory(self, peer_id: str, memory: GPUInfo) -> None:
        """A worker says unasked what memory it has for us now: another coordinator got some."""
        member = self.member(peer_id)
        if member is None:
            return
        member.has_memory(memory)
        member.is_short = True
        logger.info(
            "worker %s has %s B for us now, for others use it: what was placed on it is placed again when it is needed",
            member.worker.shown,
            f"{member.info.free_bytes:,}",
        )

    # ------------------------------------------------------------------ mending

    def join(self, worker: RemoteWorker) -> None:
        """A worker is there, for the first time or again."""
        if self.is_excluded(worker.peer_id):
            logger.warning(
                "worker %s is here again, and is not used: it was excluded", worker.shown
            )
            return
        member = self.member(worker.peer_id)
        if member is not None and member.is_placing:
            # Cut off and here again: the placer goes on with it. What it had went with the connection before.
            member.is_cut, member.is_configured, member.layers = False, False, range(0)
            self.changed()
            return
        self._joining.append(worker)
        self._strangers[worker.peer_id] = worker
        self.changed()

    def lost(self, peer_id: str, reason: str) -> None:
        self._strangers.pop(peer_id, None)
        super().lost(peer_id, reason)

    async def mend(self) -> None:
        """Keep every layer on a ready member, and use the members left over; runs until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                changed = self.change
                self._speeds.look(self.members, self.planning.size, nursery)
                for worker in self._take_joining():
                    nursery.start_soon(self._welcome, worker)
                for member in self._unprepared():
                    member.is_preparing = True
                    nursery.start_soon(self._prepare, member)
                if self.holes():
                    if self._extra is not None:
                        self._extra.cancel()
                    await self._fill_holes()
                elif self._extra is None and (bring := self._next_extra()) is not None:
                    self._extra = trio.CancelScope()
                    nursery.start_soon(self._bring_extra, bring, self._extra)
                with trio.move_on_after(self._seconds_to_wait()):
                    await changed.wait()

    def _take_joining(self) -> list[RemoteWorker]:
        joining, self._joining = self._joining, []
        return joining

    async def _welcome(self, worker: RemoteWorker) -> None:
        while self._strangers.get(worker.peer_id) is worker:
            try:
                (info,) = await self.describe([worker])
                break
            except NoRouteError as exc:
                logger.warning("%s; asking again in %g s while it is there", exc, RETRY_DELAY)
            await trio.sleep(RETRY_DELAY)
        else:
            return  # it is gone, or has come back as another
        if self._strangers.get(worker.peer_id) is not worker:
            return  # as one that has come back, it is welcomed by itself
        del self._strangers[worker.peer_id]
        self._progress.joined(info)
        self._speeds.forget(info.peer_id)
        self._look_for_better()
        self.add(Member(worker, info))

    def _unprepared(self) -> list[Member]:
        """Members that stand by and do not know the model yet: to check its config takes them a second.

        None where they are others' as well.
        """
        if not self.planning.prepares_spares:
            return []
        now = trio.current_time()
        return [
            member
            for member in self.members
            if not (member.is_configured or member.is_preparing or member.rests_until > now)
        ]

    async def _prepare(self, member: Member) -> None:
        try:
            await self._assigner.configure(member)
        except NeuroGridError as exc:
            logger.warning("worker %s did not take the model's config: %s", member.peer_id, exc)
            member.rest(getattr(exc, "retry_after", None) or RETRY_DELAY)
        finally:
            member.is_preparing = False
            self.changed()

    async def _fill_holes(self) -> None:
        """Plan anew over the members that are there, and place what is missing."""
        holes, now = self.holes(), trio.current_time()
        self._ask_at = math.inf
        await self._ask_short()
        try:
            plan = self._plan_again()
        except (CapacityError, ConfigurationError) as exc:
            if not any(member.rests_until > now for member in self.members):
                self.why_not = str(exc)
            if any(member.is_short for member in self.members):
                self._ask_at = trio.current_time() + RETRY_DELAY
            return
        self._progress.mending([range(hole.start, hole.stop) for hole in holes])
        self.plan = plan
        asked = {member.peer_id: member for member in self.members}
        try:
            failures = await self._assigner.stages(plan.stages, patience=MEND_PATIENCE)
        except ModelError as exc:  # a file has changed, or must not be sent
            logger.error("cannot place the layers: %s", exc)
            self.why_not = str(exc)
            return
        for failure in failures:
            logger.warning("%s", failure)
            self.why_not = str(failure)
            if (member := asked.get(failure.peer_id or "")) is None:
                continue
            if await self._is_fuller(member, failure):
                self.forget_placement(member)
            else:
                self._rest(member, failure)
        if not failures:
            for short in asked.values():
                short.is_short = False
            self._progress.mended(self.plan)
        self.changed()

    def _next_extra(self) -> Callable[[], Awaitable[None]] | None:
        """Choose what to bring to members besides: the layers of a better plan, or those of a replica."""
        if self._improve_at <= trio.current_time():
            return self._improve
        spare = self._next_replica() if self.planning.with_replicas else None
        return partial(self._replicate, *spare) if spare is not None else None

    async def _bring_extra(
        self, bring: Callable[[], Awaitable[None]], scope: trio.CancelScope
    ) -> None:
        try:
            with scope:
                await bring()
        finally:
            self._extra = None
            self.changed()

    def _look_for_better(self) -> None:
        """A member joined, or is slower or faster than was planned with."""
        self._improve_at = trio.current_time()
        self.changed()

    async def _improve(self) -> None:
        """Take a plan for new sessions that is worth its bytes, if there is one; sessions that run stay as they are."""
        self._improve_at, is_decided = math.inf, False
        try:
            is_decided = await self._take_better_plan()
        finally:
            if not is_decided:
                self._improve_at = min(self._improve_at, trio.current_time() + IMPROVE_DELAY)

    async def _take_better_plan(self) -> bool:
        """Returns False where there is one, and sessions that run leave no room for it yet."""
        infos = self._usable()
        in_use = {m.peer_id: m.layers for m in self.members if m.num_sessions}
        try:
            plan = self.planning.better(self.plan, infos, kept=in_use)
            if plan is None:
                return not in_use or self.planning.better(self.plan, infos, kept={}) is None
        except (CapacityError, ConfigurationError) as exc:
            logger.debug("no other plan: %s", exc)
            return True
        moves = []
        for stage in plan.stages:
            member, layers = self.member(stage.peer_id), range(stage.start, stage.stop)
            if member is None:
                return True
            if member.holds(layers):
                continue
            # With what it holds, and what lies between: its sessions go on then.
            grown = layers
            if member.layers:
                first, last = min(layers[0], member.layers[0]), max(layers[-1], member.layers[-1])
                grown = range(first, last + 1)
            (limited,) = self.limited([member.current_info])
            if not self.planning.fits(limited, grown):
                if member.num_sessions:
                    logger.debug(
                        "no room for another plan beside the sessions of %s", stage.peer_id
                    )
                    return False
                grown = layers
            moves.append(replace(stage, start=grown.start, stop=grown.stop))
        try:
            failures = await self._assigner.stages(moves, patience=MEND_PATIENCE)
        except ModelError as exc:
            logger.warning("cannot place another plan: %s", exc)
            return True
        for failure in failures:
            logger.warning("the plan stays as it is: %s", failure)
        if not failures:
            self.plan = plan
            self._progress.improved(plan)
        self.changed()
        return True

    def _rest(self, member: Member, failure: NoRouteError) -> None:
        """A worker did not take its layers: it is gone, or is left alone for a while."""
        if isinstance(failure.__cause__, TransportError):
            self.give_up(member, str(failure))
            return
        retry_after = getattr(failure.__cause__, "retry_after", None)
        self.forget_placement(member)
        member.rest(retry_after or RETRY_DELAY)

    def _next_replica(self) -> tuple[Member, range] | None:
        """A member that holds nothing, and what it should."""
        now = trio.current_time()
        spare = {
            member.peer_id
            for member in self.members
            if not member.layers and not member.is_leaving and member.rests_until <= now
        }
        if not spare:
            return None
        infos = [member.current_info for member in self.members]
        for replica in self.planning.replicas(map(self.as_held, self.plan.stages), infos):
            if replica.peer_id in spare:
                return self._members[replica.peer_id], range(replica.start, replica.stop)
        return None

    async def _replicate(self, member: Member, layers: range) -> None:
        try:
            await self._assigner.layers(member, layers, patience=MEND_PATIENCE)
            self._progress.replicated(member.peer_id, layers)
        except NoRouteError as exc:
            logger.warning("no replica of %s: %s", name_range(layers), exc)
            self._rest(member, exc)
        except ModelError as exc:
            logger.warning("no replica of %s: %s", name_range(layers), exc)
            member.rest(math.inf)

    def _seconds_to_wait(self) -> float:
        """Seconds until a resting member may be asked again, speeds are looked at, or a better plan is looked for."""
        now = trio.current_time()
        rests = (member.rests_until for member in self.members)
        times = [self._speeds.look_at, self._improve_at, self._ask_at, *rests]
        return min((at for at in times if at > now), default=now) - now
