"""Seats of workers in a run, by lines that its leader adds to the journal; nothing of them is verified."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["Seats"]


class Seats:
    """The seats of a run that goes on.

    Args:
        journal: its file, which need not be there yet.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._num_bytes = 0
        self._seats: dict[int, tuple[str, float]] = {}

    def joined_at(self, name: str) -> float | None:
        """The time at which a worker took the seat that it has, in seconds since 1970; None while it has none."""
        return max((at for other, at in self._seats.values() if other == name), default=None)

    def look(self) -> None:
        """Read what has been added."""
        try:
            with self._journal.open("rb") as stream:
                stream.seek(self._num_bytes)
                # The last line may not be whole yet.
                added, _, _ = stream.read().rpartition(b"\n")
        except FileNotFoundError:
            return
        if not added:
            return
        self._num_bytes += len(added) + 1
        for line in added.splitlines():
            said = json.loads(line)
            entry, at = said["entry"], said["time"]
            if entry["kind"] == "joined":
                self._seats[entry["seat"]] = entry["name"], at
            elif entry["kind"] == "left":
                self._seats.pop(entry["seat"], None)
            elif entry["kind"] == "resumed":
                self._seats.clear()
