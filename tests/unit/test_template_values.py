"""What chat templates are told of a request, and what they cannot be told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trio

from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.server.openai.request_reader import read_chat
from neurogrid.server.openai.template_values import MAX_VARIABLES_BYTES, MAX_VARIABLES_DEPTH
from tests.unit.told_coordinator import Told, asked, load_embedded, message

THINKING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<no thoughts>{% endif %}"
    "{% if style %}<{{ style.tone }}>{% endif %}"
)
REASONING = THINKING + "{% if reasoning_effort %}<{{ reasoning_effort }}>{% endif %}"


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_embedded()


@contextmanager
def template_of(model: LoadedModel, template: str) -> Iterator[None]:
    backend = model.tokenizer._backend
    before, backend.chat_template = backend.chat_template, template
    try:
        yield
    finally:
        backend.chat_template = before


def read(model: LoadedModel, template: str, **body: Any) -> str:
    """The text that a chat request makes of its messages."""

    async def main() -> str:
        request = await read_chat({"messages": [message("A")], **body}, model)
        return model.tokenizer.decode(request.choices[0].prompt)

    with template_of(model, template):
        return trio.run(main)


@pytest.mark.parametrize(
    ("template", "body", "end"),
    [
        (THINKING, {}, "<assistant>"),
        (
            THINKING,
            {"chat_template_kwargs": {"enable_thinking": False}},
            "<assistant><no thoughts>",
        ),
        (THINKING, {"chat_template_kwargs": {"style": {"tone": "dry"}}}, "<assistant><dry>"),
        (THINKING, {"chat_template_kwargs": {"never_heard_of": 1}}, "<assistant>"),
        (THINKING, {"enable_thinking": False}, "<assistant><no thoughts>"),
        (THINKING, {"enable_thinking": True}, "<assistant>"),
        (THINKING, {"reasoning_effort": "none"}, "<assistant><no thoughts>"),
        (REASONING, {"reasoning_effort": "high"}, "<assistant><high>"),
        (REASONING, {"chat_template_kwargs": {"reasoning_effort": "low"}}, "<assistant><low>"),
        ("{{ messages[0].content }}", {"reasoning_effort": "none", "enable_thinking": False}, "A"),
        (THINKING, {"add_generation_prompt": False}, "<user>A</>"),
    ],
)
def test_the_template_is_told_what_the_request_says(
    model: LoadedModel, template: str, body: dict[str, Any], end: str
) -> None:
    assert read(model, template, **body).removeprefix("<user>A</>") == end.removeprefix(
        "<user>A</>"
    )


@pytest.mark.parametrize("prompt", [{}, {"add_generation_prompt": False}])
def test_the_last_message_goes_on(model: LoadedModel, prompt: dict[str, Any]) -> None:
    turns = [message("A"), message("It is a", "assistant")]
    text = read(model, THINKING, messages=turns, continue_final_message=True, **prompt)
    assert text == "<user>A</><assistant>It is a"
    assert read(model, THINKING, messages=turns, add_generation_prompt=False) == f"{text}</>"


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else "x"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"reasoning_effort": "high"}, 400, "reasoning_effort"),
        ({"reasoning_effort": 3}, 400, "reasoning_effort"),
        ({"chat_template_kwargs": []}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"_x": 1}}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": nested(MAX_VARIABLES_DEPTH)}}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": nested(MAX_VARIABLES_DEPTH - 1)}}, 200, None),
        ({"chat_template_kwargs": {"a": nested(400)}}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "x" * MAX_VARIABLES_BYTES}}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": [0] * MAX_VARIABLES_BYTES}}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": [0] * (MAX_VARIABLES_BYTES // 4)}}, 200, None),
        (
            {"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False},
            422,
            "enable_thinking",
        ),
        ({"continue_final_message": True}, 422, "continue_final_message"),
        (
            {
                "messages": [message("A", "assistant")],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            422,
            "continue_final_message",
        ),
    ],
)
def test_what_a_template_cannot_be_told_is_named(
    model: LoadedModel, body: dict[str, Any], status: int, param: str | None
) -> None:
    with template_of(model, THINKING):
        answered = asked(Told(model), "chat/completions", **body)
    assert answered.status == status
    assert status == 200 or answered.error["param"] == param


def test_a_model_without_a_template_says_so(model: LoadedModel) -> None:
    backend = model.tokenizer._backend
    template, backend.chat_template = backend.chat_template, None
    try:
        answered = asked(Told(model), "chat/completions")
        assert "has no chat template" in answered.error["message"]
        backend.chat_template = "{{ raise_exception('only one user, please') }}"
        answered = asked(Told(model), "chat/completions")
        assert answered.status == 400
        assert "only one user, please" in answered.error["message"]
        # In the sandbox.
        backend.chat_template = "{{ messages.__class__.__mro__ }}"
        assert asked(Told(model), "chat/completions").status == 400
    finally:
        backend.chat_template = template
