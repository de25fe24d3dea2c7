"""What the documents say of the commands is so: their flags exist, and messages that are explained are printed."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
FLAGS: dict[str, frozenset[str]] = runpy.run_path(str(ROOT / "docs" / "flags.py"))["flags"]()
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "packaging" / "Dockerfile",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*.md")),
]
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
# Programs of others, whose flags are theirs.
OTHERS = (
    "docker",
    "pip",
    "uv",
    "python",
    "curl",
    "systemctl",
    "journalctl",
    "install",
    "make",
    "npm",
)
TROUBLES = ROOT / "docs" / "troubleshooting.md"


def commands(text: str) -> Iterator[str]:
    """Lines of code, continued ones joined, and code within lines."""
    text = text.replace("\\\n", " ")
    in_fence = False
    for line in text.splitlines():
        if line.startswith("```"):
            in_fence = not in_fence
        elif in_fence or line.startswith("    "):
            yield line.strip().removeprefix("$ ")
        else:
            yield from re.findall(r"`([^`]+)`", line)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_flag_exists(path: Path) -> None:
    unknown = []
    for command in commands(path.read_text()):
        words = re.split(r"[\s/]", command.strip("# "))
        if words[0] in OTHERS or "RUN" in words[:1]:
            continue
        known = FLAGS.get(words[0]) or frozenset().union(*FLAGS.values())
        unknown += [(command, flag) for flag in FLAG.findall(command) if flag not in known]
    assert unknown == []


def test_the_check_finds_flags() -> None:
    text = "`--new` and\n\n    $ neurogrid-worker --port 1 \\\n        --prompt x\n"
    assert [FLAG.findall(command) for command in commands(text)] == [
        ["--new"],
        ["--port", "--prompt"],
    ]
    assert "--prompt" not in FLAGS["neurogrid-worker"]


@cache
def printed() -> tuple[str, ...]:
    """Every text in the sources, with … for what is put in."""

    def text_of(node: ast.JoinedStr) -> str:
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
        )

    found = []
    for file in (ROOT / "neurogrid").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append(text_of(node))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[-\d.]*[sdgfr]", "…", node.value))
    return tuple(found)


def is_printed(message: str) -> bool:
    def holds(text: str) -> bool:
        for part in message.split("…"):
            _, found, text = text.partition(part) if part else ("", "…", text)
            if not found:
                return False
        return True

    return any(holds(text) for text in printed())


def messages() -> list[str]:
    """Of the page of troubles: the code in the first column of its tables."""
    rows = re.findall(r"^\| (.*?) \|", TROUBLES.read_text(), re.MULTILINE)
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row)]


def test_every_message_that_is_explained_is_printed() -> None:
    assert len(messages()) > 30
    assert [message for message in messages() if not is_printed(message)] == []


@pytest.mark.parametrize("message", ["the layers do fit: …", "no such words anywhere"])
def test_the_check_finds_messages(message: str) -> None:
    assert not is_printed(message)
