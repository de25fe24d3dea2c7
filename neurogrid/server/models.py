"""The models of a server that has several: which one a request means, which are open, and what is known of the others.

Each has a coordinator, a host and a board of its own. What is decided, which one is opened and which gives way, is
decided by `inference.residency`; what is done, by `model_keeper`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import trio

from neurogrid.fleet.board.status import Json
from neurogrid.inference.board.status_board import StatusBoard
from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.inference.residency import (
    MAX_MODELS,
    ModelState,
    MovingCount,
    Residency,
    ResidencyLimits,
)
from neurogrid.renewed_event import RenewedEvent
from neurogrid.server.backend import RETRY_AFTER, Backend
from neurogrid.server.errors import APIError

__all__ = ["Models", "Remembered", "ServedModel"]

# For which a request waits until there is room for a model, before it is told to come again. Seconds.
MAX_WAIT: Final = 120.0
# What it is told to wait then. Seconds.
MODEL_RETRY_AFTER: Final = 10.0


@dataclass(frozen=True)
class Remembered:
    """Facts that are told of a model while it is not open.

    Attributes:
        adapters: directories of those beside it, by name, in their order.
        listed: what Ollama's API lists.
        sees: it takes images.
    """

    max_seq_len: int
    adapters: Mapping[str, Path] = field(default_factory=dict)
    listed: tuple[Mapping[str, object], ...] = ()
    sees: bool = False


class ServedModel(Backend):
    """One of several models. Made by `Models.add`.

    Attributes:
        name: what requests call it.
        board: of its coordinator.
        remembered: what was known when it was open last; None before.
        kept_adapters: directories of those that it was started with, or that clients had added before that, by name;
            told of until it is open.
        asked: tokens that were asked of it, of late.
        is_to_close: set when it is to be put down; another event for each time that it is opened.
        is_gone: set when it was removed and holds nothing any more.
    """

    def __init__(self, name: str, residency: Residency, changed: RenewedEvent) -> None:
        super().__init__(board := StatusBoard())
        self.name = name
        self.board = board
        self.remembered: Remembered | None = None
        self.kept_adapters: Mapping[str, Path] = {}
        self.asked = MovingCount()
        self.is_to_close = trio.Event()
        self.is_gone = trio.Event()
        self._residency = residency
        self._changed = changed
        self._num_counted = 0

    @property
    def state(self) -> ModelState:
        """State of the model; closing once the residency has forgotten it."""
        if not self._residency.is_known(self.name):
            return ModelState.CLOSING
        return self._residency.state(self.name)

    @property
    def reason(self) -> str:
        """Reason for that state, in words; empty where there is nothing to say."""
        return self._residency.reason(self.name) if self._residency.is_known(self.name) else ""

    @property
    def told(self) -> dict[str, Json]:
        """State, and reason if there is something to say, as JSON has it."""
        told: dict[str, Json] = {"state": self.state.value}
        if self.reason:
            told["reason"] = self.reason
        return told

    @property
    def adapters(self) -> Mapping[str, Path]:
        """The directories of its adapters, by name; as they were, while it is not open."""
        if self._coordinator is not None:
            return {each.name: each.directory for each in self._coordinator.adapters}
        return self.remembered.adapters if self.remembered is not None else self.kept_adapters

    @property
    def max_seq_len(self) -> int | None:
        """Tokens of its longest session; None where it has never been open."""
        if self._coordinator is not None:
            return self._coordinator.model.max_seq_len
        return self.remembered.max_seq_len if self.remembered is not None else None

    @property
    def sees(self) -> bool | None:
        if self._coordinator is None and self.remembered is not None:
            return self.remembered.sees
        return super().sees

    @property
    def names(self) -> Collection[str]:
        return (self.name, *self.adapters)

    @property
    def why_not_ready(self) -> str | None:
        if self._is_ending:
            return "the server is about to end"
        if self._coordinator is not None and not self._pause:
            return self._coordinator.why_not_ready
        match self.state:
            case ModelState.OPENING:
                return f"{self.name}: {self._board.doing}"
            case ModelState.CLOSING:
                return f"{self.name} is being put down"
            case ModelState.FAILED:
                return f"{self.name} could not be opened: {self.reason}"
        return f"{self.name} is not open" + (f": {self.reason}" if self.reason else "")

    @contextmanager
    def request(self) -> Iterator[Coordinator]:
        with super().request() as coordinator:
            self._residency.began(self.name, trio.current_time())
            try:
                yield coordinator
            finally:
                now = trio.current_time()
                self._residency.ended(self.name, now)
                self.count(now)
                self._changed.set()

    async def remove_adapter(self, name: str) -> bool:
        """Serve an adapter no longer: a model that is not open stays so, and is opened without it later."""
        while self.state is ModelState.OPENING:  # perhaps it has read the adapter already
            await self._changed.wait()
        if self._coordinator is not None:
            return self._coordinator.adapters.remove(name)
        left = {other: place for other, place in self.adapters.items() if other != name}
        was_there = len(left) < len(self.adapters)
        if self.remembered is not None:
            self.remembered = replace(self.remembered, adapters=left)
        else:
            self.kept_adapters = left
        return was_there

    def remember(self, coordinator: Coordinator, listed: Sequence[Mapping[str, object]]) -> None:
        """Note what is told of it while it is not open.

        Args:
            listed: what Ollama's API lists of it.
        """
        adapters = {each.name: each.directory for each in coordinator.adapters}
        model = coordinator.model
        self.remembered = Remembered(
            model.max_seq_len, adapters, tuple(listed), sees=model.sight is not None
        )

    def count(self, now: float) -> float:
        """Tokens that were asked of it lately, up to this moment."""
        generations = self.board.generations
        num_tokens = generations.num_tokens + generations.num_prompt_tokens
        self.asked.add(now, max(num_tokens - self._num_counted, 0))
        self._num_counted = num_tokens
        return self.asked.value(now)

    async def wake(self) -> None:
        """Have it open, if it is not: it is opened where there is room, or as soon as another gives way."""
        if self.is_there:
            return
        residency, name = self._residency, self.name
        residency.asked(name, trio.current_time())
        self._changed.set()
        patience = trio.current_time() + MAX_WAIT
        try:
            while self._is_awaited():
                # It is on its way then, however long that is.
                is_opening = self.state is ModelState.OPENING
                with trio.move_on_at(float("inf") if is_opening else patience):
                    await self._changed.wait()
                    continue
                raise self._not_opened()
        finally:
            residency.gave_up(name)

    def _is_awaited(self) -> bool:
        """Whether it is not open and may be soon; raises where it will not be."""
        residency, name = self._residency, self.name
        if self._is_ending:
            raise self.not_ready("the server is about to end")
        if not residency.is_known(name):
            raise self.not_ready(f"{name} was removed")
        if self.is_there:
            return False
        has_no_room = residency.lacks_room(name) and not residency.may_get_room(name)
        if has_no_room or residency.is_hopeless(name, trio.current_time()):
            raise self._not_opened()
        return True

    def _not_opened(self) -> APIError:
        return APIError(
            503,
            f"not ready: {self.why_not_ready}",
            param="model",
            code="model_not_ready",
            retry_after=MODEL_RETRY_AFTER,
        )


class Models:
    """The models of one server, in the order in which they came.

    Args:
        limits: of which may be open, and for how long.
    """

    def __init__(self, limits: ResidencyLimits | None = None) -> None:
        self.residency = Residency(limits)
        self.changed = RenewedEvent()
        self._models: dict[str, ServedModel] = {}
        self._leaving: dict[str, ServedModel] = {}
        self._has_begun = False
        self._is_ending = False

    def __getitem__(self, name: str) -> ServedModel:
        return self._models[name]

    def add(self, name: str, *, is_wanted: bool) -> ServedModel:
        """A model more.

        Args:
            is_wanted: it is opened though nobody asks for it.

        Raises:
            APIError: 400, its name is taken, or there are too many.
        """
        self.require_free(name)
        if len(self._models) >= MAX_MODELS:
            raise APIError(
                400,
                f"{MAX_MODELS} models are served already: remove one before another is added",
                code="model_refused",
            )
        if self.residency.is_known(name):
            raise APIError(
                409, f"{name!r} is being removed: wait until it is gone", code="model_refused"
            )
        self.residency.add(name, trio.current_time(), is_wanted=is_wanted)
        model = self._models[name] = ServedModel(name, self.residency, self.changed)
        self.changed.set()
        return model

    def require_free(self, name: str) -> None:
        """Check that a model or an adapter may have a name; raises as `add`."""
        if any(name in model.names for model in self._models.values()):
            raise APIError(
                400,
                f"the name {name!r} is taken: give it another",
                param="name",
                code="model_refused",
            )

    def remove(self, name: str) -> ServedModel | None:
        """Take a model away: requests for it find nothing from now on; it is closed when those under way are done."""
        model = self._models.pop(name, None)
        if model is not None:
            self._leaving[name] = model
            self.residency.remove(name, trio.current_time())
            self.changed.set()
        return model

    def known(self, name: str) -> ServedModel:
        """A model, though it be about to go."""
        return self._models.get(name) or self._leaving[name]

    def take_gone(self) -> list[str]:
        """Forget the models that were removed and hold nothing any more; their names."""
        gone = [name for name in self._leaving if not self.residency.is_known(name)]
        for name in gone:
            model = self._leaving.pop(name)
            model.is_gone.set()
            model.board.events.close()  # so that nobody waits for more of them
        return gone

    def all(self) -> Sequence[ServedModel]:
        """All of them, in their order."""
        return tuple(self._models.values())

    def find(self, name: str) -> ServedModel | None:
        """The model that has this name, or an adapter of this name."""
        if name in self._models:
            return self._models[name]
        return next((model for model in self._models.values() if name in model.names), None)

    def choose(self, name: object, *, tag: str = "") -> ServedModel:
        if not self._models:
            raise APIError(
                404, "no model is served here now: POST /v1/models adds one", code="model_not_found"
            )
        if not isinstance(name, str):
            return next(iter(self._models.values()))
        found = self.find(name)
        if found is None and tag:
            found = self.find(name.removesuffix(tag))
        if found is None:
            shown = " and ".join(map(repr, self._models))
            num_adapters = sum(len(model.adapters) for model in self._models.values())
            more = f", and {num_adapters} adapters are (/v1/models)" if num_adapters else ""
            raise APIError(
                404,
                f"the model {name[:100]!r} is not served here, {shown} "
                f"{'are' if len(self._models) > 1 else 'is'}{more}",
                param="model",
                code="model_not_found",
            )
        return found

    def require_one(self) -> None:
        """Check that there is a model that is asked for, or may be; raises 503."""
        has_none = not any(model.is_there for model in self._models.values())
        if self._is_ending or (has_none and not self._has_begun):
            raise self.not_ready(self.why_not_ready or "")

    @property
    def why_not_ready(self) -> str | None:
        """Reason to send nobody here: the models of the start are still being opened, or none can serve; else None."""
        if self._is_ending:
            return "the server is about to end"
        models = self.all()
        if not self._has_begun:
            opening = [m for m in models if not self.residency.is_settled(m.name)]
            shown = next((m for m in opening if m.state is ModelState.OPENING), None) or (
                opening[0] if opening else None
            )
            return shown.why_not_ready if shown is not None else "starting"
        reasons = [
            model.why_not_ready
            for model in models
            if not (model.state is ModelState.IDLE and self.residency.may_get_room(model.name))
        ]
        if not reasons:
            return None if models else "no model is served: POST /v1/models adds one"
        return None if None in reasons else reasons[0]

    def begun(self) -> None:
        """Note that the models of the start are open, or stand by."""
        self._has_begun = True

    def not_ready(self, reason: str) -> APIError:
        return APIError(503, f"not ready: {reason}", code="not_ready", retry_after=RETRY_AFTER)

    async def finish(self) -> None:
        """Take no new request, and wait for those that are under way; those that take too long end with an error."""
        self._is_ending = True
        async with trio.open_nursery() as nursery:
            for model in (*self.all(), *self._leaving.values()):
                nursery.start_soon(model.finish)
            await trio.lowlevel.checkpoint()
            self.changed.set()  # for those that wait for a model
