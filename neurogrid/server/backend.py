"""The coordinator behind the routes: not there yet, there, or without a way through all layers.

The port is open before the workers are there, so that a client that waits for them can ask what is missing. A server
has one, or one for each of several models (`models.Models`): which of them a request means is for `Backends` to say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import trio

from neurogrid.inference.board.status_board import StatusBoard
from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.server.errors import APIError

__all__ = ["Backend", "Backends"]

# What a client is told to wait before it asks again whether we are ready. Seconds.
RETRY_AFTER = 5.0
# For answers that are under way when the server is told to end: those that take longer get an error in the second that
# is left of a command's farewell (`cli.common.FAREWELL_TIMEOUT`). Seconds.
FINISH_TIMEOUT = 4.0
# For a moment without any request, before new ones are refused so that there is one. Seconds.
DRAIN_PATIENCE = 20.0


class Backends(Protocol):
    """The coordinators of a server, as far as routes know them."""

    @property
    def why_not_ready(self) -> str | None:
        """The reason why no request can be served now; None where some can."""

    def not_ready(self, reason: str) -> APIError:
        """The error that says so."""

    def require_one(self) -> None:
        """Check that any request could be served.

        Raises:
            APIError: 503, no coordinator is there yet, or none any more.
        """

    def choose(self, name: object, *, tag: str = "") -> Backend:
        """The backend of the model, or of the adapter, that a request names; the first, where it names none.

        Args:
            tag: what may stand behind a name, as in Ollama's API.

        Raises:
            APIError: 404, nothing has this name.
        """

    def all(self) -> Sequence[Backend]:
        """All of them, in their order."""


class Backend:
    """The coordinator, as far as routes know it.

    Args:
        board: is told what the coordinator does before it is there; None where nobody is told.

    Attributes:
        gave_up: is set when the server ends before the answers that are under way.
    """

    def __init__(self, board: StatusBoard | None = None) -> None:
        self._coordinator: Coordinator | None = None
        self._board = board or StatusBoard()
        self._has_served = False
        self._num_requests = 0
        self._is_ending = False
        self._pause = ""
        self.gave_up = trio.Event()
        self._idle = trio.Event()
        self._idle.set()

    def require_one(self) -> None:
        """Check that the coordinator is there; raises as `coordinator`."""
        self.coordinator  # noqa: B018

    def choose(self, name: object, *, tag: str = "") -> Backend:
        """This one: that it has no model of that name its routes find out."""
        return self

    def all(self) -> Sequence[Backend]:
        """This one alone."""
        return (self,)

    async def wake(self) -> None:
        """Have the coordinator there, if it is one that comes when it is asked for; as it is, if it is not.

        Raises:
            APIError: 503, it did not come.
        """

    async def remove_adapter(self, name: str) -> bool:
        """Serve an adapter no longer; False where there is none of that name.

        Raises:
            APIError: 503, there is no coordinator yet, or none any more.
        """
        return self.coordinator.adapters.remove(name)

    @property
    def names(self) -> Collection[str]:
        """Names of the coordinator's model and adapters, as far as they are known."""
        if self._coordinator is None:
            return ()
        return (self._coordinator.model.name, *self._coordinator.adapters.names)

    @property
    def sees(self) -> bool | None:
        """Whether the model takes images; None where that is not known."""
        return None if self._coordinator is None else self._coordinator.model.sight is not None

    @contextmanager
    def serving(self, coordinator: Coordinator) -> Iterator[None]:
        """`coordinator` is there while the block runs."""
        self._coordinator, self._pause = coordinator, ""
        try:
            yield
        finally:
            self._coordinator = None
            self._has_served = True

    @contextmanager
    def request(self) -> Iterator[Coordinator]:
        """The coordinator, for one request: `finish` waits for the end of the block.

        Raises:
            APIError: 503, there is none yet, or none any more.
        """
        coordinator = self.coordinator
        self._num_requests += 1
        if self._num_requests == 1:
            self._idle = trio.Event()
        try:
            yield coordinator
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._idle.set()

    async def finish(self) -> None:
        """Take no new request, and wait for those that are under way; those that take too long end with an error."""
        self._is_ending = True
        with trio.move_on_after(FINISH_TIMEOUT):
            await self._idle.wait()
        self.gave_up.set()
        await self._idle.wait()

    async def drain(self, reason: str) -> None:
        """Wait until no request is under way; from then on until another coordinator serves, none is taken.

        Requests are taken while there may be such a moment by itself, but not for ever.

        Args:
            reason: that is told to those whose requests are not taken.
        """
        with trio.move_on_after(DRAIN_PATIENCE):
            while self._num_requests:
                await self._idle.wait()
        self._pause = reason
        await self._idle.wait()

    @property
    def why_not_ready(self) -> str | None:
        """The reason why no request can be served now; None where there is none."""
        if self._is_ending:
            return "the server is about to end"
        if self._pause:
            return self._pause
        if self._coordinator is None:
            return "ending" if self._has_served else self._board.doing
        return self._coordinator.why_not_ready

    @property
    def is_there(self) -> bool:
        """Whether there is a coordinator that takes requests."""
        return self._coordinator is not None and not (self._is_ending or self._pause)

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator.

        Raises:
            APIError: 503, there is none yet, or none any more.
        """
        if self._coordinator is None or not self.is_there:
            raise self.not_ready(self.why_not_ready or "")
        return self._coordinator

    def not_ready(self, reason: str) -> APIError:
        """The error that says so."""
        return APIError(503, f"not ready: {reason}", code="not_ready", retry_after=RETRY_AFTER)
