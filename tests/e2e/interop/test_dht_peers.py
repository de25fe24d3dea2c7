"""Provider records with go-libp2p (`p2pd`) and js-libp2p, both ways: each keeps ours and finds us, and is found."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from libp2p.peer.id import ID

from neurogrid.p2p import Identity, open_host
from neurogrid.p2p.discovery.dht import Announcement, Dht, open_dht
from neurogrid.p2p.discovery.dht_key import cluster_cid
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost
from neurogrid.p2p.trust import COORDINATOR, WORKER, Cluster, ClusterAdmission, Membership
from tests.e2e.interop import go_control
from tests.e2e.interop.foreign_peer import ForeignPeer
from tests.e2e.interop.go_peer import run_p2pd

NAMESPACE = "interop"
CID = cluster_cid(NAMESPACE)
DEADLINE = 120.0
JS_DIRECTORY = Path(__file__).parent / "js"

DHT, FIND_PROVIDERS, PROVIDE = 4, 2, 8  # a type of request, and two of a DHTRequest
VALUE, END = 1, 2  # types of a DHTResponse


async def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        await trio.sleep(0.05)


def run_go_server() -> AbstractAsyncContextManager[ForeignPeer]:
    """The daemon as a server of a DHT that it alone is in."""
    return run_p2pd("-dhtServer", "-relay=false", "-relayService=false")


def dht_request(kind: int) -> bytes:
    content = go_control._number(1, kind) + go_control._block(3, CID) + go_control._number(6, 2)
    content += go_control._number(7, 5_000_000_000)
    return go_control._frame(go_control._number(1, DHT) + go_control._block(5, content))


async def go_provide(peer: ForeignPeer) -> None:
    """Let the daemon announce itself, once it has found out that we are a server."""
    while True:
        async with await peer._open_control() as socket:
            await socket.send_all(dht_request(PROVIDE))
            answer = dict(go_control._fields(await take_frame(socket, bytearray())))
            if answer[1] == go_control.OK:
                return
            assert b"failed to find any peer" in go_control._bytes(answer[2]), answer
            await trio.sleep(0.1)


async def go_find(peer: ForeignPeer) -> set[str]:
    """Whom the daemon finds; it answers BEGIN in a response, then a VALUE for each, and END."""
    found: set[str] = set()
    async with await peer._open_control() as socket:
        await socket.send_all(dht_request(FIND_PROVIDERS))
        received = bytearray()
        answer = dict(go_control._fields(await take_frame(socket, received)))
        assert answer[1] == go_control.OK, answer
        while True:
            part = dict(go_control._fields(await take_frame(socket, received)))
            if part[1] == END:
                return found
            assert part[1] == VALUE, part
            info = dict(go_control._fields(go_control._bytes(part[2])))
            found.add(ID(go_control._bytes(info[1])).to_base58())


async def take_frame(socket: trio.SocketStream, received: bytearray) -> bytes:
    while (message := go_control._take_frame(received)) is None:
        received += await receive(socket)
    return message


async def receive(socket: trio.SocketStream) -> bytes:
    data = bytes(await socket.receive_some())
    assert data, "the daemon ended the connection within an answer"
    return data


class JsServer:
    """js-libp2p as a server of a DHT that it alone is in; `js/dht_peer.mjs`."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._received = bytearray()

    async def ask(self, **request: str) -> Any:
        assert self._process.stdin is not None
        await self._process.stdin.send_all(json.dumps(request).encode() + b"\n")
        return await self.take_answer()

    async def take_answer(self) -> Any:
        assert self._process.stdout is not None
        while b"\n" not in self._received:
            data = await self._process.stdout.receive_some()
            assert data, "the JavaScript peer ended"
            self._received += data
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received[:] = rest
        answer = json.loads(line)
        assert "error" not in answer, answer
        return answer


