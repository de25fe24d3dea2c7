"""Members of a cluster, as directories for `--cluster`: what a ticket leads to, without the way there."""

from __future__ import annotations

from pathlib import Path

from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.trust import WORKER, Cluster, Membership

__all__ = ["make_member"]


def make_member(cluster: Cluster, directory: Path, role: str = WORKER) -> str:
    """Write identity and membership of a new member; returns its peer id."""
    directory.mkdir(mode=0o700)
    peer_id = Identity.load(directory / "identity.key").peer_id
    certificate = cluster.issue(peer_id, role)
    Membership(cluster.public_key, certificate, directory=directory).save()
    return peer_id
