"""The remote worker for the version of the protocol that a peer speaks."""

from __future__ import annotations

from neurogrid.fleet.remote_worker import RemoteWorker, Timeouts
from neurogrid.inference.pipeline.remote_v10 import RemoteWorkerV10
from neurogrid.inference.pipeline.remote_v11 import RemoteWorkerV11
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.wire import PROTOCOL_V10

__all__ = ["remote_worker"]


def remote_worker(
    protocol: Exchange, peer_id: str, version: str, *, timeouts: Timeouts
) -> RemoteWorker:
    """Make the remote worker that a coordinator speaks to; `version` is the protocol id of their stream."""
    kind = RemoteWorkerV10 if version == PROTOCOL_V10 else RemoteWorkerV11
    return kind(protocol, peer_id, timeouts)
