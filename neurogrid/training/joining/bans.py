"""The bans of one run, as anybody keeps them who heard of them: the newest about each peer. Pure.

Source: protocol_spec/training/joining.md, "Ban".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from neurogrid.errors import NeuroGridError
from neurogrid.training.joining.records import Ban

__all__ = ["MAX_BANS", "BanRefusedError", "Bans", "ban_seconds"]

MAX_BANS: Final = 4096
"""Peers whose bans are known, in force or not: a run with as many takes nobody new by open invitations."""


_FIRST_BAN_SECONDS: Final = 3600
_TIMES_LONGER: Final = 10
_NUM_THAT_END: Final = 3


def ban_seconds(num_before: int) -> int | None:
    """Seconds of a ban of a peer that did other than it was told, where no claim of its was found wrong.

    It may be a fault of its machine, or of ours: an hour at first, and ten times as long each further time; from the
    fourth on as long as the run: None.

    Args:
        num_before: bans of the peer in this run.
    """
    return _FIRST_BAN_SECONDS * _TIMES_LONGER**num_before if num_before < _NUM_THAT_END else None


class BanRefusedError(NeuroGridError):
    """A ban is not taken: of another run, expired, or replayed. The text says which."""


class Bans:
    """The newest ban of each peer.

    One that is over stays known, so that it does not come again.

    Args:
        run: the id of the run, 16 bytes.
        leader: its leader's peer id.
        known: bans that there are already.
    """

    def __init__(self, run: bytes, leader: str, known: Iterable[Ban] = ()) -> None:
        self.run, self.leader = run, leader
        self._bans: dict[str, Ban] = {}
        for ban in known:
            self.keep(ban)

    def __len__(self) -> int:
        return len(self._bans)

    def __iter__(self) -> Iterator[Ban]:
        return iter(sorted(self._bans.values(), key=lambda ban: ban.number))

    @property
    def is_full(self) -> bool:
        """Whether no other peer should come who might have to be banned."""
        return len(self._bans) >= MAX_BANS

    @property
    def last_number(self) -> int:
        """The highest number; 0 for no ban."""
        return max((ban.number for ban in self._bans.values()), default=0)

    def of(self, peer: str, now: float) -> Ban | None:
        """The ban of a peer that is in force, if one is."""
        ban = self._bans.get(peer)
        return ban if ban is not None and ban.is_in_force(now) else None

    def take(self, ban: Ban, now: float) -> bool:
        """Take a ban that came from elsewhere, whose signature is good; whether it is new.

        Raises:
            BanRefusedError: it is of another run or leader, has expired, or is replayed; or there are too many.
        """
        if (ban.run, ban.leader) != (self.run, self.leader):
            raise BanRefusedError(f"the ban of {ban.peer} is of another run")
        known = self._bans.get(ban.peer)
        if ban == known:
            return False
        if known is not None and ban.number <= known.number:
            raise BanRefusedError(
                f"ban {ban.number} of {ban.peer} is replayed: {known.number} is known"
            )
        if not ban.is_in_force(now):
            raise BanRefusedError(f"ban {ban.number} of {ban.peer} has expired")
        if known is None and self.is_full:
            raise BanRefusedError(f"{MAX_BANS} peers are banned already")
        self._bans[ban.peer] = ban
        return True

    def keep(self, ban: Ban) -> None:
        """Take one's own: a ban of one's journal, or a new one."""
        assert (ban.run, ban.leader) == (self.run, self.leader)
        known = self._bans.get(ban.peer)
        if known is None or ban.number > known.number:
            self._bans[ban.peer] = ban
