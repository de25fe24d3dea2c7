"""A stage's process as its owner has it, with another one in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import trio
from trio.testing import MockClock

from neurogrid.training.stages import stage_process
from neurogrid.training.stages.stage_process import open_stage_process
from neurogrid.training.trainer.child import ChildEnded


class _Child:
    """Takes its time for each order; the first one is to begin."""

    seconds: ClassVar[dict[str, float]] = {}

    def __init__(self, *_: object) -> None:
        self.pid: int | None = None
        self._ended = trio.Event()

    async def start(self, *, threads: int) -> None:
        self.pid = 1

    async def exchange(self, order: dict[str, Any], _: Callable[..., object]) -> dict[str, Any]:
        with trio.move_on_after(self.seconds.get(order["order"], 0.0)):
            await self._ended.wait()
            raise ChildEnded("it was ended")
        return {}

    async def end(self) -> None:
        self.pid = None
        self._ended.set()


@pytest.fixture
def _child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_process, "Child", _Child)


@pytest.mark.usefixtures("_child")
async def test_a_process_that_is_long_in_beginning_is_not_ended(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first order comes while it imports torch from a slow disk."""
    monkeypatch.setattr(_Child, "seconds", {"begin": 100.0})
    began = trio.current_time()
    async with open_stage_process(threads=1) as process:
        await trio.testing.wait_all_tasks_blocked()
        await process.settle()
        assert trio.current_time() - began == pytest.approx(100.0)
        assert process.pid == 1
        await process.forget()


@pytest.mark.usefixtures("_child")
async def test_a_process_that_never_begins_is_ended(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Child, "seconds", {"begin": float("inf")})

    async def wait() -> None:
        async with open_stage_process(threads=1) as process:
            await trio.testing.wait_all_tasks_blocked()
            await process.settle()
            await trio.sleep_forever()

    with pytest.raises(ChildEnded):
        await wait()


@pytest.mark.usefixtures("_child")
async def test_a_call_that_does_not_end_costs_the_process(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Child, "seconds", {"squared_norm": float("inf")})
    began = trio.current_time()
    async with open_stage_process(threads=1) as process:
        with trio.move_on_after(1.0):
            await process.squared_norm()
        await process.settle()
        assert trio.current_time() - began == pytest.approx(21.0)
        assert process.pid is None
