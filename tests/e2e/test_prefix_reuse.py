"""What a prompt shares with a finished session is not computed again, and what is written stays the same."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from neurogrid import Coordinator, CoordinatorSettings, open_coordinator
from neurogrid.assembly.worker import Worker, WorkerSettings, open_worker
from neurogrid.p2p.exchange.counters import Direction
from neurogrid.p2p.wire import MessageType
from tests.e2e.support import DEADLINE, WorkerProcess, reference_tokens, start_worker
from tests.families import FAMILIES, save_checkpoint

HIDDEN_BYTES = (
    64 * 4
)  # of a token of these families, in float32; more than the rest of a message takes
MAX_TOKENS = 12
PROMPT = list(range(40, 100))
FAMILY = {family.name: family for family in FAMILIES}


def settings(path: Path, addresses: Sequence[str], **more: Any) -> CoordinatorSettings:
    chosen = {"max_seq_len": 256, "max_sessions": 4, **more}
    return CoordinatorSettings(model=path, peers=tuple(addresses), stages=len(addresses), **chosen)


@asynccontextmanager
async def open_both(
    path: Path, *, takes: int = 8, **more: Any
) -> AsyncIterator[tuple[Worker, Coordinator]]:
    """A worker that takes so many sessions at once, and a coordinator of it."""
    async with (
        open_worker(WorkerSettings(device="cpu", max_sessions=takes)) as worker,
        open_coordinator(settings(path, [worker.addresses[0]], **more)) as coordinator,
    ):
        yield worker, coordinator


def run(main: Callable[[], Any]) -> None:
    async def in_time() -> None:
        with trio.fail_after(DEADLINE):
            await main()

    trio.run(in_time)


class Chat:
    """Turns over one coordinator, and how many tokens went to the first worker for each."""

    def __init__(self, coordinator: Coordinator, token_bytes: int = HIDDEN_BYTES) -> None:
        self.coordinator = coordinator
        self.token_bytes = token_bytes
        self.first = coordinator.stages[0].peer_id
        self.num_sent = 0

    async def turn(self, prompt: Sequence[int], max_tokens: int = MAX_TOKENS) -> list[int]:
        before = self._sent()
        generating = self.coordinator.generate(prompt, max_tokens=max_tokens)
        tokens = [token async for token in generating]
        self.num_sent = self._sent() - before
        return tokens

    def _sent(self) -> int:
        traffic = self.coordinator.counters.total(
            Direction.SENT, peer_id=self.first, msg_type=MessageType.ACTIVATION
        )
        overhead = traffic.num_messages * (self.token_bytes // 2)
        return (traffic.num_bytes - overhead) // self.token_bytes

    def sent_about(self, num_tokens: int) -> bool:
        """Whether so many were sent; each message adds up to half a token more or less than it has."""
        return abs(self.num_sent - num_tokens) <= MAX_TOKENS // 2 + 1


@pytest.mark.parametrize("family", ["llama-tied", "mistral-sliding", "lfm2"])
@pytest.mark.parametrize("routing", ["chain", "star"])
def test_the_next_turn_sends_the_new_tokens_alone(
    workers: list[WorkerProcess], tmp_path: Path, family: str, routing: str
) -> None:
    model = save_checkpoint(FAMILY[family], tmp_path)
    chosen = settings(tmp_path, [w.address for w in workers[:2]], routing=routing)

    async def main() -> None:
        async with open_coordinator(chosen) as coordinator:
            chat = Chat(coordinator)
            prompt = list(PROMPT)
            for number in range(3):
                answer = await chat.turn(prompt)
                assert answer == reference_tokens(model, prompt, MAX_TOKENS), number
                # The last token of an answer was never fed; five more are asked, and eleven follow.
                assert chat.sent_about(6 + 11 if number else 60 + 11), (number, chat.num_sent)
                prompt += [*answer, *range(7 + number, 12 + number)]
            # The same up to a word in the middle: where no token was dropped, caches go back to that.
            edited = [*prompt[:70], 5, *prompt[71:90]]
            assert await chat.turn(edited) == reference_tokens(model, edited, MAX_TOKENS)
            goes_back = family == "llama-tied"
            assert chat.sent_about(20 + 11 if goes_back else 90 + 11), chat.num_sent
            if goes_back:  # it was a copy: what was cut off is there still
                answer = await chat.turn(prompt)
                assert answer == reference_tokens(model, prompt, MAX_TOKENS)
                assert chat.sent_about(6 + 11)

    run(main)


def test_many_at_once_begin_with_the_same_tokens(
    workers: list[WorkerProcess], tmp_path: Path
) -> None:
    model = save_checkpoint(FAMILIES[0], tmp_path)
    prompts = [[*PROMPT, *range(110 + 9 * i, 115 + 9 * i)] for i in range(6)]
    expected = [reference_tokens(model, prompt, MAX_TOKENS) for prompt in prompts]
    chosen = settings(tmp_path, [w.address for w in workers[:2]], max_seq_len=512)

    async def main() -> None:
        async with open_coordinator(chosen) as coordinator:
            chat = Chat(coordinator)
            await chat.turn(PROMPT, 2)
            before = chat._sent()
            for _ in range(2):
                tokens: list[list[int]] = [[] for _ in prompts]

                async def generate(i: int, into: list[list[int]]) -> None:
                    generating = coordinator.generate(prompts[i], max_tokens=MAX_TOKENS)
                    into[i] = [token async for token in generating]

                async with trio.open_nursery() as nursery:
                    for i in range(len(prompts)):
                        nursery.start_soon(generate, i, tokens)
                assert tokens == expected
            # Twelve prompts of 65 tokens, of which five and then one were new.
            assert chat._sent() - before < 12 * 11 + 6 * 6 + 12 * MAX_TOKENS

    run(main)


@pytest.mark.parametrize("num_times", [5, pytest.param(50, marks=pytest.mark.long)])
def test_a_copy_comes_too_late(
    workers: list[WorkerProcess], tmp_path: Path, num_times: int
) -> None:
    """Of two that begin at once one takes the session over, and a worker may hear of that one first."""
    model = save_checkpoint(FAMILIES[0], tmp_path)
    chosen = settings(tmp_path, [w.address for w in workers[:2]], max_seq_len=512)

    async def main() -> None:
        async with open_coordinator(chosen) as coordinator:
            chat = Chat(coordinator)
            for first in range(3, 3 + num_times):
                prompt = [first, *PROMPT]
                answer = await chat.turn(prompt)
                async with trio.open_nursery() as nursery:
                    for begun in ([*prompt[:40], 5, 6], [*prompt, *answer, 7, 8]):
                        nursery.start_soon(expect, coordinator, model, begun)

    run(main)


def test_what_is_closed_while_it_is_opened_is_not_left_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The close of a session can be served before its opening, which waits for the session that it begins with."""
    model = save_checkpoint(FAMILIES[0], tmp_path)
    caplog.set_level(logging.DEBUG, "neurogrid.p2p.exchange.dispatcher")

    async def main() -> None:
        async with open_both(tmp_path, max_sessions=2) as (worker, coordinator):
            chat = Chat(coordinator)
            await chat.turn(PROMPT)
            (kept,) = worker.sessions._sessions
            prompt = [*PROMPT[:50], 5, 6]
            with trio.fail_after(DEADLINE):
                async with kept.turn, trio.open_nursery() as nursery:
                    nursery.start_soon(expect, coordinator, model, prompt)
                    while not kept.turn.statistics().lock_statistics.tasks_waiting:
                        await trio.sleep(0.01)
                    nursery.cancel_scope.cancel()
                while "was closed before it was open" not in caplog.text:
                    await trio.sleep(0.01)
            assert [*worker.sessions._sessions] == [kept]
            # There is room for another, and for that again.
            await expect(coordinator, model, [*range(100, 150)])
            await expect(coordinator, model, PROMPT)

    run(main)


