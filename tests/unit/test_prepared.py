"""A pass that was prepared before its hidden state came gives the bits of one that was not, or is not used."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import trio
from stage_families import FAMILIES, Checkpoint, held_model, shared
from torch import nn
from transformers.models.llama import modeling_llama

from neurogrid.inference.sessions.passes import forward, prepare
from neurogrid.inference.sessions.step_queue import WorkerSteps
from neurogrid.inference.sessions.table import Session
from neurogrid.model.caches.cache import StageCache
from neurogrid.model.caches.prepared import markers, same_values
from neurogrid.model.stages.stage import Stage
from neurogrid.worker.state import WorkerState

PROMPT = 11
# Their layers return more than a hidden state, or get the cache by its place.
NOT_PREPARED = {"bloom", "falcon", "gpt2"}


def _hidden(stage: Stage, num_tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, num_tokens, stage.hidden_size, generator=generator)


def _begun(stage: Stage, start: int, stop: int, num_tokens: int = PROMPT) -> StageCache:
    cache = stage.new_cache()
    hidden = _hidden(stage, num_tokens, 1)
    stage.forward(hidden, start=start, stop=stop, position=0, cache=cache)
    return cache


@pytest.mark.parametrize("family", FAMILIES)
def test_prepared_steps_give_the_same_bits(family: str) -> None:
    checkpoint = shared(family)
    stage, other = checkpoint.shared_stage(1, 3), checkpoint.shared_stage(0, checkpoint.num_layers)
    cache, same = _begun(stage, 1, 3), _begun(other, 1, 3)
    # Another session in between, whose positions are elsewhere.
    beside = _begun(stage, 1, 3, 30)
    is_prepared = []
    for position in range(PROMPT, PROMPT + 7):
        stage.prepare(start=1, stop=3, position=position, cache=cache)
        is_prepared.append(cache.prepared is not None)
        stage.forward(_hidden(stage, 1, 7), start=1, stop=3, position=position + 19, cache=beside)
        hidden = _hidden(stage, 1, position)
        mine = stage.forward(hidden, start=1, stop=3, position=position, cache=cache)
        its = other.forward(hidden, start=1, stop=3, position=position, cache=same)
        assert cache.prepared is None
        assert same_values(mine, its)
    assert all(is_prepared) or not any(is_prepared)
    assert any(is_prepared) == (family not in NOT_PREPARED)


@pytest.fixture
def llama() -> Checkpoint:
    return shared("llama")


def test_it_is_used_for_what_it_was_prepared_for_alone(llama: Checkpoint) -> None:
    stage = llama.stage(0, 3)
    cache, same = _begun(stage, 0, 3), _begun(stage, 0, 3)

    def prepared() -> None:
        stage.prepare(start=0, stop=3, position=PROMPT, cache=cache)
        assert cache.prepared is not None

    prepared()
    twin = cache.copy(PROMPT)
    assert twin.prepared is None
    cache.cut(PROMPT - 2)
    assert cache.prepared is None
    # Cut back, and forward by several tokens to another length.
    hidden = _hidden(stage, 4, 5)
    stage.forward(hidden, start=0, stop=3, position=PROMPT - 2, cache=cache)
    for _ in range(2):
        same.cut(PROMPT - 2)
        stage.forward(hidden, start=0, stop=3, position=PROMPT - 2, cache=same)
    # Prepared for all three layers, run over one after the other.
    stage.prepare(start=0, stop=3, position=PROMPT + 2, cache=cache)
    step = _hidden(stage, 1, 6)
    mine = its = step
    for layer in range(3):
        mine = stage.forward(mine, start=layer, stop=layer + 1, position=PROMPT + 2, cache=cache)
    its = stage.forward(its, start=0, stop=3, position=PROMPT + 2, cache=same)
    assert torch.equal(mine, its)


def test_layers_that_were_loaded_since_are_the_ones_that_run(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = llama.stage(0, 2)
    cache, same = _begun(stage, 0, 2), _begun(stage, 0, 2)
    stage.prepare(start=0, stop=2, position=PROMPT, cache=cache)
    stage.drop_layer(1)
    stage.load_layer(1, {name: 2 * each for name, each in llama.layer(1).items()})
    step = _hidden(stage, 1, 6)
    mine = stage.forward(step, start=0, stop=2, position=PROMPT, cache=cache)
    its = stage.forward(step, start=0, stop=2, position=PROMPT, cache=same)
    assert torch.equal(mine, its)


def _between_layers(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]
) -> None:
    """Let Llama's base model do something to what its second layer is called with."""
    original = modeling_llama.LlamaModel.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept = list(self.layers)

        def wrap(layer: nn.Module) -> Callable[..., Any]:
            return lambda hidden, *more, **named: layer(change(hidden, named), *more, **named)

        class Layers:
            def __getitem__(self, index: Any) -> list[Any]:
                return [kept[0], *(wrap(layer) for layer in kept[1:])][index]

        layers, self._modules["layers"] = self._modules["layers"], None
        self.__dict__["layers"] = Layers()
        try:
            return original(self, *args, **kwargs)
        finally:
            del self.__dict__["layers"]
            self._modules["layers"] = layers

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", forward)


