"""A trio loop in a thread: every call ends, as itself or with an error that says why."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial

import pytest
import trio
from blocking_pair import DEADLINE, open_lonely_host

from neurogrid.errors import (
    ConfigurationError,
    LocalProtocolError,
    ResponseTimeout,
    StreamBrokenError,
)
from neurogrid.p2p.blocking import fail_after, trio_thread
from neurogrid.p2p.blocking.trio_thread import TrioThread

needs_signals = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and fork")


class Resource:
    """Something that lives in a loop, may break there, and knows whether it was left."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.is_left = False


@asynccontextmanager
async def open_resource() -> AsyncIterator[Resource]:
    async with trio.open_nursery() as nursery:
        resource = Resource(nursery)
        try:
            yield resource
        finally:
            resource.is_left = True
        nursery.cancel_scope.cancel()


def open_thread(close_timeout: float = trio_thread.CLOSE_TIMEOUT) -> TrioThread[Resource]:
    return TrioThread(open_resource, name="under test", close_timeout=close_timeout)


def threads_under_test() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "under test"]


class Waiting:
    """An async function that begins, tells so, and waits until it is cancelled."""

    def __init__(self, on_begun: Callable[[], object] = lambda: None) -> None:
        self.has_begun = threading.Event()
        self.was_cancelled = threading.Event()
        self._on_begun = on_begun

    async def __call__(self) -> None:
        self.has_begun.set()
        self._on_begun()
        try:
            await trio.sleep_forever()
        finally:
            self.was_cancelled.set()


def interrupt() -> None:
    """Ctrl-C: the system gives the signal to the main thread, wherever that waits."""
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGINT)


async def double(number: int) -> int:
    await trio.lowlevel.checkpoint()
    return 2 * number


def test_a_call_returns_what_its_task_returns() -> None:
    with open_thread() as thread:
        assert thread.call(partial(double, 21)) == 42
        assert thread.call_sync(threading.get_ident) != threading.get_ident()


@pytest.mark.parametrize("kind", [ConfigurationError, ZeroDivisionError, SystemExit])
def test_an_exception_crosses_unchanged(kind: type[BaseException]) -> None:
    error = kind("from the loop")
    cause = ValueError("why")

    async def fail() -> None:
        raise error from cause

    with open_thread() as thread:
        with pytest.raises(kind) as caught:
            thread.call(fail)
        assert caught.value is error
        assert caught.value.__cause__ is cause
        assert thread.call(partial(double, 1)) == 2


def test_many_threads_call_at_once() -> None:
    barrier = threading.Barrier(32)

    def call(number: int) -> int:
        barrier.wait(DEADLINE)
        return thread.call(partial(double, number))

    with open_thread() as thread, ThreadPoolExecutor(32) as pool:
        assert list(pool.map(call, range(32))) == [2 * number for number in range(32)]


def test_asyncio_calls_through_its_threads() -> None:
    async def main(thread: TrioThread[Resource]) -> list[int]:
        calls = [asyncio.to_thread(thread.call, partial(double, number)) for number in range(8)]
        return await asyncio.gather(*calls)

    with open_thread() as thread:
        assert asyncio.run(main(thread)) == [0, 2, 4, 6, 8, 10, 12, 14]


def test_the_callers_context_is_active_in_the_task() -> None:
    trace: ContextVar[str] = ContextVar("trace", default="none")

    async def read() -> str:
        return trace.get()

    with open_thread() as thread:
        trace.set("mine")
        assert thread.call(read) == "mine"


def test_a_call_from_the_loop_is_an_error() -> None:
    with open_thread() as thread, pytest.raises(LocalProtocolError, match="wait for itself"):
        thread.call_sync(lambda: thread.call(partial(double, 1)))


def test_a_call_after_the_end_is_an_error() -> None:
    with open_thread() as thread:
        pass
    assert thread.resource.is_left
    assert not threads_under_test()
    with pytest.raises(LocalProtocolError, match="was closed"):
        thread.call(partial(double, 1))


