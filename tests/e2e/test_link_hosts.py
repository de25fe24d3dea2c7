"""Hosts with our link among hosts with the stock one, over every kind of connection that stands below it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio
from libp2p import new_host
from libp2p.abc import INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.host.ping import PingService
from libp2p.network.config import ConnectionConfig
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.security.tls.transport import PROTOCOL_ID as TLS_PROTOCOL_ID
from libp2p.security.tls.transport import TLSTransport
from multiaddr import Multiaddr

from neurogrid.p2p.link import install_link
from neurogrid.p2p.link.connection import LinkConnection
from neurogrid.p2p.link.pipe import SecurePipe, SocketPipe

DEADLINE = 120.0
MIB = 1024 * 1024
ECHO = TProtocol("/echo/1")
KEY_OF_A_PRIVATE_NETWORK = "1f" * 32


@asynccontextmanager
async def host(kind: str, *, psk: str | None = None, only_tls: bool = False) -> AsyncIterator[Any]:
    """A host of py-libp2p on loopback, "ours" with the link in it or "stock" without."""
    key_pair = create_new_key_pair()
    created = new_host(
        key_pair=key_pair,
        psk=psk,
        sec_opt={TLS_PROTOCOL_ID: TLSTransport(key_pair)} if only_tls else None,
        connection_config=ConnectionConfig(max_connections_per_peer=1),
    )
    if kind == "ours":
        install_link(created.get_network())
    async with (
        _closing_what_is_dialled(created.get_network()),
        created.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]),
    ):
        # It dials whom it knows, and leaves the socket of a dial that its end cancels to the garbage collector.
        await created.get_network().auto_connector.stop()
        created.set_stream_handler(ECHO, echo)
        yield created


@asynccontextmanager
async def _closing_what_is_dialled(swarm: Any) -> AsyncIterator[None]:
    """Close the sockets that a host dialled: a stock one that ends on a busy machine does not close them all."""
    dialled: list[Any] = []
    upgrade = swarm.upgrade_outbound_raw_conn

    async def upgrade_remembered(raw_conn: Any, *args: Any) -> Any:
        dialled.append(raw_conn)
        return await upgrade(raw_conn, *args)

    swarm.upgrade_outbound_raw_conn = upgrade_remembered
    try:
        yield
    finally:
        with trio.CancelScope(shield=True), suppress(BaseLibp2pError, OSError):
            for raw_conn in dialled:
                await raw_conn.close()


async def echo(stream: INetStream) -> None:
    try:
        while True:
            await stream.write(await stream.read(65_536))
    except StreamEOF:
        await stream.close()


async def dial(dialler: Any, listener: Any) -> Any:
    connection = await dialler.get_network().dial_addr(listener.get_addrs()[0], listener.get_id())
    await connection.event_started.wait()
    return connection.muxed_conn


async def check_echo(dialler: Any, listener: Any, num_bytes: int) -> None:
    stream = await dialler.new_stream(listener.get_id(), [ECHO])
    data = secrets.token_bytes(num_bytes)
    received = bytearray()

    async def receive() -> None:
        while len(received) < num_bytes:
            received.extend(await stream.read(65_536))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        for at in range(0, num_bytes, MIB):
            await stream.write(data[at : at + MIB])
    assert received == data
    await stream.close()


@pytest.mark.parametrize(
    ("dialler", "listener"), [("ours", "stock"), ("stock", "ours"), ("ours", "ours")]
)
def test_sixteen_mib_there_and_back(dialler: str, listener: str) -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with host(dialler) as one, host(listener) as other:
                muxed = await dial(one, other)
                if isinstance(muxed, LinkConnection):
                    assert isinstance(muxed._pipe, SocketPipe)
                await check_echo(one, other, 16 * MIB)
                await check_echo(other, one, 1)  # the listener opens streams too
                rtts = await PingService(one).ping(other.get_id(), ping_amt=3)
                assert len(rtts) == 3

    trio.run(main)


@pytest.mark.parametrize("options", [{"only_tls": True}, {"psk": KEY_OF_A_PRIVATE_NETWORK}])
@pytest.mark.parametrize(
    ("dialler", "listener"), [("ours", "stock"), ("stock", "ours"), ("ours", "ours")]
)
def test_what_is_no_socket_carries_the_link_too(
    dialler: str, listener: str, options: dict[str, Any]
) -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with host(dialler, **options) as one, host(listener, **options) as other:
                muxed = await dial(one, other)
                if isinstance(muxed, LinkConnection):
                    assert isinstance(muxed._pipe, SecurePipe)
                await check_echo(one, other, 2 * MIB)

    trio.run(main)


def test_hosts_end_while_streams_are_in_use() -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with host("ours") as one:
                async with host("ours") as other:
                    await dial(one, other)
                    stream = await one.new_stream(other.get_id(), [ECHO])
                    await stream.write(b"x")
                    assert await stream.read(1) == b"x"
                with pytest.raises(Exception, match=r"closed|reset|broke|gone"):
                    await stream.read(1)

    trio.run(main)
