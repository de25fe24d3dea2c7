"""Whether a JSON value is what a JSON schema says: the part of the language that our own schemas use.

The schemas that are published (`openapi.json`) are those that are checked here, so that neither can say what the
other does not. An error names the field, as `messages[0].role`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from neurogrid.server.errors import APIError

__all__ = ["Schema", "check", "is_one_of"]

Schema: TypeAlias = Mapping[str, Any]

_NUMBERS = (int, float)
_OF_NUMBERS = frozenset({"type", "minimum", "maximum"})


def check(value: object, schema: Schema, where: str = "") -> None:
    """Refuse a value that is not as `schema` says.

    Args:
        where: the name of the field; empty for the whole body.

    Raises:
        APIError: 400, with the field and what is wrong.
    """
    if "anyOf" in schema:
        _check_any_of(value, schema["anyOf"], where)
    if "type" in schema:
        types = _types_of(schema)
        if not any(_IS_TYPE[name](value) for name in types):
            names = " or ".join(_NAMES[name] for name in types)
            raise _wrong(where, f"has to be {names}, and is {_NAMES[_type_of(value)]}")
    if "enum" in schema and value not in schema["enum"]:
        options = ", ".join(map(repr, schema["enum"]))
        raise _wrong(where, f"has to be one of {options}, and is {str(value)[:40]!r}")
    if isinstance(value, str):
        _check_size(len(value), schema, "Length", "characters", where)
        # All have ^ and $, which in Python stands before a line break at the end, too.
        if "pattern" in schema and re.fullmatch(schema["pattern"], value) is None:
            raise _wrong(where, f"has to match {schema['pattern']}")
    elif isinstance(value, bool):
        pass
    elif isinstance(value, int | float):
        _check_range(value, schema, where)
    elif isinstance(value, list):
        _check_size(len(value), schema, "Items", "items", where)
        if "items" in schema:
            _check_items(value, schema["items"], where)
    elif isinstance(value, dict):
        _check_object(value, schema, where)


def is_one_of(value: object, options: Sequence[object]) -> bool:
    """Whether a value equals one of these in JSON: 1.0 is 1, and true is not."""
    return any(value == o and isinstance(value, bool) == isinstance(o, bool) for o in options)


def _check_items(values: list[Any], schema: Schema, where: str) -> None:
    is_plain = schema.keys() <= _OF_NUMBERS and _types_of(schema) == ["integer"]
    low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    for index, item in enumerate(values):
        # A prompt may have millions of tokens: one by one as others they would take seconds, in which nothing else
        # goes on here.
        if is_plain and type(item) in _NUMBERS and item == item // 1 and low <= item <= high:
            continue
        check(item, schema, f"{where}[{index}]")


def _check_any_of(value: object, options: list[Schema], where: str) -> None:
    errors = []
    for option in options:
        try:
            check(value, option, where)
            return
        except APIError as error:
            errors.append((option, error))
    # The one that is meant tells best what is wrong.
    meant = [error for option, error in errors if _is_alike(value, option)]
    if meant:
        raise meant[0]
    kinds = dict.fromkeys(_NAMES[name] for option in options for name in _types_of(option))
    raise _wrong(where, f"has to be {' or '.join(kinds)}, and is {_NAMES[_type_of(value)]}")


def _is_alike(value: object, schema: Schema) -> bool:
    """Whether value and schema are of one type, as far as the first item shows, and of one kind."""
    if "anyOf" in schema:
        return any(_is_alike(value, option) for option in schema["anyOf"])
    if not any(_IS_TYPE[name](value) for name in _types_of(schema)):
        return False
    if isinstance(value, list) and value and "items" in schema:
        return _is_alike(value[0], schema["items"])
    if isinstance(value, dict):
        # Objects of several kinds tell them by their `type`.
        kinds = schema.get("properties", {}).get("type", {}).get("enum")
        return kinds is None or value.get("type") in kinds
    return True


def _check_range(value: float, schema: Schema, where: str) -> None:
    if "minimum" in schema and value < schema["minimum"]:
        raise _wrong(where, f"has to be {schema['minimum']} or more, and is {str(value)[:40]}")
    if "maximum" in schema and value > schema["maximum"]:
        raise _wrong(where, f"has to be {schema['maximum']} or less, and is {str(value)[:40]}")


def _check_size(size: int, schema: Schema, what: str, unit: str, where: str) -> None:
    if size < schema.get(f"min{what}", 0):
        raise _wrong(where, f"has to have {schema[f'min{what}']} {unit} or more, and has {size}")
    if f"max{what}" in schema and size > schema[f"max{what}"]:
        raise _wrong(where, f"may have {schema[f'max{what}']:,} {unit}, and has {size:,}")


def _check_object(value: dict[str, object], schema: Schema, where: str) -> None:
    _check_size(len(value), schema, "Properties", "entries", where)
    prefix = f"{where}." if where else ""
    for name in schema.get("required", ()):
        if name not in value:
            raise _wrong(f"{prefix}{name}", "is missing")
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties")
    for name, item in value.items():
        if "propertyNames" in schema:
            check(name, schema["propertyNames"], where)
        if name in properties:
            check(item, properties[name], f"{prefix}{name}")
        elif isinstance(others, Mapping):
            check(item, others, f"{prefix}{name[:40]}")


def _wrong(where: str, what: str) -> APIError:
    return APIError(400, f"{where or 'the body'} {what}", param=where or None, code="invalid_value")


def _types_of(schema: Schema) -> list[str]:
    kind = schema.get("type", [])
    return [kind] if isinstance(kind, str) else list(kind)


def _type_of(value: object) -> str:
    return next(name for name, is_type in _IS_TYPE.items() if is_type(value))


def _is_integer(value: object) -> bool:
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool)


_IS_TYPE: dict[str, Callable[[object], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": _is_integer,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
_NAMES = {
    "null": "null",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "a string",
    "array": "a list",
    "object": "an object",
}
