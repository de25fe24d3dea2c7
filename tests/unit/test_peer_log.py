"""What peers make a host write into its log is bounded, and what is left out is counted."""

from __future__ import annotations

import logging

import pytest
import trio

from neurogrid.p2p import MessageType, Protocol, TensorMessage
from neurogrid.p2p.peer_log import MAX_LINES, MAX_REMEMBERED, WINDOW, PeerLog
from neurogrid.p2p.wire import PROTOCOL_V11, ErrorCode, ErrorPayload, Hello, encode_message
from tests.unit.blocking_pair import DEADLINE, open_two

logger = logging.getLogger("neurogrid.test_peer_log")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_so_many_lines_and_then_a_count(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = PeerLog(logger, clock)
    for number in range(1025):
        log.log(logging.WARNING, "alice", "alice reports: %d", number)
    log.log(logging.WARNING, "bob", "bob reports: too")
    assert len(caplog.records) == MAX_LINES + 1
    clock.now += WINDOW
    log.log(logging.WARNING, "alice", "alice reports: %s", "again")
    count, again = (record.getMessage() for record in caplog.records[-2:])
    assert count == f"and {1025 - MAX_LINES} more such lines about alice"
    assert again == "alice reports: again"


def test_a_peer_that_goes_is_counted_and_gets_no_more(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    log = PeerLog(logger, clock)
    for _ in range(10):
        for _ in range(MAX_LINES):
            log.log(logging.WARNING, "alice", "a line")
        log.forget("alice")
    assert len(caplog.records) == MAX_LINES + 9
    assert caplog.records[-1].getMessage() == f"and {MAX_LINES} more such lines about alice"
    log.forget("nobody")


def test_lines_for_those_who_ask_for_them_are_not_counted(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    log = PeerLog(logger, clock)
    with caplog.at_level(logging.DEBUG, logger.name):
        for _ in range(3 * MAX_LINES):
            log.log(logging.DEBUG, "alice", "a detail")
        log.log(logging.WARNING, "alice", "a line")
    assert len(caplog.records) == 3 * MAX_LINES + 1


def test_not_every_peer_is_remembered(clock: Clock) -> None:
    log = PeerLog(logger, clock)
    for number in range(2 * MAX_REMEMBERED):
        log.log(logging.INFO, f"peer {number}", "a line")
    assert len(log._windows) == MAX_REMEMBERED


async def test_a_peer_that_sends_1025_errors(caplog: pytest.LogCaptureFixture) -> None:
    hello = Hello("peer", "test", (PROTOCOL_V11,), 2**20, 2**20)
    error = ErrorPayload(ErrorCode.SESSION_LIMIT, "no room").encode()
    with trio.fail_after(DEADLINE):
        async with open_two() as (client, server):
            Protocol(server)
            await client.connect(server.addresses[0])
            stream = await client.open_stream(server.peer_id, [PROTOCOL_V11])
            await stream.send_all(
                encode_message(TensorMessage(MessageType.HELLO, data=hello.encode()))
            )
            for number in range(1, 1026):
                message = TensorMessage(MessageType.ERROR, request_id=number, data=error)
                await stream.send_all(encode_message(message))
            while await stream.receive_some():
                pass  # until it has had enough
    lines = [
        r.getMessage() for r in caplog.records if r.name == "neurogrid.p2p.exchange.dispatcher"
    ]
    assert len(lines) == MAX_LINES + 1
    assert lines[-1] == f"and {1025 - MAX_LINES} more such lines about " + lines[0].split()[0]
