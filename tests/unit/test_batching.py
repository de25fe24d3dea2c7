"""What waits is taken together, in a fair order, and leaves the queue when nobody wants it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from stage_families import held_model

from neurogrid.errors import RequestRefusedError
from neurogrid.inference.sessions import passes
from neurogrid.inference.sessions.passes import forward, run_steps
from neurogrid.inference.sessions.steps import (
    BATCH_TIMEOUT,
    Step,
    next_steps,
    seconds_until_next,
)
from neurogrid.node.batcher import Batcher
from neurogrid.worker.held_model import HeldModel


class Desk:
    """A batcher of numbers whose calls end when the test says so; doubles them."""

    def __init__(self, max_waiting: int = 8) -> None:
        self.calls: list[list[int]] = []
        self.may_end = trio.Semaphore(0)
        self.results: dict[int, object] = {}
        self.batcher: Batcher[int, Any] = Batcher(
            lambda waiting: [job for job in waiting if job % 10 == waiting[0] % 10],
            self._compute,
            self._run_torch,
            max_waiting=max_waiting,
        )

    async def _run_torch(
        self, function: Callable[[Sequence[int]], Sequence[Any]], jobs: Sequence[int]
    ) -> Sequence[Any]:
        self.calls.append(list(jobs))
        with trio.CancelScope(shield=True):
            await self.may_end.acquire()
        return function(jobs)

    def _compute(self, jobs: Sequence[int]) -> Sequence[Any]:
        if 99 in jobs:
            raise RuntimeError("all of them")
        return [ValueError(f"{job} is odd one out") if job == 13 else 2 * job for job in jobs]

    async def submit(self, job: int) -> None:
        try:
            self.results[job] = await self.batcher.submit(job)
        except (ValueError, RuntimeError, RequestRefusedError) as exc:
            self.results[job] = exc


def with_desk(
    scenario: Callable[[Desk, trio.Nursery], Awaitable[None]],
) -> Callable[[], None]:
    """A test of `scenario`, with a desk that is open."""

    def test() -> None:
        async def main() -> None:
            async with trio.open_nursery() as nursery:
                desk = Desk()
                nursery.start_soon(desk.batcher.run)
                await scenario(desk, nursery)
                nursery.cancel_scope.cancel()

        trio.run(main)

    return test


async def _settle() -> None:
    await trio.testing.wait_all_tasks_blocked()


@with_desk
async def test_what_came_while_one_ran_is_the_next_batch(desk: Desk, nursery: trio.Nursery) -> None:
    for job in (1, 11, 2, 21):
        nursery.start_soon(desk.submit, job)
        await _settle()
    assert desk.calls == [[1]]  # nobody waited for the others
    desk.may_end.release()
    await _settle()
    assert desk.calls == [[1], [11, 21]]
    desk.may_end.release()
    desk.may_end.release()
    await _settle()
    assert desk.calls == [[1], [11, 21], [2]]
    assert desk.results == {1: 2, 11: 22, 21: 42, 2: 4}


@with_desk
async def test_an_error_of_one_is_told_to_that_one_and_a_failed_call_to_all(
    desk: Desk, nursery: trio.Nursery
) -> None:
    for job in (1, 3, 13, 23, 99, 9):
        nursery.start_soon(desk.submit, job)
        await _settle()
    for _ in range(3):
        desk.may_end.release()
    await _settle()
    assert isinstance(desk.results[13], ValueError)
    assert desk.results[3] == 6
    assert desk.results[23] == 46
    assert isinstance(desk.results[99], RuntimeError)
    assert isinstance(desk.results[9], RuntimeError)
    # And it goes on.
    nursery.start_soon(desk.submit, 5)
    desk.may_end.release()
    await _settle()
    assert desk.results[5] == 10


@with_desk
async def test_the_queue_is_bounded(desk: Desk, nursery: trio.Nursery) -> None:
    for job in range(10):
        nursery.start_soon(desk.submit, job)
        await _settle()
    error = desk.results[9]
    assert isinstance(error, RequestRefusedError)
    assert error.retry_after is not None
    assert desk.batcher.num_waiting == 8
    for _ in range(9):
        desk.may_end.release()
    await _settle()
    assert len(desk.results) == 10


@with_desk
async def test_who_is_cancelled_or_withdrawn_leaves_the_queue(
    desk: Desk, nursery: trio.Nursery
) -> None:
    nursery.start_soon(desk.submit, 1)
    await _settle()
    with trio.move_on_after(0):
        await desk.submit(2)
    nursery.start_soon(desk.submit, 3)
    nursery.start_soon(desk.submit, 4)
    await _settle()
    assert desk.batcher.num_waiting == 2
    desk.batcher.withdraw(lambda job: job in (1, 3))
    await _settle()
    assert desk.results == {3: None}
    desk.may_end.release()
    desk.may_end.release()
    await _settle()
    assert desk.calls == [[1], [4]]
    assert desk.results[4] == 8


@with_desk
async def test_cancelled_while_it_runs_it_waits_for_the_end(
    desk: Desk, nursery: trio.Nursery
) -> None:
    ended = trio.Event()

    async def leave() -> None:
        with scope:
            await desk.submit(1)
        ended.set()

    scope = trio.CancelScope()
    nursery.start_soon(leave)
    await _settle()
    scope.cancel()
    await _settle()
    assert not ended.is_set()
    desk.may_end.release()
    await ended.wait()


@pytest.fixture(scope="module")
def llama() -> HeldModel:
    return held_model("llama", 3)


def _step(model: HeldModel, num_tokens: int, position: int = 0, stop: int = 3) -> Step:
    generator = torch.Generator().manual_seed(num_tokens + position)
    cache = model.stage.new_cache()
    if position:
        hidden = torch.randn(1, position, 48, generator=generator)
        forward(model, hidden, start=0, stop=stop, position=0, cache=cache)
    hidden = torch.randn(1, num_tokens, 48, generator=generator)
    return Step(0, model, 0, stop, position, hidden, cache, 0.0)


def test_all_that_decode_share_a_forward_with_one_chunk_between(llama: HeldModel) -> None:
    first, other, last = (_step(llama, 1, position) for position in (3, 9, 5))
    elsewhere = _step(llama, 1, 4, stop=2)
    long, short = _step(llama, 100), _step(llama, 1)  # a prompt of one token is a prefill too
    waiting = [long, first, elsewhere, other, short, last]
    assert next_steps(waiting, after_prefill=True, now=0.0) == [first, other, last]
    assert next_steps(waiting, after_prefill=False, now=0.0) == [long]
    assert next_steps([elsewhere, *waiting], after_prefill=True, now=0.0) == [elsewhere, elsewhere]
    assert next_steps([long, short], after_prefill=True, now=0.0) == [long]
    assert next_steps([first], after_prefill=False, now=0.0) == [first]


def _row(session: int, batch: tuple[int, ...] = (), *, came: float = 0.0, stop: int = 1) -> Step:
    nothing = cast(Any, None)
    return Step(session, nothing, 0, stop, 1, torch.zeros(1, 1, 1), nothing, came, batch)


def test_a_batch_runs_when_it_is_whole_and_no_other_with_it() -> None:
    first, second = (7, 2), (8, 3)
    waiting = [_row(1, second), _row(2, first), _row(3, second)]
    assert next_steps(waiting, after_prefill=False, now=0.01) == []
    assert seconds_until_next(waiting, now=0.01) == pytest.approx(BATCH_TIMEOUT - 0.01)
    waiting += [_row(4, first), _row(5), _row(6, second), _row(7, stop=2)]
    assert seconds_until_next(waiting, now=0.01) == 0.0
    chosen = next_steps(waiting, after_prefill=False, now=0.01)
    # The oldest that is whole, and what is of none.
    assert [step.session for step in chosen] == [1, 3, 6, 5]
    rest = [step for step in waiting if step not in chosen]
    assert [s.session for s in next_steps(rest, after_prefill=False, now=0.01)] == [2, 4]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([(), (1, 2), (2, 3), (3, 1), (1, 9)]),
            st.floats(0.0, 0.2),
            st.integers(1, 2),
            st.booleans(),
        ),
        max_size=12,
    ),
    st.booleans(),
)
def test_whatever_waits_runs_in_the_end(
    rows: list[tuple[tuple[int, ...], float, int, bool]], after_prefill: bool
) -> None:
    """Nothing waits longer than the rest of its batch may take, whatever numbers a peer has made up."""
    waiting = []
    rows.sort(key=lambda row: row[1])
    for session, (batch, came, stop, is_prefill) in enumerate(rows):
        step = _row(session, batch, came=came, stop=stop)
        step.is_decoded = not is_prefill
        waiting.append(step)
    now = 0.2
    while waiting:
        if pause := seconds_until_next(waiting, now=now):
            assert pause <= BATCH_TIMEOUT
            now += pause + 1e-9
        steps = next_steps(waiting, after_prefill=after_prefill, now=now)
        assert steps
        assert len(steps) == len({id(step) for step in steps})
        assert len({step.stop for step in steps}) == 1
        assert len({step.batch[0] for step in steps if step.batch and step.is_decoded}) <= 1
        if not steps[0].is_decoded:
            assert len(steps) == 1
        after_prefill = not steps[0].is_decoded
        waiting = [step for step in waiting if step not in steps]


def test_a_batch_is_handed_on_as_large_as_it_is_left(llama: HeldModel) -> None:
    steps = [_step(llama, 1, position) for position in (3, 9, 5, 7)]
    for step in steps[:3]:
        step.batch = (7, 3)
    steps[1].cache.spoil("it was dropped")
    run_steps(steps, chunk=None)
    assert [step.batch for step in steps] == [(7, 2), (7, 3), (7, 2), ()]
    steps[2] = _step(llama, 1, 5)
    steps[2].batch = (7, 2)
    run_steps(steps[1:3], chunk=None)
    assert steps[2].batch == ()  # all that is left of it


def test_steps_give_what_each_gives_alone(llama: HeldModel) -> None:
    steps = [_step(llama, 1, position) for position in (3, 9, 5)]
    alone = [_step(llama, 1, position) for position in (3, 9, 5)]
    got = run_steps(steps, chunk=None)
    for mine, step in zip(got, alone, strict=True):
        (expected,) = run_steps([step], chunk=None)
        assert isinstance(mine, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        assert torch.allclose(mine, expected, atol=1e-4)


def test_a_prefill_runs_in_chunks(llama: HeldModel) -> None:
    whole, chunked = _step(llama, 20), _step(llama, 20)
    (expected,) = run_steps([whole], chunk=None)
    results = [run_steps([chunked], chunk=8)[0] for _ in range(3)]
    assert results[:2] == [None, None]
    assert isinstance(results[2], torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert torch.allclose(results[2], expected, atol=1e-4)
    assert chunked.cache.length == 20


def test_the_row_at_fault_fails_alone(llama: HeldModel) -> None:
    steps = [_step(llama, 1, position) for position in (3, 9, 5)]
    steps[1].cache.spoil("it was dropped")
    got = run_steps(steps, chunk=None)
    assert isinstance(got[0], torch.Tensor)
    assert isinstance(got[1], RequestRefusedError)
    assert isinstance(got[2], torch.Tensor)
    assert [step.cache.length for step in steps] == [4, 9, 6]


def test_results_for_which_there_is_no_memory_together_come_one_by_one(
    llama: HeldModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are computed, and in the caches: nothing could compute them again."""

    class FullDevice:
        """torch, to those that would join what is on the device."""

        def cat(self, tensors: Sequence[torch.Tensor], **more: Any) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    steps = [_step(llama, 1, position) for position in (3, 9, 5)]
    expected = run_steps([_step(llama, 1, position) for position in (3, 9, 5)], chunk=None)
    monkeypatch.setattr(passes, "torch", FullDevice())
    for mine, its in zip(run_steps(steps, chunk=None), expected, strict=True):
        assert isinstance(mine, torch.Tensor)
        assert isinstance(its, torch.Tensor)
        assert torch.equal(mine, its)
    assert [step.cache.length for step in steps] == [4, 10, 6]


