"""Weights that most members have after a round, by what each of them tells, and the peers that give these. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final

from neurogrid.training.wire.runs import EpochReport
from neurogrid.training.witnessed import EpochState, Health

__all__ = ["WeightAgreement", "providers_of", "tells_of_weights"]

# Rounds of which it is known who has what.
_NUM_KEPT: Final = 16
# In which a member has the weights of the epoch. In all others it may have those of before: of rounds that were taken
# back since, or are made once more.
_WITH_WEIGHTS: Final = ("warm", "training", "kept")


def tells_of_weights(report: EpochReport, peer: str, epoch: EpochState) -> bool:
    """Whether a report counts for what weights there are: it is a healthy member's, of this process of it, and about
    rounds that were made.
    """
    is_member = any(
        (each.peer, each.incarnation, each.health) == (peer, report.incarnation, Health.HEALTHY)
        for each in epoch.members
    )
    has_weights = bool(report.digest) and report.has_weights and report.state in _WITH_WEIGHTS
    return is_member and has_weights and report.step <= epoch.made


def providers_of(
    reports: Mapping[str, EpochReport],
    step: int,
    digest: bytes,
    names: tuple[str, ...],
    attempt: int,
) -> tuple[tuple[bytes, ...], list[str]]:
    """The pieces to fetch of the weights after a round, and the peers that say the same of them.

    Args:
        digest: of these weights.
        names: of their pieces, which follow from how many elements there are.
        attempt: from 0: first what most say that the pieces are; where these were not the weights, what others say.

    Returns:
        Blobs and peers; both empty where nobody has the weights.
    """
    wanted = (step, digest, names)
    said = {
        peer: report.blobs
        for peer, report in reports.items()
        if (report.step, report.digest, report.names) == wanted
    }
    if not said:
        return (), []
    kinds = [blobs for blobs, _ in Counter(said.values()).most_common()]
    blobs = kinds[attempt % len(kinds)]
    return blobs, [peer for peer, each in said.items() if each == blobs]


class WeightAgreement:
    """Digests that members have told of their weights, by the number of rounds in these; the first of each counts."""

    def __init__(self) -> None:
        self._told: dict[int, dict[str, bytes]] = {}
        self._counted: set[tuple[int, str]] = set()
        self._equal = self._other = 0

    def told(self, peer: str, step: int, digest: bytes) -> None:
        """A member has weights with this digest, with so many rounds in them."""
        self._told.setdefault(step, {}).setdefault(peer, digest)
        while len(self._told) > _NUM_KEPT:
            del self._told[min(self._told)]

    def digest(self, step: int, members: Collection[str]) -> bytes:
        """The digest that more than half of these members have told of; empty while there is none."""
        there = frozenset(members)
        told = Counter(each for peer, each in self._told.get(step, {}).items() if peer in there)
        return next((each for each, num in told.items() if 2 * num > len(members)), b"")

    def apart(
        self, members: Collection[str], others: Collection[str] = ()
    ) -> list[tuple[int, str]]:
        """Members that have other weights than most: each with the number of rounds in them, once.

        Args:
            others: members that do not count: what they have is compared, and makes no majority.
        """
        found, known = [], {*members, *others}
        for step, told in self._told.items():
            most = self.digest(step, members)
            for peer, digest in told.items() if most else ():
                if peer not in known or (step, peer) in self._counted:
                    continue
                self._counted.add((step, peer))
                self._equal += digest == most
                self._other += digest != most
                if digest != most:
                    found.append((step, peer))
        self._counted = {each for each in self._counted if each[0] in self._told}
        return found

    def take(self) -> tuple[int, int]:
        """Take the numbers of digests that were those of most, and of others, since the last call."""
        found = self._equal, self._other
        self._equal = self._other = 0
        return found
