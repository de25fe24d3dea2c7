"""Handlers when their host is left: they end before it, or are named; none begins afterwards."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from blocking_pair import DEADLINE, open_lonely_host

from neurogrid.errors import LocalProtocolError
from neurogrid.p2p import TensorMessage
from neurogrid.p2p.blocking import Protocol, host
from neurogrid.p2p.blocking.handler_threads import HandlerThreads


class Hanging:
    """A handler that begins, and ends when it is told to."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.goes_on = threading.Event()

    def __call__(self, message: TensorMessage) -> None:
        self.has_begun.set()
        self.goes_on.wait(DEADLINE)

    def __repr__(self) -> str:
        return "the hanging one"

    @contextmanager
    def running(self) -> Iterator[None]:
        """A host that is left while it runs."""
        with open_lonely_host() as lonely:
            protocol = Protocol(lonely)
            protocol.on_activation_received(self)
            protocol.send_activation(lonely.peer_id, 0, 0, 1, b"")
            assert self.has_begun.wait(DEADLINE)
            yield


def test_a_handler_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "HANDLERS_TIMEOUT", 0.01)
    handler = Hanging()
    with (
        pytest.raises(LocalProtocolError, match="the hanging one: still running"),
        handler.running(),
    ):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "neurogrid host"]
    handler.goes_on.set()


def test_a_handler_that_hangs_does_not_hide_the_error_of_the_block(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host, "HANDLERS_TIMEOUT", 0.01)
    handler = Hanging()
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(ZeroDivisionError),
        handler.running(),
    ):
        raise ZeroDivisionError
    assert "the hanging one" in caplog.text
    handler.goes_on.set()


def test_a_handler_ends_before_the_block_does() -> None:
    handler = Hanging()
    has_ended = threading.Event()

    def answer(message: TensorMessage) -> None:
        handler(message)
        has_ended.set()

    with open_lonely_host() as lonely:
        protocol = Protocol(lonely)
        protocol.on_activation_received(answer)
        protocol.send_activation(lonely.peer_id, 0, 0, 1, b"")
        assert handler.has_begun.wait(DEADLINE)
        threading.Timer(0.01, handler.goes_on.set).start()
    assert has_ended.is_set()


def test_a_handler_that_waits_for_a_peer_ends_with_the_host() -> None:
    has_begun = threading.Event()
    errors: list[Exception] = []

    def ask(message: TensorMessage) -> None:
        if message.layer_id == 1:
            return  # the one that nobody answers
        has_begun.set()
        try:
            protocol.request_activation(lonely.peer_id, 1, 0, b"", timeout=DEADLINE)
        except Exception as exc:
            errors.append(exc)
            raise

    with open_lonely_host() as lonely:
        protocol = Protocol(lonely)
        protocol.on_activation_received(ask)
        protocol.send_activation(lonely.peer_id, 0, 0, 1, b"")
        assert has_begun.wait(DEADLINE)
    assert len(errors) == 1
    assert "closed" in str(errors[0])


def test_a_handler_may_close_the_host() -> None:
    was_closed = threading.Event()

    def close(message: TensorMessage) -> None:
        stack.close()
        was_closed.set()

    with ExitStack() as stack:
        lonely = stack.enter_context(open_lonely_host())
        protocol = Protocol(lonely)
        protocol.on_activation_received(close)
        protocol.send_activation(lonely.peer_id, 0, 0, 1, b"")
        assert was_closed.wait(DEADLINE)


async def test_no_handler_begins_after_the_end() -> None:
    begun = []
    threads = HandlerThreads()
    assert threads.stop(DEADLINE) == []
    with pytest.raises(LocalProtocolError, match="before this handler began"):
        await threads.at_once(begun.append)(1)
    assert begun == []
