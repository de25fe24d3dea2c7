"""The documents hold: the reference is that of the sources, links lead somewhere, code is code that tests run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "protocol_spec").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
)
# Those that teach by code. The reference shows signatures, and the specification no Python.
TEACHING = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def prose(text: str) -> str:
    """Without code, whose brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


@cache
def anchors(document: Path) -> set[str]:
    """What GitHub lets one link to in a document."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", document.read_text()), re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        number = 0
        while f"{anchor}-{number}" in found or (not number and anchor in found):
            number += 1
        found.add(f"{anchor}-{number}" if number else anchor)
    return found


def broken_links(document: Path, text: str) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"[a-z]+:", link):
            continue  # elsewhere: not ours to hold
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if (
            not target.is_relative_to(ROOT)
            or not target.exists()
            or (anchor and (target.suffix != ".md" or anchor not in anchors(target)))
        ):
            yield link


def lines_of(code: str) -> list[str]:
    """Without blank lines, of which a formatter puts more outside of functions than within."""
    return list(filter(str.strip, code.splitlines()))


def stands_in(shown: list[str], lines: list[str]) -> bool:
    """Whether lines are a run of others, without the common indentation of these."""
    return any(
        textwrap.dedent("\n".join(lines[start : start + len(shown)])) == "\n".join(shown)
        for start in range(len(lines) - len(shown) + 1)
        if lines[start].strip() == shown[0].strip()
    )


@cache
def examples(suffix: str) -> list[list[str]]:
    return [lines_of(path.read_text()) for path in (ROOT / "examples").glob(f"*.{suffix}")]


def test_the_reference_is_that_of_the_sources() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_reference.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_rooms_are_those_of_the_imports() -> None:
    """And no two of them import each other: the script would end with a CycleError."""
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_architecture.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_what_architecture_names_is_there() -> None:
    pages = (
        ROOT / "docs" / "architecture.md",
        ROOT / "docs" / "words.md",
        ROOT / "CONTRIBUTING.md",
    )
    for page in pages:
        text = page.read_text(encoding="utf-8")
        floors = {path.name for path in (ROOT / "neurogrid").iterdir() if path.is_dir()}
        for named in re.findall(r"`([\w/]+(?:\.py)?)`", text):
            path = named.removeprefix("neurogrid/")
            if path.partition("/")[0] in floors and "/" in path:
                there = ROOT / "neurogrid" / path
                assert there.exists() or there.with_suffix(".py").exists(), f"{page.name}: {named}"


def test_one_word_is_for_one_thing() -> None:
    """A word that stands twice says so; one with "of" or "in" behind it is told apart by that."""
    rows = re.findall(
        r"^\| (.+?) \| (.+?) \| .+ \|$", (ROOT / "docs" / "words.md").read_text(), re.MULTILINE
    )
    told: dict[str, list[str]] = {}
    for cell, what in rows:
        for named in () if what == "is" else cell.split("; "):
            words = [named] if re.search(", (of|in) ", named) else named.split(", ")
            for word in words:
                told.setdefault(word, []).append(what)
    assert len(told) > 100
    twice = [
        word
        for word, each in told.items()
        if len(each) > 1 and not any("another thing" in what for what in each)
    ]
    assert twice == []


def test_every_public_name_is_explained() -> None:
    """A name without a docstring has an empty line in the table of its page."""
    for page in (ROOT / "docs" / "reference").glob("neurogrid*.md"):
        table = page.read_text().partition("\n## ")[0]
        rows = re.findall(r"^\| \[`(\w+)`\]\(\S+\) \| (.*) \|$", table, re.MULTILINE)
        assert rows, page
        assert [name for name, explanation in rows if not explanation.strip()] == [], page


def summaries(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and summaries of a file's docstrings."""
    for node in ast.walk(ast.parse(path.read_text())):
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
            yield node.body[0].lineno, docstring.partition("\n")[0]


def test_every_summary_begins_with_a_noun_or_a_verb() -> None:
    """As docs/words.md asks for: it says what a thing is, also where it stands alone in a table."""
    neither = re.compile(
        r"(what|who|whom|whose|how|where|when|which|why|whoever|whatever|whichever|wherever"
        r"|that|those|it|they|there|he|of|by|beyond|args)\b",
        re.IGNORECASE,
    )
    found = [
        f"{path.relative_to(ROOT)}:{line}: {summary}"
        for folder in ("neurogrid", "cmd", "docs")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, summary in summaries(path)
        if neither.match(summary)
    ]
    assert found == []


@pytest.mark.parametrize("name", names(DOCUMENTS))
def test_every_link_leads_somewhere(name: str) -> None:
    document = ROOT / name
    assert list(broken_links(document, document.read_text())) == []


@pytest.mark.parametrize(
    "link", ["nowhere.md", "#no-such-heading", "tutorial.md#no", "../../outside", "index.md/x"]
)
def test_the_check_of_links_finds(link: str) -> None:
    assert list(broken_links(ROOT / "docs" / "index.md", f"a [link]({link}) to")) == [link]


def test_the_tutorial_shows_both_scripts_whole() -> None:
    shown = {code for language, code in FENCE.findall((ROOT / "docs" / "tutorial.md").read_text())}
    for name in ("receive_array.py", "send_array.py"):
        assert (ROOT / "examples" / name).read_text() in shown


@pytest.mark.parametrize("name", names(TEACHING))
def test_code_in_the_documents_stands_in_an_example(name: str) -> None:
    """Examples run in tests/e2e/test_examples.py, so what is shown was run."""
    suffixes = {"python": "py", "toml": "toml"}
    for language, code in FENCE.findall((ROOT / name).read_text()):
        if language == "mermaid":
            continue  # a picture
        assert language in suffixes, f"{name} has a block of {language or 'no language'}"
        shown = lines_of(code)
        assert any(stands_in(shown, lines) for lines in examples(suffixes[language])), code


def test_examples_import_public_names_alone() -> None:
    public = {"neurogrid", "neurogrid.errors", "neurogrid.p2p"} | {
        page.stem for page in (ROOT / "docs" / "reference").glob("*.md")
    }
    for example in (ROOT / "examples").glob("*.py"):
        for node in ast.walk(ast.parse(example.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("neurogrid"):
                assert node.module in public, example
