"""The host of this process that all its process groups share: one identity, one connection to each peer.

It runs in a thread of its own, from the first group of a process until the last one is destroyed, or the process ends.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import trio

from neurogrid.errors import NeuroGridError, RequestRefusedError
from neurogrid.p2p.blocking.trio_thread import TrioThread
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.libp2p.libp2p_host import open_host
from neurogrid.p2p.reach.reach import Reach, ReachOptions
from neurogrid.p2p.reach.relay_service import RelayLimits
from neurogrid.p2p.trust import Admission
from neurogrid.p2p.wire import ErrorCode, TensorMessage
from neurogrid.training.distributed.errors import RankError
from neurogrid.training.distributed.group import Group
from neurogrid.training.distributed.work import Futures
from neurogrid.training.wire import TrainingMessage, training_table

__all__ = ["Node", "NodeThread", "Places"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds that a relay has to give a slot before others are told where we are.
RELAY_WAIT = 15.0


@dataclass(frozen=True, slots=True)
class Places:
    """Addresses at which a node is to be reached.

    Attributes:
        listen: multiaddrs to listen on.
        relays: full multiaddrs of relays to be reached through.
        relay: how much to relay for the other ranks, as far as they cannot reach each other directly; None is nothing.
    """

    listen: Sequence[str]
    relays: Sequence[str] = ()
    relay: RelayLimits | None = None


class Node:
    """A host with an exchange, and the groups whose posts come by it. In the loop's thread.

    Attributes:
        host: the host.
        exchange: its messages.
        admission: which peers it serves.
        reach: how it is reached through relays, and reaches others; None where it is not.
    """

    def __init__(self, host: Host, admission: Admission) -> None:
        self.reach: Reach | None = None
        self.host = host
        self.admission = admission
        self.exchange = Exchange(host, training_table())
        self._groups: dict[int, Group] = {}
        self.exchange.on_message(TrainingMessage.POST, self._receive)
        self.exchange.on_message(TrainingMessage.FAILED, self._receive_failure)
        self.exchange.on_stream_broken(self._lost)

    async def use_relays(self, addresses: Sequence[str]) -> None:
        """Be reachable through relays; returns when each has given its first answer.

        Raises:
            ConfigurationError: an address is malformed.
        """
        if self.reach is None:
            return
        for address in addresses:
            self.reach.use_relay(address)
        with trio.move_on_after(RELAY_WAIT) as scope:
            await self.reach.wait_relays()
        if scope.cancelled_caught:
            logger.warning("a relay has not answered in %g s; it is asked again", RELAY_WAIT)

    def add(self, group: Group) -> None:
        """Take the posts of a group from now on."""
        self._groups[group.number] = group

    def remove(self, group: Group) -> None:
        """Take no more posts of a group."""
        self._groups.pop(group.number, None)

    def _receive(self, message: TensorMessage) -> None:
        group = self._groups.get(message.request_id)
        if group is None:
            # One that was destroyed here, and not yet there.
            raise RequestRefusedError(
                "there is no such process group here",
                code=ErrorCode.NOT_SUPPORTED,
                is_expected=True,
            )
        group.receive(message)

    def _receive_failure(self, message: TensorMessage) -> None:
        group = self._groups.get(message.request_id)
        if group is not None:
            group.receive_failure(message)

    def _lost(self, peer_id: str, reason: NeuroGridError) -> None:
        for group in tuple(self._groups.values()):
            group.peer_lost(peer_id, reason)


@asynccontextmanager
async def open_node(
    places: Places, identity: Identity, admission: Admission
) -> AsyncIterator[tuple[Node, trio.lowlevel.TrioToken]]:
    """Run a node until the block is left."""
    async with open_host(listen=places.listen, identity=identity, admission=admission) as host:
        node = Node(host, admission)
        node.reach = Reach(host, ReachOptions(relay_service=places.relay, autonat=False))
        await node.use_relays(places.relays)
        yield node, trio.lowlevel.current_trio_token()


class NodeThread:
    """A node in a thread, for callers in others.

    Args:
        places: where it is to be reached.
        identity: of the host.
        admission: which peers it serves.
        keep: what has to be there as long as it runs, and is left then.

    Attributes:
        is_open: whether it runs.
        node: belongs to the loop's thread.
        identity: of the host.
        futures: the threads in which callbacks run.
    """

    def __init__(
        self,
        places: Places,
        identity: Identity,
        admission: Admission,
        *,
        keep: ExitStack | None = None,
    ) -> None:
        self.identity = identity
        self.is_open = True
        self._keep = keep
        self.futures = Futures()
        self._thread = TrioThread(
            partial(open_node, places, identity, admission),
            name="neurogrid-ranks",
            what="host of the process groups",
        )
        self._thread.__enter__()
        self.node, self._token = self._thread.resource
        self._num_groups = 0
        # Connections end in order, so that what was sent last arrives.
        atexit.register(self.close)

    @property
    def is_here(self) -> bool:
        """Whether this is the process that it runs in, and not a fork of it."""
        return self._thread.is_here

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run a task in the loop and wait for what it returns; as `TrioThread.call`."""
        return self._thread.call(function)

    def call_sync(self, function: Callable[[], T]) -> T:
        """`call` for what is quick and not async."""
        return self._thread.call_sync(function)

    def soon(self, function: Callable[[], object]) -> None:
        """Have the loop call `function()` after those before it, and wait for nothing.

        Raises:
            RankError: the loop has ended.
        """
        try:
            self._token.run_sync_soon(function)
        except trio.RunFinishedError as exc:
            raise RankError("the host of the process groups has ended") from exc

    def check(self) -> None:
        """Check that the loop has not ended.

        Raises:
            RankError: it has.
        """
        self.soon(lambda: None)

    def hold(self) -> None:
        """Count one more process group."""
        self._num_groups += 1

    def release(self) -> None:
        """Count one process group less; the last one ends the thread."""
        self._num_groups -= 1
        if not self._num_groups:
            self.close()

    def close(self) -> None:
        """End the thread, and the connections in order. Again: nothing happens."""
        atexit.unregister(self.close)
        self.is_open = False
        error = self._thread.close()
        if error is not None:
            logger.error("the host of the process groups did not end well: %s", error)
        if self.is_here:
            self.futures.close()
            if self._keep is not None:
                self._keep.close()
