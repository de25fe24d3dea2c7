"""The vectors use what the tables of `protocol_spec/vectors/README.md` have, and the tables have nothing unused."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatch
from functools import cache
from typing import Any

import pytest

from neurogrid.p2p.trust.refusal import Refusal
from neurogrid.p2p.wire import ErrorCode
from tests.unit.vectors import VECTORS, in_turn, names, subject

README = (VECTORS / "README.md").read_text(encoding="utf-8")
FILES = {name: subject(name) for name in names()}
RESULTS = {"record": {"valid", "malformed", "forged"}}


@cache
def rows(heading: str, table: int = 0) -> list[list[str]]:
    """The rows of a table under a heading, without its head; cells as they stand."""
    section = re.split(r"^## ", README, flags=re.MULTILINE)
    (text,) = (part for part in section if part.startswith(f"{heading}\n"))
    tables = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    lines = tables[table].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def is_decimal(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"0|[1-9][0-9]*", value) is not None


def is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) <= 2**53


FORMS: dict[str, Callable[[Any], bool]] = {
    "integer": is_integer,
    "number": lambda value: type(value) in (int, float),
    "decimal": is_decimal,
    "hex": lambda value: isinstance(value, str) and bool(re.fullmatch("([0-9a-f]{2})*", value)),
    "text": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
}


def has_form(value: Any, form: str) -> bool:
    if form.endswith(" or null"):
        return value is None or has_form(value, form.removesuffix(" or null"))
    if form.startswith("array of "):
        inner = form.removeprefix("array of ")
        return isinstance(value, list) and all(has_form(item, inner) for item in value)
    return FORMS[form](value)


def fields_of(name: str) -> dict[str, str]:
    """The form of each field of a file."""
    payload = FILES[name].get("payload")
    found = {}
    for whose, field, form, _ in rows("Fields", 1):
        files = named(whose)
        payloads = {part.strip() for part in whose.split(",")} - {f"`{file}`" for file in files}
        if payload in payloads or any(fnmatch(name, file) for file in files):
            (found[field.strip("`")],) = [form]
    return found


@cache
def members(heading: str) -> set[str]:
    return {member for row in rows(heading) for member in named(row[0])}


def test_a_file_has_what_the_tables_have() -> None:
    for name, file in FILES.items():
        assert set(file) <= members("A file"), name
        assert {"subject", "specification", "cases"} <= set(file), name


@in_turn(*FILES)
def test_a_case_has_what_the_tables_have(name: str, case: Any) -> None:
    assert set(case) <= members("A case")
    assert {"id", "comment", "result"} <= set(case)
    allowed = RESULTS.get(name, {"valid", "invalid"})
    if name.startswith("framing_"):
        allowed = allowed | {"incomplete"}
    assert case["result"] in allowed
    assert ("error" in case) == (case["result"] == "invalid")
    assert case.get("canonical", False) is False


@pytest.mark.parametrize("name", FILES)
def test_fields_have_the_names_and_forms_of_the_table(name: str) -> None:
    fields = fields_of(name)
    used = set()
    for case in FILES[name]["cases"]:
        said = case.get("messages", []) if name.startswith("framing_") else []
        for found in (*said, *([case["fields"]] if "fields" in case else ())):
            assert set(found) <= set(fields), case["id"]
            assert name.startswith("trust/") or len(found) == len(fields), case["id"]
            used |= set(found)
            for field, value in found.items():
                assert has_form(value, fields[field]), (case["id"], field, value)
    assert used == set(fields)


@in_turn(*FILES, where=lambda case: "error" in case)
def test_errors_have_names(name: str, case: Any) -> None:
    if name in {"trust/certificate", "trust/join_token", "trust/revocation_list"}:
        assert case["error"] in Refusal.__members__
    elif name not in {"trust/ticket", "witnessed"}:
        assert case["error"] in ErrorCode.__members__


def test_steps_and_results_and_forms_are_those_of_the_tables() -> None:
    steps = {key for case in FILES["transfer_v11"]["cases"] for s in case["steps"] for key in s}
    assert steps == members("Steps")
    results = {case["result"] for subject in FILES.values() for case in subject["cases"]}
    assert results == members("Results")
    assert {row[0] for row in rows("Fields")} == {*FORMS, "array of ...", "... or null"}


def test_no_row_is_without_a_vector() -> None:
    assert members("A file") == {key for subject in FILES.values() for key in subject}
    used = {key for subject in FILES.values() for case in subject["cases"] for key in case}
    assert members("A case") == used
