"""Listeners to what a leader tells: one that takes what it wants of it, and one that tells several."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from neurogrid.training.leading.settings import LeaderProgress

__all__ = ["ProgressTee", "QuietProgress"]


class QuietProgress:
    """Does nothing; subclasses take what they want to know."""

    def listening(self, peer_id: str, addresses: Sequence[str]) -> None:
        """The peer listens."""

    def at_end(self, farewell: Callable[[], Awaitable[None]]) -> None:
        """Do this before a signal ends the process."""

    def say(self, text: str) -> None:
        """Something happened that is worth a line."""

    def warn(self, text: str) -> None:
        """Something went wrong."""

    def metrics(self, figures: Mapping[str, float]) -> None:
        """A line of metrics.jsonl was written."""


class ProgressTee:
    """Tells several what it is told, in their order."""

    def __init__(self, *listeners: LeaderProgress) -> None:
        self._listeners = listeners

    def listening(self, peer_id: str, addresses: Sequence[str]) -> None:
        """The peer listens."""
        for each in self._listeners:
            each.listening(peer_id, addresses)

    def at_end(self, farewell: Callable[[], Awaitable[None]]) -> None:
        """Do this before a signal ends the process."""
        for each in self._listeners:
            each.at_end(farewell)

    def say(self, text: str) -> None:
        """Something happened that is worth a line."""
        for each in self._listeners:
            each.say(text)

    def warn(self, text: str) -> None:
        """Something went wrong."""
        for each in self._listeners:
            each.warn(text)

    def metrics(self, figures: Mapping[str, float]) -> None:
        """A line of metrics.jsonl was written."""
        for each in self._listeners:
            each.metrics(figures)
