"""Peers that a host has a connection to, admitted or not: relays and askers for reachability may be outsiders."""

from __future__ import annotations

from neurogrid.p2p.hosts.host import Host

__all__ = ["linked_peers"]


def linked_peers(host: Host) -> frozenset[str]:
    """All peers with an open connection."""
    return host.connected_peers | host.unadmitted_peers
