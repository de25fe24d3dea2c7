"""Multicast DNS: peers on the same local network announce themselves and are asked for.

To the specification of libp2p, so that peers in Go, JavaScript and Rust see us and we see them, and beside it
under a service type of our own. `engine` is the protocol without sockets, `service` drives it.

Source: https://github.com/libp2p/specs/blob/master/discovery/mdns.md, RFC 6762 and RFC 6763.
"""

from neurogrid.p2p.discovery.mdns.limits import DEFAULT_EXPIRY
from neurogrid.p2p.discovery.mdns.service import open_mdns

__all__ = ["DEFAULT_EXPIRY", "open_mdns"]
