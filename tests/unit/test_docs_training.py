"""What the documents say of run files is so: keys, defaults, and the example."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from neurogrid.training.runs.run_directory import read_run_file
from neurogrid.training.runs.run_file import RunFile, parse_run_file
from neurogrid.training.runs.run_file.run_file import SECTIONS
from neurogrid.training.runs.run_file.values import written

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "training.md",
    ROOT / "docs" / "training-stages.md",
]
EXAMPLE = ROOT / "examples" / "run.toml"
REFERENCE = ROOT / "docs" / "reference" / "run-file.md"


@pytest.mark.parametrize("name", ["run", "mixture", "stages", "adapter", "replicas", "witnessed"])
def test_the_examples_train_on_what_is_in_a_clone(name: str) -> None:
    run = read_run_file(ROOT / "examples" / f"{name}.toml")
    assert run.data.places
    assert all(run.place(each).is_dir() for each in run.data.places)
    assert run.is_chain == (name not in ("run", "mixture", "witnessed"))
    assert run.is_witnessed == (name == "witnessed")


def test_the_example_is_one_that_check_takes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "neurogrid.cli.commands.main", "train", "check", str(EXAMPLE)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # What it prints is a run file again, with the same in it.
    assert parse_run_file(done.stdout) == parse_run_file(EXAMPLE.read_text())
    assert "# parameters   3,640,512 that are trained" in done.stdout


def keys_and_defaults() -> set[tuple[str, str, str]]:
    found = set()
    for title, body in re.findall(
        r"^## (.+?)\n(.*?)(?=^## |\Z)", REFERENCE.read_text(), re.MULTILINE | re.DOTALL
    ):
        for key, default in re.findall(r"^\| `(\w+)` \| (.*?) \|", body, re.MULTILINE):
            found.add((title.strip("[]"), key, default.strip("`")))
    return found


def test_the_page_of_keys_has_each_with_its_default() -> None:
    run = parse_run_file(
        '[model]\nconfig = "embedded"\n[data]\npath = "data/"\n[stop]\ntokens = 1\n'
    )
    told = {
        ("model", "config"): "",
        ("data", "path"): '""',
        ("stop", "tokens"): "none",
        ("Above the first section", "name"): "the file's",
    }
    expected = set()
    for title, section in {"Above the first section": run, **sections(run)}.items():
        for key in section.keys:
            value = getattr(section, key)
            default = "none" if value is None else written(value)
            expected.add((title, key, told.get((title, key), default)))
    assert keys_and_defaults() == expected


def sections(run: RunFile) -> dict[str, object]:
    return {title: getattr(run, title) for title in SECTIONS}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_that_are_named_exist(page: Path) -> None:
    """As `[section] key` in code."""
    named = re.findall(r"`\[(\w+)\] (\w+)", page.read_text())
    keys = {(title, key) for title, section in SECTIONS.items() for key in section.keys}
    assert [each for each in named if each not in keys] == []


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_defaults_that_the_pages_of_training_tell_are_so(page: Path) -> None:
    rows = re.findall(
        r"^\| `\[(\w+)\] (\w+)` \| ([\w.]+)(?: s)? \|", page.read_text(), re.MULTILINE
    )
    assert len(rows) > 5
    defaults = {
        (title, key): default.strip('"').removesuffix(".0")
        for title, key, default in keys_and_defaults()
    }
    assert [row for row in rows if defaults[row[:2]] != row[2]] == []
