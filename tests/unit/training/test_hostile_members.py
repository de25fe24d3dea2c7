"""A member that keeps to no rule: what it sends is refused or ignored, and the others go on.

Not held off without signatures, and so not asked here: a member that says it leads in a greater term is followed until
it is silent for a grace; what it then calls decided is believed, also that others are members no more; a reducer's
aggregate of its part is believed; and vectors and weights are anybody's own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import trio

from neurogrid.errors import NeuroGridError
from neurogrid.p2p.wire import TensorMessage
from neurogrid.training.averaging.groups.messenger import CODES
from neurogrid.training.wire import (
    Candidate,
    Decision,
    DecisionPayload,
    Join,
    Lead,
    Leave,
    Promise,
    Status,
    TrainingMessage,
)
from tests.unit.training.test_groups import LAYOUT, SIZE, TIMEOUT, Peer, Peers, a_group, vectors

MAX_U64 = 2**64 - 1


@asynccontextmanager
async def scene(*, way: str = "butterfly") -> AsyncIterator[tuple[Peers, Peer]]:
    """Three that keep to the rules, and one more, the last to join."""
    async with a_group(4, way=way, attempt_timeout=2.0, chunk_elements=128) as peers:
        await peers.average(vectors(4))
        yield peers, peers.all.pop()


async def go_on(peers: Peers, *, without: Peer | None = None) -> None:
    """The others average, twice, and agree."""
    for round_ in (5, 6):
        given = vectors(len(peers.all), round_)
        outcomes = await peers.average(given)
        for outcome in outcomes:
            assert torch.equal(outcome.values, outcomes[0].values)
            assert outcome.has_contributed
            if without is not None:
                assert without.group.peer_id not in outcome.contributors
                torch.testing.assert_close(outcome.values, sum(given) / len(given))


async def send(hostile: Peer, to: Peer, message: Any) -> None:
    """Send something that no machine has said; a stream that was closed for it is opened again."""
    await send_raw(hostile, to, TensorMessage(CODES[type(message)], data=message.encode()))


async def send_raw(hostile: Peer, to: Peer, message: TensorMessage) -> None:
    exchange = hostile.group._exchange
    try:
        await exchange.open(to.group.peer_id)
        await exchange.send(to.group.peer_id, message)
    except NeuroGridError:
        await trio.sleep(0.01)


async def send_all(hostile: Peer, peers: Peers, make: Callable[[Peer], Any]) -> None:
    for _ in range(3):
        for peer in peers.all:
            await send(hostile, peer, make(peer))
        await trio.sleep(0.05)


async def contribute(hostile: Peer) -> None:
    """Until it is thrown out."""
    while True:
        try:
            await hostile.group.average(torch.full((SIZE,), 7.0), timeout=TIMEOUT)
        except NeuroGridError:
            return


async def test_one_that_says_nothing_is_not_waited_for() -> None:
    async with scene() as (peers, hostile):
        hostile.group._messenger.post = lambda *_: None  # type: ignore[method-assign]
        await go_on(peers, without=hostile)


async def test_one_that_promises_a_vector_and_sends_none() -> None:
    async with scene() as (peers, hostile), trio.open_nursery() as nursery:

        async def reduce(*_: object, **__: object) -> None:
            await trio.sleep_forever()

        hostile.group._reductions.reduce = reduce  # type: ignore[method-assign, assignment]
        nursery.start_soon(contribute, hostile)
        await go_on(peers, without=hostile)
        nursery.cancel_scope.cancel()


def nan(data: bytes) -> bytes:
    return torch.full((len(data) // 4,), float("nan")).numpy().tobytes()


WRONG: dict[str, Callable[[bytes], bytes]] = {
    "short": lambda data: data[:-4],
    "long": lambda data: data + bytes(4),
    "empty": lambda data: b"",
    "not finite": nan,
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_wrong_bytes_cost_their_sender_the_round(wrong: str) -> None:
    async with scene() as (peers, hostile), trio.open_nursery() as nursery:
        exchange = hostile.group._exchange
        honest = exchange._send_to

        async def tamper(peer_id: str, message: TensorMessage, *more: Any) -> None:
            if message.msg_type is TrainingMessage.CHUNK:
                message = TensorMessage(
                    TrainingMessage.CHUNK,
                    message.layer_id,
                    message.seq_id,
                    message.request_id,
                    WRONG[wrong](bytes(message.data)),
                )
            await honest(peer_id, message, *more)

        exchange._send_to = tamper  # type: ignore[method-assign]
        exchange.send_nowait = lambda *_: False  # type: ignore[method-assign]
        nursery.start_soon(contribute, hostile)
        await go_on(peers, without=hostile)
        nursery.cancel_scope.cancel()


async def test_chunks_of_reductions_that_there_are_not() -> None:
    async with scene() as (peers, hostile), trio.open_nursery() as nursery:
        hostile.group._messenger.post = lambda *_: None  # type: ignore[method-assign]
        for peer in peers.all:
            for number in range(1, 40):
                message = TensorMessage(TrainingMessage.CHUNK, 0, number, number, bytes(4 * SIZE))
                nursery.start_soon(send_raw, hostile, peer, message)
        await trio.sleep(0.2)
        await go_on(peers, without=hostile)
        nursery.cancel_scope.cancel()


async def test_another_digest_than_that_of_the_others() -> None:
    async with scene() as (peers, hostile), trio.open_nursery() as nursery:
        messenger = hostile.group._messenger
        honest = messenger.post

        def post(peer_id: str, message: Any) -> None:
            if isinstance(message, Status) and message.accepted_attempt:
                message = replace(message, accepted=bytes(range(32)))
            honest(peer_id, message)

        messenger.post = post  # type: ignore[method-assign]
        nursery.start_soon(contribute, hostile)
        await go_on(peers, without=hostile)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("kind", [Status, Candidate, Promise, Lead])
async def test_terms_cannot_be_used_up(kind: type) -> None:
    """And the group finds another leader when it wants one."""
    async with scene() as (peers, hostile):
        me = hostile.group._machine.me.incarnation
        for term in (MAX_U64, MAX_U64 - 1, 2**63):
            made = {
                Status: Status(me, term, 1),
                Candidate: Candidate(me, term, 1),
                Promise: Promise(me, term, 1),
                Lead: Lead(term, 1),
            }[kind]
            await send_all(hostile, peers, lambda _, made=made: made)  # type: ignore[misc]
        assert all(peer.group._machine.term < 2**40 for peer in peers.all)
        assert all(peer.group._machine._greatest_term < 2**40 for peer in peers.all)
        hostile.kill()
        while any(len(peer.group.members) > len(peers.all) for peer in peers.all):
            await go_on(peers)
        peers.all.pop(0).kill()
        await go_on(peers)


async def test_leading_without_being_the_leader() -> None:
    """In the term of another it is ignored; in a greater one it is followed until it is silent for a grace."""
    async with scene() as (peers, hostile):
        machine = hostile.group._machine
        hostile.group._messenger.post = lambda *_: None  # type: ignore[method-assign]
        await send_all(hostile, peers, lambda _: Lead(machine.term, machine.index))
        assert all(p.group.leader == peers.all[0].group.peer_id for p in peers.all)
        await send_all(hostile, peers, lambda _: Lead(machine.term + 1, machine.index))
        await go_on(peers, without=hostile)


def forged(hostile: Peer) -> list[Decision]:
    """Decisions that cannot be the next."""
    last = hostile.group._machine.last
    round_ = replace(
        last,
        index=last.index + 1,
        round=last.round + 1,
        contributors=last.peers,
        weights=(1.0,) * len(last.peers),
        digest=bytes(32),
        num_elements=SIZE,
        chunk_elements=4096,
        codec="f32",
        holders=(hostile.group.peer_id,),
    )
    return [
        replace(round_, round=last.round + 7),
        replace(round_, digest=b""),
        replace(round_, num_elements=2**62),
        replace(round_, chunk_elements=1),
        replace(round_, codec="int4"),
        replace(round_, index=last.index + 9),
    ]


@pytest.mark.parametrize("kind", [Lead, Candidate])
async def test_decisions_that_cannot_be_are_not_learnt(kind: type) -> None:
    async with scene() as (peers, hostile):
        hostile.group._messenger.post = lambda *_: None  # type: ignore[method-assign]
        machine = hostile.group._machine
        index = machine.index
        sound = machine.last.members
        encoded = [decision.encode(sound) for decision in forged(hostile)]
        payload = DecisionPayload.decode(encoded[0])
        nowhere = len(sound)
        for odd in (
            replace(payload, contributors=(nowhere,), weights=(1.0,)),
            replace(payload, holders=(nowhere,)),
            replace(payload, gone=tuple(range(nowhere))),
            replace(payload, gone=(nowhere,)),
            replace(payload, joined=sound[:1][0][:1], incarnations=(9,)),
        ):
            encoded.append(odd.encode())
        for each in encoded:
            told, said = (each,), DecisionPayload.decode(each).index
            made = (
                Lead(machine.term, said, told)
                if kind is Lead
                else Candidate(machine.me.incarnation, machine.term, said, told)
            )
            for peer in peers.all:
                await send(hostile, peer, made)
        await trio.sleep(0.1)
        assert all(peer.group._machine.last.index == index for peer in peers.all)
        await go_on(peers, without=hostile)


async def test_promises_for_nothing_and_leaving_for_others() -> None:
    async with scene() as (peers, hostile):
        hostile.group._messenger.post = lambda *_: None  # type: ignore[method-assign]
        machine = hostile.group._machine
        others = [peer.group._machine.me.incarnation for peer in peers.all]
        for incarnation in others:
            await send_all(hostile, peers, lambda _: Promise(machine.me.incarnation, 1, 1))
            await send_all(hostile, peers, lambda _, i=incarnation: Leave(i))  # type: ignore[misc]
        assert all(len(peer.group.members) >= 3 for peer in peers.all)
        await go_on(peers, without=hostile)


async def test_a_flood_of_joins() -> None:
    async with scene() as (peers, hostile), trio.open_nursery() as nursery:
        exchange = hostile.group._exchange
        leader = peers.all[0].group

        async def join(number: int) -> None:
            request = Join(number, LAYOUT.digest, SIZE, ("/ip4/127.0.0.1/tcp/1",) * 16)
            message = TensorMessage(
                TrainingMessage.JOIN, request_id=number + 1, data=request.encode()
            )
            try:
                await exchange.request(leader.peer_id, message, TrainingMessage.JOINED, timeout=2.0)
            except NeuroGridError:
                return

        for number in range(300):
            nursery.start_soon(join, number)
        await trio.sleep(0.3)
        assert len(leader._joining) <= 1
        await go_on(peers)
        nursery.cancel_scope.cancel()


async def test_a_host_may_join_again() -> None:
    async with a_group(2) as peers:
        await peers.average(vectors(2))
        again = peers.all[1]
        await again.group.leave()
        again.scope.cancel()
        host = again.host
        assert host is not None
        del peers.all[1]
        await peers.add()
        await peers.average(vectors(2))


@pytest.mark.parametrize("how", ["short", "not finite"])
async def test_wrong_means_cost_their_sender_its_part(how: str) -> None:
    """Nobody takes them over, and the others reduce in its place; its vector counts, as it is right."""
    async with a_group(4, attempt_timeout=2.0, chunk_elements=128) as peers:
        await peers.average(vectors(4))
        exchange = peers.all[3].group._exchange
        send, send_nowait = exchange.send, exchange.send_nowait
        num_wrong = 0

        async def send_wrong(peer_id: str, message: TensorMessage, *more: Any) -> None:
            nonlocal num_wrong
            if message.msg_type is TrainingMessage.MEAN:
                num_wrong += 1
                right = bytes(message.data)
                wrong = right[:-4] if how == "short" else b"\xff" * len(right)
                message = replace(message, data=wrong)
            await send(peer_id, message, *more)

        def send_others(peer_id: str, message: TensorMessage) -> bool:
            return message.msg_type is not TrainingMessage.MEAN and send_nowait(peer_id, message)

        exchange.send, exchange.send_nowait = send_wrong, send_others  # type: ignore[method-assign]
        for round_ in (2, 3):
            given = vectors(4, round_)
            for outcome in await peers.average(given):
                torch.testing.assert_close(outcome.values, sum(given) / 4)
        assert num_wrong
