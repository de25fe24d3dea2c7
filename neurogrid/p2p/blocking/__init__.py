"""The transport library for programs that are not on trio: most torch programs, asyncio, plain scripts.

    with blocking.open_host() as host:
        protocol = blocking.Protocol(host)
        peer_id = host.connect(address)
        reply = protocol.request_activation(peer_id, layer_id, seq_id, tensor, timeout=30)

A trio loop runs in a thread underneath (`trio_thread`), handlers run in others (`handler_threads`). Messages,
errors, identities and wire types are those of `neurogrid.p2p`.
"""

from neurogrid.p2p.blocking.handler_threads import MAX_HANDLER_THREADS
from neurogrid.p2p.blocking.host import Host, in_thread, open_host
from neurogrid.p2p.blocking.protocol import Protocol
from neurogrid.p2p.blocking.transfers import TransferPolicy, Transfers, Wanted, send_blob
from neurogrid.p2p.blocking.trio_thread import fail_after

__all__ = [
    "MAX_HANDLER_THREADS",
    "Host",
    "Protocol",
    "TransferPolicy",
    "Transfers",
    "Wanted",
    "fail_after",
    "in_thread",
    "open_host",
    "send_blob",
]
