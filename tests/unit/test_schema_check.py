"""Values against the part of JSON schema that is published: the same verdict as a whole validator's, and a name."""

from __future__ import annotations

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.server import schema_check
from neurogrid.server.errors import APIError
from neurogrid.server.openai.request_schemas import CHAT_REQUEST, COMPLETION_REQUEST
from neurogrid.server.schema_check import check

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.floats(-3, 3),
    st.sampled_from(["", "a", "user", "text", "x" * 300]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(st.sampled_from(["role", "content", "type", "text", "7"]), inner),
    ),
    max_leaves=8,
)
FIELDS = sorted({*CHAT_REQUEST["properties"], *COMPLETION_REQUEST["properties"]})

WHOLE_VALIDATORS = [
    (schema, jsonschema_rs.validator_for(schema).is_valid)
    for schema in (CHAT_REQUEST, COMPLETION_REQUEST)
]


def refuses(value: object, schema: object) -> bool:
    try:
        check(value, schema)  # type: ignore[arg-type]
    except APIError:
        return True
    return False


@settings(max_examples=60, deadline=None)
@given(body=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
def test_the_verdict_is_that_of_a_whole_validator(body: dict[str, object]) -> None:
    for schema, is_valid in WHOLE_VALIDATORS:
        assert refuses(body, schema) is not is_valid(body)


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_name_that_ends_in_a_line_break_is_none(end: str) -> None:
    tools = [{"type": "function", "function": {"name": f"weather{end}"}}]
    for more in ({"tools": tools}, {"logit_bias": {f"5{end}": 1}}):
        body = {"messages": [{"role": "user", "content": "x"}], **more}
        schema, is_valid = WHOLE_VALIDATORS[0]
        assert refuses(body, schema) is not is_valid(body)
        assert refuses(body, schema) is bool(end)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "messages", "is missing"),
        ({"messages": []}, "messages", "has to have 1 items or more, and has 0"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        (
            {"messages": [{"role": "critic", "content": "x"}]},
            "messages[0].role",
            "has to be one of 'system', 'developer', 'user', 'assistant', 'tool', and is 'critic'",
        ),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content",
            "has to be a string or a list, and is a whole number",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "is missing",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "temperature": True},
            "temperature",
            "has to be a number or null, and is true or false",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"1": 101}},
            "logit_bias.1",
            "has to be 100 or less, and is 101",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "stop": ["a", ""]},
            "stop[1]",
            "has to have 1 characters or more, and has 0",
        ),
    ],
)
def test_the_field_is_named(body: dict[str, object], param: str, says: str) -> None:
    with pytest.raises(APIError) as refused:
        check(body, CHAT_REQUEST)
    assert refused.value.param == param
    assert refused.value.message == f"{param} {says}"


def test_tokens_are_not_looked_at_as_if_they_could_be_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Millions of them would take seconds, in which nothing else goes on."""
    calls = []

    def counted(value: object, schema: schema_check.Schema, where: str = "") -> None:
        calls.append(where)
        check(value, schema, where)

    monkeypatch.setattr(schema_check, "check", counted)
    counted({"prompt": [5, 6.0] * 1000}, COMPLETION_REQUEST)
    assert len(calls) < 10
    for wrong, says in (
        (-1, "has to be 0 or more, and is -1"),
        (0.5, "has to be a whole number, and is a number"),
        (True, "has to be a whole number, and is true or false"),
    ):
        with pytest.raises(APIError, match=rf"^prompt\[2000\] {says}$"):
            check({"prompt": [5, 6.0] * 1000 + [wrong]}, COMPLETION_REQUEST)
