"""A watch over the steps that are under way: a worker that keeps one waiting far longer than before is bypassed.

A step that is late makes the coordinator ask the workers of its chain how far they are (SessionQuery). The first that
has not done its part, or says nothing at all, is the slow one. If another member is ready with the same layers, the
session leaves for it, and the slow one gets no new session until it has proved quick. If none is, the step waits
on, as long as the deadline of a stage allows.

Which step is late follows from what the workers took so far (`step_times`), with all that goes through them just now.
The step itself pays for an entry in a set; everything else happens here, 20 times a second, for those that are late.

Source: protocol_spec/sessions.md, "How long it took".
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import trio

from neurogrid.errors import NeuroGridError, NoRouteError, PeerRefusedError
from neurogrid.fleet.progress import FleetProgress
from neurogrid.inference.pipeline.pipeline_stage import PipelineStage
from neurogrid.inference.pipeline.session_worker import Reached

__all__ = ["Alternatives", "SlowWatch"]

logger = logging.getLogger(__name__)

# Seconds between looks at what is under way.
INTERVAL: Final = 0.05
# A step is late after so many times what it should take, and not before a floor. A worker that is asked then and
# says nothing for as long again has lost its link, or its process stands still: others go on at the price of a detour.
# Twice the floor is more than TCP takes to send a lost packet twice more (0.2 and 0.4 s, RFC 6298 as Linux has it);
# half of it would leave workers that a busy machine keeps from answering. One that answers gets the larger floor: on a
# busy machine a process that is fine may not get to compute for a second. Seconds.
FACTOR: Final = 4.0
SILENT_FLOOR: Final = 0.4
# Round trips, as they were measured when the worker joined, that an answer may take on top of that.
NUM_ROUND_TRIPS: Final = 4
# What counts of a latency that was measured, at most: more is no distance, but a worker that took its time. Seconds.
MAX_LATENCY: Final = 0.5
FLOOR: Final = 2.0
# A worker that is there, and computes, is given so many times more.
FACTOR_IF_THERE: Final = 3.0
# Seconds for an answer that costs nothing, at most.
ANSWER_TIMEOUT: Final = 1.0
# A slow worker has proved quick when it has answered so many times in a row, so many seconds apart. One that was
# there and yet slow is tried again after longer, twice as long each time.
NUM_PROOFS: Final = 3
PROOF_INTERVAL: Final = 1.0
PROBATION: Final = 30.0
MAX_PROBATION: Final = 600.0


class Alternatives(Protocol):
    """Other members that could take over (`fleet.Fleet`)."""

    def has_alternative(self, peer_id: str, layers: range) -> bool:
        """Whether another member, which is quick, is ready for these layers."""

    def changed(self) -> None:
        """Note that a member is slow now, or no longer."""

    def is_member(self, peer_id: str) -> bool:
        """Whether this worker is still there."""


class Step:
    """One step under way. Made by `SlowWatch.step`."""

    __slots__ = (
        "error",
        "look_at",
        "num_tokens",
        "position",
        "scope",
        "session_id",
        "stages",
        "started",
    )

    def __init__(
        self, stages: tuple[PipelineStage, ...], session_id: int, position: int, num_tokens: int
    ) -> None:
        self.stages = stages
        self.session_id = session_id
        self.position = position
        self.num_tokens = num_tokens
        self.started = trio.current_time()
        self.look_at = self.started + SILENT_FLOOR
        self.scope = trio.CancelScope()
        self.error: NoRouteError | None = None


class SlowWatch:
    """The watch of one coordinator; `run` is its task.

    Args:
        alternatives: the other members.
        progress: is told which worker a step waits for.
    """

    def __init__(self, alternatives: Alternatives, progress: FleetProgress | None = None) -> None:
        self._alternatives = alternatives
        self._progress = progress or FleetProgress()
        self._steps: set[Step] = set()
        self._nursery: trio.Nursery | None = None
        self._probations: dict[str, float] = {}

    @contextmanager
    def step(
        self, stages: tuple[PipelineStage, ...], session_id: int, position: int, num_tokens: int
    ) -> Iterator[None]:
        """The block is one step of a session through these stages.

        Raises:
            NoRouteError: it was given up, because the stage that it names keeps it waiting and somebody else is ready.
        """
        step = Step(stages, session_id, position, num_tokens)
        self._steps.add(step)
        try:
            with step.scope:
                yield
        finally:
            self._steps.remove(step)
        if step.scope.cancelled_caught and step.error is not None:
            raise step.error

    def start_soon(self, call: Callable[..., Awaitable[object]], *args: object) -> None:
        """Have something done that nobody waits for; not at all when the watch is over."""
        if self._nursery is not None:
            self._nursery.start_soon(self._done_quietly, call, *args)

    async def _done_quietly(self, call: Callable[..., Awaitable[object]], *args: object) -> None:
        try:
            await call(*args)
        except NeuroGridError as exc:
            logger.debug("%s", exc)

    async def run(self) -> None:
        """Watch; runs as long as the coordinator."""
        async with trio.open_nursery() as self._nursery:
            try:
                while True:
                    await trio.sleep(INTERVAL)
                    now = trio.current_time()
                    for step in [step for step in self._steps if step.look_at <= now]:
                        self._look(step, now)
            finally:
                self._nursery = None

    def _look(self, step: Step, now: float) -> None:
        late_at = step.started + max(SILENT_FLOOR, FACTOR * self._expected(step))
        if now < late_at:
            step.look_at = min(late_at, now + FLOOR)  # what else is under way may end meanwhile
            return
        step.look_at = math.inf
        assert self._nursery is not None
        self._nursery.start_soon(self._inquire, step, late_at)

    def _expected(self, step: Step) -> float:
        """Seconds that the step may take, with everything that goes through the same workers; infinite if unknown."""
        total = 0.0
        for item in step.stages:
            for other in self._steps:
                for its in other.stages:
                    if its.worker is item.worker:
                        layers = its.stage.stop - its.stage.start
                        seconds = its.times.expected(other.num_tokens, layers)
                        total += math.inf if seconds is None else seconds
        return total

    async def _inquire(self, step: Step, late_at: float) -> None:
        """Find the worker that keeps a step waiting, and bypass it if that is possible."""
        reached: dict[int, Reached | None] = {}
        usual = late_at - step.started
        farthest = min(max(item.latency for item in step.stages), MAX_LATENCY)
        patience = min(usual, ANSWER_TIMEOUT) + 2 * NUM_ROUND_TRIPS * farthest

        async def ask(index: int) -> None:
            reached[index] = await _reached(step.session_id, step.stages[index], math.inf)

        async with trio.open_nursery() as nursery:
            for index in range(len(step.stages)):
                nursery.start_soon(ask, index)
            # Bit by bit: time in which this process did not run is nobody else's silence, and counts as one bit.
            for _ in range(math.ceil(patience / INTERVAL)):
                await trio.sleep(INTERVAL)
                if len(reached) == len(step.stages):
                    break
            nursery.cancel_scope.cancel()
        if step not in self._steps:
            return
        now = trio.current_time()
        step.look_at = now + FLOOR
        item = next(
            (
                item
                for index, item in enumerate(step.stages)
                if not (reached.get(index) or Reached()).has_taken(step.position, step.num_tokens)
            ),
            None,
        )
        if item is None:
            return  # all have done their part: the answer is on its way
        is_there = reached.get(step.stages.index(item)) is not None
        if is_there and now - step.started < FACTOR_IF_THERE * max(usual, FLOOR):
            return
        layers = range(item.stage.start, item.stage.stop)
        waited = f"{now - step.started:.1f} s, where it should take {usual:.1f} s at most"
        state = "computes" if is_there else "does not answer"
        is_first = not item.times.suspicion
        item.times.suspicion = "is slow" if is_there else "does not answer"
        if not self._alternatives.has_alternative(item.peer_id, layers):
            if is_first:
                why = f"{state}: a step takes {waited}; nobody else is ready for its layers"
                logger.warning("%s %s", item.name, why)
                self._progress.suspected(item.peer_id, why)
            return
        step.error = NoRouteError(
            f"{item.name} {state}: a step takes {waited}", layers=layers, peer_id=item.peer_id
        )
        self._mark(item, step.error, is_there=is_there)
        step.scope.cancel()

    def _mark(self, item: PipelineStage, reason: NoRouteError, *, is_there: bool) -> None:
        if item.times.is_slow or self._nursery is None:
            return
        item.times.is_slow = True
        logger.warning("%s; its sessions go elsewhere until it is quick again", reason)
        self._progress.suspected(
            item.peer_id,
            f"{item.times.suspicion}; its sessions go elsewhere until it is quick again",
        )
        self._alternatives.changed()
        self._nursery.start_soon(self._prove, item, is_there)

    async def _prove(self, item: PipelineStage, was_there: bool) -> None:
        """Wait until a slow worker has proved quick, or is no more."""
        if was_there:
            probation = self._probations.get(item.peer_id, PROBATION)
            self._probations[item.peer_id] = min(2 * probation, MAX_PROBATION)
            await trio.sleep(probation)
        num_proofs = 0
        while num_proofs < NUM_PROOFS:
            await trio.sleep(PROOF_INTERVAL)
            if not self._alternatives.is_member(item.peer_id):
                self._probations.pop(item.peer_id, None)
                return
            num_proofs = num_proofs + 1 if await _reached(0, item) is not None else 0
        item.times.is_slow, item.times.suspicion = False, ""
        logger.warning("worker %s is quick again", item.peer_id)
        self._alternatives.changed()


async def _reached(
    session_id: int, item: PipelineStage, timeout: float = ANSWER_TIMEOUT
) -> Reached | None:
    """Ask a stage for its progress with a session; `Reached()` if it does not tell, None if it does not answer."""
    try:
        with trio.fail_after(timeout):
            return await item.worker.session_reached(session_id)
    except PeerRefusedError:
        return Reached()
    except (NeuroGridError, trio.TooSlowError):
        return None
