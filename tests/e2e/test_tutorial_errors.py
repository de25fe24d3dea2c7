"""Every error that the tutorial lists is raised as it is written there, and for the cause that it names."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import torch
import trio

from neurogrid.errors import NeuroGridError
from neurogrid.p2p import Host, Identity, Protocol, TensorMessage, open_host

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
DEADLINE = 240.0
ROW = re.compile(r"^\| `(\w+: .*?)` \|", re.MULTILINE)


def masked(text: str) -> str:
    """As the tutorial writes it: what differs from run to run has a name in capitals."""
    text = re.sub(r"(?<=connect to )/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+", "ADDRESS", text)
    text = re.sub(r"12D3KooW\w+", "PEER", text)
    text = re.sub(r"(?<=listen on /ip4/127\.0\.0\.1/tcp/)\d+", "PORT", text)
    # No test machine needs to have a GPU: torch's device without memory stands for it.
    text = text.replace("tensor on meta", "tensor on cuda:0")
    return re.sub(r"(lost the stream to PEER: ).*", r"\1…", text)


def double(message: TensorMessage) -> np.ndarray:
    """The handler of the tutorial."""
    assert message.envelope is not None
    return 2 * np.frombuffer(message.data, np.float32).reshape(message.envelope.shape)


async def provoke(raised: list[str], cause: Callable[[], Awaitable[object]]) -> None:
    try:
        await cause()
    except NeuroGridError as exc:
        raised.append(masked(f"{type(exc).__name__}: {exc}"))
    else:
        raised.append("nothing was raised")


async def provoke_all(raised: list[str], server: Host, client: Host) -> None:
    address = server.addresses[0]
    place, _, peer_id = address.rpartition("/")
    protocol, served = Protocol(client), Protocol(server)

    async def connect(to: str) -> None:
        await provoke(raised, lambda: client.connect(to))

    async def ask(data: object, timeout: float = DEADLINE) -> None:
        await provoke(
            raised, lambda: protocol.request_activation(peer_id, 0, 0, data, timeout=timeout)
        )

    async def listen() -> None:
        async with open_host(listen=[place.removesuffix("/p2p")]):
            pass

    async def make_another() -> None:
        Protocol(client)

    await connect(f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id}")
    await connect(f"{place}/{Identity.generate().peer_id}")
    await connect("localhost:9000")
    await connect("/ip4/127.0.0.1/tcp/1")
    await provoke(raised, listen)
    await ask(b"")
    await client.connect(address)
    await ask(b"")
    served.on_activation_received(double)
    await ask(np.ones((2, 3)))
    await ask(np.ones((4, 4), np.float32)[:, ::2])
    await ask(torch.ones(2, device="meta"))
    await provoke(raised, make_another)


async def provoke_the_rest(raised: list[str], server: Host, client: Host) -> None:
    protocol, served = Protocol(client), Protocol(server)
    peer_id = await client.connect(server.addresses[0])

    async def hang_up(message: TensorMessage) -> None:
        assert message.from_peer is not None
        if message.layer_id == 1:
            await server.disconnect(message.from_peer)

    served.on_activation_received(hang_up)
    await protocol.open(peer_id)
    ask = protocol.request_activation
    await provoke(raised, lambda: ask(peer_id, 0, 0, b"", timeout=0.2))
    await provoke(raised, lambda: ask(peer_id, 1, 0, b"", timeout=DEADLINE))


def test_the_errors_of_the_tutorial() -> None:
    raised: list[str] = []

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            for scenario in (provoke_all, provoke_the_rest):
                async with open_host() as server, open_host() as client:
                    await scenario(raised, server, client)

    trio.run(main)
    listed = ROW.findall(TUTORIAL.read_text(encoding="utf-8"))
    assert sorted(raised) == sorted(listed)