def test_a_long_prompt_does_not_stall_those_that_decode(llama: HeldModel) -> None:
    order: list[str] = []
    after_prefill = True

    def choose(waiting: Sequence[Step]) -> list[Step]:
        nonlocal after_prefill
        steps = next_steps(waiting, after_prefill=after_prefill, now=0.0)
        after_prefill = not steps[0].is_decoded
        order.append(f"{len(steps)} decoded" if steps[0].is_decoded else "chunk")
        return steps

    async def run_torch(function: Callable[..., Any], steps: Sequence[Step]) -> Any:
        await _settle()  # all that want to come have come
        return function(steps)

    batcher: Batcher[Step, torch.Tensor] = Batcher(
        choose, lambda steps: run_steps(steps, chunk=8), run_torch, max_waiting=8
    )
    done = trio.Event()

    async def prefill() -> None:
        assert await batcher.submit(_step(llama, 40)) is not None
        done.set()

    async def decode(position: int) -> None:
        step = _step(llama, 1, position)
        while not done.is_set():
            position = step.cache.length
            await batcher.submit(Step(0, llama, 0, 3, position, step.hidden, step.cache, 0.0))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(prefill)
            nursery.start_soon(decode, 3)
            nursery.start_soon(decode, 6)
            nursery.start_soon(batcher.run)
            await done.wait()
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert order.count("chunk") == 5
    assert not any(pair == ("chunk", "chunk") for pair in pairwise(order))
    assert "2 decoded" in order
