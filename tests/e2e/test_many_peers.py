"""A host outlives its peers: more come and go than may be connected at once, in order or not."""

from __future__ import annotations

import subprocess
import sys

import pytest
import trio

from neurogrid.p2p import Host, Protocol, open_host
from tests.e2e.support import DEADLINE, ENVIRONMENT

MAX_CONNECTIONS = 3
# Connects so many peers to an address, and is gone without a word.
VANISH = f"""
import os, sys, trio
from contextlib import AsyncExitStack
from neurogrid.p2p import Protocol, open_host

async def main():
    async with AsyncExitStack() as stack:
        for _ in range({MAX_CONNECTIONS}):
            host = await stack.enter_async_context(open_host())
            await Protocol(host).open(await host.connect(sys.argv[1]))
        os._exit(0)

trio.run(main)
"""


@pytest.fixture(autouse=True)
def _few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neurogrid.p2p.libp2p.libp2p_host.MAX_CONNECTIONS", MAX_CONNECTIONS)


async def can_connect(server: Host) -> None:
    async with open_host() as host:
        protocol = Protocol(host)
        await protocol.open(await host.connect(server.addresses[0]))
    while server.connected_peers:  # its end takes a moment to get there
        await trio.sleep(0.01)


def test_peers_that_leave_in_order_make_room() -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with open_host() as server:
                Protocol(server)
                for _ in range(2 * MAX_CONNECTIONS):
                    await can_connect(server)

    trio.run(main)


def test_peers_that_vanish_make_room() -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with open_host() as server:
                Protocol(server)
                for _ in range(2):
                    command = [sys.executable, "-c", VANISH, server.addresses[0]]
                    await trio.run_process(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
                    while server.connected_peers:
                        await trio.sleep(0.01)
                await can_connect(server)

    trio.run(main)


def test_connections_that_are_no_peers_make_room() -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with open_host() as server:
                Protocol(server)
                port = int(server.addresses[0].split("/")[4])
                for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 1000) * MAX_CONNECTIONS:
                    stream = await trio.open_tcp_stream("127.0.0.1", port)
                    await stream.send_all(data)
                    await stream.aclose()
                await can_connect(server)

    trio.run(main)
