"""Messages read from a model's text: thoughts, calls of known formats, and text that only looks like one."""
# ruff: noqa: RUF001

from __future__ import annotations

import json
import re
import time
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.inference.generation.sampling import GeneratedToken, Logprobs
from neurogrid.model.embedded import embedded_model_path
from neurogrid.model.files.tokenizer import Tokenizer
from neurogrid.server.openai.answer_writer import AnswerWriter, Piece
from neurogrid.server.openai.tools.call_formats import (
    _FORMATS,
    CallFormat,
    Style,
    Thinking,
    call_format,
    thinking_of,
)
from neurogrid.server.openai.tools.call_object import CallObject
from neurogrid.server.openai.tools.message_reader import MessageForm, MessageReader

TOOLS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "time": {"type": "object"},
}
ARGUMENTS = {"city": 'A "}" {<tool_call>\\ü', "days": 3}
THINKING = Thinking("<think>", "</think>")
TOKENIZER = Tokenizer.open(embedded_model_path())


def form_of(name: str, **more: Any) -> MessageForm:
    known = next(known for known in _FORMATS if known.name == name)
    return MessageForm(call_format=known, tools=TOOLS, **more)


def read(
    form: MessageForm, text: str, *, size: int = 0, reason: Any = "stop"
) -> tuple[str, str, list[tuple[str, str]], str | None]:
    """Text, thoughts, calls and finish reason of a message that comes in pieces of so many characters."""
    reader = MessageReader(form)
    size = size or max(len(text), 1)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    content, thoughts, calls, ended = "", "", [], None
    for each in [Piece(piece) for piece in pieces] + [Piece("", finish_reason=reason)]:
        told = reader.push(each)
        content, thoughts = content + told.text, thoughts + told.reasoning
        for call in told.calls:
            if call.name is not None:
                assert call.call_id is not None
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
        ended = told.finish_reason
        if reader.is_over:
            break
    return content, thoughts, [(name, arguments) for name, arguments in calls], ended


