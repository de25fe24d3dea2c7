"""Spread of layers over workers: each comes from the coordinator once, from workers that have it afterwards.

Several workers that want the same layers begin with different ones and exchange them, so that each layer leaves the
coordinator about once. The choice is `choose`, a pure function; around it stands which worker waits for which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from neurogrid.p2p.wire import MAX_ADDRESS_CHARS, MAX_SOURCES
from neurogrid.renewed_event import RenewedEvent

__all__ = ["Choice", "Spread", "choose"]

# Holders that an offer names; when none of these is of use, the coordinator sends.
MAX_HOLDERS: Final = 3


@dataclass(frozen=True, slots=True)
class Choice:
    """The layer to offer next.

    Attributes:
        layer_id: the layer.
        holders: peers that have it, the one to ask first in front; none where the coordinator sends it.
    """

    layer_id: int
    holders: tuple[str, ...] = ()


def choose(
    wanted: Set[int],
    *,
    said_held: Collection[int],
    holders: Mapping[int, Sequence[str]],
    under_way: Collection[int],
    is_sent_to: bool,
) -> Choice | None:
    """The next layer for one worker; None if it had better wait for those that are under way to others.

    Args:
        wanted: layers that it lacks and that are not on their way to it.
        said_held: layers that it says it has.
        holders: the workers that have a layer for certain, by layer.
        under_way: layers that another worker is about to have, because the coordinator sends it or it said so.
        is_sent_to: whether the coordinator sends this worker something already: then it can fetch from others besides.
    """
    held = min(wanted & set(said_held), default=None)
    if held is not None:
        return Choice(held, tuple(holders.get(held, ())))
    elsewhere = min((layer for layer in wanted if holders.get(layer)), default=None)
    fresh = min(
        (layer for layer in wanted if not holders.get(layer) and layer not in under_way),
        default=None,
    )
    if elsewhere is not None and (is_sent_to or fresh is None):
        return Choice(elsewhere, tuple(holders[elsewhere]))
    return Choice(fresh) if fresh is not None else None


class Spread:
    """The layers of one model on their way to several workers.

    Args:
        addresses_of: full multiaddrs at which a worker can be dialled.
    """

    def __init__(self, addresses_of: Callable[[str], Sequence[str]]) -> None:
        self._addresses_of = addresses_of
        self._holders: dict[int, list[str]] = {}
        self._sent: dict[int, str] = {}
        self._said: dict[str, set[int]] = {}
        self._num_served: Counter[str] = Counter()
        self._changed = RenewedEvent()

    def said_held(self, peer_id: str, layers: Collection[int]) -> None:
        """A worker says that it has these layers. Whether it has these very bytes, their offers will tell."""
        self._said[peer_id] = set(layers)

    async def next(self, peer_id: str, wanted: Set[int]) -> Choice | None:
        """The next of `wanted`, as soon as there is one that this worker should get; None when none is left.

        Others may take from `wanted` meanwhile. `giving` is to follow at once.
        """
        while wanted:
            others = [said for other, said in self._said.items() if other != peer_id]
            choice = choose(
                wanted,
                said_held=self._said.get(peer_id, ()),
                holders=self._holders,
                under_way=set(self._sent).union(*others),
                is_sent_to=peer_id in self._sent.values(),
            )
            if choice is not None:
                ordered = sorted(choice.holders, key=self._num_served.__getitem__)
                return Choice(choice.layer_id, tuple(ordered[:MAX_HOLDERS]))
            await self._changed.wait()
        return None

    @contextmanager
    def giving(self, peer_id: str, choice: Choice) -> Iterator[None]:
        """A layer is on its way to a worker, which has it when the block is left without an error."""
        layer_id, source = choice.layer_id, next(iter(choice.holders), None)
        if source is None:
            self._sent[layer_id] = peer_id
        else:
            self._num_served[source] += 1
        try:
            yield
            holders = self._holders.setdefault(layer_id, [])
            if peer_id not in holders:
                holders.append(peer_id)
        finally:
            self._said.get(peer_id, set()).discard(layer_id)
            if source is None:
                self._sent.pop(layer_id, None)
            else:
                self._num_served[source] -= 1
            self._note_change()

    def lost(self, peer_id: str) -> None:
        """A worker is gone, and what it holds with it."""
        self._said.pop(peer_id, None)
        for holders in self._holders.values():
            if peer_id in holders:
                holders.remove(peer_id)
        self._note_change()

    def sources(self, choice: Choice) -> tuple[str, ...]:
        """The addresses of the holders, each one's first before the second of any."""
        known = [self._addresses_of(peer_id) for peer_id in choice.holders]
        most = max(map(len, known), default=0)
        mixed = [found[rank] for rank in range(most) for found in known if rank < len(found)]
        return tuple(a for a in mixed if len(a) <= MAX_ADDRESS_CHARS)[:MAX_SOURCES]

    def _note_change(self) -> None:
        self._changed.set()
