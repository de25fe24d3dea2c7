"""The trial of a member that was found slow, and computes nothing since: one short session through its layers.

Others compute meanwhile, with which it can be compared. No other is asked for anything, and any real session that
goes through it ends the trial. When it is tried is the matter of `fleet.speeds.trials`.

T = tokens, D = hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final, cast

import torch
import trio

from neurogrid.errors import NeuroGridError
from neurogrid.fleet.member import Member
from neurogrid.fleet.speeds.drift import MIN_STEPS, Steps
from neurogrid.fleet.speeds.trials import Trials
from neurogrid.fleet.step_times import NUM_RECENT, StepTimes
from neurogrid.inference.pipeline.pipeline_stage import PipelineStage
from neurogrid.inference.pipeline.routing import Routing
from neurogrid.inference.pipeline.session import open_session
from neurogrid.inference.pipeline.session_worker import SessionWorker
from neurogrid.planner import PlannedStage

__all__ = ["SessionTrials"]

logger = logging.getLogger(__name__)

# A member that does not get through its trial in this time is slow. Seconds.
TRIAL_TIMEOUT: Final = 300.0
# A trial takes so many steps, or lasts so long if those are enough to judge by: a process that is given a part of the
# time gets it in turns of a tenth of a second, and each of the means (`drift`) has to see some of them. Seconds.
NUM_STEPS: Final = NUM_RECENT
TRIAL_SECONDS: Final = 2.0


class SessionTrials(Trials):
    """The trials of one coordinator, one at a time: a member that shares a machine would look slow by the other's.

    Args:
        hidden_size: the model's D.
        dtype: that it is computed in.
        max_length: tokens that a session may have.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype, max_length: int) -> None:
        super().__init__()
        self._hidden_size, self._dtype = hidden_size, dtype
        self._num_steps = min(NUM_STEPS, max_length)
        self._member: Member | None = None
        self._scope = trio.CancelScope()
        self._ended = trio.Event()

    @property
    def is_running(self) -> bool:
        """See `Trials`."""
        return self._member is not None

    async def run(self, member: Member) -> Steps | None:
        """See `Trials`."""
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
            # No session needs it now, and one that does finds out by itself.
            logger.debug("could not try %s: %s", member.peer_id, exc)
            return None
        finally:
            self._member = None
            self._ended.set()

    async def give_way(self, peer_ids: Collection[str]) -> None:
        """See `Trials`."""
        if self._member is not None and self._member.peer_id in peer_ids:
            self._scope.cancel()
            await self._ended.wait()

    async def _steps_of(self, member: Member) -> Steps | None:
        times, layers = StepTimes(), member.layers
        planned = PlannedStage(member.peer_id, layers.start, layers.stop, 0)
        # As `remote_workers` makes all of a coordinator's.
        stage = PipelineStage(planned, cast(SessionWorker, member.worker), times)
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
