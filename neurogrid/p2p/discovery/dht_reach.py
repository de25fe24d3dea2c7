"""A question to a peer that may be a stranger: the servers of a DHT belong to many clusters, or to none.

A host that admits only its own keeps such a connection for the DHT's sake (`Host.serve_strangers`). The refusal is no
failure then, unless the peer does not keep it likewise.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from neurogrid.errors import PeerUnreachableError, TransportError
from neurogrid.p2p.discovery.explanation import NO_DIALLED_ADDRESS
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.trust.refusal import NotAdmittedError

__all__ = ["ask_anybody"]

T = TypeVar("T")


async def ask_anybody(
    host: Host, peer_id: str, addresses: Sequence[str], question: Callable[[], Awaitable[T]]
) -> T:
    """Connect to a peer, where there is no connection yet, and return what `question()` does.

    Raises:
        NotAdmittedError: one side does not admit the other, and no question came through either.
        NeuroGridError: it is not reached, or what `question` raises.
    """
    refusal: NotAdmittedError | None = None
    if not host.is_linked(peer_id):
        if not addresses:
            raise PeerUnreachableError(NO_DIALLED_ADDRESS)
        try:
            await host.connect_any(addresses)
        except NotAdmittedError as exc:
            refusal = exc
    try:
        return await question()
    except TransportError as exc:
        if refusal is None:
            raise
        raise refusal from exc
