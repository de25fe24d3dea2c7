"""Residency of several models: a machine that is told what happens, and says which to open, and which gives way.

A model is opened when it was named at the start, or when somebody asks for it. Where there is no room for it, one that
nobody asked for lately gives way: of those that nobody uses at the moment, the one that was used the longest ago. If
there is none, those who asked wait until there is. While all fit, nothing is put down.

What keeps models from taking turns all the time: one that was opened is safe for a while, for at least as long as it
took to open it; and one that is in use never gives way.

    idle ──asked──> opening ──opened──> ready ──gives way──> closing ──closed──> idle
                       └──no room──> idle (waits for room)      failed: as idle, with a reason, and left for a while
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

__all__ = ["MAX_MODELS", "Action", "Close", "ModelState", "Open", "Residency", "ResidencyLimits"]


MAX_MODELS: Final = 16
"""Models of one server. Each open one has its embedding and head in the coordinator's process, and a port."""

_SETTLING_STEP: Final = 1.0  # seconds


class ModelState(StrEnum):
    """State of a model."""

    IDLE = "idle"
    """The model holds nothing on any worker, and is opened when somebody asks for it."""
    OPENING = "opening"
    READY = "ready"
    CLOSING = "closing"
    FAILED = "failed"
    """The model could not be opened; it is tried again when somebody asks after a while."""


@dataclass(frozen=True)
class Open:
    """The model is to be opened; `opened`, `no_room` or `failed` follows."""

    name: str


@dataclass(frozen=True)
class Close:
    """The model is to be put down; `closed` follows."""

    name: str


Action: TypeAlias = Open | Close


@dataclass(frozen=True)
class ResidencyLimits:
    """Bounds, in seconds but for the first.

    Attributes:
        max_opening: that are opened at once.
        idle_after: without a request a model is idle, and may give way; infinite for never.
        min_ready: for which one that was opened is safe, or for as long as it took, if that is more.
        retry_after: before one that failed is tried again.
        settling: for which workers may not have noticed that a model let them go: what finds no room meanwhile is
            tried again every second.
    """

    max_opening: int = 1
    idle_after: float = 300.0
    min_ready: float = 10.0
    retry_after: float = 30.0
    settling: float = 10.0


@dataclass
class _Model:
    state: ModelState = ModelState.IDLE
    reason: str = ""
    since: float = 0.0
    used_at: float = 0.0
    safe_until: float = -math.inf
    retry_at: float = -math.inf
    num_waiting: int = 0
    num_running: int = 0
    first_asked: float = math.inf
    is_wanted: bool = False  # though nobody waits: it was named at the start
    lacks_room: bool = False
    is_leaving: bool = False


