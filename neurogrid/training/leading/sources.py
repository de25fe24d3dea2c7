"""Sources of a run's data beside its leader: data nodes, which tell it of themselves, and which it names to its members
until they are gone; members with slices of their own, which give them to the leader for others; and members that have
fetched slices to train on them, which hand them on.

Source: protocol_spec/training/runs.md, "Hold".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Final

import trio

from neurogrid.errors import ConfigurationError, NeuroGridError, RequestRefusedError
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import is_address_of
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.wire import ErrorCode, TensorMessage
from neurogrid.renewed_event import RenewedEvent
from neurogrid.training.data.manifest import Manifest, SliceInfo
from neurogrid.training.data.takers import SliceTakers
from neurogrid.training.leading.settings import LeaderProgress
from neurogrid.training.wire.runs import MAX_RUN_SOURCES, Held, Hold, RunMessage

__all__ = ["Holder", "Sources"]

logger = logging.getLogger(__name__)

# An order names an address of each at least.
_MAX_NODES: Final = MAX_RUN_SOURCES
# Members that are named for a slice that they took, and the addresses that are named of each.
_MAX_NAMED: Final = 2
_MAX_ADDRESSES: Final = 4


@dataclass(frozen=True, slots=True)
class Holder:
    """A member with slices on its own disk.

    Attributes:
        slices: their numbers.
        addresses: multiaddrs at which members can dial it.
    """

    slices: Collection[int]
    addresses: Sequence[str] = ()


Holders = Callable[[], Mapping[str, Holder]]
"""Gives the members with slices of their own that are here, by peer id."""

AddressesOf = Callable[[str], Sequence[str]]
"""Gives the multiaddrs at which members can dial a member; none where it is not here."""


class Sources:
    """The data nodes of a run, and its members that have data themselves.

    Args:
        exchange: of runs.
        run_id: 16 bytes.
        manifest: of the data.
        manifest_id: its blob id.
        missing: slices that the leader itself can give nobody.
        where: the leader has its data, for people.
        progress: is told when slices are waited for.

    Attributes:
        holders: gives the members that have slices themselves.
        addresses_of: where members are, for others.
    """

    def __init__(
        self,
        exchange: Exchange,
        run_id: bytes,
        manifest: Manifest,
        manifest_id: bytes,
        missing: tuple[SliceInfo, ...],
        where: str,
        progress: LeaderProgress,
    ) -> None:
        self._run_id, self._manifest_id, self._progress = run_id, manifest_id, progress
        self._nodes: dict[str, Hold] = {}
        self._changed = RenewedEvent()
        self.holders: Holders = dict
        self.addresses_of: AddressesOf = lambda peer_id: ()
        self._takers = SliceTakers()
        self._was_complete = False
        ids = {info.blob_id for info in missing}
        self._numbers = {info.blob_id: number for number, info in enumerate(manifest.slices)}
        # Nobody says which held-out slices are there: those with all others have them, too.
        is_held_out = any(info.blob_id in ids for info in manifest.held_out)
        self._needed = frozenset(
            number
            for number, info in enumerate(manifest.slices)
            if is_held_out or info.blob_id in ids
        )
        self._num_needed = max(self._needed, default=-1) + 1
        self._lack = (
            f"{len(missing)} of {len(manifest.slices) + len(manifest.held_out)} slices are not in {where}, and no "
            "node here has them"
        )
        exchange.on_message(RunMessage.HOLD, self._on_hold)
        exchange.on_peer_lost(self._on_lost)
        self._exchange = exchange

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs at which members can dial data nodes: at most as many as an order may name, some of each node."""
        turns = zip_longest(*(hold.addresses for hold in self._nodes.values()))
        return tuple(each for turn in turns for each in turn if each)[:MAX_RUN_SOURCES]

    def peers_with(self, blob_id: bytes) -> tuple[str, ...]:
        """The peer ids of those that may have a slice: nodes, members that do, and members that have others."""
        holders = self.holders()
        number = self._numbers.get(blob_id, -1)
        takers = [each for each in self._takers.of(number) if self.addresses_of(each)]
        members = sorted(holders, key=lambda each: (number not in holders[each].slices, each))
        return tuple(dict.fromkeys((*self._nodes, *takers, *members)))

    def takes(self, peer_id: str, numbers: Iterable[int]) -> None:
        """A member is told to train on slices: others may have them of it from now on."""
        self._takers.note(peer_id, numbers)

    def addresses_for(self, peer_id: str, numbers: Collection[int]) -> tuple[str, ...]:
        """Multiaddrs of peers that may have the slices which a member needs: data nodes, members with slices that the
        leader lacks, and members that took the same slices before."""
        lacking = self._needed.intersection(numbers)
        holders = [
            holder.addresses
            for each, holder in self.holders().items()
            if each != peer_id and not lacking.isdisjoint(holder.slices)
        ]
        turns = zip_longest(*holders, *self._addresses_of_takers(peer_id, numbers))
        others = [each for turn in turns for each in turn if each]
        return tuple(dict.fromkeys((*self.addresses, *others)))[:MAX_RUN_SOURCES]

    def _addresses_of_takers(
        self, peer_id: str, numbers: Collection[int]
    ) -> Iterator[Sequence[str]]:
        named: dict[str, None] = {}
        for number in sorted(numbers):
            there = (
                each
                for each in self._takers.of(number)
                if each != peer_id and self.addresses_of(each)
            )
            named |= dict.fromkeys(islice(there, _MAX_NAMED))
        for each in named:
            yield self.addresses_of(each)[:_MAX_ADDRESSES]

    def is_complete(self) -> bool:
        """Whether the leader, nodes or members have all slices."""
        most = max((hold.num_slices for hold in self._nodes.values()), default=0)
        if most >= self._num_needed:
            return True
        left = {number for number in self._needed if number >= most}
        for holder in self.holders().values():
            left.difference_update(holder.slices)
        return not left

    def look(self) -> None:
        """See what members have now, and say so where what only one had is gone."""
        was_complete, self._was_complete = self._was_complete, self.is_complete()
        if was_complete and not self._was_complete:
            self._progress.say(
                f"a member that had slices of its own is gone; {self._lack}: members wait until one comes"
            )
        self._changed.set()

    async def wait(self, timeout: float) -> None:
        """Wait until all slices are to be had somewhere, and say so where they are not.

        Raises:
            ConfigurationError: nobody who has them came in time.
        """
        if self.is_complete():
            return
        self._progress.say(
            f"{self._lack}: waiting for one (neurogrid train data DIR --join TICKET, or a worker with --data DIR)"
        )
        with trio.move_on_after(timeout):
            while not self.is_complete():
                await self._changed.wait()
        if not self.is_complete():
            raise ConfigurationError(f"{self._lack} after {timeout:g} s")

    def end(self) -> None:
        """The run is over: nobody needs them any more."""
        self._needed, self._num_needed = frozenset(), 0
        self._nodes.clear()

    async def _on_hold(self, message: TensorMessage) -> None:
        hold, peer_id = Hold.decode(message.data), sender_of(message)
        if hold.manifest != self._manifest_id:
            raise RequestRefusedError(
                "this run trains on other data: their manifests differ",
                code=ErrorCode.NOT_SUPPORTED,
            )
        for address in hold.addresses:
            _require_own(address, peer_id)
        if peer_id not in self._nodes:
            if len(self._nodes) >= _MAX_NODES:
                raise RequestRefusedError(
                    f"this run has {_MAX_NODES} data nodes already", code=ErrorCode.BUSY
                )
            self._progress.say(
                f"data come from {self._name_of(peer_id)}, too: {hold.num_slices} slices"
            )
        self._nodes[peer_id] = hold
        self._changed.set()
        held = TensorMessage(
            RunMessage.HELD, request_id=message.request_id, data=Held(self._run_id).encode()
        )
        await self._exchange.send(peer_id, held)

    def _on_lost(self, peer_id: str, reason: NeuroGridError) -> None:
        if self._nodes.pop(peer_id, None) is None:
            return
        logger.info("the data node %s is gone: %s", peer_id, reason)
        self._was_complete = self.is_complete()
        left = "" if self._was_complete else f"; {self._lack}: members wait until one comes"
        self._progress.say(f"a data node is gone{left}")
        self._changed.set()

    def _name_of(self, peer_id: str) -> str:
        hello = self._exchange.hello_of(peer_id)
        return hello.name if hello is not None and hello.name else peer_id


def _require_own(address: str, peer_id: str) -> None:
    """A node says where it is itself, and nobody else: members dial what it says."""
    if not is_address_of(address, peer_id):
        raise RequestRefusedError(
            "a data node tells its own addresses", code=ErrorCode.PROTOCOL_VIOLATION
        )
