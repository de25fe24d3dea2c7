"""JSON schemas as people ask models with: of the shapes of public suites, written anew.

Those of JSON-Schema-Test-Suite are about one keyword each; those of JSONSchemaBench are functions, configurations,
records of databases and trees. `answer_schemas` gives so many, the same each time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Any

__all__ = ["answer_schemas", "closing_bias"]

Schema = dict[str, Any]


def closing_bias(texts: list[str], ends: Collection[int], *, bias: float = 8.0) -> dict[str, float]:
    """A `logit_bias` for models that know no JSON: they come to an end when tokens that close something are likelier.

    Args:
        texts: of all tokens.
        ends: the tokens that end a sequence.
    """
    closing = [
        token_id
        for token_id, text in enumerate(texts)
        if text.strip() and not text.strip(' "}],')  # nothing but what closes
    ]
    return {str(token_id): bias for token_id in [*ends, *closing][:1024]}


def _object(required: list[str] | None = None, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, "maxItems": 3, **more}


_TEXT: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 24}
_WHOLE: Schema = {"type": "integer"}
_REF: Callable[[str], Schema] = lambda name: {"$ref": f"#/$defs/{name}"}  # noqa: E731

# By hand: one keyword each, and what people really ask for.
_WRITTEN: list[Schema] = [
    {"type": "object"},
    {"type": "null"},
    {"type": "boolean"},
    {"type": "integer", "minimum": 3, "maximum": 17},
    {"type": "integer", "exclusiveMinimum": -5, "exclusiveMaximum": 0},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "integer", "minimum": 0, "maximum": 500, "multipleOf": 25},
    {"type": "string", "minLength": 5, "maxLength": 9},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "email", "maxLength": 40},
    {"const": {"a": [1, None, "ü\n"]}},
    {"enum": ["red", 2, None, True, {"deep": [1]}]},
    {"type": ["string", "null"], "maxLength": 10},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    {
        "type": "array",
        "prefixItems": [_WHOLE, _TEXT, {"type": "boolean"}],
        "items": False,
        "minItems": 3,
    },
    {"type": "array", "prefixItems": [_WHOLE], "items": _NAME, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "integer"}, _object(a=_TEXT)]},
    {"oneOf": [_object(kind={"const": "a"}, x=_WHOLE), _object(kind={"const": "b"}, y=_TEXT)]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {"allOf": [_object(["a"], a=_WHOLE, b=_TEXT), {"required": ["b"]}]},
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
    {
        "type": "object",
        "patternProperties": {"^n_[a-z]{1,4}$": _WHOLE},
        "additionalProperties": False,
    },
    _object([], a=_TEXT, b=_WHOLE, c={"type": "boolean"}),
    _object(['a"b', "ü{"], **{'a"b': _WHOLE, "ü{": _NAME}),
    {**_object(value=_WHOLE, next={"anyOf": [_REF("node"), {"type": "null"}]}), "$defs": {}},
    {"type": "array", "items": {"type": "array", "items": _WHOLE, "maxItems": 2}, "maxItems": 2},
    # A function that is called.
    _object(
        ["location", "unit"],
        location={"type": "string", "description": "City and country, as in Bogotá, Colombia"},
        unit={"type": "string", "enum": ["celsius", "fahrenheit"]},
        days={"type": "integer", "minimum": 1, "maximum": 14, "default": 3},
    ),
    # Steps of a solution, and its answer.
    {
        **_object(steps=_list(_REF("step"), minItems=1), final_answer=_TEXT),
        "$defs": {"step": _object(explanation=_TEXT, output=_TEXT)},
    },
    # An event in a calendar.
    _object(name=_TEXT, date={"type": "string", "format": "date"}, participants=_list(_NAME)),
    # A page's parts, in each other.
    {
        **_REF("part"),
        "$defs": {
            "part": _object(
                kind={"enum": ["div", "button", "field"]},
                label=_NAME,
                children={"type": "array", "items": _REF("part"), "maxItems": 2},
            )
        },
    },
    # A service in a configuration.
    _object(
        ["image", "ports"],
        image={"type": "string", "pattern": "^[a-z]{1,12}:[0-9]{1,3}$"},
        ports=_list({"type": "string", "pattern": "^[0-9]{2,5}:[0-9]{2,5}$"}, minItems=1),
        environment={"type": "object", "additionalProperties": _NAME, "maxProperties": 2},
        restart={"enum": ["no", "always", "on-failure"]},
    ),
]
_WRITTEN[28]["$defs"] = {"node": {key: _WRITTEN[28][key] for key in _WRITTEN[28] if key != "$defs"}}

# What properties are called.
_WORDS = [
    "id",
    "name",
    "title",
    "status",
    "kind",
    "count",
    "price",
    "unit",
    "email",
    "address",
    "city",
    "country",
    "tags",
    "items",
    "owner",
    "created_at",
    "enabled",
    "score",
    "version",
    "path",
    "size",
    "color",
    "priority",
    "notes",
    "parent",
    "width",
    "height",
    "url",
    "lang",
]


class _Generator:
    """Schemas by chance: records, choices, references; what a grammar can hold a model to."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._definitions: dict[str, Schema] = {}

    def whole(self) -> Schema:
        schema = self._record(depth=self._random.randint(1, 3))
        if self._definitions:
            schema["$defs"] = self._definitions
        return schema

    def _record(self, depth: int) -> Schema:
        names = self._random.sample(_WORDS, self._random.randint(1, 5))
        required = [name for name in names if self._random.random() < 0.7]
        schema: Schema = {
            "type": "object",
            "properties": {name: self._value(depth - 1) for name in names},
            "required": required,
        }
        if self._random.random() < 0.9:
            schema["additionalProperties"] = False
        if self._random.random() < 0.3:
            schema["description"] = "Of " + " ".join(names)
        return schema

    def _value(self, depth: int) -> Schema:
        simple = (self._text, self._number, self._choice, self._flag, self._nullable)
        deep = (self._record, self._array, self._reference, self._either, self._map)
        if depth > 0 and self._random.random() < 0.6:
            return self._random.choice(deep)(depth)
        return self._random.choice(simple)()

    def _text(self) -> Schema:
        return self._random.choice(
            [
                {"type": "string"},
                {"type": "string", "maxLength": self._random.randint(1, 30)},
                {"type": "string", "minLength": 2, "maxLength": self._random.randint(2, 12)},
                {"type": "string", "pattern": self._random.choice(("^[a-z]{3,8}$", "^v[0-9]+$"))},
                {"type": "string", "format": self._random.choice(("date", "time", "uuid", "ipv4"))},
            ]
        )

    def _number(self) -> Schema:
        low = self._random.randint(-1000, 1000)
        return self._random.choice(
            [
                {"type": "integer", "minimum": low, "maximum": low + self._random.randint(0, 5000)},
                {"type": "integer", "minimum": low},
                {"type": "number", "minimum": 0, "maximum": self._random.randint(1, 99)},
                {"type": "integer", "minimum": 0, "maximum": 60, "multipleOf": 5},
            ]
        )

    def _choice(self) -> Schema:
        options = self._random.sample(_WORDS, self._random.randint(1, 6))
        return self._random.choice(
            [
                {"type": "string", "enum": options},
                {"enum": [*options, 7, None]},
                {"const": options[0]},
            ]
        )

    def _flag(self) -> Schema:
        return {"type": "boolean"}

    def _nullable(self) -> Schema:
        return self._random.choice(
            [{"type": ["integer", "null"]}, {"anyOf": [self._text(), {"type": "null"}]}]
        )

    def _array(self, depth: int) -> Schema:
        least = self._random.randint(0, 2)
        return {
            "type": "array",
            "items": self._value(depth - 1),
            "minItems": least,
            "maxItems": least + self._random.randint(0, 2),
        }

    def _reference(self, depth: int) -> Schema:
        name = f"d{len(self._definitions)}"
        self._definitions[name] = {}
        self._definitions[name] = self._record(depth - 1)
        return {"$ref": f"#/$defs/{name}"}

    def _either(self, depth: int) -> Schema:
        kinds = self._random.sample(_WORDS, 2)
        records = []
        for kind in kinds:
            record = self._record(depth - 1)
            record["properties"] = {"type": {"const": kind}, **record["properties"]}
            record["required"] = ["type", *record["required"]]
            records.append(record)
        return {self._random.choice(("anyOf", "oneOf")): records}

    def _map(self, depth: int) -> Schema:
        return {
            "type": "object",
            "additionalProperties": self._value(depth - 1),
            "maxProperties": self._random.randint(1, 3),
        }


def answer_schemas(count: int = 200) -> list[Schema]:
    """So many schemas: those that are written, then those by chance."""
    by_chance = [_Generator(seed).whole() for seed in range(count - len(_WRITTEN))]
    return [*_WRITTEN, *by_chance][:count]
