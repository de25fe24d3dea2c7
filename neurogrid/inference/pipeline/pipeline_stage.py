"""A stage of a session, as its coordinator uses it: which layers, on which worker, and the errors that name both."""

from __future__ import annotations

from dataclasses import dataclass, field

from neurogrid.errors import NeuroGridError, NoRouteError
from neurogrid.fleet.step_times import StepTimes
from neurogrid.inference.pipeline.session_worker import SessionWorker
from neurogrid.planner import PlannedStage, name_range

__all__ = ["PipelineStage"]


@dataclass(frozen=True)
class PipelineStage:
    """A planned stage and the worker that holds it.

    Attributes:
        times: what the worker took for its steps so far, of whichever session.
        latency: seconds that a message takes to the worker, as far as that was measured.
    """

    stage: PlannedStage
    worker: SessionWorker
    times: StepTimes = field(default_factory=StepTimes)
    latency: float = 0.0

    @property
    def peer_id(self) -> str:
        """The worker's peer id."""
        return self.worker.peer_id

    @property
    def name(self) -> str:
        """`layers 4 to 7 on worker 12D3...`, for errors and logs."""
        return f"{name_range(range(self.stage.start, self.stage.stop))} on worker {self.peer_id}"

    def lost(self, exc: NeuroGridError) -> NoRouteError:
        """The error that says that these layers are gone."""
        return NoRouteError(
            f"lost {self.name}: {exc}",
            layers=range(self.stage.start, self.stage.stop),
            peer_id=self.peer_id,
        )

    def cut_off(self, before: PipelineStage, exc: NeuroGridError) -> NoRouteError:
        """The error that says that the stage before cannot reach this one, which is there all the same."""
        return NoRouteError(
            f"{before.name} cannot hand on to {self.name}, which is there: {exc}",
            layers=range(self.stage.start, self.stage.stop),
            peer_id=self.peer_id,
            unreachable_from=before.peer_id,
        )
