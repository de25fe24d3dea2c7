"""Blobs that are asked for: from whoever has them, past liars and past those that go."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from neurogrid.errors import (
    CapacityError,
    PeerRefusedError,
    RemoteProtocolError,
    TransportError,
)
from neurogrid.p2p.transfer import (
    BlobUnavailableError,
    BytesSource,
    DirectoryStore,
    TransferLimits,
)
from neurogrid.p2p.wire import (
    ErrorCode,
)
from tests.e2e.transfers.nodes import (
    BLOB,
    NUM_CHUNKS,
    SMALL,
    LyingSource,
    Policy,
    id_of,
    node,
    pair,
    run,
)


def test_fetch_from_a_peer_that_has_it() -> None:
    async def main() -> None:
        policy = Policy(provided={id_of(BLOB): BytesSource(BLOB)})
        async with pair(policy=policy) as (taker, giver):
            fetched = await taker.transfers.fetch_blob(giver.peer_id, id_of(BLOB))
            assert fetched.blob.data == BLOB
            assert fetched.blob.path is None
            assert (fetched.peer_id, fetched.failures) == (giver.peer_id, {})
            # Now this one can serve it on.
            taker.policy.provided[id_of(BLOB)] = fetched.blob
            again = await giver.transfers.fetch_blob(taker.peer_id, id_of(BLOB))
            assert again.blob.data == BLOB
            with pytest.raises(PeerRefusedError) as caught:
                await taker.transfers.fetch_blob(giver.peer_id, bytes(32))
            assert caught.value.code == ErrorCode.BLOB_UNKNOWN
            with pytest.raises(CapacityError, match="no more than 1,000 B"):
                await taker.transfers.fetch_blob(giver.peer_id, id_of(BLOB), max_bytes=1000)
            await taker.all_over()

    run(main)


def test_fetch_from_two_peers_of_which_one_lies() -> None:
    async def main() -> None:
        lying = Policy(provided={id_of(BLOB): LyingSource(BLOB, wrong=9)})
        honest = Policy(provided={id_of(BLOB): BytesSource(BLOB)})
        async with pair() as (taker, nobody), node(lying) as liar, node(honest) as giver:
            await taker.meet(liar)
            await taker.meet(giver)
            fetched = await taker.transfers.fetch_blob(
                [nobody.peer_id, liar.peer_id, giver.peer_id], id_of(BLOB)
            )
            assert fetched.blob.data == BLOB
            assert fetched.peer_id == giver.peer_id
            assert list(fetched.failures) == [nobody.peer_id, liar.peer_id]
            lie = fetched.failures[liar.peer_id]
            assert isinstance(lie, RemoteProtocolError)
            assert lie.code == ErrorCode.HASH_MISMATCH
            assert f"chunk 9 from {liar.peer_id} has another hash" in str(lie)
            # What the liar sent before was good, and did not go twice.
            assert giver.chunks_sent() <= NUM_CHUNKS - 8

    run(main)


def test_fetch_from_two_liars_names_both() -> None:
    async def main() -> None:
        one = Policy(provided={id_of(SMALL): LyingSource(SMALL, wrong=1)})
        other = Policy(provided={id_of(SMALL): LyingSource(SMALL, wrong=1)})
        async with pair(policy=one) as (taker, first), node(other) as second:
            await taker.meet(second)
            with pytest.raises(BlobUnavailableError, match="none of 2 peers gave blob") as caught:
                await taker.transfers.fetch_blob([first.peer_id, second.peer_id], id_of(SMALL))
            for peer in (first, second):
                assert f"chunk 1 from {peer.peer_id}" in str(caught.value.failures[peer.peer_id])
                assert f"chunk 1 from {peer.peer_id}" in str(caught.value)

    run(main)


def test_fetch_from_a_peer_that_goes_and_one_that_stays(tmp_path: Path) -> None:
    async def main() -> None:
        store = DirectoryStore(tmp_path)
        honest = Policy(provided={id_of(BLOB): BytesSource(BLOB)})
        async with pair() as (taker, second), node() as first:
            await taker.meet(first)
            second.policy.provided = honest.provided

            class Leaving(BytesSource):
                def chunk(self, index: int) -> memoryview:
                    # By then some have gone: no more than ten chunks are read ahead.
                    if index == 15:
                        trio.from_thread.run(first.protocol.close_peer, taker.peer_id)
                    return super().chunk(index)

            first.policy.provided[id_of(BLOB)] = Leaving(BLOB)
            fetched = await taker.transfers.fetch_blob(
                [first.peer_id, second.peer_id], id_of(BLOB), store=store
            )
            assert fetched.blob.data == BLOB
            assert fetched.blob.path == tmp_path / f"{id_of(BLOB).hex()}.blob"
            assert isinstance(fetched.failures[first.peer_id], TransportError)
            assert second.chunks_sent() < NUM_CHUNKS

    run(main)


def test_a_peer_that_serves_too_much_says_when_to_ask_again() -> None:
    async def main() -> None:
        class Slow(BytesSource):
            def chunk(self, index: int) -> memoryview:
                trio.from_thread.run(go_on.wait)
                return super().chunk(index)

        go_on = trio.Event()
        policy = Policy(provided={id_of(SMALL): Slow(SMALL)})
        limits = TransferLimits(max_served_per_peer=2)
        async with (
            pair(policy=policy, limits=limits) as (taker, giver),
            trio.open_nursery() as nursery,
        ):
            for _ in range(2):
                nursery.start_soon(taker.transfers.fetch_blob, giver.peer_id, id_of(SMALL))
            while taker.transfers.num_incoming < 2:
                await trio.sleep(0.01)
            with pytest.raises(PeerRefusedError) as caught:
                await taker.transfers.fetch_blob(giver.peer_id, id_of(SMALL))
            assert caught.value.code == ErrorCode.BUSY
            assert caught.value.retry_after
            go_on.set()

    run(main)
