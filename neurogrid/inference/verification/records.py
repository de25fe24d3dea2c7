"""Records of sessions that are verified: what went into their stages, and what came out; kept on the coordinator.

Nothing is asked of anybody for it. A chain of stages is given its input here and answers here, so that both are at
hand; nothing that a worker sees is different. What passes between the workers of a chain is not known.

A step may begin before the end of those before it, as where tokens that were guessed turn out wrong: what it cuts off
is over, in the caches and here.

T = tokens, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from neurogrid.inference.pipeline.pipeline_stage import PipelineStage
from neurogrid.model.adapters import AdapterSource

__all__ = ["MAX_RECORD_BYTES", "RecordRoom", "SegmentRecord", "SessionRecord"]

# Hidden states of all records together, on the coordinator: about 16,000 tokens of a model of hidden size 4,096 in two
# bytes. What has no room is not verified.
MAX_RECORD_BYTES = 256 * 1024 * 1024


class RecordRoom:
    """The memory that records may take.

    Args:
        on_shortage: called where something has no room; True if it made some.
    """

    def __init__(
        self, limit: int = MAX_RECORD_BYTES, *, on_shortage: Callable[[], bool] = lambda: False
    ) -> None:
        self.limit = limit
        self.taken = 0
        self.on_shortage = on_shortage

    def take(self, num_bytes: int) -> bool:
        """Take so many bytes; False if there are not as many."""
        while self.taken + num_bytes > self.limit:
            if not self.on_shortage():
                return False
        self.taken += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """So many are not needed any more."""
        self.taken -= num_bytes


@dataclass(eq=False)
class _Step:
    position: int
    inputs: torch.Tensor
    outputs: torch.Tensor | None = None

    @property
    def stop(self) -> int:
        return self.position + self.inputs.shape[1]

    @property
    def num_bytes(self) -> int:
        return 2 * self.inputs.nbytes

    def first(self, num_tokens: int) -> _Step:
        outputs = self.outputs
        return _Step(
            self.position,
            self.inputs[:, :num_tokens],
            outputs[:, :num_tokens] if outputs is not None else None,
        )


class SegmentRecord:
    """Record of what consecutive stages were given, and what they gave, from the first token of a session on.

    Attributes:
        stages: in order; one, or a chain.
        is_complete: whether nothing was left out for want of room, or because it began further on.
        num_left_out: steps that were.
    """

    def __init__(self, stages: Sequence[PipelineStage], room: RecordRoom) -> None:
        self.stages = tuple(stages)
        self.is_complete = True
        self.num_left_out = 0
        self._room = room
        self._steps: list[_Step] = []

    @property
    def length(self) -> int:
        """Tokens that have gone in."""
        return self._steps[-1].stop if self._steps else 0

    def sent(self, position: int, hidden_BTD: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """A step goes to the first of the stages; returns what is to be called with what comes of it.

        Called in the order in which steps go out.
        """
        self.cut(position)
        num_bytes = 2 * hidden_BTD.nbytes
        if not self.is_complete or position != self.length or not self._room.take(num_bytes):
            self.is_complete = False
            self.num_left_out += 1
            return _forget
        # They may be parts of what is much larger, or be written to.
        step = _Step(position, hidden_BTD.clone())
        self._steps.append(step)
        return partial(_came, step)

    def cut(self, position: int) -> None:
        """Forget what was there from `position` on: the next step begins there."""
        while self._steps and self._steps[-1].stop > position:
            last = self._steps.pop()
            self._room.give_back(last.num_bytes)
            if last.position < position:
                first = last.first(position - last.position)
                self._room.take(first.num_bytes)
                self._steps.append(first)

    def beginning(self, num_tokens: int) -> SegmentRecord:
        """A record that begins with the first tokens of this one."""
        other = SegmentRecord(self.stages, self._room)
        other._steps = [step for step in self._steps if step.position < num_tokens]
        other.is_complete = self.is_complete or self.length >= num_tokens
        if not self._room.take(sum(step.num_bytes for step in other._steps)):
            other._steps, other.is_complete = [], False
        other.cut(num_tokens)
        if other.length < num_tokens:
            other.is_complete = False
        return other

    def bounds(self) -> list[tuple[int, int]]:
        """First position and end of each step whose outcome is known, as far as those before are."""
        found: list[tuple[int, int]] = []
        for step in self._steps:
            if step.outputs is None:
                break
            found.append((step.position, step.stop))
        return found

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and outputs, [1, T, D] each, of the steps of `bounds`, of which there is one at least."""
        steps = self._steps[: len(self.bounds())]
        outputs = [step.outputs for step in steps if step.outputs is not None]
        return torch.cat([step.inputs for step in steps], 1), torch.cat(outputs, 1)

    def close(self) -> None:
        """Forget all of it."""
        self.cut(0)
        self.is_complete = False


def _came(step: _Step, hidden_BTD: torch.Tensor) -> None:
    step.outputs = hidden_BTD.clone()


def _forget(hidden_BTD: torch.Tensor) -> None:
    """Do nothing with it."""


@dataclass(eq=False)
class SessionRecord:
    """The records of one session.

    Attributes:
        segments: in order.
        adapter: what was added to the layers; None for nothing.
        num_known: tokens that an earlier session had computed, which is verified for itself.
        distrusted: the workers that were kept apart (`Routing.distrusted`) when it began.
        is_done: its turn has been.
    """

    session_id: int
    segments: tuple[SegmentRecord, ...]
    adapter: AdapterSource | None
    num_known: int = 0
    distrusted: frozenset[str] = frozenset()
    is_done: bool = field(default=False, init=False)

    def close(self) -> None:
        """Forget all of it."""
        for segment in self.segments:
            segment.close()