def test_closing_ends_the_calls_under_way() -> None:
    waits = [Waiting() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        with open_thread() as thread:
            calls = [pool.submit(thread.call, waiting) for waiting in waits]
            assert all(waiting.has_begun.wait(DEADLINE) for waiting in waits)
        for call in calls:
            with pytest.raises(StreamBrokenError, match="closed during this call"):
                call.result(DEADLINE)
    assert all(waiting.was_cancelled.is_set() for waiting in waits)


def test_an_error_of_the_opener_leaves_the_block() -> None:
    @asynccontextmanager
    async def fail() -> AsyncIterator[None]:
        raise ConfigurationError("no such place")
        yield

    with (
        pytest.raises(ConfigurationError, match="no such place"),
        TrioThread(fail, name="under test"),
    ):
        pytest.fail("was opened")
    assert not threads_under_test()


def break_resource(thread: TrioThread[Resource]) -> None:
    """Let a task of the resource fail; returns when a call that was under way has ended."""

    async def fail() -> None:
        raise ConfigurationError("broke underneath")

    async def cause_and_wait() -> None:
        thread.resource.nursery.start_soon(fail)
        await trio.sleep_forever()

    with pytest.raises(StreamBrokenError):
        thread.call(cause_and_wait)


def test_a_resource_that_breaks_ends_calls_and_leaves_the_block() -> None:
    def use() -> None:
        with open_thread() as thread:
            break_resource(thread)
            with pytest.raises(LocalProtocolError, match="was closed"):
                thread.call(partial(double, 1))

    with pytest.raises(ExceptionGroup) as caught:
        use()
    assert caught.group_contains(ConfigurationError, match="broke underneath")


def test_the_error_of_the_block_goes_before_that_of_the_resource(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def use() -> None:
        with open_thread() as thread:
            break_resource(thread)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert "under test" in caplog.text


def test_a_loop_that_crashes_ends_its_calls() -> None:
    def crash() -> None:
        raise ZeroDivisionError

    async def crash_and_wait() -> None:
        # What trio calls for us must not raise: it gives up at once.
        trio.lowlevel.current_trio_token().run_sync_soon(crash)
        await trio.sleep_forever()

    def use() -> None:
        with open_thread() as thread:
            with pytest.raises(StreamBrokenError):
                thread.call(crash_and_wait)
            with pytest.raises(LocalProtocolError, match="was closed"):
                thread.call(partial(double, 1))

    with pytest.raises(trio.TrioInternalError):
        use()


def test_a_call_that_the_loop_took_and_never_began_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    was_taken = threading.Event()
    monkeypatch.setattr(TrioThread, "_start", lambda self, call: was_taken.set())
    with ThreadPoolExecutor(1) as pool:
        with open_thread() as thread:
            call = pool.submit(thread.call, partial(double, 1))
            assert was_taken.wait(DEADLINE)
        with pytest.raises(StreamBrokenError):
            call.result(DEADLINE)


@needs_signals
def test_an_interrupt_ends_the_call_and_its_task() -> None:
    waiting = Waiting(interrupt)
    with open_thread() as thread:
        with pytest.raises(KeyboardInterrupt):
            thread.call(waiting)
        assert waiting.was_cancelled.is_set()
        assert thread.call(partial(double, 1)) == 2


@needs_signals
def test_an_interrupt_while_opening_closes_again() -> None:
    is_left = threading.Event()

    @asynccontextmanager
    async def open_slowly() -> AsyncIterator[None]:
        interrupt()
        try:
            await trio.sleep_forever()
        finally:
            is_left.set()
        yield

    with pytest.raises(KeyboardInterrupt), TrioThread(open_slowly, name="under test"):
        pytest.fail("was opened")
    assert is_left.is_set()
    assert not threads_under_test()


@needs_signals
def test_a_fork_cannot_call_and_leaves_in_peace() -> None:
    def use_in_fork() -> int:
        signal.alarm(int(DEADLINE))  # a hang is killed, and fails the test
        try:
            thread.call(partial(double, 1))
        except LocalProtocolError as exc:
            return 0 if "fork" in str(exc) and thread.close() is None else 2
        return 1

    with open_thread() as thread:
        pid = os.fork()
        if pid == 0:
            status = 3
            try:
                status = use_in_fork()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert thread.call(partial(double, 1)) == 2


def test_closing_from_the_loop_does_not_wait_for_itself() -> None:
    with open_thread() as thread:
        thread.call_sync(thread.close)
    assert thread.resource.is_left


def test_closing_twice_is_closing() -> None:
    with open_thread() as thread:
        assert thread.close() is None
        assert thread.close() is None


def test_a_blocked_loop_does_not_block_the_end() -> None:
    has_begun, goes_on = threading.Event(), threading.Event()

    def block() -> None:
        has_begun.set()
        goes_on.wait(DEADLINE)

    def use() -> None:
        with open_thread(close_timeout=0.01) as thread:
            pool.submit(thread.call_sync, block)
            assert has_begun.wait(DEADLINE)

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(LocalProtocolError, match="'under test' did not end"):
            use()
        [blocked] = threads_under_test()
        goes_on.set()
    blocked.join(DEADLINE)
    assert not threads_under_test()


@needs_signals
def test_an_interrupt_does_not_wait_for_a_blocked_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trio_thread, "INTERRUPT_TIMEOUT", 0.01)
    goes_on = threading.Event()

    def block() -> None:
        interrupt()
        goes_on.wait(DEADLINE)

    with open_thread() as thread:
        with pytest.raises(KeyboardInterrupt):
            thread.call_sync(block)
        goes_on.set()
        assert thread.call(partial(double, 1)) == 2


def test_a_deadline_ends_the_call() -> None:
    waiting = Waiting()
    with open_thread() as thread:
        with fail_after(0.01), pytest.raises(ResponseTimeout):
            thread.call(waiting)
        assert waiting.was_cancelled.is_set()
        assert thread.call(partial(double, 1)) == 2


def test_the_earlier_deadline_holds() -> None:
    with open_thread() as thread:
        started = time.monotonic()
        with fail_after(0.01), fail_after(DEADLINE), pytest.raises(ResponseTimeout):
            thread.call(Waiting())
        assert time.monotonic() - started < DEADLINE


def test_a_deadline_follows_into_the_threads_of_asyncio() -> None:
    async def main(thread: TrioThread[Resource]) -> None:
        with fail_after(0.01), pytest.raises(ResponseTimeout):
            await asyncio.to_thread(thread.call, Waiting())

    with open_thread() as thread:
        asyncio.run(main(thread))


def test_what_is_left_to_the_collector_is_closed() -> None:
    block = open_lonely_host()
    host = block.__enter__()
    assert host.connected_peers == frozenset()
    del block
    gc.collect()
    with pytest.raises(LocalProtocolError, match="was closed"):
        host.connect("/memory/1")
