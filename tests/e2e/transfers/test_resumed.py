"""Transfers that go on where they stopped: with the same peer, with another, after a restart."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from neurogrid.errors import TransportError
from neurogrid.p2p import Protocol, open_host
from neurogrid.p2p.transfer import (
    BytesSource,
    DirectoryStore,
    send_blob,
)
from neurogrid.p2p.wire import (
    CHUNK_BYTES,
)
from tests.e2e.transfers.nodes import (
    BLOB,
    DEADLINE,
    NUM_CHUNKS,
    Node,
    Policy,
    id_of,
    node,
    pair,
    run,
    stop_after,
)


def test_after_a_cut_connection_exactly_the_missing_chunks_go() -> None:
    async def main() -> None:
        async with pair() as (giver, taker):

            async def cut() -> None:
                await giver.protocol.close_peer(taker.peer_id)

            await stop_after(6, giver, taker, BLOB, cut)
            await taker.all_over()
            held = taker.transfers.idle_bytes // CHUNK_BYTES
            assert 0 < held < NUM_CHUNKS

            before = giver.chunks_sent()
            await giver.meet(taker)
            sent = await send_blob(giver.protocol, taker.peer_id, BLOB)
            assert giver.chunks_sent() - before == NUM_CHUNKS - held
            assert sent.held_bytes == held * CHUNK_BYTES
            assert sent.sent_bytes == len(BLOB) - sent.held_bytes
            assert taker.policy.taken == [(0, BLOB)]
            assert taker.transfers.idle_bytes == 0

    run(main)


def test_another_peer_goes_on_where_the_first_one_stopped() -> None:
    async def main() -> None:
        async with pair() as (first, taker), node() as second:
            await second.meet(taker)

            async def cut() -> None:
                await taker.protocol.close_peer(first.peer_id)

            await stop_after(6, first, taker, BLOB, cut)
            await taker.all_over()
            held = taker.transfers.idle_bytes // CHUNK_BYTES
            assert 0 < held < NUM_CHUNKS
            await send_blob(second.protocol, taker.peer_id, BLOB)
            assert second.chunks_sent() == NUM_CHUNKS - held
            assert taker.policy.taken == [(0, BLOB)]

    run(main)


def test_a_directory_goes_on_after_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        async with node() as giver:
            with trio.fail_after(DEADLINE):
                async with node(Policy(DirectoryStore(tmp_path))) as taker:
                    await giver.meet(taker)

                    async def nothing() -> None:
                        pass

                    await stop_after(6, giver, taker, BLOB, nothing)
                    await taker.all_over()
                (part,) = tmp_path.glob("*.part")
                before = giver.chunks_sent()
                async with node(Policy(DirectoryStore(tmp_path))) as taker:
                    await giver.meet(taker)
                    sent = await send_blob(giver.protocol, taker.peer_id, BLOB)
                    assert 0 < sent.held_bytes < len(BLOB)
                    assert (
                        giver.chunks_sent() - before == NUM_CHUNKS - sent.held_bytes // CHUNK_BYTES
                    )
                    assert taker.policy.taken == [(0, BLOB)]
                assert not part.exists()
                (whole,) = tmp_path.iterdir()
                assert whole.name == f"{id_of(BLOB).hex()}.blob"
                assert whole.read_bytes() == BLOB

    run(main)


def test_two_peers_send_the_same_blob_at_once() -> None:
    async def main() -> None:
        async with pair() as (first, taker), node() as second:
            await second.meet(taker)
            async with trio.open_nursery() as nursery:
                for number, giver in enumerate((first, second)):

                    async def send(giver: Node = giver, layer_id: int = number) -> None:
                        await send_blob(giver.protocol, taker.peer_id, BLOB, layer_id=layer_id)

                    nursery.start_soon(send)
            assert sorted(taker.policy.taken) == [(0, BLOB), (1, BLOB)]
            await taker.all_over()
            assert taker.transfers.idle_bytes == 0

    run(main)


TAKER = """
import sys
import threading
from pathlib import Path

import trio

from neurogrid.p2p import Protocol, open_host
from neurogrid.p2p.transfer import DirectoryStore, Transfers
from tests.e2e.transfers.nodes import Policy

async def main():
    async with open_host() as host:
        Transfers(Protocol(host), Policy(DirectoryStore(Path(sys.argv[1]))))
        print(host.addresses[0], flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


def test_a_directory_goes_on_after_its_process_was_killed(tmp_path: Path) -> None:
    @contextmanager
    def taker() -> Iterator[tuple[subprocess.Popen[str], str]]:
        process = subprocess.Popen(
            [sys.executable, "-c", TAKER, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()
            process.wait(DEADLINE)
            process.stdout.close()

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with open_host() as host:
                protocol = Protocol(host)
                with taker() as (process, address):
                    peer_id = await host.connect(address)

                    killed = threading.Event()

                    class HalfWay(BytesSource):
                        def chunk(self, index: int) -> memoryview:
                            if index == NUM_CHUNKS // 2:
                                killed.wait(DEADLINE)
                            return super().chunk(index)

                    async def kill() -> None:
                        while not any(
                            have.read_bytes()[:1] > b"\0" for have in tmp_path.glob("*.have")
                        ):
                            await trio.sleep(0.01)
                        process.kill()
                        killed.set()

                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(kill)
                        with pytest.raises(TransportError):
                            await send_blob(protocol, peer_id, HalfWay(BLOB))
                (part,) = tmp_path.glob("*.part")
                with taker() as (_, address):
                    peer_id = await host.connect(address)
                    sent = await send_blob(protocol, peer_id, BLOB)
                assert 0 < sent.held_bytes < len(BLOB)
                assert sent.sent_bytes + sent.held_bytes == len(BLOB)
                assert not part.exists()
                (whole,) = tmp_path.iterdir()
                assert whole.read_bytes() == BLOB

    run(main)
