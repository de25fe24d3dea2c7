"""Requests that wait for answers: the right peer, type and id resolve them, and nothing else does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import LocalProtocolError, ResponseTimeout, StreamBrokenError
from neurogrid.p2p.exchange.pending import MAX_GONE_PEERS, PendingRequests
from neurogrid.p2p.streams.bounds import Bounds
from neurogrid.p2p.wire import MessageType, TensorMessage

pytestmark = pytest.mark.usefixtures("autojump_clock")

RESPONSE, ACK, STATUS = (
    MessageType.RESPONSE,
    MessageType.WEIGHTS_ACK,
    MessageType.LAYER_STATUS,
)


def run(test: Callable[[], Awaitable[None]]) -> None:
    trio.run(test, clock=trio.testing.MockClock(autojump_threshold=0))


def answer(
    peer_id: str,
    msg_type: MessageType,
    request_id: int = 0,
    *,
    layer_id: int = 0,
    data: bytes = b"",
) -> TensorMessage:
    return TensorMessage(
        msg_type=msg_type,
        request_id=request_id,
        layer_id=layer_id,
        data=data,
        from_peer=peer_id,
    )


ANSWERS = st.tuples(
    st.sampled_from(["a", "b"]), st.sampled_from([RESPONSE, ACK, STATUS]), st.integers(1, 3)
)


@given(st.lists(ANSWERS, unique=True), st.lists(ANSWERS))
def test_only_the_right_answer_resolves_and_the_first_counts(
    expected: list[tuple[str, MessageType, int]], arriving: list[tuple[str, MessageType, int]]
) -> None:
    pending = PendingRequests()

    async def test() -> None:
        waiters = {key: pending.expect(*key) for key in expected}
        opened = {key: manager.__enter__() for key, manager in waiters.items()}
        seen: dict[tuple[str, MessageType, int], bytes] = {}
        for number, (peer_id, msg_type, request_id) in enumerate(arriving):
            key = (peer_id, msg_type, request_id)
            data = bytes([number % 256])
            is_first = key in opened and key not in seen
            assert pending.resolve(answer(*key, data=data)) is is_first
            if is_first:
                seen[key] = data
        for key, waiter in opened.items():
            assert waiter.is_done is (key in seen)
            if key in seen:
                assert (await waiter.wait(timeout=0)).data == seen[key]
            waiters[key].__exit__(None, None, None)
        assert len(pending) == 0
        assert not pending._peers

    run(test)


def test_traced_answers_count_as_untraced() -> None:
    pending = PendingRequests()
    with pending.expect("a", RESPONSE, 7) as waiter:
        assert pending.resolve(answer("a", MessageType.TRACED_RESPONSE, 7))
        assert waiter.is_done


def test_answers_without_a_request_id() -> None:
    pending = PendingRequests()
    with (
        pending.expect("a", ACK, 5) as ack,
        pending.expect("a", STATUS, 99) as oldest,
        pending.expect("a", STATUS, 98) as youngest,
        pending.expect("a", RESPONSE, 97) as response,
    ):
        # An acknowledgement is known by its layer, a status by its peer; a response by nothing but its id.
        assert not pending.resolve(answer("a", ACK, layer_id=6))
        assert pending.resolve(answer("a", ACK, layer_id=5))
        assert pending.resolve(answer("a", STATUS))
        assert not pending.resolve(answer("a", RESPONSE))
        assert (ack.is_done, oldest.is_done, youngest.is_done) == (True, True, False)
        assert not response.is_done
        assert not pending.resolve(answer("b", STATUS))


async def test_no_answer_in_time() -> None:
    pending = PendingRequests()
    with pending.expect("a", RESPONSE, 1) as waiter, pytest.raises(ResponseTimeout):
        await waiter.wait(timeout=5)
    # Too late: nobody is there any more.
    assert not pending.resolve(answer("a", RESPONSE, 1))
    assert not pending.keep(answer("a", RESPONSE, 1))


def test_an_error_fails_one_request_or_all_of_a_peer() -> None:
    pending = PendingRequests()
    error = StreamBrokenError("gone")
    with (
        pending.expect("a", RESPONSE, 1) as first,
        pending.expect("a", ACK, 2) as second,
        pending.expect("b", RESPONSE, 1) as other,
    ):
        assert pending.fail("a", error, correlation=1)
        assert (first.is_done, second.is_done, other.is_done) == (True, False, False)
        assert not pending.fail("a", error, correlation=1)
        assert pending.fail("a", error)
        assert (second.is_done, other.is_done) == (True, False)
        assert not pending.fail("a", error)
        assert not pending.fail("nobody", error)


def test_as_many_as_may_be() -> None:
    pending = PendingRequests(Bounds(max_pending_per_peer=2, max_pending=3))
    with (
        pending.expect("a", RESPONSE, 1),
        pending.expect("a", RESPONSE, 2),
        pending.expect("b", RESPONSE, 1),
    ):
        for peer_id in ("a", "b", "c"):
            with pytest.raises(LocalProtocolError), pending.expect(peer_id, RESPONSE, 3):
                pass
        assert len(pending) == 3
    assert len(pending) == 0
    assert not pending._peers


async def test_an_announced_answer_is_kept_and_no_other() -> None:
    pending = PendingRequests()
    pending.announce("a", RESPONSE, 1)
    assert not pending.keep(answer("a", RESPONSE, 2))
    assert not pending.keep(answer("b", RESPONSE, 1))
    assert pending.keep(answer("a", RESPONSE, 1, data=b"first"))
    assert not pending.keep(answer("a", RESPONSE, 1, data=b"second"))
    with pending.expect("a", RESPONSE, 1) as waiter:
        assert (await waiter.wait(timeout=0)).data == b"first"
    assert not pending._peers


def test_what_is_kept_is_bounded_by_number() -> None:
    pending = PendingRequests(Bounds(max_pending_per_peer=3))
    for request_id in range(5):
        pending.announce("a", RESPONSE, request_id)
    assert [pending.keep(answer("a", RESPONSE, i)) for i in range(5)] == [False] * 2 + [True] * 3


def test_what_is_kept_is_bounded_by_bytes_and_what_is_still_to_come_stays() -> None:
    pending = PendingRequests(Bounds(max_early_bytes_per_peer=100))
    for request_id in range(4):
        pending.announce("a", RESPONSE, request_id)
    for request_id in (1, 2, 3):
        assert pending.keep(answer("a", RESPONSE, request_id, data=bytes(60)))
    # The latest is there, those before it are not, and the one that has cost nothing may still come.
    outcomes = []
    for request_id in range(4):
        with pending.expect("a", RESPONSE, request_id) as waiter:
            outcomes.append(waiter.num_bytes)
    assert outcomes == [0, 0, 0, 60]
    pending.announce("a", RESPONSE, 9)
    assert pending.keep(answer("a", RESPONSE, 9, data=bytes(1000)))


def test_what_could_not_be_asked_is_taken_back() -> None:
    pending = PendingRequests()
    pending.announce("a", RESPONSE, 1)
    pending.take_back("a", RESPONSE, 2)
    assert pending._peers
    pending.take_back("a", RESPONSE, 1)
    pending.take_back("nobody", RESPONSE, 1)
    assert not pending._peers


def test_what_peers_left_that_are_gone_is_bounded() -> None:
    pending = PendingRequests()
    peers = [f"peer {number}" for number in range(10 * MAX_GONE_PEERS)]
    for peer_id in peers:
        pending.announce(peer_id, RESPONSE, 1)
        pending.fail(peer_id, StreamBrokenError("gone"))
        pending.forget(peer_id)
        pending.forget(peer_id)
    assert set(pending._peers) == set(peers[-MAX_GONE_PEERS:]) == set(pending._gone)
    for peer_id in peers:
        with pending.expect(peer_id, RESPONSE, 1):
            pass
    assert not pending._peers
    assert not pending._gone


def test_a_peer_that_came_back_is_not_forgotten_with_those_that_went() -> None:
    pending = PendingRequests()
    pending.announce("back", RESPONSE, 1)
    pending.forget("back")
    pending.announce("back", RESPONSE, 2)
    for number in range(2 * MAX_GONE_PEERS):
        pending.announce(f"peer {number}", RESPONSE, 1)
        pending.forget(f"peer {number}")
    assert pending.keep(answer("back", RESPONSE, 2))


async def test_an_error_of_any_ends_what_goes_through_several() -> None:
    pending = PendingRequests()
    lost = StreamBrokenError("gone")
    with pending.expect_through(["a", "b", "c"], RESPONSE, 7) as waiter:
        assert not pending.resolve(answer("a", RESPONSE, 7))  # it is the last that answers
        assert not pending.resolve(answer("b", RESPONSE, 7))
        assert pending.resolve(answer("c", RESPONSE, 7))
        assert pending.fail("a", lost)  # too late
        assert (await waiter.wait(timeout=1)).from_peer == "c"
        assert waiter.ended_by == "c"
    for correlation in (7, None):
        with pending.expect_through(["a", "b", "c"], RESPONSE, 7) as waiter:
            assert not pending.fail("b", lost, correlation=8)
            assert pending.fail("b", lost, correlation=correlation)
            with pytest.raises(StreamBrokenError):
                await waiter.wait(timeout=1)
            assert waiter.ended_by == "b"
    assert len(pending) == 0
    assert not pending._peers
