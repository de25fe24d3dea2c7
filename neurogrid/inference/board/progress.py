"""The progress of a coordinator's work: that with its machines, and its generations.

Several may listen at once (`ProgressTee`).
"""

from __future__ import annotations

from collections.abc import Callable

from neurogrid.errors import NoRouteError
from neurogrid.fleet.progress import FleetProgress

__all__ = ["Progress", "ProgressTee"]


class Progress(FleetProgress):
    """Does nothing; subclasses show what happens."""

    def generation_queued(self, number: int, num_prompt_tokens: int) -> None:
        """Somebody wants tokens. Numbers count the generations of one coordinator."""

    def generation_opened(self, number: int) -> None:
        """A generation has been given room."""

    def token_generated(self, number: int) -> None:
        """One more token of a generation is there."""

    def tokens_proposed(self, number: int, num_proposed: int, num_accepted: int) -> None:
        """A pass of a generation had proposed tokens in it, of which so many were accepted."""

    def speculation_settled(self, how: str) -> None:
        """The means of proposing tokens is settled: `how` names it, or says why there is none."""

    def step_failed(self, number: int, error: NoRouteError) -> None:
        """A worker failed a step of a generation; whether others take over is told later."""

    def generation_rerouted(self, number: int, reason: str, seconds: float) -> None:
        """A worker failed a generation, and others took over after so many seconds."""

    def generation_finished(self, number: int, reason: str) -> None:
        """A generation has all its tokens: `stop`, the model ended it; `length`, there is no place for more."""

    def generation_ended(self, number: int, error: str) -> None:
        """A generation is over; `error` says why it failed, empty if it did not."""

    def steps_verified(self, num_steps: int, num_differing: int) -> None:
        """So many steps of a session were computed again; so many of them were wrong."""

    def steps_unverified(self, num_steps: int) -> None:
        """So many steps that were to be computed again could not be."""


class ProgressTee(Progress):
    """Tells several what it is told, in their order."""

    def __init__(self, *listeners: Progress) -> None:
        self._listeners = listeners


def _tell_all(name: str) -> Callable[..., None]:
    def tell(self: ProgressTee, *args: object, **kwargs: object) -> None:
        for listener in self._listeners:
            getattr(listener, name)(*args, **kwargs)

    return tell


# Every method of `Progress`, so that none is forgotten when there is one more.
for _name in [name for name in dir(Progress) if not name.startswith("_")]:
    setattr(ProgressTee, _name, _tell_all(_name))