@asynccontextmanager
async def run_js_server() -> AsyncIterator[tuple[JsServer, str, str]]:
    """The peer, its id and its address."""
    node = shutil.which("node")
    if node is None or not (JS_DIRECTORY / "node_modules" / "@libp2p" / "kad-dht").is_dir():
        pytest.fail(
            "The JavaScript peer is missing: Node.js 20 or later, and js-libp2p with"
            " @libp2p/kad-dht. Run `.ci/setup peers`.",
            pytrace=False,
        )
    process = await trio.lowlevel.open_process(
        [node, str(JS_DIRECTORY / "dht_peer.mjs")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        server = JsServer(process)
        hello = await server.take_answer()
        yield server, hello["peer"], hello["address"]
    finally:
        with trio.CancelScope(shield=True):
            process.kill()
            await process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                await pipe.aclose()


@asynccontextmanager
async def member(
    bootstrap: str,
    told: list[str],
    *,
    identity: Identity | None = None,
    admission: ClusterAdmission | None = None,
) -> AsyncIterator[tuple[Libp2pHost, Dht]]:
    """A member of the cluster that begins with a foreign server; `told` gets what succeeded."""
    certificate = admission.own_certificate if admission is not None else None
    async with (
        open_host(identity=identity, admission=admission) as host,
        open_dht(
            host,
            namespace=NAMESPACE,
            record=lambda: Announcement("worker", certificate=certificate or b""),
            mode="server",
            bootstrap=[bootstrap],
            verify=admission.verify if admission is not None else None,
            on_sighting=lambda sighting: None,
            on_attempt=lambda attempt: told.append(attempt.what) if attempt.is_good else None,
        ) as dht,
    ):
        yield host, dht


def is_announced(told: list[str]) -> bool:
    return any(what.startswith("announce") for what in told)


def test_go_keeps_our_announcement_and_introduces_two_members() -> None:
    async def main() -> None:
        told: list[str] = []
        with trio.fail_after(DEADLINE):
            async with (
                run_go_server() as go,
                member(go.address, told) as (one, one_dht),
                member(go.address, told) as (other, other_dht),
            ):
                await wait_for(lambda: other.peer_id in one_dht.members)
                await wait_for(lambda: one.peer_id in other_dht.members)
                while not {one.peer_id, other.peer_id} <= await go_find(go):
                    await trio.sleep(0.1)

    trio.run(main)


def test_go_introduces_members_who_serve_nobody_else(tmp_path: Path) -> None:
    """The daemon shows no certificate, and two workers admit coordinators only: the DHT is for all of them."""
    cluster = Cluster.create(tmp_path / "cluster")

    def worker() -> dict[str, Any]:
        identity = Identity.generate()
        membership = Membership(cluster.public_key, cluster.issue(identity.peer_id, WORKER))
        admission = ClusterAdmission(membership, admits={COORDINATOR})
        return {"identity": identity, "admission": admission}

    async def main() -> None:
        told: list[str] = []
        with trio.fail_after(DEADLINE):
            async with (
                run_go_server() as go,
                member(go.address, told, **worker()) as (one, one_dht),
                member(go.address, told, **worker()) as (other, other_dht),
            ):
                await wait_for(lambda: other.peer_id in one_dht.members)
                await wait_for(lambda: one.peer_id in other_dht.members)
                while not {one.peer_id, other.peer_id} <= await go_find(go):
                    await trio.sleep(0.1)
                await go_provide(go)
                await wait_for(lambda: go.peer_id in named_here(one_dht) | named_here(other_dht))
                assert not one.connected_peers
                assert not other.connected_peers

    trio.run(main)


def test_we_keep_what_go_announces() -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with run_go_server() as go, member(go.address, []) as (_, dht):
                await wait_for(lambda: dht.num_servers > 0)
                await go_provide(go)
                await wait_for(lambda: go.peer_id in named_here(dht))

    trio.run(main)


def test_js_keeps_our_announcement_and_finds_us() -> None:
    async def main() -> None:
        told: list[str] = []
        cid = "b" + base64.b32encode(CID).decode().lower().rstrip("=")
        with trio.fail_after(DEADLINE):
            async with (
                run_js_server() as (js, js_id, address),
                member(address, told) as (host, dht),
            ):
                await wait_for(lambda: is_announced(told))
                found = (await js.ask(do="find", cid=cid))["found"]
                assert found[host.peer_id], found
                await js.ask(do="provide", cid=cid)
                await wait_for(lambda: js_id in named_here(dht))

    trio.run(main)


def test_js_introduces_two_members() -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with (
                run_js_server() as (_, _, address),
                member(address, []) as (one, one_dht),
                member(address, []) as (other, other_dht),
            ):
                await wait_for(lambda: other.peer_id in one_dht.members)
                await wait_for(lambda: one.peer_id in other_dht.members)

    trio.run(main)


def named_here(dht: Dht) -> set[str]:
    """Who announced itself to this server."""
    return {peer.to_base58() for peer in dht._named_here()}
