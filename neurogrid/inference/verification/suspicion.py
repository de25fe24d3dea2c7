"""Choice of the sessions that are verified, and the suspects among workers. Pure: chance is given.

A session is drawn with the share that was asked for. While there are suspects every session is, and goes to them and
from them by way of the coordinator (`Routing.distrusted`), so that what each of them was given and gave is known: a
worker that goes on being wrong is named by its next session that is verified, and one that stops does no harm. A
suspect that was right for long enough is none any more; the next time that takes twice as long.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

__all__ = ["MAX_PROOF_STEPS", "OWN_SHARE", "PROOF_STEPS", "Suspicion"]

# Steps that a suspect has to be right in: of one that is wrong in 1 of 20 none is left after 200 but in 4 of 100,000
# cases. Doubled each time that it is a suspect again.
PROOF_STEPS: Final = 200
MAX_PROOF_STEPS: Final = 6400
# Of the records that a worker could verify, the coordinator verifies so many itself: two workers that are wrong alike
# agree with each other.
OWN_SHARE: Final = 0.125


@dataclass
class _Suspect:
    case: int
    num_left: int


class Suspicion:
    """Suspects of one coordinator, and the drawing of sessions that are verified.

    Args:
        share: of sessions that are verified, 0 to 1.

    Attributes:
        wrong: peer ids of the workers that were found wrong.
    """

    def __init__(self, share: float) -> None:
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"a share of {share} is not between 0 and 1")
        self.share = share
        self.wrong: set[str] = set()
        self._suspects: dict[str, _Suspect] = {}
        self._num_times: dict[str, int] = {}
        self._num_cases = 0

    @property
    def suspects(self) -> frozenset[str]:
        """Peer ids of the workers that are suspects now."""
        return frozenset(self._suspects)

    def draws(self, chance: float) -> bool:
        """Whether a session is verified; `chance` is uniform in [0, 1)."""
        return bool(self._suspects) or chance < self.share

    def is_own(self, chance: float) -> bool:
        """Whether the coordinator verifies a record itself, though a worker could; `chance` is uniform in [0, 1)."""
        return chance < OWN_SHARE

    def suspect(self, peer_ids: Collection[str]) -> frozenset[str]:
        """One of these is wrong at least; returns those that were not suspects before."""
        self._num_cases += 1
        new = frozenset(peer_ids) - self._suspects.keys() - self.wrong
        for peer_id in frozenset(peer_ids) - self.wrong:
            times = self._num_times[peer_id] = self._num_times.get(peer_id, 0) + 1
            num_steps = min(PROOF_STEPS << min(times - 1, 16), MAX_PROOF_STEPS)
            self._suspects[peer_id] = _Suspect(self._num_cases, num_steps)
        return new

    def found_right(self, peer_id: str, num_steps: int) -> bool:
        """A worker was right in so many steps whose input and output are known; returns whether that clears it."""
        suspect = self._suspects.get(peer_id)
        if suspect is None:
            return False
        suspect.num_left -= num_steps
        if suspect.num_left > 0:
            return False
        del self._suspects[peer_id]
        return True

    def found_wrong(self, peer_id: str) -> None:
        """A worker was found wrong: those that were suspects because of the same record are none any more."""
        self.wrong.add(peer_id)
        suspect = self._suspects.get(peer_id)
        if suspect is not None:
            case = suspect.case
            self._suspects = {k: v for k, v in self._suspects.items() if v.case != case}
