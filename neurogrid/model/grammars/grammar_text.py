"""A grammar as llguidance reads it: rules, and JSON schemas that they refer to. Bounds of schemas, which clients send.

Rules are written in its variant of Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md). Nothing
here imports it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from neurogrid.errors import ConfigurationError

__all__ = ["MAX_SCHEMA_BYTES", "MAX_SCHEMA_DEPTH", "GrammarText", "check_schema"]

# A schema as JSON: the largest of public collections that people ask models with are some 40 KB.
MAX_SCHEMA_BYTES: Final = 64 * 1024
# Objects and lists in each other. What walks a schema does so by recursion.
MAX_SCHEMA_DEPTH: Final = 64
# Of all schemas and rules of one grammar: tools have a schema each. Bytes.
MAX_GRAMMAR_BYTES: Final = 256 * 1024
# How JSON may be set: as models write it, on one line or indented, and never blank without end, which a model that
# would rather write something else falls into.
_JSON_OPTIONS: Final[Mapping[str, object]] = {
    "whitespace_pattern": r"\n[ \t]{0,40}| ",
    # A keyword that is not enforced is an error, not a wrong answer.
    "lenient": False,
    "coerce_one_of": False,
}
# Dates and times that exist, for the library also has 29 February in any year, year 0, and the second 60 in any minute.
_YEAR = "[1-9][0-9]{3}"
_LEAP_YEAR = "([1-9][0-9](0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|"
    f"02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOURS = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOURS}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_HOURS})"
_FORMATS: Final[Mapping[str, str]] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
}
# Where a schema has schemas: by name, in a list, or one.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LISTED = frozenset({"anyOf", "allOf", "oneOf", "prefixItems", "items"})
_SINGLE = frozenset({"items", "additionalProperties", "additionalItems", "contains"})


class GrammarText:
    """A grammar that grows by rules and schemas; `text` is the whole."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._parts: list[dict[str, object]] = []

    def rule(self, name: str, text: str) -> str:
        """Add a rule, once; gives its name. `start` is the one that the answer has to be."""
        self._rules[name] = text
        return name

    def schema(self, schema: Mapping[str, Any]) -> str:
        """Add JSON by a schema that was checked; gives what rules call it."""
        name = f"json_{len(self._parts)}"
        options = {**_with_own_formats(schema), "x-guidance": dict(_JSON_OPTIONS)}
        self._parts.append({"name": name, "json_schema": options})
        return f"@{name}"

    def regex(self, name: str, pattern: str) -> str:
        """Add a terminal by a regular expression (Rust's syntax, without look-around); gives its name."""
        escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", "\\n")
        return self.rule(name.upper(), f"/{escaped}/")

    @staticmethod
    def literal(text: str) -> str:
        """`text` itself, as rules have it."""
        return json.dumps(text, ensure_ascii=False)

    @property
    def text(self) -> str:
        """The whole, as the compiler reads it.

        Raises:
            ConfigurationError: it is larger than grammars may be.
        """
        rules = "\n".join(f"{name}: {body}" for name, body in self._rules.items())
        whole = {"grammars": [{"name": "rules", "lark_grammar": rules}, *self._parts]}
        text = json.dumps(whole, ensure_ascii=False)
        if len(text.encode()) > MAX_GRAMMAR_BYTES:
            raise ConfigurationError(
                f"schemas may have {MAX_GRAMMAR_BYTES:,} B together, and have more"
            )
        return text


def check_schema(schema: Mapping[str, Any]) -> None:
    """Refuse a schema that is larger or deeper than one may be.

    Raises:
        ConfigurationError: it is; the text goes on from the schema's name.
    """
    level: list[Any] = [schema]
    num_values = 0
    for _ in range(MAX_SCHEMA_DEPTH):
        inner: list[Any] = []
        for holder in level:
            # Each value has a byte or more: what is far too long is not walked through to its end.
            if (num_values := num_values + len(holder)) > MAX_SCHEMA_BYTES:
                raise ConfigurationError(f"may have {MAX_SCHEMA_BYTES:,} B as JSON, and has more")
            values = holder.values() if isinstance(holder, Mapping) else holder
            inner += [value for value in values if isinstance(value, dict | list)]
        level = inner
    if level:
        raise ConfigurationError(f"may be {MAX_SCHEMA_DEPTH} objects and lists deep, and is deeper")
    if len(json.dumps(schema, ensure_ascii=False).encode()) > MAX_SCHEMA_BYTES:
        raise ConfigurationError(f"may have {MAX_SCHEMA_BYTES:,} B as JSON, and has more")


def _with_own_formats(schema: Any) -> Any:
    """The same schema, with patterns for the formats of `_FORMATS`. By recursion: its depth was checked."""
    if not isinstance(schema, Mapping):
        return schema
    told: dict[str, Any] = {}
    for word, value in schema.items():
        if word in _NAMED and isinstance(value, Mapping):
            told[word] = {name: _with_own_formats(inner) for name, inner in value.items()}
        elif word in _LISTED and isinstance(value, list):
            told[word] = [_with_own_formats(inner) for inner in value]
        else:
            told[word] = _with_own_formats(value) if word in _SINGLE else value
    own = _FORMATS.get(told["format"]) if isinstance(told.get("format"), str) else None
    if own is None:
        return told
    del told["format"]
    if "pattern" not in told:
        return {**told, "pattern": own}
    others = told.get("allOf", [])
    if not isinstance(others, list):
        return told  # what compiles it refuses that
    return {**told, "allOf": [*others, {"pattern": own}]}
