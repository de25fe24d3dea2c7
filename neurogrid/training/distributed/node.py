"""The host of this process that all its process groups share: one identity, one connection to each peer.

It runs in a thread of its own, from the first group of a process until the last one is destroyed, or the process ends.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import trio

from neurogrid.errors import NeuroGridError, RequestRefusedError
from neurogrid.p2p.blocking.trio_thread import TrioThread
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.libp2p.libp2p_host import open_host
from neurogrid.p2p.trust import Admission
from neurogrid.p2p.wire import ErrorCode, TensorMessage
from neurogrid.training.distributed.group import Group
from neurogrid.training.distributed.work import Futures
from neurogrid.training.wire import TrainingMessage, training_table

__all__ = ["Node", "NodeThread"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Node:
    """A host with an exchange, and the groups whose posts come by it. In the loop's thread.

    Attributes:
        host: the host.
        exchange: its messages.
        admission: which peers it serves.
    """

    def __init__(self, host: Host, admission: Admission) -> None:
        self.host = host
        self.admission = admission
        self.exchange = Exchange(host, training_table())
        self._groups: dict[int, Group] = {}
        self.exchange.on_message(TrainingMessage.POST, self._receive)
        self.exchange.on_stream_broken(self._lost)

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

    def _lost(self, peer_id: str, reason: NeuroGridError) -> None:
        for group in tuple(self._groups.values()):
            group.peer_lost(peer_id, reason)


@asynccontextmanager
async def open_node(
    listen: Sequence[str], identity: Identity, admission: Admission
) -> AsyncIterator[tuple[Node, trio.lowlevel.TrioToken]]:
    """Run a node until the block is left."""
    async with open_host(listen=listen, identity=identity, admission=admission) as host:
        yield Node(host, admission), trio.lowlevel.current_trio_token()


class NodeThread:
    """A node in a thread, for callers in others.

    Args:
        listen: multiaddrs to listen on.
        identity: of the host.
        admission: which peers it serves.
        keep: what has to live as long as it does.

    Attributes:
        is_open: whether it runs.
        node: belongs to the loop's thread.
        identity: of the host.
        futures: the thread in which callbacks run.
    """

    def __init__(
        self,
        listen: Sequence[str],
        identity: Identity,
        admission: Admission,
        *,
        keep: object = None,
    ) -> None:
        self.identity = identity
        self.is_open = True
        self._keep = keep
        self.futures = Futures()
        self._thread = TrioThread(
            partial(open_node, listen, identity, admission),
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
            trio.RunFinishedError: the loop has ended.
        """
        self._token.run_sync_soon(function)

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
        self._keep = None
