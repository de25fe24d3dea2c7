"""A bounded number of places: a share for each address, and which holder gives way when all are taken.

Pure bookkeeping: it knows neither sockets nor time. A holder that has not shown yet that it may be here gives way
to one that comes, the oldest first. So a client that takes places and says nothing displaces itself, and then others
like it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Generic, TypeVar

from neurogrid.errors import NeuroGridError
from neurogrid.p2p.shares import client_address, share_of

__all__ = ["NoPlaceError", "Places", "client_address", "share_of"]

Holder = TypeVar("Holder")


class NoPlaceError(NeuroGridError):
    """Every place is taken, or every one that this address may have, and nobody gives way."""


class Places(Generic[Holder]):
    """Places and their holders, oldest first.

    Args:
        total: how many there are.
        per_address: how many of them one address may have.
    """

    def __init__(self, total: int, per_address: int) -> None:
        self._total = total
        self._per_address = per_address
        self._addresses: dict[Holder, str] = {}
        self._giving_way: dict[Holder, str] = {}
        self._num_held: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._addresses)

    def __iter__(self) -> Iterator[Holder]:
        return iter(self._addresses)

    def take(self, holder: Holder, address: str) -> Holder | None:
        """Give `holder` a place; returns the one that has lost its place for it, if one had to.

        Raises:
            NoPlaceError: there is no place, and no holder that gives way.
        """
        leaver = self._leaver(address)
        if leaver is not None:
            self.leave(leaver)
        self._addresses[holder] = self._giving_way[holder] = address
        self._num_held[address] += 1
        return leaver

    def keep(self, holder: Holder) -> None:
        """Let `holder` give way to nobody any more; nothing, if it has no place."""
        self._giving_way.pop(holder, None)

    def leave(self, holder: Holder) -> None:
        """Free the place of `holder`; nothing, if it has none."""
        address = self._addresses.pop(holder, None)
        if address is None:
            return
        self._giving_way.pop(holder, None)
        self._num_held[address] -= 1
        if not self._num_held[address]:
            del self._num_held[address]

    def has_room(self, address: str) -> bool:
        """Whether one more of this address gets a place."""
        try:
            self._leaver(address)
        except NoPlaceError:
            return False
        return True

    def _leaver(self, address: str) -> Holder | None:
        if self._num_held[address] >= self._per_address:
            for holder, of in self._giving_way.items():
                if of == address:
                    return holder
            raise NoPlaceError(
                f"{address} has as many as one address can have: {self._per_address}"
            )
        if len(self._addresses) >= self._total:
            for holder in self._giving_way:
                return holder
            raise NoPlaceError(f"there are as many as there can be: {self._total}")
        return None
