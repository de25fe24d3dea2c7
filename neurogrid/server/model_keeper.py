"""Opens and closes the models of a server as `inference.residency` decides, and holds each while it is open."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

import trio

from neurogrid.errors import CapacityError, NeuroGridError, PeerRefusedError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.inference.residency import Close, ModelState
from neurogrid.p2p.wire import ErrorCode
from neurogrid.server.models import Models, ServedModel
from neurogrid.server.ollama.model_facts import listed
from neurogrid.telemetry.coordinator_metrics import CoordinatorMetrics

__all__ = ["ModelKeeper", "ModelOpener"]

logger = logging.getLogger(__name__)

# Of a model of the start for which there is no room beside the others.
_STANDS_BY: Final = "%s stands by until somebody asks for it and another model gives way: %s"
# The same, where that would not be enough: others than this server have the memory.
_LACKS_MEMORY: Final = (
    "%s is tried again when asked for; no model gives way, as it would not fit then either: %s"
)
# What workers give back may be somewhat more than what was planned with.
_MARGIN: Final = 1.25


class ModelOpener(Protocol):
    """Opener of models, which knows where each is, and everything else that a coordinator is told."""

    def open(self, model: ServedModel) -> AbstractAsyncContextManager[Coordinator]:
        """Open a model's coordinator; raises what is wrong with it, or that there is no room."""

    def forget(self, name: str) -> None:
        """A model is not to be opened again."""

    @property
    def held_bytes(self) -> int:
        """Memory that the open models hold, on all machines together."""


class ModelKeeper:
    """Does what is decided about the models.

    Args:
        gives_way: a model for which there is no room stands by; otherwise that is an error, which ends `run`.
        added: names of models that clients had added: that one of them cannot be opened ends nothing.
    """

    def __init__(
        self,
        models: Models,
        opener: ModelOpener,
        metrics: CoordinatorMetrics,
        *,
        gives_way: bool,
        added: Collection[str] = (),
    ) -> None:
        self._models = models
        self._opener = opener
        self._metrics = metrics
        self._gives_way = gives_way
        self._added = frozenset(added)
        self._given: set[str] = set()  # those that the start depends on, until all were tried

    async def run(self, *, on_begun: Callable[[], None]) -> None:
        """Open and close models until cancelled.

        Args:
            on_begun: called when those that are there now are open, or stand by.

        Raises:
            NeuroGridError: one of those that are there now, and that no client has added, cannot be opened.
        """
        models = self._models
        first = {model.name for model in models.all()}
        self._given = first - self._added
        has_begun = False
        with unwrap_errors():
            async with trio.open_nursery() as nursery:
                while True:
                    changed = models.changed.next
                    for action in models.residency.next(trio.current_time()):
                        model = models.known(action.name)
                        if isinstance(action, Close):
                            model.is_to_close.set()
                        else:
                            model.is_to_close = trio.Event()
                            nursery.start_soon(self._hold, model)
                    for name in models.take_gone():
                        self._opener.forget(name)
                    tried = [model.name for model in models.all() if model.name in first]
                    if not has_begun and all(map(models.residency.is_settled, tried)):
                        has_begun = True
                        self._given.clear()
                        models.begun()
                        on_begun()
                    with trio.move_on_at(models.residency.wake_at(trio.current_time())):
                        await changed.wait()

    async def _hold(self, model: ServedModel) -> None:
        """Open a model, and have it open until it is put down."""
        name, residency = model.name, self._models.residency
        is_given = name in self._given
        is_open = False
        try:
            async with self._opener.open(model) as coordinator:
                residency.opened(name, trio.current_time())
                is_open = True
                with model.serving(coordinator), self._metrics.of(coordinator, name):
                    self._models.changed.set()
                    try:
                        await model.is_to_close.wait()
                        await model.drain("it is being put down")
                    finally:
                        # Also where it ends with an error: by the name of an adapter it is asked for again.
                        model.remember(coordinator, listed(coordinator))
        except NeuroGridError as exc:
            now = trio.current_time()
            if not is_open and _lacks_room(exc) and (self._gives_way or not is_given):
                held = self._opener.held_bytes
                others_may_do = _missing_bytes(exc) <= _MARGIN * held
                residency.no_room(name, now, str(exc), others_may_do=others_may_do)
                has_failed = residency.is_known(name) and model.state is ModelState.FAILED
                if held or not has_failed:
                    text = _LACKS_MEMORY if has_failed else _STANDS_BY
                    logger.log(logging.WARNING if is_given else logging.INFO, text, name, exc)
                    return
            if is_given and not is_open:
                raise
            what = "has ended" if is_open else "was not opened"
            logger.warning("the model %s %s: %s", name, what, exc)
            residency.failed(name, now, str(exc))
        else:
            residency.closed(name, trio.current_time())
        finally:
            self._models.changed.set()


def _lacks_room(error: NeuroGridError) -> bool:
    """Whether a model was not opened for want of memory, or of a worker that is not another's."""
    cause = error.__cause__
    return isinstance(error, CapacityError) or (
        isinstance(cause, PeerRefusedError)
        and cause.code in (ErrorCode.BUSY, ErrorCode.OUT_OF_MEMORY)
    )


def _missing_bytes(error: NeuroGridError) -> int:
    """Memory that a model lacks, as far as that is known."""
    return error.needed - error.available if isinstance(error, CapacityError) else 0
