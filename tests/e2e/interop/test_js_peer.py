"""js-libp2p speaks `/neurogrid/tensor/1.0.0` with us, over Noise and over TLS."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import trio
import trio.testing

from neurogrid.p2p import MessageType, TensorMessage
from neurogrid.p2p.wire import encode_message
from tests.e2e.interop.foreign_peer import ForeignProcess
from tests.e2e.interop.golden import GOLDEN
from tests.e2e.interop.js_peer import start_js_peer
from tests.e2e.interop.suite import BOTH_VERSIONS, DEADLINE, PeerSuite, Way, run


class TestJsPeer(PeerSuite):
    confirms = True

    def start_peer(self, security: str) -> AbstractContextManager[ForeignProcess]:
        return start_js_peer(security)

    def test_our_end_comes_when_the_message_is_dealt_with(self, way: Way) -> None:
        async def scenario() -> None:
            happened: list[str] = []
            handled = trio.Event()

            async def deal_with(message: TensorMessage) -> None:
                handled.set()
                await trio.testing.wait_all_tasks_blocked(0.05)
                happened.append("dealt with")

            async with self.meet(*way) as meeting:
                meeting.protocol.on_message(MessageType.ACTIVATION, deal_with)
                await meeting.send_from_there(GOLDEN["activation"].encoded)
                happened.append("end")
                assert handled.is_set()
                assert happened == ["dealt with", "end"]

        run(scenario)

    def test_a_request_is_answered_on_a_stream_of_theirs(self, way: Way) -> None:
        async def scenario() -> None:
            question = GOLDEN["activation"].message
            answer = replace(question, msg_type=MessageType.RESPONSE, data=b"\xbb\xaa")

            async with self.meet(*way, BOTH_VERSIONS) as meeting:

                async def answer_there() -> None:
                    stream = await meeting.next_message_stream()
                    assert await stream.receive_until_end() == GOLDEN["activation"].encoded
                    await stream.aclose()
                    await meeting.send_from_there(encode_message(answer), num_messages=0)

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(answer_there)
                    response = await meeting.protocol.request(
                        meeting.peer.peer_id, question, MessageType.RESPONSE, timeout=DEADLINE
                    )
                assert bytes(response.data) == b"\xbb\xaa"
                assert response.request_id == 12345
                assert response.from_peer == meeting.peer.peer_id

        run(scenario)
