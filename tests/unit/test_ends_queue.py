"""Head, choice and embedding in one call: each gets its own, an error included."""

from __future__ import annotations

import pytest
import torch
import trio
import trio.testing

from neurogrid.errors import ModelError
from neurogrid.inference.generation.ends_queue import Chosen, EndsQueue, open_ends
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.model.embedded import embedded_model_path


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return LoadedModel.load(embedded_model_path(), name=None, max_seq_len=64, dtype="float32")


PEERS = ("near", "far")


async def hidden_states(queue: EndsQueue, num_rows: int) -> list[torch.Tensor]:
    return [await queue.embed([i + 5], position=i + 1, session=i) for i in range(num_rows)]


def likeliest(logits_V: torch.Tensor) -> Chosen[str]:
    token_id = int(logits_V.argmax())
    return Chosen(f"token {token_id}", token_id)


def run(model: LoadedModel, scenario: object, *, shares_forward: bool = True) -> None:
    async def main() -> None:
        async with open_ends(model.ends, shares_forward=shares_forward) as queue:
            await scenario(queue)  # type: ignore[operator]

    trio.run(main)


@pytest.mark.parametrize("shares_forward", [True, False])
def test_what_is_chosen_is_embedded_at_once(model: LoadedModel, shares_forward: bool) -> None:
    async def scenario(queue: EndsQueue) -> None:
        hidden = await hidden_states(queue, 5)
        results: dict[int, tuple[Chosen[str], torch.Tensor | None]] = {}

        async def choose(i: int) -> None:
            results[i] = await queue.choose(hidden[i], position=i + 1, choose=likeliest, session=i)

        async with trio.open_nursery() as nursery:
            for i in range(5):
                nursery.start_soon(choose, i)
        for i, (chosen, ahead_BTD) in results.items():
            logits_V = model.ends.logits(hidden[i], position=i + 1)
            assert chosen == likeliest(logits_V)
            assert chosen.token_id is not None
            expected_BTD = await queue.embed([chosen.token_id], position=i + 2, session=i)
            assert ahead_BTD is not None
            torch.testing.assert_close(ahead_BTD, expected_BTD)

    run(model, scenario, shares_forward=shares_forward)


def test_an_error_is_of_the_one_that_chose(model: LoadedModel) -> None:
    async def scenario(queue: EndsQueue) -> None:
        hidden = await hidden_states(queue, 4)
        outcomes: list[str] = [""] * 4

        def refuse(logits_V: torch.Tensor) -> Chosen[str]:
            raise ModelError("no")

        async def choose(i: int) -> None:
            try:
                how = refuse if i == 2 else likeliest
                chosen, _ = await queue.choose(hidden[i], position=i + 1, choose=how, session=i)
                outcomes[i] = chosen.value
            except ModelError as exc:
                outcomes[i] = str(exc)

        async with trio.open_nursery() as nursery:
            for i in range(4):
                nursery.start_soon(choose, i)
        assert outcomes[2] == "no"
        assert all(outcomes[i].startswith("token ") for i in (0, 1, 3))

    run(model, scenario)


def test_the_last_token_is_not_embedded(model: LoadedModel) -> None:
    async def scenario(queue: EndsQueue) -> None:
        (hidden_BTD,) = await hidden_states(queue, 1)
        last: Chosen[int] = Chosen(7, None)
        assert await queue.choose(hidden_BTD, position=1, choose=lambda _: last, session=0) == (
            last,
            None,
        )

    run(model, scenario)


def test_those_that_left_together_are_chosen_together(model: LoadedModel) -> None:
    """One that fails on its way is not waited for, nor one that is given up where it waits to leave."""

    async def scenario(queue: EndsQueue) -> None:
        hidden = await hidden_states(queue, 4)
        left: dict[int, tuple[int, ...]] = {}
        chosen: list[int] = []

        async def leave(i: int) -> None:
            left[i] = await queue.leave(i, PEERS)

        async def choose(i: int) -> None:
            await queue.choose(hidden[i], position=i + 1, choose=likeliest, session=i)
            chosen.append(i)

        async with trio.open_nursery() as nursery:
            await leave(0)
            for i in (1, 2, 3):
                nursery.start_soon(leave, i)
            await trio.testing.wait_all_tasks_blocked()
            assert left == {0: ()}
            await choose(0)
            await leave(0)
            await trio.testing.wait_all_tasks_blocked()
            assert {len(batch) for batch in left.values()} == {2}
            assert {batch[1] for batch in left.values()} == {4}
            async with trio.open_nursery() as choosing:
                for i in (0, 1, 3):
                    choosing.start_soon(choose, i)
                await trio.testing.wait_all_tasks_blocked()
                assert (queue.batcher.num_waiting, chosen) == (3, [0])
                queue.forget(2)
            assert sorted(chosen) == [0, 0, 1, 3]
            nursery.start_soon(leave, 3)
            with trio.move_on_after(0):
                await leave(1)
            queue.forget(1)
            queue.forget(0)  # its reader has had enough
            await trio.testing.wait_all_tasks_blocked()
            assert left[3] == ()

    run(model, scenario)
