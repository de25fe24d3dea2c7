"""Digests of the common weights, as the leader has them and as members tell: after one round all are the same. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from neurogrid.training.runs.state import Occupant

__all__ = ["WeightDigests"]

# Rounds of which the leader's own digest is kept: a member is behind by less.
_NUM_KEPT: Final = 16


class WeightDigests:
    """Compares what members tell with what the leader has; what each tells of a round counts once."""

    def __init__(self) -> None:
        self._own: dict[int, bytes] = {}
        self._told: dict[Occupant, tuple[int, bytes]] = {}
        self._compared: dict[Occupant, int] = {}
        self._since: dict[Occupant, int] = {}
        self._equal = self._other = 0

    def own(self, round_number: int, digest: bytes) -> list[Occupant]:
        """The leader's own after a round; the members that have told another one."""
        self._own[round_number] = digest
        while len(self._own) > _NUM_KEPT:
            del self._own[min(self._own)]
        return [member for member in self._told if self._differs(member)]

    def told(self, member: Occupant, round_number: int, digest: bytes) -> bool:
        """A member tells of its digest after a round; whether it is another than the leader's."""
        self._told[member] = round_number, digest
        return self._differs(member)

    def keep(self, members: Collection[Occupant]) -> None:
        """Forget all but these, which are the members from here on."""
        for member in [member for member in self._told if member not in members]:
            del self._told[member]
            self._compared.pop(member, None)
            self._since.pop(member, None)

    @property
    def differing(self) -> Mapping[Occupant, int]:
        """Members that have told other weights than the leader's, and not the leader's since: from which round on."""
        return dict(self._since)

    def take(self) -> tuple[int, int]:
        """Take the numbers of digests that equalled the leader's, and of those that did not, since the last call."""
        found = self._equal, self._other
        self._equal = self._other = 0
        return found

    def _differs(self, member: Occupant) -> bool:
        round_number, digest = self._told[member]
        own = self._own.get(round_number)
        if own is None or self._compared.get(member) == round_number:
            return False
        self._compared[member] = round_number
        if own == digest:
            self._since.pop(member, None)
        else:
            self._since.setdefault(member, round_number)
        self._equal += own == digest
        self._other += own != digest
        return own != digest
