"""The address of a client, and the share of a thing that one address may have, so that others get some of it too."""

from __future__ import annotations

import ipaddress

__all__ = ["client_address", "share_of"]


def share_of(total: int) -> int:
    """Return the number of `total` places that one address may have: three quarters, at least one.

    All users of a reverse proxy or behind a NAT have its address, and all of one machine have loopback, so that it is
    most of them; the last quarter is for other addresses alone.
    """
    return max(total * 3 // 4, 1)


def client_address(host: str) -> str:
    """Return a client's one address: an IPv4 address, or the 64 bits of IPv6 within which a machine chooses freely."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
