"""What a coordinator tells while it works, for whoever shows it.

The coordinator calls; a terminal or a page draws. All calls are quick and never fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from neurogrid.inference.planner import PeerSpeed, Plan

__all__ = ["Progress", "ProgressTee", "WorkerInfo"]


@dataclass(frozen=True)
class WorkerInfo:
    """A worker as its coordinator sees it.

    Attributes:
        name: of its device, in its own words.
        free_bytes: what it can give to a stage.
        protocol_id: the version that it speaks with us.
        memory_known: False where it did not say and a size was assumed.
        held_layers: layers in its memory, of whatever model.
        model_layers: layers of the coordinator's model that need not be sent to it.
        speed: as it measured itself; None where it did not say.
        latency: seconds that a message takes to it; None where that was not measured.
    """

    peer_id: str
    name: str
    free_bytes: int
    protocol_id: str
    memory_known: bool
    held_layers: tuple[int, ...]
    model_layers: frozenset[int] = frozenset()
    speed: PeerSpeed | None = None
    latency: float | None = None


class Progress:
    """Does nothing; subclasses show what happens."""

    def listening(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Workers can dial us, at these full multiaddrs."""

    def working(self, what: str) -> None:
        """Something begins that takes a while; it ends when anything else is told."""

    def waiting(self, found: int, wanted: int) -> None:
        """`found` of `wanted` workers are there."""

    def explained(self, table: str) -> None:
        """Too few workers are there: what was tried to find them, a line each."""

    def planned(self, plan: Plan, workers: Sequence[WorkerInfo], num_layers: int) -> None:
        """The layers have been placed."""

    def transfer_planned(self, peer_id: str, num_bytes: int) -> None:
        """So many bytes of weights may go to this worker."""

    def transferred(self, peer_id: str, num_bytes: int) -> None:
        """So many more bytes of weights have gone out."""

    def passed_on(self, peer_id: str, num_bytes: int) -> None:
        """Bytes came to a worker from other workers."""

    def already_held(self, peer_id: str, num_bytes: int) -> None:
        """So many bytes of the plan need not be sent: the worker has them."""

    def ready(self) -> None:
        """Every worker is ready."""

    def joined(self, worker: WorkerInfo) -> None:
        """A worker came later, or again."""

    def lost(self, peer_id: str, layers: range, reason: str) -> None:
        """A worker is gone, and with it what it held."""

    def mending(self, missing: Sequence[range]) -> None:
        """Nobody holds these layers any more; they are being placed."""

    def mended(self, plan: Plan) -> None:
        """Every layer is on a worker again."""

    def replicated(self, peer_id: str, layers: range) -> None:
        """A worker that was left over holds these layers, too."""


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
for _name in [name for name in vars(Progress) if not name.startswith("_")]:
    setattr(ProgressTee, _name, _tell_all(_name))
