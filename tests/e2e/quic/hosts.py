"""Hosts that speak QUIC with each other, and what is looked at inside them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from libp2p.peer.id import ID

from neurogrid.p2p import Host, Stream, open_host
from neurogrid.p2p.libp2p import libp2p_host as libp2p_host_module
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost
from neurogrid.p2p.quic import QuicLimits
from tests.conformance.networks import until

KIB = 1024
MIB = 1024 * KIB
DEADLINE = 120.0
QUIC = "/ip4/127.0.0.1/udp/0/quic-v1"
TCP = "/ip4/127.0.0.1/tcp/0"


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(DEADLINE):
            await scenario()

    trio.run(bounded)


def limits_of_hosts(monkeypatch: pytest.MonkeyPatch, limits: QuicLimits) -> None:
    """Let every host that is opened from now on go by `limits`."""
    monkeypatch.setattr(libp2p_host_module, "quic_limits", lambda keep_alive: limits)


@asynccontextmanager
async def two_hosts() -> AsyncIterator[tuple[Libp2pHost, Libp2pHost]]:
    """A host that has dialled another over QUIC."""
    async with open_host(listen=[QUIC]) as one, open_host(listen=[QUIC]) as other:
        await one.connect(other.addresses[0])
        await until(lambda: one.peer_id in other.connected_peers)
        yield one, other


def udp_socket() -> Any:
    """A socket of a stranger that speaks no QUIC; to be closed."""
    return trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM)


def udp_address_of(host: Host) -> tuple[str, int]:
    """Where a host that listens on one address is sent datagrams."""
    _, _, ip, _, port, *_ = host.addresses[0].split("/")
    return ip, int(port)


async def send_without_end(stream: Stream) -> None:
    while True:
        await stream.send_all(bytes(KIB))
        await trio.sleep(0.01)


def endpoint_of(host: Libp2pHost) -> Any:
    """The socket that a host listens on."""
    network: Any = host.libp2p.get_network()
    (listener,) = network.listeners.values()
    return listener._endpoint


def core_of(host: Libp2pHost, peer: Host) -> Any:
    """The state machine of a connection."""
    network: Any = host.libp2p.get_network()
    (connection,) = network.connections[ID.from_base58(peer.peer_id)]
    return connection.muxed_conn.core