def _scaled(hidden: torch.Tensor, named: dict[str, Any]) -> torch.Tensor:
    return hidden * 1.5


def _scaled_in_place(hidden: torch.Tensor, named: dict[str, Any]) -> torch.Tensor:
    return hidden.mul_(1.5)


def _told_of_it(hidden: torch.Tensor, named: dict[str, Any]) -> torch.Tensor:
    cos, sin = named["position_embeddings"]
    named["position_embeddings"] = cos + hidden.nan_to_num(0.0).mean(), sin
    return hidden


@pytest.mark.parametrize("change", [_scaled, _scaled_in_place, _told_of_it])
def test_a_base_model_that_meddles_between_layers_is_not_prepared(
    llama: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor],
) -> None:
    stage = llama.stage(0, 3)
    cache = _begun(stage, 0, 3)
    _between_layers(monkeypatch, change)
    stage.prepare(start=0, stop=3, position=PROMPT, cache=cache)
    assert cache.prepared is None
    stage.prepare(start=0, stop=1, position=PROMPT, cache=_begun(stage, 0, 1))
    monkeypatch.undo()
    stage.prepare(start=0, stop=3, position=PROMPT, cache=cache)
    assert cache.prepared is None  # it is not asked again


def test_no_next_position_is_no_error() -> None:
    longest = FAMILIES["opt"]().max_position_embeddings
    model = held_model("opt", 1)
    cache = model.stage.new_cache()
    hidden = torch.randn(1, longest, model.hidden_size)
    forward(model, hidden, start=0, stop=1, position=0, cache=cache)
    with pytest.raises(IndexError):  # the table of positions ends here
        model.stage.prepare(start=0, stop=1, position=longest, cache=cache)
    prepare(model, start=0, stop=1, position=longest, cache=cache)
    assert cache.prepared is None


async def test_the_end_of_a_session_has_no_next_step_nor_has_one_that_is_here() -> None:
    prepared: list[int] = []

    async def run_briefly(call: partial[None]) -> None:
        prepared.append(call.keywords["position"])

    thread = SimpleNamespace(run_briefly=run_briefly)
    steps = WorkerSteps(cast(WorkerState, SimpleNamespace(torch_thread=thread)))
    for length in (0, 1, 7, 8):
        session = SimpleNamespace(
            length=length,
            max_length=8,
            start=0,
            stop=1,
            cache=None,
            model=None,
            turn=trio.Condition(),
        )
        await steps.prepare(cast(Session, session))
        # Somebody computes for it: what is there then may be at another position when its turn comes.
        async with session.turn, trio.open_nursery() as nursery:
            nursery.start_soon(steps.prepare, cast(Session, session))
    assert prepared == [1, 7]


def test_a_session_takes_its_memory_with_it(llama: Checkpoint) -> None:
    stage = llama.stage(0, 2)
    cache = _begun(stage, 0, 2)
    stage.prepare(start=0, stop=2, position=PROMPT, cache=cache)
    gone = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert gone() is None
    finally:
        gc.enable()


def test_values_are_the_same_by_their_bits() -> None:
    first, second = markers(torch.empty(1, 1, 8))
    assert same_values(second, second.clone())  # though there is a NaN in it
    assert not same_values(first, second)
    assert not same_values(torch.zeros(2), -torch.zeros(2))
    assert same_values({"a": (1, None, [first])}, {"a": (1, None, [first.clone()])})
    assert not same_values({"a": 1}, {"b": 1})
    assert not same_values(1, True)
    assert not same_values(object(), object())