class Residency:
    """The models of one server. Used from one thread.

    Names that are not known are nobody's mistake: a request may end after its model was removed.
    """

    def __init__(self, limits: ResidencyLimits | None = None) -> None:
        self.limits: Final = limits or ResidencyLimits()
        self._models: dict[str, _Model] = {}
        self._freed_at = -math.inf

    # ------------------------------------------------------------------ what happens

    def add(self, name: str, now: float, *, is_wanted: bool) -> None:
        """Add a model.

        Args:
            is_wanted: it is to be opened though nobody asks.
        """
        assert name not in self._models, name
        self._models[name] = _Model(since=now, used_at=now, is_wanted=is_wanted)

    def remove(self, name: str, now: float) -> None:
        """A model is to go: it is closed if it is open, and forgotten as soon as it holds nothing."""
        model = self._models.get(name)
        if model is None:
            return
        model.is_leaving, model.is_wanted = True, False
        self._forget_left(name)

    def asked(self, name: str, now: float) -> None:
        """A request waits for a model that is not ready. `began` or `gave_up` follows."""
        if (model := self._models.get(name)) is not None:
            model.num_waiting += 1
            model.first_asked = min(model.first_asked, now)
            if now - model.since > self.limits.retry_after:
                model.lacks_room = False  # workers may have come since

    def gave_up(self, name: str) -> None:
        """A request waits no longer, with or without the model."""
        if (model := self._models.get(name)) is not None:
            model.num_waiting -= 1
            if not model.num_waiting:
                model.first_asked = math.inf

    def began(self, name: str, now: float) -> None:
        """A request uses a model. `ended` follows."""
        if (model := self._models.get(name)) is not None:
            model.num_running += 1
            model.used_at = now

    def ended(self, name: str, now: float) -> None:
        """A request is over."""
        if (model := self._models.get(name)) is not None:
            model.num_running -= 1
            model.used_at = now

    def opened(self, name: str, now: float) -> None:
        """A model is ready. Whoever waited for it may begin."""
        model = self._models[name]
        model.safe_until = now + max(self.limits.min_ready, now - model.since)
        model.used_at, model.is_wanted, model.lacks_room = now, False, False
        self._turn(model, ModelState.READY, now)

    def no_room(self, name: str, now: float, reason: str, *, others_may_do: bool = True) -> None:
        """A model found no room. Where no other has any, it will find none later: it failed.

        Args:
            others_may_do: False where it would find none either if all others gave way.
        """
        model = self._models[name]
        model.is_wanted = False
        if now - self._freed_at < self.limits.settling:
            model.retry_at = now + _SETTLING_STEP
            self._turn(model, ModelState.IDLE, now, reason)
            self._forget_left(name)
            return
        if not (others_may_do and any(self._holding(besides=name))):
            self.failed(name, now, reason)
            return
        model.lacks_room = True
        self._turn(model, ModelState.IDLE, now, reason)
        self._forget_left(name)

    def failed(self, name: str, now: float, reason: str) -> None:
        """A model could not be opened, or has ended by itself."""
        model = self._models.get(name)
        if model is None:
            return
        model.retry_at, model.is_wanted = now + self.limits.retry_after, False
        model.lacks_room = False
        self._turn(model, ModelState.FAILED, now, reason)
        self._room_came(now)
        self._forget_left(name)

    def closed(self, name: str, now: float) -> None:
        """A model holds nothing any more."""
        self._turn(self._models[name], ModelState.IDLE, now)
        self._room_came(now)
        self._forget_left(name)

    # ------------------------------------------------------------------ what to do

    def next(self, now: float) -> list[Action]:
        """Decide what to do at this moment. Each action is taken to be begun when this returns."""
        actions: list[Action] = []
        for name, model in self._models.items():
            if model.is_leaving and model.state is ModelState.READY:
                actions.append(self._close(name, model, now))
        num_opening = sum(m.state is ModelState.OPENING for m in self._models.values())
        for name in sorted(self._to_open(now), key=lambda name: self._models[name].first_asked):
            model = self._models[name]
            if model.lacks_room:
                # One at a time: perhaps that is room enough.
                if not any(m.state is ModelState.CLOSING for m in self._models.values()):
                    victim = self._victim(now)
                    if victim is not None:
                        actions.append(self._close(victim, self._models[victim], now))
            elif num_opening < self.limits.max_opening:
                num_opening += 1
                self._turn(model, ModelState.OPENING, now)
                actions.append(Open(name))
        return actions

    def wake_at(self, now: float) -> float:
        """Time at which `next` may say something else though nothing happened; inf for never."""
        times = [model.retry_at for model in self._models.values() if model.num_waiting]
        if any(m.lacks_room and m.num_waiting for m in self._models.values()):
            times += [
                self._gives_way_at(m) for m in self._models.values() if m.state is ModelState.READY
            ]
        return min((at for at in times if at > now), default=math.inf)

    # ------------------------------------------------------------------ questions

    @property
    def names(self) -> tuple[str, ...]:
        """All that are not about to go, in the order in which they came."""
        return tuple(name for name, model in self._models.items() if not model.is_leaving)

    def state(self, name: str) -> ModelState:
        """State of a model."""
        return self._models[name].state

    def reason(self, name: str) -> str:
        """Reason for a model's state, in words; empty where there is nothing to say."""
        return self._models[name].reason

    def since(self, name: str) -> float:
        """Time at which a model came into its state."""
        return self._models[name].since

    def is_settled(self, name: str) -> bool:
        """Whether nothing is being tried, or to be tried, that nobody asked for."""
        model = self._models[name]
        return not model.is_wanted and model.state is not ModelState.OPENING

    def is_known(self, name: str) -> bool:
        """Whether there is a model of this name, though it be about to go."""
        return name in self._models

    def is_hopeless(self, name: str, now: float) -> bool:
        """Whether whoever waits for a model waits in vain: it failed just now, or is about to go."""
        model = self._models[name]
        return model.is_leaving or (model.state is ModelState.FAILED and model.retry_at > now)

    def lacks_room(self, name: str) -> bool:
        """Whether it was tried, and others have what it needs."""
        return self._models[name].lacks_room

    def may_get_room(self, name: str) -> bool:
        """Whether another might give way to it, sooner or later."""
        others = (m for other, m in self._models.items() if other != name)
        return math.isfinite(self.limits.idle_after) and any(
            m.state in (ModelState.READY, ModelState.CLOSING) for m in others
        )

    def _to_open(self, now: float) -> Iterator[str]:
        for name, model in self._models.items():
            is_down = model.state in (ModelState.IDLE, ModelState.FAILED) and model.retry_at <= now
            if is_down and not model.is_leaving and (model.is_wanted or model.num_waiting):
                yield name

    def _victim(self, now: float) -> str | None:
        found = [
            (model.used_at, name)
            for name, model in self._models.items()
            if model.state is ModelState.READY and self._gives_way_at(model) <= now
        ]
        return min(found)[1] if found else None

    def _gives_way_at(self, model: _Model) -> float:
        if model.num_running or model.num_waiting:
            return math.inf
        return max(model.used_at + self.limits.idle_after, model.safe_until)

    def _holding(self, *, besides: str) -> Iterator[str]:
        for name, model in self._models.items():
            is_open = model.state in (ModelState.READY, ModelState.OPENING, ModelState.CLOSING)
            if name != besides and is_open:
                yield name

    def _close(self, name: str, model: _Model, now: float) -> Close:
        self._turn(model, ModelState.CLOSING, now)
        return Close(name)

    def _room_came(self, now: float) -> None:
        self._freed_at = now
        for model in self._models.values():
            model.lacks_room = False

    def _turn(self, model: _Model, state: ModelState, now: float, reason: str = "") -> None:
        model.state, model.since, model.reason = state, now, reason

    def _forget_left(self, name: str) -> None:
        model = self._models[name]
        if model.is_leaving and model.state in (ModelState.IDLE, ModelState.FAILED):
            del self._models[name]
