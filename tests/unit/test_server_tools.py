"""Tools and formats in chats, over a coordinator that says what it is told to: what is asked, refused and answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.model.embedded import embedded_model_path
from tests.unit.told_coordinator import Told, asked, message

HERMES = """\
{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}\
{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}\
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments.a + 1 }}</tool_call>\
{% endfor %}</>{% endfor %}<assistant>"""
UNKNOWN = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
TAGGED = HERMES + "{# <function= <parameter= #}"
LLAMA = UNKNOWN + "{# <|python_tag|> #}"
SEPARATE = {"default": UNKNOWN, "tool_use": HERMES}
CALLS = (
    "<think>Hm.</think>\nLook:\n"
    '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
)
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}},
}


def tool_of(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return LoadedModel.load(
        embedded_model_path(), name="embedded", max_seq_len=1024, dtype="float32"
    )


@contextmanager
def template_of(model: LoadedModel, template: Any) -> Iterator[None]:
    backend = model.tokenizer._backend
    before, backend.chat_template = backend.chat_template, template
    try:
        yield
    finally:
        backend.chat_template = before


def chat(model: LoadedModel, text: str = CALLS, *, template: Any = HERMES, **body: Any) -> Any:
    with template_of(model, template):
        return asked(Told(model, text=text), "chat/completions", max_tokens=200, **body)


def test_thoughts_text_and_calls_stand_apart(model: LoadedModel) -> None:
    choice = chat(model, tools=[TOOL]).json["choices"][0]
    told = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (told["content"], told["reasoning_content"], told["reasoning"]) == (
        "Look:",
        "Hm.",
        "Hm.",
    )
    calls = [(call["type"], call["function"]) for call in told["tool_calls"]]
    assert calls == [
        ("function", {"name": "f", "arguments": '{"a": 1}'}),
        ("function", {"name": "f", "arguments": "{}"}),
    ]
    assert len({call["id"] for call in told["tool_calls"]}) == 2


@pytest.mark.parametrize("stop", ["m.", '"a"', "}}"])
def test_a_stop_string_leaves_thoughts_and_calls_whole(model: LoadedModel, stop: str) -> None:
    choice = chat(model, tools=[TOOL], stop=[stop]).json["choices"][0]
    told = choice["message"]
    calls = [json.loads(call["function"]["arguments"]) for call in told["tool_calls"]]
    assert (told["content"], told["reasoning_content"], calls) == ("Look:", "Hm.", [{"a": 1}, {}])
    assert choice["finish_reason"] == "tool_calls"
    assert chat(model, tools=[TOOL], stop=["k"]).json["choices"][0]["message"]["content"] == "Loo"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_an_object_that_is_no_call(model: LoadedModel, stream: bool) -> None:
    text = '{"answer": "yes", "why": "so"}'
    told = chat(model, text, template=LLAMA, tools=[TOOL], stop=[', "why'], stream=stream)
    choices = [event["choices"][0] for event in (told.events[:-1] if stream else [told.json])]
    texts = [choice["delta" if stream else "message"].get("content") or "" for choice in choices]
    assert "".join(texts) == '{"answer": "yes"'
    assert choices[-1]["finish_reason"] == "stop"


def test_a_stream_is_the_same_in_deltas(model: LoadedModel) -> None:
    events = chat(model, tools=[TOOL], stream=True).events[:-1]
    content, thoughts, calls = "", "", []
    for event in events:
        delta = event["choices"][0]["delta"]
        content += delta.get("content") or ""
        thoughts += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append([call["function"]["name"], ""])
                assert call["type"] == "function"
            calls[call["index"]][1] += call["function"]["arguments"]
    assert (content, thoughts) == ("Look:", "Hm.")
    assert calls == [["f", '{"a": 1}'], ["f", "{}"]]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_without_tools_calls_are_text(model: LoadedModel) -> None:
    told = chat(model).json["choices"][0]
    assert told["finish_reason"] == "stop"
    assert told["message"]["content"] == CALLS.partition("\n")[2]
    assert "tool_calls" not in told["message"]


def test_one_call_at_most(model: LoadedModel) -> None:
    choice = chat(model, tools=[TOOL], parallel_tool_calls=False).json["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("body", "has_grammar"),
    [
        ({"tools": [TOOL]}, False),
        ({"tools": [TOOL], "tool_choice": "required"}, True),
        ({"tools": [{**TOOL, "function": {"name": "f", "strict": True}}]}, True),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": {"type": "json_object"}}, True),
        ({"tools": [TOOL], "tool_choice": "none"}, False),
        ({"tools": [tool_of({"properties": None, "required": None})]}, False),
    ],
)
def test_answers_are_held_to_a_grammar_where_that_is_asked(
    model: LoadedModel, body: dict[str, Any], has_grammar: bool
) -> None:
    coordinator = Told(model)
    with template_of(model, HERMES):
        assert asked(coordinator, "chat/completions", max_tokens=9, **body).status == 200
    assert [grammar is not None for grammar in coordinator.grammars] == [has_grammar]


def test_the_template_for_tools_is_taken(model: LoadedModel) -> None:
    assert chat(model, template=SEPARATE, tools=[TOOL]).status == 200


@pytest.mark.parametrize(
    ("template", "body", "status", "says"),
    [
        ("{{ messages }}", {"tools": [TOOL]}, 400, "does not name them"),
        (UNKNOWN, {"tools": [TOOL]}, 400, "format that is not known"),
        (
            HERMES,
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            422,
            "none of the tools",
        ),
        ("{{ messages }}", {"messages": [message("x", "tool")]}, 400, "does not name tool"),
        (HERMES, {"messages": [message("x", "tool")]}, 422, "tool_call_id is missing"),
        (HERMES, {"messages": [{"role": "assistant"}]}, 400, "messages[0].content is missing"),
        (
            HERMES,
            {"tools": [{**TOOL, "function": {"name": "f", "parameters": {"type": "array"}}}]},
            400,
            "parameters.type",
        ),
        *(
            (TAGGED, {"tools": [tool_of(given)], **more}, 400, says)
            for given, says in (
                ({"properties": [1]}, "parameters.properties has to be an object"),
                ({"properties": {"a": {"type": "string", "enum": 5}}}, "properties.a.enum has to"),
                ({"required": 5}, "parameters.required has to be a list"),
                ({"required": [[1]]}, "parameters.required[0] has to be a string"),
            )
            for more in ({}, {"tool_choice": "required"})
        ),
    ],
)
def test_what_cannot_be_is_refused(
    model: LoadedModel, template: Any, body: dict[str, Any], status: int, says: str
) -> None:
    answered = chat(model, template=template, **body)
    assert answered.status == status
    assert says in answered.error["message"]


def test_calls_and_answers_of_tools_reach_the_template(model: LoadedModel) -> None:
    function = {"name": "f", "arguments": '{"a": 41}'}
    call = {"id": "c", "type": "function", "function": function}
    turns = [
        message("A"),
        {"role": "assistant", "content": None, "reasoning": "So.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "18"},
    ]
    template = HERMES.replace("<{{ m.role }}>", "<{{ m.role }} {{ m.tool_call_id }}>")
    with template_of(model, template):
        text = model.tokenizer.chat_text(
            [
                message("A"),
                {
                    **message("", "assistant"),
                    "reasoning_content": "So.",
                    "tool_calls": [{"function": {"arguments": {"a": 41}}}],
                },
                {**message("18", "tool"), "tool_call_id": "c"},
            ]
        )
        assert "<think>So.</think><tool_call>42</tool_call></><tool c>18</>" in text
        count = len(model.tokenizer.encode(text, add_special_tokens=False))
    usage = chat(model, template=template + "{# tool #}", messages=turns).json["usage"]
    assert usage["prompt_tokens"] == count
    for arguments in ("no JSON", "[1]"):
        function["arguments"] = arguments
        refused = chat(model, template=template, messages=turns)
        assert refused.error["param"] == "messages[1].tool_calls[0].function.arguments"


def test_nothing_of_an_answer_is_json_by_itself(model: LoadedModel) -> None:
    answered = chat(model, '{"a": 1}', response_format={"type": "json_object"})
    assert json.loads(answered.json["choices"][0]["message"]["content"]) == {"a": 1}
