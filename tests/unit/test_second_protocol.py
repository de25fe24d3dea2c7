"""A second protocol beside 1.1.0: three messages with limits and roles of its own, by the same streams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import trio
import trio.testing

from neurogrid.errors import (
    LocalProtocolError,
    PeerRefusedError,
    StreamBrokenError,
    TransportError,
)
from neurogrid.node.roles import authorise
from neurogrid.p2p import Bounds, Identity, MessageType, Protocol, TensorMessage, new_request_id
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.memory import open_memory_network
from neurogrid.p2p.trust import AllowList
from neurogrid.p2p.wire import (
    OF_THE_STREAM,
    Answers,
    ErrorCode,
    MessageCode,
    MessageTable,
    Traits,
    encode_message,
)

TOY = "/toy/1.0.0"
DEADLINE = 30
BULK_BYTES = 1000


@dataclass(frozen=True)
class ToyLimits:
    question: int = 100
    answer: int = 10
    bulk: int = BULK_BYTES


class Toy(MessageCode, limits=ToyLimits()):
    """The same numbers as other messages of 1.1.0, with other traits."""

    ASK = 0x02, Traits("question", is_request=True)
    TELL = 0x01, Traits("answer", answers=Answers.REQUEST)
    BULK = 0x30, Traits("bulk", is_credited=True)


TAKES = {Toy.ASK: frozenset({"trainer"}), Toy.BULK: frozenset({"trainer", "guest"})}


def toy_table(limits: ToyLimits = ToyLimits()) -> MessageTable:
    return MessageTable(TOY, (*Toy, *OF_THE_STREAM), limits)


@dataclass
class Side:
    """A host with both protocols."""

    tensor: Protocol
    toy: Exchange

    @property
    def peer_id(self) -> str:
        return self.toy.host.peer_id


@asynccontextmanager
async def two_sides(role: str, limits: ToyLimits = ToyLimits()) -> AsyncIterator[tuple[Side, Side]]:
    """A peer in a role, and the one that serves it."""
    identity = Identity.generate()
    bounds = Bounds(credit_window=3 * BULK_BYTES)
    async with (
        open_memory_network() as network,
        network.open_host(identity=identity) as near,
        network.open_host(admission=AllowList({identity.peer_id: role})) as far,
    ):
        ours = Side(Protocol(near), Exchange(near, toy_table()))
        theirs = Side(Protocol(far), Exchange(far, toy_table(limits), bounds=bounds))
        authorise(theirs.toy, TAKES)
        await near.connect(far.addresses[0])
        yield ours, theirs


@asynccontextmanager
async def both_protocols(
    *, role: str = "trainer", limits: ToyLimits = ToyLimits()
) -> AsyncIterator[tuple[Side, Side]]:
    with trio.fail_after(DEADLINE):
        async with two_sides(role, limits) as (ours, theirs):
            theirs.tensor.on_activation_received(lambda message: bytes(message.data) * 2)
            yield ours, theirs
            # Whatever became of the one protocol, the other goes on.
            answer = await ours.tensor.request_activation(
                theirs.peer_id, 1, 0, b"ab", timeout=DEADLINE
            )
            assert bytes(answer.data) == b"abab"


async def ask(ours: Side, theirs: Side, question: bytes = b"?") -> TensorMessage:
    message = TensorMessage(Toy.ASK, request_id=new_request_id(), data=question)
    return await ours.toy.request(theirs.peer_id, message, Toy.TELL, timeout=DEADLINE)


def serve_answers(side: Side) -> None:
    async def tell(message: TensorMessage) -> None:
        assert message.msg_type is Toy.ASK
        answer = TensorMessage(Toy.TELL, request_id=message.request_id, data=b"!")
        await side.toy.send(message.from_peer or "", answer)

    side.toy.on_message(Toy.ASK, tell)


async def test_a_request_is_answered() -> None:
    async with both_protocols() as (ours, theirs):
        serve_answers(theirs)
        answer = await ask(ours, theirs)
        assert (answer.msg_type, bytes(answer.data)) == (Toy.TELL, b"!")
        assert answer.msg_type is Toy.TELL
        assert await ours.toy.open(theirs.peer_id) == TOY
        assert ours.toy.counters.snapshot()[theirs.peer_id]["sent"]["ask"].num_messages == 1
        with pytest.raises(LocalProtocolError, match="ASK needs a request id"):
            await ours.toy.send(theirs.peer_id, TensorMessage(Toy.ASK))
        with pytest.raises(LocalProtocolError, match="without a type"):
            await ours.toy.send(theirs.peer_id, TensorMessage(None))


async def test_a_stream_that_comes_after_the_end_of_an_exchange_is_for_nobody() -> None:
    """It was on its way: by the handler that it was given, it comes to the one that has ended."""
    async with both_protocols() as (ours, theirs):
        host, ended = theirs.toy.host, theirs.toy
        await ended.aclose()
        host.set_stream_handler(TOY, ended._serve_stream)
        with pytest.raises(TransportError):
            await ours.toy.open(theirs.peer_id)
        await trio.testing.wait_all_tasks_blocked()
        host.remove_stream_handler(TOY)
        theirs.toy = Exchange(host, toy_table())
        serve_answers(theirs)
        assert bytes((await ask(ours, theirs)).data) == b"!"


async def test_a_request_that_is_under_way_ends_with_its_exchange() -> None:
    """Nobody would bring its answer: not when its time is over is that said, which may be long."""
    async with both_protocols() as (ours, theirs):
        asked = trio.Event()

        async def think(message: TensorMessage) -> None:
            asked.set()
            await trio.sleep_forever()

        async def close() -> None:
            await asked.wait()
            await ours.toy.aclose()

        theirs.toy.on_message(Toy.ASK, think)
        message = TensorMessage(Toy.ASK, request_id=new_request_id(), data=b"?")
        with trio.fail_after(DEADLINE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(close)
                with pytest.raises(StreamBrokenError, match="closed here"):
                    await ours.toy.request(theirs.peer_id, message, Toy.TELL, timeout=3600)


async def test_credit_holds_a_flood_back() -> None:
    async with both_protocols() as (ours, theirs):
        num_begun, served = 0, trio.Event()

        async def take(message: TensorMessage) -> None:
            nonlocal num_begun
            num_begun += 1
            await served.wait()

        theirs.toy.on_message(Toy.BULK, take)
        serve_answers(theirs)
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                message = TensorMessage(Toy.BULK, data=bytes(BULK_BYTES))
                nursery.start_soon(ours.toy.send, theirs.peer_id, message)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert num_begun == 3
            await ask(ours, theirs)  # needs no credit
            served.set()
        while num_begun < 10:
            await trio.testing.wait_all_tasks_blocked()


async def test_a_message_above_its_limit_is_refused() -> None:
    async with both_protocols(limits=ToyLimits(question=20)) as (ours, theirs):
        serve_answers(theirs)
        await ask(ours, theirs, bytes(20))
        with pytest.raises(PeerRefusedError, match="an ask message announces 21 bytes") as refused:
            await ask(ours, theirs, bytes(21))
        assert refused.value.code == ErrorCode.LIMIT_EXCEEDED
        with pytest.raises(LocalProtocolError, match="the limit is 100"):
            await ask(ours, theirs, bytes(101))


async def test_a_code_of_another_protocol_is_refused() -> None:
    async with both_protocols() as (ours, theirs):
        await ours.toy.open(theirs.peer_id)
        foreign = TensorMessage(MessageType.WEIGHTS_ACK)
        with ours.toy.expect(theirs.peer_id, Toy.TELL, request_id=1) as waiter:
            await ours.toy._streams[theirs.peer_id]._stream.send_all(encode_message(foreign))
            with pytest.raises(PeerRefusedError, match="0x04 is no message type here") as refused:
                await waiter.wait(timeout=DEADLINE)
        assert refused.value.code == ErrorCode.PROTOCOL_VIOLATION


async def test_a_role_may_send_what_its_table_says() -> None:
    async with both_protocols(role="guest") as (ours, theirs):
        serve_answers(theirs)
        taken = trio.Event()
        theirs.toy.on_message(Toy.BULK, lambda message: taken.set())
        with pytest.raises(
            PeerRefusedError, match=r"ASK is taken from trainer, .* is a guest"
        ) as e:
            await ask(ours, theirs)
        assert e.value.code == ErrorCode.UNAUTHORIZED
        await ours.toy.send(theirs.peer_id, TensorMessage(Toy.BULK, data=b"x"))
        await taken.wait()


def test_no_two_messages_have_one_number() -> None:
    with pytest.raises(ValueError, match=r"two messages of /toy/1\.0\.0 have one number"):
        MessageTable(TOY, (*Toy, MessageType.ACTIVATION), ToyLimits())


async def test_a_host_has_one_exchange_for_each_protocol() -> None:
    async with open_memory_network() as network, network.open_host() as host:
        Exchange(host, toy_table())
        with pytest.raises(LocalProtocolError, match=TOY):
            Exchange(host, toy_table())
