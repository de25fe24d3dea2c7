"""Credit, from both ends at once: never exceeded, never lost, never stuck while something is to be had."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from neurogrid.errors import LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.streams.credit import GrantedCredit, ReceivedCredit
from neurogrid.p2p.wire import Credit, ErrorCode

MAX_U64 = 2**64 - 1


def test_the_last_message_may_overdraw() -> None:
    credit = ReceivedCredit()
    credit.grant(100)
    credit.begin(99)
    credit.begin(10_000)
    assert not credit.is_available
    with pytest.raises(LocalProtocolError):
        credit.begin(0)


def test_nothing_may_be_begun_before_a_grant() -> None:
    assert not ReceivedCredit().is_available


def test_the_example_of_the_specification() -> None:
    sender, receiver = ReceivedCredit(), GrantedCredit(100)
    sender.grant(100)
    for _ in range(2):
        sender.begin(60)
        assert receiver.arrived(60) is None
    assert not sender.is_available
    granted = receiver.served(60)
    assert granted == Credit(160)
    sender.grant(granted.max_total)
    assert sender.is_available


def test_a_message_without_credit_is_a_violation() -> None:
    receiver = GrantedCredit(100)
    receiver.arrived(100)
    with pytest.raises(RemoteProtocolError) as caught:
        receiver.arrived(0)
    assert caught.value.code == ErrorCode.LIMIT_EXCEEDED


def test_credit_that_shrinks_is_a_violation() -> None:
    sender = ReceivedCredit()
    sender.grant(100)
    sender.grant(100)
    with pytest.raises(RemoteProtocolError) as caught:
        sender.grant(99)
    assert caught.value.code == ErrorCode.PROTOCOL_VIOLATION


def test_everything_may_be_granted() -> None:
    sender = ReceivedCredit()
    sender.grant(MAX_U64)
    sender.begin(2**63)
    assert sender.is_available


def test_what_was_not_sent_is_taken_back() -> None:
    sender = ReceivedCredit()
    sender.grant(100)
    sender.begin(100)
    sender.take_back(100)
    assert sender.is_available


def test_a_peer_that_has_some_left_is_granted_half_a_window_at_once() -> None:
    receiver = GrantedCredit(100)
    for _ in range(4):
        assert receiver.arrived(20) is None
    assert receiver.served(20) is None
    assert receiver.served(20) is None
    assert receiver.served(20) == Credit(160)


@pytest.mark.parametrize("order", ["served last", "arrived last"])
def test_a_peer_that_has_none_left_is_granted_what_there_is(order: str) -> None:
    """What is still served may wait for what the peer would send."""
    receiver = GrantedCredit(100)
    receiver.arrived(10)
    if order == "served last":
        receiver.arrived(90)
        assert receiver.served(10) == Credit(110)
    else:
        assert receiver.served(10) is None
        assert receiver.arrived(90) == Credit(110)


@given(st.integers(0, 10), st.lists(st.integers(0, 20)))
def test_a_window_of_nothing_or_little_never_stalls_for_ever(window: int, sizes: list[int]) -> None:
    sender, receiver = ReceivedCredit(), GrantedCredit(window)
    sender.grant(window)
    for size in sizes:
        if not window:
            assert not sender.is_available
            return
        sender.begin(size)
        granted = [receiver.arrived(size), receiver.served(size)]
        for credit in granted:
            if credit is not None:
                sender.grant(credit.max_total)
        assert sender.is_available


class BothEnds(RuleBasedStateMachine):
    """A sender and a receiver with a wire between them that delays both directions."""

    WINDOW = 50

    def __init__(self) -> None:
        super().__init__()
        self.sender = ReceivedCredit()
        self.receiver = GrantedCredit(self.WINDOW)
        self.sender.grant(self.WINDOW)
        self.messages: deque[int] = deque()
        self.credits: deque[Credit] = deque()
        self.serving: list[int] = []

    def tell(self, credit: Credit | None) -> None:
        if credit is not None:
            self.credits.append(credit)

    @precondition(lambda self: self.sender.is_available)
    @rule(num_bytes=st.integers(0, 120), is_cancelled=st.booleans())
    def send(self, num_bytes: int, is_cancelled: bool) -> None:
        self.sender.begin(num_bytes)
        if is_cancelled:
            self.sender.take_back(num_bytes)
        else:
            self.messages.append(num_bytes)

    @precondition(lambda self: self.messages)
    @rule()
    def arrive(self) -> None:
        num_bytes = self.messages.popleft()
        self.tell(self.receiver.arrived(num_bytes))  # never a violation
        self.serving.append(num_bytes)

    @precondition(lambda self: self.serving)
    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.serving) - 1))
        self.tell(self.receiver.served(self.serving.pop(at)))

    @precondition(lambda self: self.credits)
    @rule()
    def grant(self) -> None:
        self.sender.grant(self.credits.popleft().max_total)  # never shrinks

    @invariant()
    def at_most_a_window_and_a_message_is_in_memory(self) -> None:
        assert self.receiver.outstanding_bytes == sum(self.serving)
        assert sum(self.serving) + sum(self.messages) < self.WINDOW + 120

    @invariant()
    def never_stuck_with_something_to_be_had(self) -> None:
        idle = not self.messages and not self.credits
        if idle and sum(self.serving) < self.WINDOW:
            assert self.sender.is_available


TestBothEnds = BothEnds.TestCase
