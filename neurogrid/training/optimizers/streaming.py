"""Streaming DiLoCo: the vector in fragments that are synced in turn, each while the members go on computing.

A fragment is some whole tensors. Each is sent every so many steps, one fragment a step, and its mean is applied some
steps later; until then nobody waits. A member has moved on by then, and mixes what was agreed with what it has.
(Douillard et al., "Streaming DiLoCo with overlapping communication", 2025.) With one fragment and no overlap this is
DiLoCo.

`StreamingSchedule` is arithmetic on numbers of steps. `StreamingOuter` has the vectors: it says what to average, takes
the means, and applies them when it is time. Whoever averages stands between the two and is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neurogrid.training.optimizers.outer import OuterOptimizer
from neurogrid.training.optimizers.vectors import (
    Spans,
    check_finite,
    check_spans,
    check_vector,
    load_vectors,
    pieces,
)

__all__ = ["Flight", "StreamingOuter", "StreamingSchedule"]


@dataclass(frozen=True)
class StreamingSchedule:
    """Schedule of fragments: the steps after which each is sent, and its mean applied. Steps are counted from 1.

    Attributes:
        num_fragments: at most one is sent a step, so there are no more than `every`.
        every: steps from one sync of a fragment to its next (H).
        overlap: steps between sending a fragment and applying its mean (tau); 0 applies it at once.
        last_step: after it all fragments are sent, and applied at once; what is still under way then is dropped, since
            the differences that are sent have it in them. None where there is no end.

    Raises:
        ValueError: a number is out of its range.
    """

    num_fragments: int
    every: int
    overlap: int = 0
    last_step: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_fragments <= self.every:
            raise ValueError(
                f"{self.num_fragments} fragments do not fit into {self.every} steps: at least one "
                "fragment, and at least as many steps"
            )
        if not 0 <= self.overlap < self.every:
            raise ValueError(f"the overlap must be in [0, {self.every}) steps, not {self.overlap}")

    def offset(self, fragment: int) -> int:
        """The step, modulo `every`, after which a fragment is sent."""
        return self.every * fragment // self.num_fragments

    def due(self, step: int) -> tuple[int, ...]:
        """The fragments to send after this step: none, one, or all after the last."""
        if step == self.last_step:
            return tuple(range(self.num_fragments))
        return tuple(f for f in range(self.num_fragments) if step % self.every == self.offset(f))

    def apply_step(self, step: int) -> int:
        """The step after which the mean of a fragment is applied that was sent after `step`."""
        return step if step == self.last_step else step + self.overlap

    def apply(self, step: int) -> tuple[int, ...]:
        """The fragments whose mean is applied after this step."""
        if step == self.last_step:
            return self.due(step)
        sent = step - self.overlap
        return self.due(sent) if sent >= 1 else ()


@dataclass
class Flight:
    """A fragment that was sent and is not applied yet.

    Attributes:
        fragment: its number.
        apply_step: the step after which its mean is applied.
        mean: float32 [elements of the fragment], once it is known.
    """

    fragment: int
    apply_step: int
    mean: Tensor | None = None


class StreamingOuter:
    """The outer optimiser of a member that streams.

    After each step: `send`, average what it gives (elsewhere, and as long as it takes), `receive` each mean or
    `give_up` where a round failed, and `apply`. All of it in the same order with all members.

    Args:
        outer: theta0, momentum and their step.
        fragments: spans of each, which no other has.
        schedule: for as many fragments.
        mix: share of the agreed weights in a member's own after an overlap (alpha). Without overlap it is 1.
    """

    def __init__(
        self,
        outer: OuterOptimizer,
        fragments: Sequence[Spans],
        schedule: StreamingSchedule,
        *,
        mix: float = 0.5,
    ) -> None:
        if len(fragments) != schedule.num_fragments:
            raise ValueError(
                f"{len(fragments)} fragments, but a schedule for {schedule.num_fragments}"
            )
        if not 0 <= mix <= 1:
            raise ValueError(f"the share of the agreed weights must be in [0, 1], not {mix}")
        self.outer = outer
        self.fragments = tuple(tuple(spans) for spans in fragments)
        self._sizes = [check_spans(spans, outer.theta0.numel()) for spans in fragments]
        # What lies in two fragments, or in none, shows here.
        every = sorted(span for spans in self.fragments for span in spans)
        if check_spans(every, outer.theta0.numel()) != outer.theta0.numel():
            raise ValueError("the fragments have not all elements of the vector")
        self.schedule = schedule
        self._mix = mix if schedule.overlap else 1.0
        self._flights: list[Flight] = []

    def send(self, step: int, theta: Tensor) -> list[tuple[int, Tensor]]:
        """Begin flights due after `step`: fragments with differences to average, float32 [elements of the fragment].

        Args:
            step: number of steps done.
            theta: float32 [n], the member's weights.
        """
        if step == self.schedule.last_step:
            self._flights.clear()
        due = self.schedule.due(step)
        self._flights += [Flight(f, self.schedule.apply_step(step)) for f in due]
        return [(f, self.outer.difference(theta, part=self.fragments[f])) for f in due]

    def receive(self, fragment: int, mean_difference: Tensor) -> None:
        """Takes the mean of a fragment that is under way; kept, not copied, until it is applied.

        Raises:
            ValueError: the fragment is not under way, or the vector has another shape or dtype.
            NotFiniteError: an element is infinite or no number.
        """
        flight = self._flight(fragment)
        check_vector("the mean difference", mean_difference, self._sizes[fragment])
        check_finite("the mean difference", mean_difference)
        flight.mean = mean_difference

    def give_up(self, fragment: int) -> None:
        """Forgets a fragment whose round failed for all: what members did stays in their next difference.

        Raises:
            ValueError: the fragment is not under way.
        """
        self._flights.remove(self._flight(fragment))

    def awaited(self, step: int) -> tuple[int, ...]:
        """The fragments whose mean must be there before `apply(step)`, and is not."""
        return tuple(f.fragment for f in self._flights if f.apply_step <= step and f.mean is None)

    @torch.no_grad()
    def apply(self, step: int, theta: Tensor) -> tuple[int, ...]:
        """Applies the means whose time has come, to theta0, and to the member's weights in place.

        Args:
            step: number of steps done.
            theta: float32 [n], the member's weights; the fragments that are applied are mixed into it.

        Returns:
            The fragments that were applied.

        Raises:
            ValueError: a mean is awaited. Nothing was applied.
        """
        check_vector("theta", theta, self.outer.theta0.numel())
        if awaited := self.awaited(step):
            raise ValueError(
                f"the means of fragments {list(awaited)} are wanted after step {step}, and are not "
                "there: receive them, or give them up"
            )
        ready = [flight for flight in self._flights if flight.apply_step <= step]
        for flight in ready:
            spans = self.fragments[flight.fragment]
            assert flight.mean is not None  # nothing is awaited
            self.outer.step(flight.mean, spans)
            self._flights.remove(flight)
            for place, _ in pieces(spans):
                agreed = self.outer.theta0[place]
                # Without overlap a copy, so that members have the same bits whatever lerp does.
                theta[place] = agreed if self._mix == 1 else theta[place].lerp(agreed, self._mix)
        return tuple(flight.fragment for flight in ready)

    def flights(self) -> tuple[Flight, ...]:
        """Fragments under way, in the order of sending. A newcomer is told fragment and step of each."""
        return tuple(self._flights)

    def state_vectors(self) -> list[Tensor]:
        """State for a newcomer beside `flights`: the outer state, then each mean that is there and not yet applied."""
        means = [flight.mean for flight in self._flights if flight.mean is not None]
        return [*self.outer.state_vectors(), *means]

    def load(self, vectors: Sequence[Tensor], flights: Sequence[Flight] = ()) -> None:
        """Takes over the state of another member.

        Args:
            vectors: in the order of `state_vectors`; means are copied.
            flights: the other member's, of which `mean` says only whether there is one.

        Raises:
            ValueError: a number, a shape or a dtype is wrong. Nothing was taken over.
            NotFiniteError: an element is infinite or no number. Nothing was taken over.
        """
        if any(not 0 <= flight.fragment < len(self.fragments) for flight in flights):
            raise ValueError(f"a fragment under way is none of the {len(self.fragments)}")
        taken = [
            Flight(
                flight.fragment,
                flight.apply_step,
                None
                if flight.mean is None
                else self.outer.theta0.new_empty(self._sizes[flight.fragment]),
            )
            for flight in flights
        ]
        means = [flight.mean for flight in taken if flight.mean is not None]
        load_vectors([*self.outer.state_vectors(), *means], vectors)
        self._flights = taken

    def _flight(self, fragment: int) -> Flight:
        for flight in self._flights:
            if flight.fragment == fragment:
                return flight
        raise ValueError(f"fragment {fragment} is not under way")