def written(known: CallFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls as a model of this format writes them."""

    def one(name: str, arguments: dict[str, Any]) -> str:
        told = json.dumps(arguments, ensure_ascii=False)
        if known.style is Style.NAMED:
            return known.call_begin + name + known.name_end + told + known.call_end
        if known.style is Style.TAGGED:
            values = "".join(
                f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
            )
            return f"{known.call_begin}<function={name}>\n{values}</function>\n{known.call_end}"
        return f'{known.call_begin}{{"name": "{name}", "{known.arguments_key}": {told}}}{known.call_end}'

    parts = (known.separator or "").join(one(*call) for call in calls)
    return known.begin + parts + known.end


@pytest.mark.parametrize("size", [0, 1, 2, 5])
@pytest.mark.parametrize("known", _FORMATS, ids=lambda known: known.name)
def test_calls_of_each_format_are_read_in_any_pieces(known: CallFormat, size: int) -> None:
    form = form_of(known.name)
    calls = [("weather", ARGUMENTS)]
    if known.separator is not None:
        calls.append(("time", {}))
    text = written(known, *calls)
    content, _, told, reason = read(form, text, size=size)
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in told] == calls
    assert reason == "tool_calls"


@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize(
    "known", [known for known in _FORMATS if known.trigger], ids=lambda k: k.name
)
def test_text_before_a_call_is_the_answer_s(known: CallFormat, size: int) -> None:
    text = "Let me < look. [x]\n\n" + written(known, ("time", {}))
    content, _, told, reason = read(form_of(known.name), text, size=size)
    assert (content, told, reason) == ("Let me < look. [x]", [("time", "{}")], "tool_calls")


@pytest.mark.parametrize("size", [0, 1, 4])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "if a < b: <tool"),
        ("hermes", "It writes <tool_call> and means it."),
        ("hermes", '<tool_call>\n{"names": [1], "a": 2}\n</tool_call> after'),
        ("hermes", '<tool_call>\n{"name": 3}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"na'),
        ("llama3", '{"name": "nobody", "parameters": {}}'),
        ("llama3", '{"answer": 42}'),
        ("llama3", '{"answer": 4'),
        ("llama3", "No object {} at all."),
        ("mistral_list", "[TOOL_CALLS] is a mark"),
        ("granite", "<|tool_call|>nothing"),
    ],
)
def test_what_is_no_call_is_text(name: str, text: str, size: int) -> None:
    assert read(form_of(name), text, size=size) == (text, "", [], "stop")


def test_a_call_that_is_cut_is_told_as_far_as_it_came() -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bo'
    told = read(form_of("hermes"), text, size=7, reason="length")
    assert told == ("", "", [("weather", '{"city": "Bo')], "length")


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<tool_call>\n<function=weather>\n<parameter=city>\nBo", "{"),
        (
            "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n<par",
            '{"city": "Bonn"',
        ),
    ],
)
def test_a_call_between_tags_that_is_cut_does_not_look_whole(text: str, arguments: str) -> None:
    told = read(form_of("qwen3_coder"), text, reason="length")
    assert told == ("", "", [("weather", arguments)], "length")
    assert read(form_of("qwen3_coder"), text)[2] == [("weather", arguments + "}")]


def test_an_answer_with_one_call_ends_after_it() -> None:
    form = form_of("hermes", max_calls=1)
    text = written(form.call_format or _FORMATS[0], ("time", {}), ("time", {}))
    assert read(form, text, size=3)[2:] == ([("time", "{}")], "tool_calls")


def test_a_call_that_was_asked_for_is_no_reason_to_end() -> None:
    form = form_of("hermes", is_forced=True)
    assert read(form, written(_FORMATS[1], ("time", {})))[3] == "stop"


@pytest.mark.parametrize("size", [0, 1, 4])
@pytest.mark.parametrize(
    ("thinking", "text", "told"),
    [
        (THINKING, "<think>\nHm. <a>\n</think>\n\nYes.", ("Yes.", "Hm. <a>")),
        (THINKING, "Yes. <think>", ("Yes. <think>", "")),
        (THINKING, "\n<think></think>Yes.", ("Yes.", "")),
        (THINKING, "<think>never ends </thi", ("", "never ends </thi")),
        (THINKING, "<thi", ("<thi", "")),
        (Thinking("<think>", "</think>", is_open=True), "Hm.\n</think>\n\nYes.", ("Yes.", "Hm.")),
        (None, "<think>Hm.</think>Yes.", ("<think>Hm.</think>Yes.", "")),
    ],
)
def test_thoughts_are_no_text_of_the_answer(
    thinking: Thinking | None, text: str, told: tuple[str, str], size: int
) -> None:
    assert read(MessageForm(thinking=thinking), text, size=size)[:2] == told


def test_thoughts_come_before_calls() -> None:
    form = form_of("hermes", thinking=THINKING)
    text = "<think>I <tool_call> it.</think>\n\n" + written(_FORMATS[1], ("time", {}))
    assert read(form, text, size=1) == ("", "I <tool_call> it.", [("time", "{}")], "tool_calls")


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ('{"arguments": {"a": [1, "}"]}, "name": "f"}', "f", '{"a": [1, "}"]}'),
        ('{"name":"f"}', "f", "{}"),
        ('{"id": 7, "name": "f", "arguments": "{\\"a\\": 1}"}', "f", '{"a": 1}'),
        ('{"type": "function", "name": "f\\u0041", "parameters": {}}', "fA", "{}"),
    ],
)
def test_an_object_tells_its_name_before_its_arguments(
    text: str, name: str, arguments: str
) -> None:
    for size in (1, 3, len(text)):
        reader, told = CallObject("arguments"), []
        for at in range(0, len(text), size):
            told.append(reader.push(text[at : at + size])[0])
        names = [call.name for call in told if call.name is not None]
        assert names == [name]
        assert "".join(call.arguments for call in told) == arguments
        assert reader.is_over
        assert not reader.is_broken


@pytest.mark.parametrize(
    "text",
    [
        *("[1]", "{1}", '{"name" 1}', '{"name":,}', '{"a": 1}', '{"name": ""}'),
        # Half of a surrogate pair, which no answer could tell.
        *('{"name": "f\\ud83d"}', '{"name": "f", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}'),
        # Twice what there can be once.
        '{"name": "f", "arguments": {"a": 1}, "parameters": {"a": 2}}',
        '{"arguments": "{}", "arguments": {}, "name": "f"}',
        '{"name": "f", "name": "g"}',
    ],
)
def test_an_object_that_is_no_call_is_broken(text: str) -> None:
    reader = CallObject("arguments")
    reader.push(text)
    assert reader.is_broken


@pytest.mark.parametrize("size", [0, 1, 4])
def test_arguments_that_come_twice_are_never_told_as_one(size: int) -> None:
    text = (
        '<tool_call>\n{"name": "time", "arguments": {"a": 1}, "parameters": {"b": 2}}\n</tool_call>'
    )
    content, _, told, _ = read(form_of("hermes"), text, size=size)
    assert told in ([], [("time", '{"a": 1}')])
    assert '"b": 2' in content


def test_templates_are_recognised_by_their_text() -> None:
    known = {
        "hermes": "{{ '<tool_call>\n' }}{{ '</tool_call>' }}",
        "qwen3_coder": "<tool_call> <function= <parameter=",
        "mistral": "[TOOL_CALLS] [ARGS]",
        "mistral_list": "[TOOL_CALLS]",
        "deepseek_v3": "<｜tool▁calls▁begin｜> ```json",
        "deepseek_v31": "<｜tool▁calls▁begin｜>",
        "phi4_mini": "<|tool_call|> <|/tool_call|>",
        "granite": "<|tool_call|>",
        "llama3": '{"name": function name, "parameters": dictionary of argument name and its value}',
    }
    for name, template in known.items():
        found = call_format(template)
        assert found is not None
        assert found.name == name
    assert call_format("{{ tools }}") is None


def test_thinking_is_as_the_template_and_the_prompt_say() -> None:
    assert thinking_of("a </think> b", "x<think>\n") == Thinking(
        "<think>", "</think>", is_open=True
    )
    assert thinking_of("a </think> b", "x<think>\n\n</think>\n\n") is None
    assert thinking_of("a </think> b", "x<think>y</think>z") == THINKING
    assert thinking_of("nothing", "x<think>") is None


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"\\ud83d"', "[" * 100_000])
def test_a_value_that_no_answer_could_tell_is_text(value: str) -> None:
    text = f"<tool_call>\n<function=weather>\n<parameter=days>\n{value}\n</parameter>\n</function>"
    ((name, arguments),) = read(form_of("qwen3_coder"), text)[2]
    assert (name, json.loads(arguments)) == ("weather", {"days": value})


def read_until(
    form: MessageForm, text: str, stop: tuple[str, ...]
) -> tuple[str, str, list[str], str | None]:
    """Text, thoughts, arguments of calls and finish reason of what a model writes, with stop strings."""
    reader = MessageReader(form)
    writer = AnswerWriter(TOKENIZER, [0], stop, is_read=True)
    content, thoughts, calls = "", "", [""] * 4
    for token in [
        *map(GeneratedToken, TOKENIZER.encode(text)[1:]),
        GeneratedToken(1, None, "stop"),
    ]:
        told = reader.push(writer.push(token))
        content, thoughts = content + told.text, thoughts + told.reasoning
        for call in told.calls:
            calls[call.index] += call.arguments
        if told.finish_reason is not None:
            return content, thoughts, [call for call in calls if call], told.finish_reason
    raise AssertionError("the last has a finish reason")


@pytest.mark.parametrize("known", _FORMATS, ids=lambda known: known.name)
def test_a_stop_string_in_a_call_leaves_it_whole(known: CallFormat) -> None:
    calls = [("weather", ARGUMENTS)]
    if known.separator is not None:
        calls.append(("time", {}))
    stop = ("\n", " ", "}", "day", '"')
    content, _, told, reason = read_until(form_of(known.name), written(known, *calls), stop)
    assert (content, reason) == ("", "tool_calls")
    assert [json.loads(arguments) for arguments in told] == [arguments for _, arguments in calls]


def test_a_stop_string_counts_before_a_call_and_after_it() -> None:
    known = form_of("hermes").call_format
    assert known is not None
    text = "Let me look." + written(known, ("time", {})) + "\n\nIt is late. So"
    form = form_of("hermes")
    assert read_until(form, text, ("me l",)) == ("Let ", "", [], "stop")
    told = ("Let me look.It is", "", ["{}"], "tool_calls")
    assert read_until(form, text, (" late",)) == told


@pytest.mark.parametrize("is_open", [False, True])
def test_a_stop_string_in_a_thought_leaves_the_answer(is_open: bool) -> None:
    thinking = Thinking("<think>", "</think>", is_open=is_open)
    begin = "" if is_open else "<think>"
    text = f"{begin}\nOne. Two.\n</think>\n\nThree. Four.\nFive."
    form = MessageForm(thinking=thinking)
    for stop, content in (("\n", "Three. Four."), (". ", "Three"), ("<", "Three. Four.\nFive.")):
        assert read_until(form, text, (stop,)) == (content, "One. Two.", [], "stop")


@pytest.mark.parametrize(
    ("name", "text", "stop", "content"),
    [
        ("hermes", "It writes <tool_call> and means it.", " and", "It writes <tool_call>"),
        ("hermes", "It writes <tool_call>, says Bo.", ">, s", "It writes <tool_call"),
        (
            "hermes",
            '<tool_call>\n{"names": [1], "a": 2} after',
            '"a"',
            '<tool_call>\n{"names": [1], ',
        ),
        ("hermes", '<tool_call>\n{"na', '"n', "<tool_call>\n{"),
        ("llama3", '{"answer": 42}', "42", '{"answer": '),
        ("llama3", '{"answer": 42} So.', "2} S", '{"answer": 4'),
        ("llama3", '{"name": "nobody", "parameters": {}}', "body", '{"name": "no'),
        ("llama3", '{"answer": 4', '"answ', "{"),
        ("mistral_list", "[TOOL_CALLS] is a mark", "is", "[TOOL_CALLS] "),
    ],
)
def test_a_stop_string_ends_text_that_looked_like_a_call(
    name: str, text: str, stop: str, content: str
) -> None:
    assert read_until(form_of(name), text, (stop,)) == (content, "", [], "stop")


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("Yes. No.", "Yes"),
        ("<table>", "<t"),
        ("<think>Hm.</think>\n\nYes. No.", "Yes"),
    ],
)
def test_a_stop_string_at_the_beginning_of_an_answer_after_thoughts_ends_it(
    text: str, stop: str
) -> None:
    content, _, _, reason = read_until(MessageForm(thinking=THINKING), text, (stop,))
    assert (content, reason) == ("", "stop")


def test_a_stop_string_right_behind_a_call_ends_the_answer() -> None:
    text = "Let me look." + written(_FORMATS[1], ("time", {})) + "\n\nIt is late."
    told = read_until(form_of("hermes"), text, ("It",))
    assert told == ("Let me look.", "", ["{}"], "tool_calls")


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(["hermes", "llama3", "mistral", "mistral_list"]),
    parts=st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "[TOOL_CALLS]",
                "<think>",
                "{",
                "}",
                '"name"',
                ": ",
                '"a"',
                "\n",
                "b",
                "<",
            ]
        ),
        max_size=12,
    ),
    stop=st.lists(st.text('<>{}"ab \n', min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_ends_before_the_first_stop_string_whatever_it_looked_like(
    name: str, parts: list[str], stop: list[str]
) -> None:
    form, text = form_of(name), "".join(parts)
    whole, _, _, reason = read_until(form, text, ())
    if reason == "tool_calls":
        return
    so_far, stream = "", TOKENIZER.stream()
    for token_id in TOKENIZER.encode(text)[1:]:
        so_far += stream.push(token_id)
        if found := [so_far.find(each) for each in stop if each in so_far]:
            whole = so_far[: min(found)]
            break
    assert read_until(form, text, tuple(stop)) == (whole, "", [], "stop")


def test_tokens_of_text_that_looked_like_a_call_end_before_a_stop_string() -> None:
    text, stop = '{"answer": 42} So.', "42"
    reader = MessageReader(form_of("llama3"))
    writer = AnswerWriter(TOKENIZER, [0], (stop,), is_read=True)
    content, tokens = "", []
    for token_id in TOKENIZER.encode(text)[1:]:
        told = reader.push(writer.push(GeneratedToken(token_id, Logprobs(-1.0))))
        content, tokens = content + told.text, [*tokens, *told.tokens]
        assert not tokens or content
        if told.finish_reason is not None:
            break
    assert content == '{"answer": '
    assert all(token.offset < len(content) for token in tokens)
    assert "".join(token.text for token in tokens).startswith(content)


def test_tokens_of_a_long_call_are_not_all_looked_at_for_each() -> None:
    looked_at = 0

    class Token:
        def __init__(self, at: int) -> None:
            self._at = at

        @property
        def offset(self) -> int:
            nonlocal looked_at
            looked_at += 1
            return self._at

    reader = MessageReader(form_of("qwen3_coder"))
    num_tokens, begin = 2000, "<tool_call>\n<function=time>\n<parameter=a>\n"
    told = list(reader.push(Piece(begin)).tokens)
    for at in range(len(begin), len(begin) + num_tokens):
        told += reader.push(Piece("x", (cast(Any, Token(at)),))).tokens
    assert not told
    told += reader.push(Piece("\n</parameter>\n</function>\n</tool_call>")).tokens
    assert len(told) == num_tokens
    assert looked_at < 50 * num_tokens


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "94105", "94105"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "true", "true"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "null"]}, "1.50", "1.50"),
        ({"type": ["string", "integer"]}, "94105", 94105),
        ({"type": ["string", "integer"]}, "1.5", "1.5"),
        ({"oneOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": ["integer", "null"]}, "3", 3),
        ({"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}, "3", 3),
        ({}, "3", 3),
    ],
)
def test_a_value_between_tags_is_text_where_it_may_be_and_is_nothing_else(
    schema: dict[str, Any], text: str, value: object
) -> None:
    known = form_of("qwen3_coder").call_format
    form = MessageForm(call_format=known, tools={"f": {"properties": {"a": schema}}})
    written = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>"
    ((_, arguments),) = read(form, written)[2]
    assert json.loads(arguments) == {"a": value}


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(["<parameter=", "</parameter>", "a", ">", "\n", " ", "<"]), max_size=20
    )
)
def test_arguments_are_those_that_a_pattern_finds(parts: list[str]) -> None:
    body = "".join(parts)
    pattern = r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>"
    found = {name.strip(): value for name, value in re.findall(pattern, body, re.DOTALL)}
    text = f"<tool_call>\n<function=f>{body}</function>"
    ((_, arguments),) = read(form_of("qwen3_coder"), text)[2]
    assert json.loads(arguments) == found


@pytest.mark.parametrize("part", ["<parameter=a>\n", "<parameter=", "<parameter=\n"])
def test_tags_without_an_end_are_read_in_no_time(part: str) -> None:
    """The loop stands still meanwhile; by trying each of them up to the end it would for minutes."""
    reader = MessageReader(form_of("qwen3_coder"))
    reader.push(Piece("<tool_call>\n<function=f>" + part * 30_000 + ">"))
    began = time.perf_counter()
    told = reader.push(Piece("", finish_reason="stop"))
    assert [call.arguments for call in told.calls] == ["{}"]
    assert time.perf_counter() - began < 2.0
