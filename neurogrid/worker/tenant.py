"""A tenant: a coordinator that a worker serves, with what it has there. Several may have models of their own.

No handlers here, and no messages. What of the worker's memory it was promised is in `room`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from neurogrid.worker.claim import Claim
from neurogrid.worker.held_model import HeldModel

__all__ = ["Assignment", "Tenant"]


@dataclass
class Assignment:
    """Layers [start, stop) that the coordinator wants here, and those confirmed by their hash.

    Its sessions have coded caches or not, all of them. Ready is announced once: two layers may be confirmed before
    either of their tasks goes on.
    """

    start: int
    stop: int
    max_length: int
    max_sessions: int
    request_id: int
    has_coded_caches: bool = False
    confirmed: set[int] = field(default_factory=set)
    is_announced: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether every layer is here with the announced content."""
        return len(self.confirmed) == self.stop - self.start

    def __contains__(self, layer_id: int) -> bool:
        return self.start <= layer_id < self.stop


@dataclass(eq=False)
class Tenant:
    """A coordinator that is served, from its first config until its connection ends.

    Attributes:
        claim: on the worker.
        model: of its last config, with the layers that are held for it; None until that is proven.
        assignment: its stage, once assigned (1.1.0), as long as it does not give way.
        has_given_way: another one has the memory of its last assignment.
        lock: held while its model, its assignment or its layers change.
    """

    claim: Claim
    model: HeldModel | None = None
    assignment: Assignment | None = None
    has_given_way: bool = False
    lock: trio.Lock = field(default_factory=trio.Lock)

    @property
    def owner(self) -> str:
        """Its peer id."""
        return self.claim.owner
