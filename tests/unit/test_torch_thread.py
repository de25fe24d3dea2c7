"""The thread of torch: in order, one at a time, errors to their callers, cancellation after the call."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from neurogrid.node.torch_thread import TorchThread


@pytest.fixture
@asynccontextmanager
async def thread() -> AsyncIterator[TorchThread]:
    with TorchThread() as thread, trio.fail_after(60):
        yield thread


async def test_calls_run_in_one_thread_in_order(thread: TorchThread) -> None:
    order: list[int] = []
    idents: set[int] = set()

    def call(number: int) -> None:
        order.append(number)
        idents.add(threading.get_ident())

    for number in range(50):
        await thread.run(lambda number=number: call(number))  # type: ignore[misc]
    assert order == list(range(50))
    assert len(idents) == 1
    assert threading.get_ident() not in idents


async def test_results_and_errors_come_back(thread: TorchThread) -> None:
    assert await thread.run(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 // 0)
    assert await thread.run(lambda: 8) == 8


async def test_a_brief_call_runs_here_unless_another_is_under_way(thread: TorchThread) -> None:
    here = threading.get_ident()
    assert await thread.run_briefly(threading.get_ident) == here
    with pytest.raises(ZeroDivisionError):
        await thread.run_briefly(lambda: 1 // 0)

    may_end = threading.Event()
    order: list[str] = []

    def long() -> None:
        may_end.wait(60)
        order.append("long")

    async def brief() -> None:
        assert await thread.run_briefly(threading.get_ident) != here
        order.append("brief")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(thread.run, long)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(brief)
        await trio.testing.wait_all_tasks_blocked()
        may_end.set()
    assert order == ["long", "brief"]
    assert await thread.run_briefly(threading.get_ident) == here

    with trio.CancelScope() as scope:
        scope.cancel()
        await thread.run_briefly(pytest.fail)
    assert scope.cancelled_caught


async def test_cancellation_waits_for_the_call(thread: TorchThread) -> None:
    may_end, ended = threading.Event(), threading.Event()

    def call() -> None:
        may_end.wait(60)
        ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(thread.run, call)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        nursery.start_soon(_set, may_end)
    assert ended.is_set()

    with trio.CancelScope() as scope:
        scope.cancel()
        await thread.run(pytest.fail)  # not begun at all
    assert scope.cancelled_caught


async def _set(event: threading.Event) -> None:
    event.set()
