"""A group in a script or a notebook: the same calls, and its loop in a thread.

with open_group({"a": a, "b": b}, join=[address]) as group:
    group.all_reduce({"a": a, "b": b})
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Final

from torch import Tensor

from neurogrid.p2p.blocking.trio_thread import TrioThread
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.libp2p.libp2p_host import open_host
from neurogrid.p2p.trust import Admission, LoopbackOnly
from neurogrid.training.averaging.groups.group import Group, Outcome
from neurogrid.training.averaging.groups.group import open_group as open_async_group
from neurogrid.training.averaging.parts import Layout
from neurogrid.training.wire import Decision, GroupSettings

__all__ = ["BlockingGroup", "open_group"]

_CLOSE_TIMEOUT: Final = 30.0


class BlockingGroup:
    """A group, in a thread. Made by `open_group`."""

    def __init__(self, thread: TrioThread[Group]) -> None:
        self._thread = thread
        self._group = thread.resource

    @property
    def peer_id(self) -> str:
        """The peer id of this member (base58)."""
        return self._group.peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs that others can join at."""
        return self._thread.call_sync(lambda: self._group.addresses)

    @property
    def members(self) -> tuple[str, ...]:
        """Peer ids of the members, this one included."""
        return self._thread.call_sync(lambda: self._group.members)

    @property
    def round(self) -> int:
        """Rounds that the group has decided."""
        return self._thread.call_sync(lambda: self._group.round)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The last rounds that were decided, in order. As `Group.decisions`."""
        return self._thread.call_sync(lambda: self._group.decisions)

    def wait_members(self, number: int, *, timeout: float = 60.0) -> None:
        """Wait until there are so many members. Raises: as `Group.wait_members`."""
        self._thread.call(partial(self._group.wait_members, number, timeout=timeout))

    def average(self, vector: Tensor, *, weight: float = 1.0, timeout: float = 60.0) -> Outcome:
        """Contribute to the next round, and wait for its outcome. Args and errors: as `Group.average`."""
        return self._thread.call(
            partial(self._group.average, vector, weight=weight, timeout=timeout)
        )

    def next_outcome(self, *, timeout: float = 60.0) -> Outcome:
        """Wait for the next outcome without contributing. Args and errors: as `Group.next_outcome`."""
        return self._thread.call(partial(self._group.next_outcome, timeout=timeout))

    def all_reduce(
        self, tensors: Mapping[str, Tensor], *, weight: float = 1.0, timeout: float = 60.0
    ) -> Outcome:
        """Replace tensors by their aggregates over all members. Args and errors: as `Group.all_reduce`."""
        return self._thread.call(
            partial(self._group.all_reduce, tensors, weight=weight, timeout=timeout)
        )


@contextmanager
def open_group(
    tensors: Mapping[str, Tensor],
    *,
    join: Sequence[str] = (),
    settings: GroupSettings | None = None,
    listen: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
    identity: Identity | None = None,
    admission: Admission | None = None,
    timeout: float = 60.0,
) -> Iterator[BlockingGroup]:
    """Found a group, or join one, for as long as the block lasts.

    Args:
        tensors: what is averaged, by name; their values do not matter here, and may be replaced by others of the same
            names, order and shapes later.
        join: full multiaddrs of members, any of them; empty to found a group.
        settings: of a group that is founded.
        listen: multiaddrs to listen on; loopback alone unless told otherwise.
        identity: the key pair of this member; a new one if not given.
        admission: which peers it serves (`neurogrid.p2p.trust`); those of this machine alone if not given.
        timeout: seconds for joining.

    Raises: as `neurogrid.training.averaging.groups.open_group`, and as `open_host`.
    """

    @asynccontextmanager
    async def opened() -> AsyncIterator[Group]:
        async with (
            open_host(
                listen=listen, identity=identity, admission=admission or LoopbackOnly()
            ) as host,
            open_async_group(
                host, Layout.of(tensors), join=join, settings=settings, timeout=timeout
            ) as group,
        ):
            yield group

    with TrioThread(
        opened, name="neurogrid group", what="group", close_timeout=_CLOSE_TIMEOUT
    ) as thread:
        yield BlockingGroup(thread)
