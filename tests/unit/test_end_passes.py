"""Single tokens take the short way through the ends only where it gives the bits of the whole pass."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as tf
from stage_families import FAMILIES, MAIN_FAMILIES, SMALL, Checkpoint, shared
from torch import nn
from transformers.models.llama import modeling_llama

from neurogrid.errors import CheckpointError
from neurogrid.model.files.tensor_names import is_end_tensor
from neurogrid.model.stages.stage import Ends

BOTH = {"embedding", "head"}
# Positions that are added to the embedding; caps and scales of logits; Granite multiplies on both sides.
SHORTCUTS = {
    "gpt2": {"head"},
    "opt": {"head"},
    "gemma2": {"embedding"},
    "cohere2": {"embedding"},
    "granite": set(),
}


def _whole(ends: Ends) -> Ends:
    """The same ends without shortcuts."""
    whole = copy.copy(ends)
    whole._passes = copy.copy(ends._passes)
    whole._passes.forget_shortcuts()
    return whole


def _results(ends: Ends) -> Iterator[torch.Tensor]:
    """What single tokens give, at other places than the proof tries, and past the longest sequence too."""
    generator = torch.Generator().manual_seed(2)
    longest = 127 if _has_table(ends) else 200
    for token_id, position in ((0, 0), (50, 12), (95, 33), (7, longest)):
        yield ends.embed([token_id], position=position)
        hidden = torch.randn(3, 1, ends.hidden_size, generator=generator)
        yield ends.logits(hidden[:1], position=position)
        # The last of several, in place.
        yield ends.logits(hidden.transpose(0, 1)[:, -1:], position=position)
        for rows in ([position, 5], [2, position, 40]):
            yield ends.embed_rows(range(len(rows)), positions=rows)
            yield ends.logits_rows(hidden[: len(rows)], positions=rows)
            yield ends.logits_rows(hidden[:1], positions=rows[:1])
    yield ends.embed([5, 6, 7], position=3)
    yield ends.logits(hidden.transpose(0, 1), position=3)


def _has_table(ends: Ends) -> bool:
    """Whether there is a position after which nothing can be embedded."""
    tables = [m for m in ends._skeleton.modules_outside() if isinstance(m, nn.Embedding)]
    return len(tables) > 1


def _assert_bits_of_whole_passes(family: str, ends: Ends) -> None:
    assert ends._passes.shortcuts == SHORTCUTS.get(family, BOTH)
    whole = _whole(ends)
    assert whole._passes.shortcuts == set()
    for mine, its in zip(_results(ends), _results(whole), strict=True):
        assert (mine.dtype, mine.shape) == (its.dtype, its.shape)
        assert torch.equal(mine.contiguous().view(torch.uint8), its.contiguous().view(torch.uint8))


@pytest.mark.parametrize("family", FAMILIES)
def test_single_tokens_get_the_bits_of_whole_passes(family: str) -> None:
    ends = shared(family).ends()
    _assert_bits_of_whole_passes(family, ends)
    ends.speed_up()
    _assert_bits_of_whole_passes(family, ends)


@pytest.mark.parametrize("family", MAIN_FAMILIES)
def test_they_do_in_bfloat16(family: str) -> None:
    _assert_bits_of_whole_passes(family, shared(family, torch.bfloat16).shared_ends)


@pytest.fixture
def llama() -> Checkpoint:
    return shared("llama")


def _wrap(
    monkeypatch: pytest.MonkeyPatch, owner: type[nn.Module], wrapper: Callable[..., Any]
) -> None:
    original = owner.forward

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return wrapper(functools.partial(original, self), *args, **kwargs)

    monkeypatch.setattr(owner, "forward", forward)


def test_a_pass_that_touches_logits_without_changing_them_is_no_shortcut(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def anew(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.0
        return output

    with monkeypatch.context() as patch:
        _wrap(patch, tf.LlamaForCausalLM, anew)
        assert llama.ends()._passes.shortcuts == {"embedding"}

    def in_place(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits.mul_(1.0)
        return output

    _wrap(monkeypatch, tf.LlamaForCausalLM, in_place)
    assert llama.ends()._passes.shortcuts == {"embedding"}


@pytest.mark.parametrize("key", ["scaled_at_position", "scaled_token", "scaled_with_others"])
def test_a_branch_at_a_number_that_the_config_names_or_for_rows_is_no_shortcut(
    key: str, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def branch(
        forward: functools.partial[Any],
        input_ids: Any = None,
        position_ids: Any = None,
        inputs_embeds: Any = None,
        **kwargs: Any,
    ) -> Any:
        base = forward.args[0]
        if input_ids is not None:
            inputs_embeds = base.embed_tokens(input_ids)
            branches = {
                "scaled_at_position": position_ids.max() == 77,
                "scaled_token": (input_ids == 77).any(),
                "scaled_with_others": len(input_ids) > 4,
            }
            if branches[key]:
                inputs_embeds = inputs_embeds * 2
        return forward(position_ids=position_ids, inputs_embeds=inputs_embeds, **kwargs)

    _wrap(monkeypatch, modeling_llama.LlamaModel, branch)
    config = tf.LlamaConfig(**SMALL, **{key: 77})
    ends = Ends(config, dtype=torch.float32, device="cpu")
    ends.load({name: t for name, t in llama.tensors.items() if is_end_tensor(name)})
    assert ends._passes.shortcuts == {"head"}


def test_a_guard_against_what_is_not_finite_is_no_shortcut(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def guard(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if not output.logits.isfinite().all():
            output.logits = output.logits.nan_to_num()
        return output

    _wrap(monkeypatch, tf.LlamaForCausalLM, guard)
    assert llama.ends()._passes.shortcuts == {"embedding"}


def test_a_module_that_its_model_sets_before_each_call_is_no_shortcut(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Called right after a pass it gives what it gave there, and not after a pass of another length.
    def set_norm(forward: functools.partial[Any], *args: Any, **kwargs: Any) -> Any:
        base = forward.args[0]
        base.norm.variance_epsilon = 1.0 + float(kwargs["position_ids"].max())
        return forward(*args, **kwargs)

    _wrap(monkeypatch, modeling_llama.LlamaModel, set_norm)
    assert llama.ends()._passes.shortcuts == {"embedding"}


def test_a_module_that_keeps_something_for_its_next_call_is_no_shortcut(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(1, 1_000_000))

    def drift(forward: Callable[..., Any], hidden_states: torch.Tensor) -> Any:
        return forward(hidden_states) * next(calls)

    _wrap(monkeypatch, modeling_llama.LlamaRMSNorm, drift)
    assert llama.ends()._passes.shortcuts == {"embedding"}


def test_a_module_that_is_given_more_than_the_hidden_state_is_no_shortcut(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []

    class Norm(modeling_llama.LlamaRMSNorm):
        def __call__(self, hidden_states: torch.Tensor) -> Any:
            called.append(hidden_states.shape)
            return super().__call__(hidden_states=hidden_states)

    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", Norm)
    assert llama.ends()._passes.shortcuts == {"embedding"}
    assert called


def test_state_in_buffers_is_put_back_before_each_token() -> None:
    # Gemma scales its embedding by a buffer.
    ends = shared("gemma3").ends()
    expected = ends.embed([5], position=0)
    scales = [
        buffer
        for module in ends._skeleton.modules_outside()
        if isinstance(module, nn.Embedding)
        for buffer in module.buffers()
    ]
    assert scales
    for scale in scales:
        scale.mul_(3)
    assert torch.equal(ends.embed([5], position=0), expected)


def test_weights_that_are_loaded_or_changed_later_count(llama: Checkpoint) -> None:
    ends = llama.ends()
    tensors = {name: t for name, t in llama.tensors.items() if is_end_tensor(name)}
    hidden = torch.randn(1, 1, 48, generator=torch.Generator().manual_seed(3))
    embedded, logits = ends.embed([5], position=2), ends.logits(hidden, position=2)
    with pytest.raises(CheckpointError):
        ends.load({})
    assert torch.equal(ends.embed([5], position=2), embedded)
    ends.load({name: tensor * 2 for name, tensor in tensors.items()})
    assert ends._passes.shortcuts == BOTH
    assert torch.equal(ends.embed([5], position=2), embedded * 2)
    assert torch.equal(ends.logits(hidden, position=2), logits * 4)
    with torch.no_grad():
        ends._skeleton.model.lm_head.weight.mul_(0.5)
    assert torch.equal(ends.logits(hidden, position=2), logits * 2)


def test_past_what_was_proven_the_whole_pass_runs(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = llama.ends()
    whole = []
    run = ends._skeleton.run_embedding
    monkeypatch.setattr(
        ends._skeleton,
        "run_embedding",
        lambda *args: whole.append(args[1]) or run(*args),  # type: ignore[func-returns-value]
    )
    for position in (0, 64, 127, 128, 4000):
        ends.embed([5], position=position)
    ends.embed_rows([5, 6], positions=[3, 127])
    ends.embed_rows([5, 6], positions=[3, 128])
    ends.embed([5, 6], position=9)
    assert whole == [128, 4000, [3, 128], 9]


def test_a_config_of_too_many_numbers_is_not_tried(llama: Checkpoint) -> None:
    config = tf.LlamaConfig(**SMALL, suppressed=list(range(1000)))
    ends = Ends(config, dtype=torch.float32, device="cpu")
    ends.load({name: t for name, t in llama.tensors.items() if is_end_tensor(name)})
    assert ends._passes.shortcuts == set()


def test_the_proof_leaves_no_trace(llama: Checkpoint) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    ends = llama.ends()
    assert torch.equal(torch.rand(3), expected)
    for module in ends._skeleton.modules_outside():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)