def test_who_finds_a_worker_full_waits_for_room(tmp_path: Path) -> None:
    """There is room for more by bytes, and the worker takes one session at once."""
    model = save_checkpoint(FAMILIES[0], tmp_path)

    async def main() -> None:
        opening = open_both(tmp_path, takes=1, max_sessions=1, max_seq_len=512)
        async with opening as (_, coordinator), trio.open_nursery() as nursery:
            for start in (40, 41, 42):
                prompt = [*range(start, start + 30)]
                nursery.start_soon(expect, coordinator, model, prompt)

    run(main)


def test_kept_sessions_keep_nobody_waiting(workers: list[WorkerProcess], tmp_path: Path) -> None:
    model = save_checkpoint(FAMILIES[0], tmp_path)
    others = [[3 + i, *range(120 + i, 150 + i)] for i in range(5)]
    # Room for one session of this length.
    chosen = settings(tmp_path, [w.address for w in workers[:2]], max_seq_len=100, max_sessions=1)

    async def main() -> None:
        async with open_coordinator(chosen) as coordinator:
            chat = Chat(coordinator)
            answer = await chat.turn(PROMPT)
            assert len(coordinator._kept) == 1
            async with trio.open_nursery() as nursery:
                for prompt in others:
                    nursery.start_soon(expect, coordinator, model, prompt)
            # Its room was needed; what is kept now fits.
            prompt = [*PROMPT, *answer, 7, 8, 9, 10]
            assert await chat.turn(prompt) == reference_tokens(model, prompt, MAX_TOKENS)
            assert chat.sent_about(76 + 11)
            # The session takes the room of the one that it goes on from: there is none for both.
            assert len(coordinator._kept) == 1
            prompt += [11, 12]
            assert await chat.turn(prompt, 4) == reference_tokens(model, prompt, 4)
            assert chat.sent_about(2 + 3)

    run(main)


