"""Tokens with proposals are those without, over real workers: whatever is asked for, and whoever is lost on the way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
import trio
from transformers import AutoTokenizer

from neurogrid import Coordinator, CoordinatorSettings, SamplingParams, open_coordinator
from neurogrid.errors import ConfigurationError
from neurogrid.inference.generation.sampling import GeneratedToken
from neurogrid.model.embedded import embedded_model_path
from neurogrid.p2p.wire import PROTOCOL_V10
from tests.e2e.support import DEADLINE, WorkerProcess, start_worker
from tests.families import FAMILIES, save_checkpoint

# Text that repeats itself, of a kind that the embedded model goes on with.
SOURCE = """def first(items):
    return items[0]


def last(items):
    return items[-1]


def second(items):
    return items[1]


def first(items):
    return items[0]


def last(items):
"""
PROSE = "The with statement is used to wrap the execution of a block"
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"sampling": SamplingParams(temperature=0.7, seed=7)},
    "all at once": {
        "sampling": SamplingParams(
            temperature=0.6,
            top_p=0.95,
            seed=2,
            frequency_penalty=0.1,
            presence_penalty=0.1,
            repetition_penalty=1.05,
            logit_bias={20: -1.0, 30: 0.5},
            min_tokens=40,
        ),
        "num_logprobs": 3,
    },
}
MAX_TOKENS = 80


def settings(workers: Sequence[WorkerProcess], **more: Any) -> CoordinatorSettings:
    chosen: dict[str, Any] = {"stages": 2, "max_seq_len": 512, "speculate": "auto", **more}
    return CoordinatorSettings(peers=tuple(worker.address for worker in workers), **chosen)


async def generate(
    coordinator: Coordinator,
    prompt: Sequence[int],
    after_some: Callable[[], Awaitable[None]] | None = None,
    **how: Any,
) -> list[GeneratedToken]:
    tokens: list[GeneratedToken] = []
    wanted = {"max_tokens": MAX_TOKENS, **how}
    async with aclosing(coordinator.generate_tokens(prompt, **wanted)) as generating:
        async for token in generating:
            tokens.append(token)
            if len(tokens) == MAX_TOKENS // 3 and after_some is not None:
                await after_some()
    return tokens


def told(tokens: Sequence[GeneratedToken]) -> list[tuple[Any, ...]]:
    """All of them, but for what an earlier session had computed."""
    return [(token.token_id, token.logprobs, token.finish_reason) for token in tokens]


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def in_time() -> None:
        with trio.fail_after(DEADLINE):
            await main()

    trio.run(in_time)


async def undisturbed(workers: Sequence[WorkerProcess], **more: Any) -> list[list[Any]]:
    """The tokens of each prompt and way, without proposals."""
    async with open_coordinator(settings(workers, **{**more, "speculate": "off"})) as coordinator:
        encode = coordinator.model.tokenizer.encode
        expected = [
            told(await generate(coordinator, encode(prompt), **how))
            for prompt in (PROSE, SOURCE)
            for how in WAYS.values()
        ]
        status = coordinator.status()
        assert (status.num_proposed, status.speculation) == (0, "off")
    return expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_whatever_is_asked_for(workers: list[WorkerProcess], dtype: str) -> None:
    """One after the other, all at once, and again from prefixes that were kept; in whatever is said of each token."""

    async def main() -> None:
        expected = await undisturbed(workers[:2], dtype=dtype)
        wanted = settings(workers[:2], dtype=dtype, max_sessions=8)
        async with open_coordinator(wanted) as coordinator:
            encode = coordinator.model.tokenizer.encode
            cases = [(encode(prompt), how) for prompt in (PROSE, SOURCE) for how in WAYS.values()]
            got = [told(await generate(coordinator, prompt, **how)) for prompt, how in cases]
            status = coordinator.status()
            assert ids(got) == ids(expected)
            if dtype == "bfloat16":
                assert got == expected
            assert status.speculation == "prompt lookup"
            assert 0 < status.num_accepted <= status.num_proposed
            assert status.tokens_per_pass is not None
            assert status.tokens_per_pass > 1
            assert sum(each.num_accepted for each in status.requests) == status.num_accepted
            # Side by side; what each begins with is kept of the one before.
            together: dict[int, list[Any]] = {}

            async def one(index: int) -> None:
                prompt, how = cases[index]
                together[index] = told(await generate(coordinator, prompt, **how))

            async with trio.open_nursery() as nursery:
                for index in range(len(cases)):
                    nursery.start_soon(one, index)
            assert ids([together[i] for i in range(len(cases))]) == ids(expected)
            # A conversation's next turn takes over what a session with rejected tokens left.
            turn = [*cases[3][0], *(token[0] for token in expected[3][:50])]
            again = await generate(coordinator, turn, max_tokens=20)
            assert again[0].num_reused > len(cases[3][0])
            assert [t.token_id for t in again] == [token[0] for token in expected[3][50:70]]

    run(main)


def ids(several: Sequence[Sequence[tuple[Any, ...]]]) -> list[list[int]]:
    return [[token[0] for token in tokens] for tokens in several]


def test_a_worker_is_lost_in_the_middle(tmp_path: Path) -> None:
    """Another one takes over, and goes on with proposals."""

    async def main() -> None:
        expected = await undisturbed(workers)
        async with open_coordinator(settings(workers)) as coordinator:
            prompt = coordinator.model.tokenizer.encode(SOURCE)
            by_peer = {worker.peer_id: worker for worker in workers}

            async def kill() -> None:
                by_peer[coordinator.stages[1].peer_id].kill()

            for number, way in enumerate(("greedy", "sampled"), 1):
                while len(coordinator.fleet.holdings) < 4 - number:  # one stands by
                    await trio.sleep(0.05)
                got = told(await generate(coordinator, prompt, kill, **WAYS[way]))
                assert got == expected[3 + list(WAYS).index(way)]
                status = coordinator.status()
                assert status.num_accepted > 0
                assert sum(each.num_reroutes for each in status.requests) == number

    with ExitStack() as stack:
        workers = [stack.enter_context(start_worker(tmp_path)) for _ in range(4)]
        run(main)


@pytest.mark.parametrize("name", ["mistral-sliding", "gemma3", "lfm2", "phi3-longrope"])
def test_windows_go_back_and_states_of_one_size_are_let_alone(
    workers: list[WorkerProcess], tmp_path: Path, name: str
) -> None:
    """Windows of 16 tokens, in sessions of 100."""
    save_checkpoint({family.name: family for family in FAMILIES}[name], tmp_path)
    prompt = [5, 6, 7, 8, 9] * 4

    async def main() -> None:
        tokens = {}
        for speculate in ("off", "lookup"):
            wanted = settings(workers[:2], model=tmp_path, speculate=speculate)
            async with open_coordinator(wanted) as coordinator:
                tokens[speculate] = told(await generate(coordinator, prompt))
                status = coordinator.status()
        assert tokens["lookup"] == tokens["off"]
        if name in ("lfm2", "phi3-longrope"):
            assert status.speculation.startswith("none: this model ")
            assert status.num_proposed == 0
        else:
            assert status.num_accepted > 0

    run(main)


def test_what_knows_no_cuts_is_not_speculated_with(workers: list[WorkerProcess]) -> None:
    async def main() -> None:
        async with open_coordinator(settings(workers[:2], dtype="float32")) as coordinator:
            prompt = coordinator.model.tokenizer.encode(SOURCE)
            expected = told(await generate(coordinator, prompt, max_tokens=30, speculate=False))
            assert coordinator.status().num_proposed == 0
        wanted = settings(
            workers[:2], dtype="float32", speculate="lookup", protocol_versions=(PROTOCOL_V10,)
        )
        async with open_coordinator(wanted) as coordinator:
            got = told(await generate(coordinator, prompt, max_tokens=30))
            assert ids([got]) == ids([expected])
            status = coordinator.status()
            assert "older version" in status.speculation
            assert status.num_proposed == 0

    run(main)


def test_a_draft_model_writes_ahead(workers: list[WorkerProcess]) -> None:
    """One that is as good as the model itself, also where it is lost and found again."""

    async def main() -> None:
        wanted = settings(workers[:2], draft=embedded_model_path())
        async with open_coordinator(wanted) as coordinator:
            for text in (PROSE, SOURCE):
                prompt = coordinator.model.tokenizer.encode(text)
                for how in WAYS.values():
                    expected = told(await generate(coordinator, prompt, speculate=False, **how))
                    assert told(await generate(coordinator, prompt, **how)) == expected
            status = coordinator.status()
            assert "as a draft" in status.speculation
            # How often it is asked depends on what a pass costs.
            assert status.num_accepted > status.num_tokens / 10

    run(main)


def test_a_draft_model_of_other_tokens_is_refused(
    workers: list[WorkerProcess], tmp_path: Path
) -> None:
    save_checkpoint(FAMILIES[0], tmp_path)
    files = embedded_model_path()
    other = AutoTokenizer.from_pretrained(files)
    other.add_tokens(["something else"])
    other.save_pretrained(tmp_path)

    async def main() -> None:
        with pytest.raises(ConfigurationError, match="needs the same tokenizer"):
            async with open_coordinator(settings(workers[:2], draft=tmp_path)):
                pass
        with pytest.raises(ConfigurationError, match="--speculate off"):
            async with open_coordinator(settings(workers[:2], draft=files, speculate="off")):
                pass

    run(main)
