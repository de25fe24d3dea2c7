"""Peers that fall silent in the middle of a transfer, on either side."""

from __future__ import annotations

import pytest
import trio

from neurogrid.errors import (
    PeerRefusedError,
    ResponseTimeout,
)
from neurogrid.p2p import (
    MessageType,
    Protocol,
    open_host,
)
from neurogrid.p2p.transfer import (
    BytesSource,
    OfferedBlob,
    TransferLimits,
    send_blob,
)
from neurogrid.p2p.wire import (
    ErrorCode,
    decode_bitmap,
)
from tests.e2e.transfers.nodes import (
    BLOB,
    CHUNKS,
    DEADLINE,
    SHORT,
    SMALL,
    Policy,
    id_of,
    offer,
    pair,
    run,
    send_chunk,
)


def test_a_giver_that_falls_silent_is_told_and_may_go_on() -> None:
    async def main() -> None:
        async with pair(limits=SHORT) as (giver, taker):
            request_id, _ = await offer(giver, taker, SMALL)
            with giver.protocol.expect(
                taker.peer_id, MessageType.WEIGHTS_ACK, request_id=request_id
            ) as told:
                await send_chunk(giver, taker, request_id, CHUNKS[1])
                with pytest.raises(PeerRefusedError) as caught:
                    await told.wait(timeout=DEADLINE)
            assert caught.value.code == ErrorCode.DEADLINE_EXCEEDED
            says = "gave up layer 0: 1 of 3 chunks came, and then nothing for 2 s"
            assert caught.value.text == says
            assert taker.policy.given_up == [says]
            await taker.all_over()
            _, accept = await offer(giver, taker, SMALL)
            assert decode_bitmap(accept.have, 3) == {1}

    run(main)


def test_what_nobody_offers_again_is_forgotten() -> None:
    async def main() -> None:
        limits = TransferLimits(silence_timeout=1.0, idle_timeout=0.2)
        async with pair(limits=limits) as (giver, taker):
            request_id, _ = await offer(giver, taker, SMALL)
            await send_chunk(giver, taker, request_id, CHUNKS[1])
            while not taker.policy.given_up:
                await trio.sleep(0.01)
            assert "1 of 3 chunks came" in taker.policy.given_up[0]
            while taker.transfers.idle_bytes:
                await trio.sleep(0.01)
            _, accept = await offer(giver, taker, SMALL)
            assert accept.have == b""

    run(main)


def test_a_taker_that_falls_silent_is_given_up() -> None:
    async def main() -> None:
        silent = trio.Event()
        async with pair(policy=Policy(use_hook=silent.wait)) as (giver, taker):
            with pytest.raises(ResponseTimeout, match=r"acknowledged no blob .* within 0\.3 s"):
                await send_blob(giver.protocol, taker.peer_id, SMALL, ack_timeout=0.3)
            silent.set()

            async def forever(offered: OfferedBlob) -> None:
                await trio.sleep_forever()

            taker.policy.decide_hook = forever
            with pytest.raises(ResponseTimeout):
                await send_blob(giver.protocol, taker.peer_id, BLOB, accept_timeout=0.3)

    run(main)


def test_a_giver_that_does_not_answer_a_request_is_left_for_the_next() -> None:
    async def main() -> None:
        honest = Policy(provided={id_of(SMALL): BytesSource(SMALL)})
        async with pair(policy=honest) as (taker, giver), open_host() as host:
            mute = Protocol(host)
            mute.on_message(MessageType.TRANSFER_REQUEST, lambda message: None)
            await taker.protocol.host.connect(host.addresses[0])
            fetched = await taker.transfers.fetch_blob(
                [host.peer_id, giver.peer_id], id_of(SMALL), offer_timeout=1.0
            )
            assert isinstance(fetched.failures[host.peer_id], ResponseTimeout)
            assert fetched.blob.data == SMALL

    run(main)
