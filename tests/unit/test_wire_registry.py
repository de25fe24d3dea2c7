"""The registries of the specification say the same as the code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from neurogrid.p2p import wire
from neurogrid.p2p.wire import MessageCode, MessageTable
from neurogrid.training.wire import PROTOCOL_TRAINING, TrainingMessage, training_table
from neurogrid.training.wire.runs import PROTOCOL_RUN, RunMessage, run_table

SPECIFICATION = Path(__file__).parents[2] / "protocol_spec"


def registry(name: str) -> Any:
    return json.loads((SPECIFICATION / "registry" / f"{name}.json").read_text(encoding="utf-8"))


def test_message_types() -> None:
    entries = registry("message_types")
    named = {entry["name"]: entry["value"] for entry in entries["message_types"]}
    assert named == {t.name: t.value for t in wire.MessageType}
    for entry in entries["message_types"]:
        msg_type = wire.MessageType(entry["value"])
        assert (entry["since"] == "1.0.0") == (msg_type.value in wire.v10_table().by_number)
        assert msg_type.value in wire.v11_table().by_number
        size = {"extended": wire.EXTENDED_HEADER_BYTES, "traced": wire.TRACED_HEADER_BYTES}
        assert size[entry["header"]] == wire.header_bytes(msg_type)
        assert entry["credited"] == msg_type.traits.is_credited
        assert entry["max_data"] == wire.DEFAULT_LIMITS.for_type(msg_type)


# The chapter of each, its registry, and the messages that are its own.
OF_TRAINING: list[tuple[str, str, MessageTable, type[MessageCode]]] = [
    ("messages.md", "training_message_types", training_table(), TrainingMessage),
    ("runs.md", "run_message_types", run_table(), RunMessage),
]


@pytest.mark.parametrize(("chapter", "name", "table", "codes"), OF_TRAINING)
def test_message_types_of_training(
    chapter: str, name: str, table: MessageTable, codes: type[MessageCode]
) -> None:
    entries = registry(name)["message_types"]
    assert {e["name"]: e["value"] for e in entries} == {t.name: t.value for t in codes}
    for entry in entries:
        msg_type = codes(entry["value"])
        assert table.by_number[msg_type.value] is msg_type
        assert entry["request"] == msg_type.traits.is_request
        assert entry["credited"] == msg_type.traits.is_credited
        assert entry["max_data"] == table.max_data(msg_type)


@pytest.mark.parametrize(("chapter", "name", "table", "codes"), OF_TRAINING)
def test_the_tables_of_training_have_the_same_numbers(
    chapter: str, name: str, table: MessageTable, codes: type[MessageCode]
) -> None:
    text = (SPECIFICATION / "training" / chapter).read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| 0x")]
    found = {
        int(number, 16): (
            re.split(r"\W", name.strip(" ["))[0].lower(),
            int(size.replace(",", "")),
            bool(asks.strip()),
            bool(credit.strip()),
        )
        for number, name, _, size, asks, credit in rows
    }
    assert found == {
        t.value: (
            t.name.lower().replace("_", ""),
            table.max_data(t),
            t.traits.is_request,
            t.traits.is_credited,
        )
        for t in table.by_number.values()
    }


def test_error_codes() -> None:
    entries = registry("error_codes")["error_codes"]
    assert {e["name"]: e["value"] for e in entries} == {c.name: c.value for c in wire.ErrorCode}


def test_the_chapter_on_errors_has_the_same_numbers() -> None:
    text = (SPECIFICATION / "errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", text, re.MULTILINE)
    assert {name: int(number) for number, name in rows} == {c.name: c.value for c in wire.ErrorCode}


def test_every_type_has_a_section_in_messages() -> None:
    text = (SPECIFICATION / "messages.md").read_text(encoding="utf-8")
    headings = " ".join(re.findall(r"^## (.*)$", text, re.MULTILINE))
    traced = {
        f"0x{t.value:02x}" for t in wire.MessageType if t.traits.traces
    }  # they share that of the untraced
    numbers = {f"0x{t.value:02x}" for t in wire.MessageType}
    assert set(re.findall(r"0x[0-9a-f]{2}", headings)) == numbers - traced


def test_the_first_free_numbers() -> None:
    text = (SPECIFICATION / "versioning.md").read_text(encoding="utf-8")
    assert f"0x{max(wire.MessageType) + 1:02x} is the first free type" in text
    assert f"{max(wire.ErrorCode) + 1} the first\n  free error code" in text


def test_the_chapter_on_limits_has_the_same_numbers() -> None:
    text = (SPECIFICATION / "limits.md").read_text(encoding="utf-8").replace(",", "")
    limits = {wire.DEFAULT_LIMITS.for_type(t) for t in wire.MessageType}
    others = {
        wire.CHUNK_BYTES,
        wire.MAX_CHUNKS,
        wire.MAX_LAYERS,
        wire.MAX_SESSIONS,
        wire.MAX_RANK,
        wire.MAX_BITMAP_BYTES,
        wire.MAX_ERROR_CHARS,
        wire.MAX_ADAPTER_RANK,
        wire.MAX_LAYER_ADAPTERS,
    }
    assert [n for n in limits | others if not re.search(rf"\b{n}\b", text)] == []


def test_the_readme_lists_every_chapter() -> None:
    text = (SPECIFICATION / "README.md").read_text(encoding="utf-8")
    chapters = {path.name for path in SPECIFICATION.glob("*.md")} - {"README.md"}
    chapters |= {f"training/{path.name}" for path in SPECIFICATION.glob("training/*.md")}
    assert {name for name in chapters if f"]({name})" not in text} == set()
    (revision,) = re.findall(r"^\| `/neurogrid/tensor/1.1.0` \|.*\| (r\d+) \|", text, re.MULTILINE)
    versioning = (SPECIFICATION / "versioning.md").read_text(encoding="utf-8")
    assert revision == re.findall(r"^\| (r\d+) \|", versioning, re.MULTILINE)[-1]


def test_dtypes() -> None:
    entries = registry("dtypes")
    assert {e["name"]: e["size"] for e in entries["dtypes"]} == dict(wire.DTYPES)
    assert entries["config_dtypes"] == dict(wire.CONFIG_DTYPES)
    assert set(wire.CONFIG_DTYPES.values()) <= set(wire.DTYPES)


def test_header_sizes() -> None:
    assert wire.header_bytes(None) == wire.LEGACY_HEADER_BYTES == 16
    assert (wire.EXTENDED_HEADER_BYTES, wire.TRACED_HEADER_BYTES) == (25, 50)


@pytest.mark.parametrize(
    ("chapter", "names"),
    [
        ("messages.md", [f"0x{t.value:02x}" for t in wire.MessageType]),
        ("errors.md", [c.name for c in wire.ErrorCode]),
        ("versioning.md", [wire.PROTOCOL_V10, wire.PROTOCOL_V11]),
        ("training/messages.md", [PROTOCOL_TRAINING]),
        ("training/runs.md", [PROTOCOL_RUN]),
        ("README.md", [PROTOCOL_TRAINING, PROTOCOL_RUN]),
    ],
)
def test_chapters_name_everything(chapter: str, names: list[str]) -> None:
    text = (SPECIFICATION / chapter).read_text(encoding="utf-8")
    assert [name for name in names if name not in text] == []


@pytest.mark.parametrize("chapter", sorted(SPECIFICATION.rglob("*.md")), ids=lambda p: p.name)
def test_links_lead_somewhere(chapter: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", chapter.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        if not name.startswith("http"):
            file = chapter.parent / name if name else chapter
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target


def anchors(file: Path) -> set[str]:
    """What a Markdown reader makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
