"""Answers that are held to a grammar: whatever the logits are, they fit the schema, or are calls that do."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import cache
from typing import Any

import jsonschema_rs
import pytest
import torch

from neurogrid.errors import ConfigurationError
from neurogrid.inference.generation.sampling import Sampler, SamplingParams
from neurogrid.model.embedded import embedded_model_path
from neurogrid.model.files.tokenizer import Tokenizer
from neurogrid.model.grammars import GrammarCompiler, GrammarText
from neurogrid.server.errors import APIError
from neurogrid.server.openai.answer_writer import Piece
from neurogrid.server.openai.tools.answer_grammar import answer_grammar
from neurogrid.server.openai.tools.call_formats import _FORMATS, CallFormat, Style, Thinking
from neurogrid.server.openai.tools.message_reader import MessageForm, MessageReader
from neurogrid.server.openai.tools.tool_requests import ToolRequest

END = 1
MAX_TOKENS = 2000
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 3},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string", "maxLength": 5}},
}
TOOLS = {"weather": CITY, "time": {"type": "object", "additionalProperties": False}}
THINKING = Thinking("<think>", "</think>")


@cache
def tokenizer_with(*special: str) -> Tokenizer:
    tokenizer = Tokenizer.open(embedded_model_path())
    if special:
        backend = deepcopy(tokenizer._backend)
        backend.add_special_tokens({"additional_special_tokens": list(special)})
        tokenizer = Tokenizer(backend)
    return tokenizer


@cache
def compiler_of(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, end_token_ids={END})


@cache
def likelier(tokenizer: Tokenizer) -> torch.Tensor:
    """What makes random logits come to an end: tokens that close something are likelier."""
    texts = [tokenizer.token_text(token_id) for token_id in range(tokenizer.vocab_size)]
    bias_V = torch.tensor([9.0 * any(end in text for end in '"}]<') for text in texts])
    bias_V[END] = 12.0
    return bias_V


def answered(
    text: str, *, seed: int, tokenizer: Tokenizer | None = None, begin: str = ""
) -> list[int]:
    """Tokens that random logits give under the grammar, after those of `begin`."""
    tokenizer = tokenizer or tokenizer_with()
    grammar = compiler_of(tokenizer).compile(text)
    state = grammar.begin()
    tokens = tokenizer.encode(begin)[1:] if begin else []
    for token_id in tokens:
        state.advance(token_id)
    sampler = Sampler(
        SamplingParams(temperature=seed % 2, seed=seed), end_token_ids={END}, grammar=state
    )
    generator = torch.Generator().manual_seed(seed)
    while len(tokens) < MAX_TOKENS:
        logits_V = torch.randn(tokenizer.vocab_size, generator=generator) * 4
        token_id = sampler.sample(logits_V + likelier(tokenizer))
        if token_id == END:
            return tokens
        tokens.append(token_id)
    raise AssertionError(f"it does not end: {tokenizer.decode(tokens)[:200]}")


def read(
    tokens: list[int], form: MessageForm, tokenizer: Tokenizer
) -> tuple[str, str, list[tuple[str, Any]]]:
    ids = ((tokenizer.special_id(mark), mark) for mark in form.marks)
    stream = tokenizer.stream({token_id: mark for token_id, mark in ids if token_id is not None})
    reader = MessageReader(form)
    pieces = [Piece(stream.push(token_id)) for token_id in tokens]
    pieces.append(Piece(stream.finish(), finish_reason="stop"))
    content, thoughts, calls = "", "", []
    for told in map(reader.push, pieces):
        content, thoughts = content + told.text, thoughts + told.reasoning
        for call in told.calls:
            calls += [[call.name, ""]] * (call.name is not None)
            calls[call.index] = [calls[call.index][0], calls[call.index][1] + call.arguments]
    return content, thoughts, [(name, json.loads(arguments)) for name, arguments in calls]


def request_of(known: CallFormat, **more: Any) -> ToolRequest:
    max_calls = 1 if known.separator is None else None
    fields = {"must_call": True, "max_calls": max_calls, **more}
    return ToolRequest(told=[], parameters=TOOLS, call_format=known, **fields)


def special_marks(known: CallFormat) -> tuple[str, ...]:
    return MessageForm(call_format=known, thinking=THINKING).marks


@pytest.mark.parametrize("are_special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("known", _FORMATS, ids=lambda known: known.name)
def test_calls_that_have_to_come_parse_and_fit(known: CallFormat, are_special: bool) -> None:
    if are_special and known.style is Style.TAGGED:
        pytest.skip("its marks are text")
    tokenizer = tokenizer_with(*special_marks(known)) if are_special else tokenizer_with()
    opened = Thinking("<think>", "</think>", is_open=True)
    for thinking, thought in ((None, ""), (THINKING, "<think>"), (opened, "")):
        begin = thought + "Hm.</think>\n" if thinking is not None else ""
        tools = request_of(known)
        form = MessageForm(call_format=known, tools=TOOLS, thinking=thinking)
        wanted = answer_grammar({}, tools, thinking, tokenizer)
        assert wanted is not None
        for seed in (2, 3):
            tokens = answered(wanted[0], seed=seed, tokenizer=tokenizer, begin=begin)
            content, thoughts, calls = read(tokens, form, tokenizer)
            assert (content, thoughts) == ("", "Hm." if begin else "")
            assert calls
            for name, arguments in calls:
                jsonschema_rs.validate(TOOLS[name], arguments)


@pytest.mark.parametrize("known", _FORMATS, ids=lambda known: known.name)
def test_a_strict_tool_may_be_called_or_not(known: CallFormat) -> None:
    tokenizer = tokenizer_with()
    tools = request_of(known, must_call=False, is_strict=True)
    wanted = answer_grammar({}, tools, None, tokenizer)
    assert wanted is not None
    grammar = compiler_of(tokenizer).compile(wanted[0])

    def takes(text: str) -> bool:
        state = grammar.begin()
        try:
            for token_id in tokenizer.encode(text)[1:]:
                state.advance(token_id)
        except ConfigurationError:
            return False
        return state.is_complete

    begin = (known.begin or known.call_begin) + (known.call_begin if known.begin else "")
    assert takes("No < call [at] all.")
    assert not takes(begin + '{"name": "nobody", "')
    if known.style is Style.OBJECT:
        body = f'{{"name": "time", "{known.arguments_key}": {{}}}}'
        before = "Well. " if known.trigger else ""
        assert takes(before + begin + body + known.call_end + known.end)


SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "required": ["a"]}
SCHEMA |= {"$defs": {"b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}}}
SCHEMA |= {"additionalProperties": False}


@pytest.mark.parametrize(
    ("body", "schema"),
    [
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
    ],
)
def test_an_answer_by_a_schema_fits(body: dict[str, Any], schema: dict[str, Any]) -> None:
    tokenizer = tokenizer_with()
    for thinking, begin in ((None, ""), (THINKING, "<think>Hm.</think>")):
        wanted = answer_grammar(body, ToolRequest(), thinking, tokenizer)
        assert wanted is not None
        tokens = answered(wanted[0], seed=5, begin=begin)
        content, _, _ = read(tokens, MessageForm(thinking=thinking), tokenizer)
        jsonschema_rs.validate(schema, json.loads(content))


def test_a_schema_and_tools_give_either() -> None:
    tokenizer = tokenizer_with()
    tools = request_of(_FORMATS[1], must_call=False)
    wanted = answer_grammar({"response_format": {"type": "json_object"}}, tools, None, tokenizer)
    assert wanted is not None
    state = compiler_of(tokenizer).compile(wanted[0]).begin()
    allowed_V = state.allowed()
    first = [tokenizer.encode(text)[1] for text in ("{", "<", "The")]
    assert allowed_V[first].tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ({"regex": r"[0-9]{3}/[a-f]\/x"}, "123/a/x"),
        ({"choice": ["yes", 'n"o\\']}, 'n"o\\'),
    ],
)
def test_other_forms_of_outputs(outputs: dict[str, Any], text: str) -> None:
    tokenizer = tokenizer_with()
    wanted = answer_grammar({"structured_outputs": outputs}, ToolRequest(), None, tokenizer)
    assert wanted is not None
    state = compiler_of(tokenizer).compile(wanted[0]).begin()
    for token_id in tokenizer.encode(text)[1:]:
        assert state.allowed()[token_id]
        state.advance(token_id)
    assert state.is_complete
    with pytest.raises(ConfigurationError, match="grammar could not go on"):
        state.advance(tokenizer.encode("x")[1])


def grammar_of(schema: dict[str, Any]) -> str:
    grammar = GrammarText()
    grammar.rule("start", grammar.schema(schema))
    return grammar.text


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {"type": "string"}}, "Unimplemented keys"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"$ref": "http://example.org/x"}, "not present"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(30)]}, "given up"),
        ({"format": "date", "pattern": "^2", "allOf": None}, "allOf must be an array"),
        ({"format": "time", "pattern": "^2", "allOf": 5}, "allOf must be an array"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_reason(
    schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        compiler_of(tokenizer_with()).compile(grammar_of(schema))


def test_a_client_cannot_loosen_what_is_enforced() -> None:
    schema = {"not": {"type": "string"}, "x-guidance": {"lenient": True}}
    with pytest.raises(ConfigurationError, match="Unimplemented keys"):
        compiler_of(tokenizer_with()).compile(grammar_of(schema))


def test_a_state_is_a_function_of_its_tokens() -> None:
    tokenizer = tokenizer_with()
    state = compiler_of(tokenizer).compile(grammar_of(CITY)).begin()
    tokens = tokenizer.encode('{"city": "Bonn", "unit": "C"')[1:]
    masks = []
    for token_id in tokens:
        masks.append(state.allowed())
        state.advance(token_id)
    other = state.copy()
    other.advance(tokenizer.encode("}")[1])
    assert other.is_complete
    assert not state.is_complete
    state.roll_back(3)
    assert torch.equal(state.allowed(), masks[-3])
    for token_id in tokens[-3:]:
        state.advance(token_id)
    assert not state.is_complete


def test_the_end_comes_where_the_grammar_is_complete_and_nowhere_else() -> None:
    tokenizer = tokenizer_with()
    other_end = tokenizer.encode("The")[1]
    grammar = compiler_of(tokenizer).compile(grammar_of({"const": {"a": 1}}))
    sampler = Sampler(SamplingParams(), end_token_ids={END, other_end}, grammar=grammar.begin())
    logits_V = torch.zeros(tokenizer.vocab_size + 8)  # more than the tokenizer has
    logits_V[other_end], logits_V[-1] = 5.0, 9.0
    tokens: list[int] = []
    while (token_id := sampler.sample(logits_V)) != other_end:
        tokens.append(token_id)
    assert json.loads(tokenizer.decode(tokens)) == {"a": 1}


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        (None, "is missing"),
        ({"a": "x" * 70_000}, "65,536 B"),
        (json.loads('{"a":' * 70 + "1" + "}" * 70), "64 objects and lists deep"),
    ],
)
def test_schemas_have_bounds(schema: Any, param: str) -> None:
    body = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    with pytest.raises(APIError, match=param) as refused:
        answer_grammar(body, ToolRequest(), None, tokenizer_with())
    assert refused.value.status == (400 if schema else 422)


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "string", "pattern": "x"}}},
        {"properties": {}, "required": ["a"]},
        {"properties": {}, "minProperties": 1},
    ],
)
def test_what_tags_cannot_hold_is_refused(parameters: dict[str, Any]) -> None:
    tools = ToolRequest(
        told=[],
        parameters={"f": {"type": "object", **parameters}},
        call_format=_FORMATS[0],
        must_call=True,
        max_calls=1,
    )
    with pytest.raises(APIError, match="between tags"):
        answer_grammar({}, tools, None, tokenizer_with())


@pytest.mark.parametrize(
    ("format_", "fits", "does_not"),
    [
        (
            "date",
            ["2024-02-29", "1999-12-31"],
            ["2025-02-29", "1900-02-29", "0000-01-01", "2025-04-31"],
        ),
        ("time", ["12:00:59Z", "00:00:00.5+01:30"], ["12:00:60Z", "24:00:00Z", "12:00:00"]),
        ("date-time", ["2000-02-29T23:59:59Z"], ["2025-02-29T00:00:00Z", "2025-01-01T00:00:60Z"]),
    ],
)
def test_dates_and_times_are_ones_that_exist(
    format_: str, fits: list[str], does_not: list[str]
) -> None:
    tokenizer = tokenizer_with()
    plain = {"type": "string", "format": format_}
    # As a value of several schemas, and as the name of a property, which is no format.
    schema = {
        "type": "object",
        "properties": {"format": {"anyOf": [plain, {"type": "null"}]}},
        "required": ["format"],
        "additionalProperties": False,
    }
    grammar = compiler_of(tokenizer).compile(grammar_of(schema))
    for text in fits + does_not:
        state, value, is_refused = grammar.begin(), {"format": text}, False
        try:
            for token_id in tokenizer.encode(json.dumps(value))[1:]:
                state.advance(token_id)
        except ConfigurationError:
            is_refused = True
        assert (state.is_complete and not is_refused) == (text in fits), text
        is_valid = jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(value)
        assert is_valid or text not in fits