async def expect(coordinator: Coordinator, model: Any, prompt: list[int]) -> None:
    generating = coordinator.generate(prompt, max_tokens=MAX_TOKENS)
    tokens = [token async for token in generating]
    assert tokens == reference_tokens(model, prompt, MAX_TOKENS)


def test_who_wants_none_of_it_computes_all(workers: list[WorkerProcess], tmp_path: Path) -> None:
    model = save_checkpoint(FAMILIES[0], tmp_path)
    chosen = settings(tmp_path, [w.address for w in workers[:2]], prefix_reuse=False)

    async def main() -> None:
        async with open_coordinator(chosen) as coordinator:
            chat = Chat(coordinator)
            for _ in range(2):
                assert await chat.turn(PROMPT) == reference_tokens(model, PROMPT, MAX_TOKENS)
                assert chat.sent_about(60 + 11)
            assert len(coordinator._kept) == 0

    run(main)


def test_what_workers_have_no_more_is_computed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker drops a kept session, or has no room beside it: nobody notices."""
    model = save_checkpoint(FAMILIES[0], tmp_path)
    caplog.set_level(logging.DEBUG, "neurogrid.inference.generation.token_session")

    async def main() -> None:
        async with AsyncExitStack() as stack:
            workers = [
                await stack.enter_async_context(
                    open_worker(WorkerSettings(device="cpu", max_sessions=2))
                )
                for _ in range(2)
            ]
            addresses = [worker.addresses[0] for worker in workers]
            chosen = settings(tmp_path, addresses, max_sessions=2)
            coordinator = await stack.enter_async_context(open_coordinator(chosen))
            chat = Chat(coordinator)
            prompt = list(PROMPT)
            for dropped in range(2):
                answer = await chat.turn(prompt)
                prompt += [*answer, 7, 8, 9]
                workers[dropped].sessions.forget_sessions(coordinator.host.peer_id)
                answer = await chat.turn(prompt)
                assert answer == reference_tokens(model, prompt, MAX_TOKENS)
                assert chat.sent_about(len(prompt) + 11)
            assert caplog.text.count("are computed again") == 2
            # There is room for more by bytes, and the worker takes two at once: kept ones make way.
            for start in (150, 180, 210, 240):
                await expect(coordinator, model, list(range(start, start + 20)))
            # One that nobody reads to its end is kept with what it has.
            async with aclosing(coordinator.generate(PROMPT, max_tokens=9)) as tokens:
                await anext(tokens)
                await anext(tokens)
            assert coordinator._kept._kept[-1].tokens[: len(PROMPT)] == PROMPT
            assert sum(len(worker.sessions._sessions) for worker in workers) <= 4
        assert not any(len(worker.sessions._sessions) for worker in workers)

    run(main)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_worker_dies_in_a_session_that_goes_on_from_another(tmp_path: Path, dtype: str) -> None:
    """In half precision the calls of the session before are repeated, too."""

    async def main() -> None:
        addresses = [worker.address for worker in workers]
        chosen = CoordinatorSettings(
            peers=tuple(addresses), stages=2, dtype=dtype, max_seq_len=256, max_sessions=4
        )
        async with open_coordinator(chosen) as coordinator:
            with trio.fail_after(DEADLINE):
                while len(coordinator.fleet.holdings) < 3:
                    await trio.sleep(0.02)
            width = coordinator.model.ends.hidden_size * coordinator.model.dtype.itemsize
            chat = Chat(coordinator, width)
            prompt = coordinator.model.tokenizer.encode("A function definition")
            prompt = [*prompt, *range(300, 310)]
            answer = await chat.turn(prompt)
            second = [*prompt, *answer, *range(310, 318)]
            expected = await chat.turn(second, 30)
            assert chat.num_sent < len(second) + 29

            assert await chat.turn(prompt) == answer
            victim = next(w for w in workers if w.peer_id == coordinator.stages[1].peer_id)
            tokens = []
            async for token in coordinator.generate(second, max_tokens=30):
                tokens.append(token)
                if len(tokens) == 9:
                    victim.kill()
            assert tokens == expected
            assert len(coordinator.fleet.holdings) == 2
            # Nothing that the dead one had is gone on from.
            third = [*second, *tokens, 320]
            assert len(await chat.turn(third, 4)) == 4
            victim = next(w for w in workers if w.peer_id == coordinator.stages[0].peer_id)
            victim.kill()
            assert len(await chat.turn([*third, 321], 4)) == 4

    with ExitStack() as stack:
        workers = [stack.enter_context(start_worker(tmp_path, "--no-cache")) for _ in range(3)]
        run(main)
