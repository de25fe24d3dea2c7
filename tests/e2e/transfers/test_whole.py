"""Blobs that arrive, that are held, and that nobody wants: between real hosts, counted on the wire."""

from __future__ import annotations

import pytest
import trio

from neurogrid.errors import (
    PeerRefusedError,
    PeerUnreachableError,
    RequestRefusedError,
)
from neurogrid.p2p import (
    PROTOCOL_V10,
    Protocol,
    open_host,
)
from neurogrid.p2p.transfer import (
    Transfers,
    send_blob,
)
from neurogrid.p2p.wire import (
    CHUNK_BYTES,
    ErrorCode,
    num_chunks,
)
from tests.e2e.transfers.nodes import (
    BLOB,
    DEADLINE,
    NUM_CHUNKS,
    SMALL,
    Policy,
    id_of,
    node,
    pair,
    run,
)


def test_a_whole_blob_and_then_none_of_it() -> None:
    async def main() -> None:
        async with pair() as (giver, taker):
            sent_bytes: list[int] = []
            missing: list[int] = []
            sent = await send_blob(
                giver.protocol,
                taker.peer_id,
                BLOB,
                layer_id=7,
                on_accept=missing.append,
                on_sent=sent_bytes.append,
            )
            assert (sent.num_bytes, sent.sent_bytes, sent.held_bytes) == (len(BLOB), len(BLOB), 0)
            assert sent.blob_id == id_of(BLOB)
            assert missing == [len(BLOB)]
            assert sum(sent_bytes) == len(BLOB)
            assert taker.policy.taken == [(7, BLOB)]
            assert giver.chunks_sent() == NUM_CHUNKS

            again = await send_blob(
                giver.protocol, taker.peer_id, BLOB, layer_id=7, on_accept=missing.append
            )
            assert (again.sent_bytes, again.held_bytes) == (0, len(BLOB))
            assert missing == [len(BLOB), 0]
            assert giver.chunks_sent() == NUM_CHUNKS
            assert taker.policy.acknowledged_layers == [7, 7]
            await taker.all_over()

    run(main)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_blobs_of_any_size(size: int) -> None:
    async def main() -> None:
        async with pair() as (giver, taker):
            sent = await send_blob(giver.protocol, taker.peer_id, BLOB[:size])
            assert sent.sent_bytes == size
            assert taker.policy.taken == [(0, BLOB[:size])]
            assert giver.chunks_sent() == num_chunks(size)

    run(main)


def test_the_acknowledgement_waits_until_the_blob_is_usable() -> None:
    async def main() -> None:
        loaded = trio.Event()
        acknowledged = False

        async def send() -> None:
            nonlocal acknowledged
            await send_blob(giver.protocol, taker.peer_id, SMALL)
            assert loaded.is_set()
            acknowledged = True

        async def use() -> None:
            await trio.sleep(0.2)
            assert not acknowledged
            loaded.set()

        async with pair(policy=Policy(use_hook=use)) as (giver, taker):
            await send()
        assert acknowledged

    run(main)


def test_a_blob_that_cannot_be_used() -> None:
    async def main() -> None:
        async def use() -> None:
            raise RequestRefusedError("no use for it", code=ErrorCode.TRANSFER_INVALID)

        async with pair(policy=Policy(use_hook=use)) as (giver, taker):
            with pytest.raises(PeerRefusedError, match="no use for it") as caught:
                await send_blob(giver.protocol, taker.peer_id, SMALL)
            assert caught.value.code == ErrorCode.TRANSFER_INVALID
            await taker.all_over()
            taker.policy.use_hook = None
            await send_blob(giver.protocol, taker.peer_id, SMALL)

    run(main)


def test_a_peer_without_policy_takes_and_gives_nothing() -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with open_host() as host, node() as giver:
                protocol = Protocol(host)
                Transfers(protocol)
                await giver.protocol.host.connect(host.addresses[0])
                with pytest.raises(PeerRefusedError) as caught:
                    await send_blob(giver.protocol, host.peer_id, SMALL)
                assert caught.value.code == ErrorCode.NOT_SUPPORTED
                with pytest.raises(PeerRefusedError) as caught:
                    await giver.transfers.fetch_blob(host.peer_id, id_of(SMALL))
                assert caught.value.code == ErrorCode.BLOB_UNKNOWN

    run(main)


def test_a_peer_of_1_0_0_has_no_transfers() -> None:
    async def main() -> None:
        async with pair(versions=(PROTOCOL_V10,)) as (giver, taker):
            with pytest.raises(PeerUnreachableError, match=r"speaks 1\.0\.0 alone"):
                await send_blob(giver.protocol, taker.peer_id, SMALL)
            with pytest.raises(PeerUnreachableError, match=r"speaks 1\.0\.0 alone"):
                await giver.transfers.fetch_blob(taker.peer_id, id_of(SMALL))

    run(main)
