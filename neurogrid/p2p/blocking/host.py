"""A host for programs that are not on trio: libp2p runs in a thread of its own, until the block is left."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    contextmanager,
)
from functools import partial
from typing import Any, Final, ParamSpec

import neurogrid.p2p.hosts.host
import neurogrid.p2p.libp2p.libp2p_host
from neurogrid.errors import LocalProtocolError
from neurogrid.p2p.blocking.handler_threads import HandlerThreads
from neurogrid.p2p.blocking.trio_thread import TrioThread
from neurogrid.p2p.blocking.twins import Blocking, shown_as, sync_twin, twin
from neurogrid.p2p.hosts.identity import Identity

__all__ = ["AsyncHost", "HANDLERS_TIMEOUT", "Host", "in_thread", "open_host"]

AsyncHost = neurogrid.p2p.hosts.host.Host
P = ParamSpec("P")

logger = logging.getLogger(__name__)

# Seconds for the handlers that run when a host is left. One that computes ends its step in this time; one that
# waits for a peer ends at once, since its call does.
HANDLERS_TIMEOUT: Final = 10.0


class Host(Blocking[AsyncHost]):
    """A host that runs in a thread. Made by `open_host`, never by hand.

    Its methods may be called from any thread, from many at once, and by handlers. Raw streams
    (`Host.open_stream`) are the async API's alone.
    """

    def __init__(self, thread: TrioThread[Any], inner: AsyncHost, handlers: HandlerThreads) -> None:
        super().__init__(thread, inner)
        self._handlers = handlers

    @property
    def identity(self) -> Identity:
        """Key pair and peer id."""
        return self._inner.identity

    @property
    def peer_id(self) -> str:
        """This host's peer id (base58)."""
        return self._inner.peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs that this host can be dialled at: one for each interface it listens on."""
        return self._thread.call_sync(lambda: self._inner.addresses)

    @property
    def connected_peers(self) -> frozenset[str]:
        """Peers with at least one open connection."""
        return self._thread.call_sync(lambda: self._inner.connected_peers)

    is_connected = sync_twin(AsyncHost.is_connected)
    role_of = sync_twin(AsyncHost.role_of)
    connect = twin(AsyncHost.connect)
    connect_any = twin(AsyncHost.connect_any)
    disconnect = twin(AsyncHost.disconnect)
    wait_disconnected = twin(AsyncHost.wait_disconnected)


def in_thread(
    opener: Callable[P, AbstractAsyncContextManager[AsyncHost]],
) -> Callable[P, AbstractContextManager[Host]]:
    """Turn an opener of hosts under trio into one that opens them in a thread; `open_host` is made so."""

    @functools.wraps(opener)
    @contextmanager
    def open_in_thread(*args: P.args, **kwargs: P.kwargs) -> Iterator[Host]:
        handlers = HandlerThreads()
        thread = TrioThread(partial(opener, *args, **kwargs), name="neurogrid host")
        with _handlers_end(handlers, thread), thread:
            yield Host(thread, thread.resource, handlers)

    return shown_as(open_in_thread, opener, gives="AbstractContextManager[Host]")


@contextmanager
def _handlers_end(handlers: HandlerThreads, thread: TrioThread[AsyncHost]) -> Iterator[None]:
    """Leave no handler behind, or say which: after the block, when the loop has ended."""
    try:
        yield
    except BaseException:  # told, not raised: the error of the block is the one to see
        for name in _stop(handlers, thread):
            logger.error("the handler %s still runs after its host was closed", name)
        raise
    names = _stop(handlers, thread)
    if names:
        raise LocalProtocolError(
            f"{', '.join(names)}: still running {HANDLERS_TIMEOUT:g} s after the host was closed; "
            "a handler must end"
        )


def _stop(handlers: HandlerThreads, thread: TrioThread[AsyncHost]) -> list[str]:
    # After a fork the handlers are in the other process.
    return handlers.stop(HANDLERS_TIMEOUT) if thread.is_here else []


open_host = in_thread(neurogrid.p2p.libp2p.libp2p_host.open_host)
"""`neurogrid.p2p.open_host` for a `with` block: the same arguments and errors. It gives a `Host` to call."""
