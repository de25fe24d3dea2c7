"""Iterating over an async generator in the loop's thread: as a generator of one's own, whatever ends it."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
from blocking_pair import DEADLINE

from neurogrid.errors import LocalProtocolError, ResponseTimeout, StreamBrokenError
from neurogrid.p2p.blocking import fail_after
from neurogrid.p2p.blocking.trio_thread import ITEMS_AHEAD, TrioThread


class Numbers:
    """Counts from 0 in the loop, and knows how far it got and whether it was left."""

    def __init__(self, stop: int = 10**9, error: Exception | None = None) -> None:
        self.num_made = 0
        self.has_waited = threading.Event()
        self.is_left = threading.Event()
        self._stop = stop
        self._error = error

    async def __call__(self) -> AsyncGenerator[int, None]:
        try:
            # A cancel scope, which has to be left in the task that entered it.
            with trio.CancelScope():
                while self.num_made < self._stop:
                    self.num_made += 1
                    if self.num_made > ITEMS_AHEAD:
                        self.has_waited.set()
                    yield self.num_made - 1
            if self._error is not None:
                raise self._error
        finally:
            self.is_left.set()


@asynccontextmanager
async def nothing() -> AsyncIterator[None]:
    yield


@pytest.fixture
def thread() -> TrioThread[None]:
    return TrioThread(nothing, name="under test", what="counter")


def test_every_item_comes_in_order(thread: TrioThread[None]) -> None:
    with thread:
        assert list(thread.iterate(Numbers(1000))) == list(range(1000))


def test_nothing_begins_before_the_first_item_is_asked_for(thread: TrioThread[None]) -> None:
    numbers = Numbers()
    with thread:
        items = thread.iterate(numbers)
        thread.call(trio.lowlevel.checkpoint)
        assert numbers.num_made == 0
        assert next(items) == 0


def test_it_is_few_items_ahead_of_its_reader(thread: TrioThread[None]) -> None:
    numbers = Numbers()
    with thread:
        items = thread.iterate(numbers)
        next(items)
        assert numbers.has_waited.wait(DEADLINE)
        for _ in range(100):
            thread.call(trio.lowlevel.checkpoint)
        # One is read, and one more waits for room.
        assert numbers.num_made <= ITEMS_AHEAD + 2


def test_an_error_comes_after_the_items_before_it(thread: TrioThread[None]) -> None:
    with thread:
        items = thread.iterate(Numbers(3, LookupError("the fourth")))
        assert [next(items), next(items), next(items)] == [0, 1, 2]
        with pytest.raises(LookupError, match="the fourth"):
            next(items)
        with pytest.raises(StopIteration):
            next(items)


def test_who_stops_reading_has_it_left_before_going_on(thread: TrioThread[None]) -> None:
    numbers = Numbers()
    with thread:
        items = thread.iterate(numbers)
        for item in items:
            if item == 3:
                break
        assert not numbers.is_left.is_set()
        items.close()  # type: ignore[attr-defined]
        assert numbers.is_left.is_set()


def test_what_is_dropped_is_left(thread: TrioThread[None]) -> None:
    numbers = Numbers()
    with thread:
        for _ in thread.iterate(numbers):
            break
        gc.collect()
        assert numbers.is_left.is_set()


def test_dropped_in_the_loop_it_does_not_wait_for_itself(thread: TrioThread[None]) -> None:
    numbers = Numbers()
    with thread:
        kept = [thread.iterate(numbers)]
        next(kept[0])
        thread.call_sync(kept.clear)
        assert numbers.is_left.wait(DEADLINE)


def test_a_deadline_ends_it(thread: TrioThread[None]) -> None:
    async def one_and_no_more() -> AsyncGenerator[int, None]:
        yield 1
        await trio.sleep_forever()

    with thread, fail_after(0.01):
        items = thread.iterate(one_and_no_more)
        with pytest.raises(ResponseTimeout):
            list(items)


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_an_interrupt_ends_it(thread: TrioThread[None]) -> None:
    left = threading.Event()
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    async def one_and_no_more() -> AsyncGenerator[int, None]:
        try:
            yield 1
            signal.pthread_kill(main_thread, signal.SIGINT)
            await trio.sleep_forever()
        finally:
            left.set()

    with thread:
        with pytest.raises(KeyboardInterrupt):
            list(thread.iterate(one_and_no_more))
        assert left.is_set()
        assert list(thread.iterate(Numbers(3))) == [0, 1, 2]


def test_closing_the_thread_ends_it(thread: TrioThread[None]) -> None:
    numbers = Numbers()
    with thread:
        items = thread.iterate(numbers)
        next(items)
    assert numbers.is_left.is_set()
    with pytest.raises(StreamBrokenError, match="the counter was closed"):
        list(items)
    with pytest.raises(LocalProtocolError, match="the counter was closed"):
        next(thread.iterate(Numbers()))


def test_several_threads_read_at_once(thread: TrioThread[None]) -> None:
    read: dict[int, list[int]] = {}

    def reader(number: int) -> None:
        read[number] = list(thread.iterate(Numbers(200)))

    with thread:
        readers = [threading.Thread(target=partial(reader, number)) for number in range(4)]
        for each in readers:
            each.start()
        for each in readers:
            each.join(DEADLINE)
    assert read == {number: list(range(200)) for number in range(4)}
