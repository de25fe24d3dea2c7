"""`neurogrid` and `neurogrid.blocking`: the same names and signatures; text on top of token ids."""

from __future__ import annotations

import inspect
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest
import trio

import neurogrid
from neurogrid import SamplingParams, blocking
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.inference.generation.text_generation import TextGeneration
from neurogrid.model.embedded import embedded_model_path
from neurogrid.model.files.tokenizer import Tokenizer

# What has no blocking twin, and why.
WITHOUT_TWIN = {
    "Worker.load_own": "what `open_worker` does",
    "Coordinator.host": "`peer_id`, `addresses` and `status` tell what is of use of it",
}
PAIRS = [(neurogrid.Coordinator, blocking.Coordinator), (neurogrid.Worker, blocking.Worker)]
METHODS = [
    (ours, theirs, name)
    for ours, theirs in PAIRS
    for name, member in inspect.getmembers(ours, inspect.isfunction)
    if inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member)
    if not name.startswith("_") and f"{ours.__name__}.{name}" not in WITHOUT_TWIN
]
PROPERTIES = [
    (ours, theirs, name)
    for ours, theirs in PAIRS
    for name, member in vars(theirs).items()
    if isinstance(member, property) and (theirs, name) != (blocking.Coordinator, "model")
]


@pytest.mark.parametrize(("ours", "theirs", "name"), METHODS)
def test_every_coroutine_and_generator_has_its_twin(ours: type, theirs: type, name: str) -> None:
    method, twin = getattr(ours, name), getattr(theirs, name)
    assert not inspect.iscoroutinefunction(twin)
    ours_signature, theirs_signature = inspect.signature(method), inspect.signature(twin)
    assert theirs_signature.parameters == ours_signature.parameters
    gives = re.sub(
        r"^AsyncGenerator\[(.*), None\]$", r"Iterator[\1]", ours_signature.return_annotation
    )
    assert theirs_signature.return_annotation == gives
    assert inspect.getdoc(twin) == inspect.getdoc(method)


@pytest.mark.parametrize(("ours", "theirs", "name"), PROPERTIES)
def test_properties_are_alike(ours: type, theirs: type, name: str) -> None:
    gives = [inspect.signature(vars(cls)[name].fget).return_annotation for cls in (ours, theirs)]
    assert gives[0] == gives[1]


def test_nothing_more_is_public_on_the_blocking_side() -> None:
    for ours, theirs in PAIRS:
        assert {name for name in vars(theirs) if not name.startswith("_")} - {"model"} <= set(
            dir(ours)
        )


def test_nothing_that_a_coordinator_tells_is_missing_on_the_blocking_side() -> None:
    told = {name for name in vars(neurogrid.Coordinator) if name[0] != "_"}
    missing = told - set(dir(blocking.Coordinator))
    assert {f"Coordinator.{name}" for name in missing} <= set(WITHOUT_TWIN)


def test_the_status_is_told_alike() -> None:
    ours, theirs = neurogrid.Coordinator.status, blocking.Coordinator.status
    assert inspect.signature(theirs) == inspect.signature(ours)
    assert inspect.getdoc(theirs) == inspect.getdoc(ours)


@pytest.mark.parametrize("name", ["open_coordinator", "open_worker"])
def test_they_are_opened_alike(name: str) -> None:
    ours, theirs = getattr(neurogrid, name), getattr(blocking, name)
    assert inspect.signature(theirs).parameters == inspect.signature(ours).parameters
    assert "AbstractContextManager[" in inspect.signature(theirs).return_annotation


class Model:
    """A model of which nothing but the tokenizer is asked for."""

    tokenizer = Tokenizer.open(embedded_model_path())


class Recited(TextGeneration):
    """Generates the tokens of a text that is fixed, and knows when it was left."""

    model: LoadedModel = Model()  # type: ignore[assignment]

    def __init__(self, text: str) -> None:
        self._token_ids = self.model.tokenizer.encode(text)
        self.is_left = False

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        sampling: SamplingParams | None = None,
        adapter: str | None = None,
    ) -> AsyncGenerator[int, None]:
        try:
            for token_id in self._token_ids[:max_tokens]:
                await trio.lowlevel.checkpoint()
                yield token_id
        finally:
            self.is_left = True


TEXT = " is 12 €, naïve: 日本語 and 🙂 on."


async def test_the_pieces_together_are_the_text_and_none_is_empty() -> None:
    recited = Recited(TEXT)
    pieces = [piece async for piece in recited.stream("The price", max_tokens=1000)]
    assert "".join(pieces) == TEXT
    assert len(pieces) > 5
    assert all(pieces)
    assert await recited.complete("The price", max_tokens=1000) == TEXT


def test_a_conversation_is_put_by_the_models_own_template() -> None:
    asked: list[Sequence[int]] = []

    class Conversing(Recited):
        async def generate(
            self,
            token_ids: Sequence[int],
            *,
            max_tokens: int,
            sampling: SamplingParams | None = None,
            adapter: str | None = None,
        ) -> AsyncGenerator[int, None]:
            asked.append(token_ids)
            async with aclosing(super().generate(token_ids, max_tokens=max_tokens)) as tokens:
                async for token_id in tokens:
                    yield token_id

    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    assert trio.run(Conversing(TEXT).complete, messages) == TEXT
    assert asked == [Model.tokenizer.encode_chat(messages)]
    assert len(asked[0]) > len(Model.tokenizer.encode("Why?"))


async def test_who_stops_reading_leaves_the_generation() -> None:
    recited = Recited(TEXT)
    async with aclosing(recited.stream("The price")) as pieces:
        async for _ in pieces:
            break
    assert recited.is_left


async def test_a_cancelled_completion_leaves_the_generation() -> None:
    recited = Recited(TEXT * 1000)
    with trio.CancelScope() as scope:
        scope.cancel()
        await recited.complete("The price", max_tokens=10**6)
    assert scope.cancelled_caught
