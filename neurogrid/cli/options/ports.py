"""One port number for TCP and for QUIC: what a person opens in a firewall, and a router forwards, at once."""

from __future__ import annotations

import socket
from typing import Final

from neurogrid.errors import ConfigurationError

__all__ = ["places_of", "places_on_port"]

# Numbers that are tried for one that is free on both. A second would do.
MAX_ATTEMPTS: Final = 16


def places_on_port(ip: str, port: int, *, quic: bool) -> tuple[str, ...]:
    """The multiaddrs to listen at on an IPv4 address and a port, 0 for a free one; with `quic` TCP and QUIC.

    Raises:
        ConfigurationError: the port is taken; says for which of the two.
    """
    from neurogrid.p2p.libp2p.libp2p_host import check_listen_address

    places = places_of(ip, port, quic=quic)
    if port or not quic:
        for place in places:
            try:
                check_listen_address(place)
            except ConfigurationError as exc:
                if place == places[0]:
                    raise
                raise ConfigurationError(
                    f"{exc}. The TCP port {port} is free: --no-quic listens there alone"
                ) from exc
        return places
    for _ in range(MAX_ATTEMPTS):
        places = places_of(ip, _free_tcp_port(ip), quic=True)
        try:
            check_listen_address(places[1])
        except ConfigurationError:
            continue  # somebody has that number for UDP
        return places
    raise ConfigurationError(f"no port of {ip} is free for TCP and UDP: name one, or say --no-quic")


def places_of(ip: str, port: int, *, quic: bool) -> tuple[str, ...]:
    """The same, untried."""
    tcp = f"/ip4/{ip}/tcp/{port}"
    return (tcp, f"/ip4/{ip}/udp/{port}/quic-v1") if quic else (tcp,)


def _free_tcp_port(ip: str) -> int:
    with socket.socket() as probe:
        probe.bind((ip, 0))
        port: int = probe.getsockname()[1]
        return port
