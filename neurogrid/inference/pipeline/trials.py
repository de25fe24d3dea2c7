"""When members that were found slow, and compute nothing since, are tried; and how that is done.

Who has no stage takes no steps to be judged by (`drift`), so that a worker that was slow for a minute would stay
unused for as long as it is there. It is tried instead: one short session through the layers that it still holds, while
others compute with whom it can be compared. Nobody else is asked for anything, and whatever real session goes through
it ends the trial.

One that is still slow, or slow again, is tried after twice the time.

T = tokens, D = hidden size.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from typing import Final

import torch
import trio

from neurogrid.errors import NeuroGridError
from neurogrid.fleet.member import Member
from neurogrid.fleet.speeds.drift import MIN_STEPS, Steps
from neurogrid.fleet.step_times import NUM_RECENT, StepTimes
from neurogrid.inference.pipeline.routing import Routing
from neurogrid.inference.pipeline.session import open_session
from neurogrid.inference.pipeline.stage import PipelineStage
from neurogrid.planner import PlannedStage

__all__ = ["FIRST_DELAY", "MAX_DELAY", "TrialTimes", "Trials"]

logger = logging.getLogger(__name__)

# Until a member that was found slow is tried for the first time; each time it is found slow again doubles it, unless
# it was fast for longer than the longest. Seconds.
FIRST_DELAY: Final = 60.0
MAX_DELAY: Final = 1800.0
# A member that does not get through its trial in this time is slow. Seconds.
TRIAL_TIMEOUT: Final = 300.0
# A trial takes so many steps, or lasts so long if those are enough to judge by: a process that is given a part of the
# time gets it in turns of a tenth of a second, and each of the means (`drift`) has to see some of them. Seconds.
NUM_STEPS: Final = NUM_RECENT
TRIAL_SECONDS: Final = 2.0


class TrialTimes:
    """When who is due. Pure: times are given, in seconds of a clock that never goes back."""

    def __init__(self) -> None:
        self._delays: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self._fast_since: dict[str, float] = {}

    def found_slow(self, peer_id: str, now: float) -> None:
        """It was found slow, for the first time or again: it is due later."""
        was_fast_for = now - self._fast_since.pop(peer_id, now)
        before = self._delays.get(peer_id, 0.0) if was_fast_for <= MAX_DELAY else 0.0
        delay = self._delays[peer_id] = min(max(2 * before, FIRST_DELAY), MAX_DELAY)
        self._due[peer_id] = now + delay

    def found_fast(self, peer_id: str, now: float) -> None:
        """It is as fast as it said again; how often it was not is remembered for a while."""
        self._due.pop(peer_id, None)
        if peer_id in self._delays:
            self._fast_since[peer_id] = now

    def is_due(self, peer_id: str, now: float) -> bool:
        """Whether it may be tried: it was found slow, and that is long enough ago."""
        return now >= self._due.get(peer_id, math.inf)

    def forget(self, peer_id: str) -> None:
        """Who has this peer id is somebody new."""
        for times in (self._delays, self._due, self._fast_since):
            times.pop(peer_id, None)


class Trials:
    """The trials of one coordinator, one at a time: who shares a machine would look slow by the other's.

    Args:
        hidden_size: the model's D.
        dtype: that it is computed in.
        max_length: tokens that a session may have.

    Attributes:
        times: when who is due.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype, max_length: int) -> None:
        self.times = TrialTimes()
        self._hidden_size, self._dtype = hidden_size, dtype
        self._num_steps = min(NUM_STEPS, max_length)
        self._member: Member | None = None
        self._scope = trio.CancelScope()
        self._ended = trio.Event()

    @property
    def is_running(self) -> bool:
        """Whether a member is being tried."""
        return self._member is not None

    async def run(self, member: Member) -> Steps | None:
        """Have a member that no session goes through compute tokens one by one, through all its layers.

        Returns:
            The steps that it took; none if it did not get through in time. None where it was not tried: it does not
            do it, or was needed meanwhile.
        """
        assert self._member is None
        if member.num_sessions:
            return None
        self._member, self._scope, self._ended = member, trio.CancelScope(), trio.Event()
        steps: Steps | None = None
        try:
            with self._scope:
                steps = ()
                with trio.move_on_after(TRIAL_TIMEOUT):
                    steps = await self._steps_of(member)
            return None if self._scope.cancelled_caught else steps
        except NeuroGridError as exc:
            # Nobody needs it now, and whoever does finds out for themselves.
            logger.debug("could not try %s: %s", member.peer_id, exc)
            return None
        finally:
            self._member = None
            self._ended.set()

    async def give_way(self, peer_ids: Collection[str]) -> None:
        """Give up the trial of a member that is needed; when this returns, it takes up no room there any more."""
        if self._member is not None and self._member.peer_id in peer_ids:
            self._scope.cancel()
            await self._ended.wait()

    async def _steps_of(self, member: Member) -> Steps | None:
        times, layers = StepTimes(), member.layers
        planned = PlannedStage(member.peer_id, layers.start, layers.stop, 0)
        stage = PipelineStage(planned, member.worker, times)
        routing = Routing(member.worker.protocol, "star")
        # Different ones: a mixture of experts chooses among all of them. As small as embeddings are, so that nothing
        # overflows.
        hidden_BTD = (0.02 * torch.randn(1, self._num_steps, self._hidden_size)).to(self._dtype)
        enough_at = trio.current_time() + TRIAL_SECONDS
        async with await open_session([stage], routing, max_length=self._num_steps) as session:
            for hidden_B1D in hidden_BTD.split(1, dim=1):
                if member.layers != layers:
                    return None
                await session.forward(hidden_B1D)
                if session.length >= MIN_STEPS and trio.current_time() >= enough_at:
                    break
        return times.recent
