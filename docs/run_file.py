"""The reference of run files, from the sections' docstrings, kinds and defaults: docs/reference/run-file.md, which
make_reference writes.

The sections are imported: what a value may be is told by the check that it has to pass.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from importlib import import_module
from inspect import getdoc
from typing import Any

from sources import ROOT

__all__ = ["page"]

MODULE = "neurogrid.training.runs.run_file.run_file"
PRESETS = "neurogrid.training.runs.run_file.presets"
HEAD = """# Run files

What `neurogrid train run.toml` is to do, in TOML; [training.md](../training.md) says how it is used. A key without a
default is needed; `none` stands for a key that is left out. `neurogrid train check run.toml` prints the file with all
defaults filled in. Paths begin at the folder that the file is in; `~` is your home. Sizes: 16 KiB and 1,000 lines at
most.

By method, `[outer]` has other defaults: `diloco` has 1 fragment; `averaging` also `lr = 1.0` and `momentum = 0.0`;
`data_parallel` and `distro` also `every = 1` and `projected = false`. A preset fills in values before the file does:
{presets}.
"""


def page() -> str:
    """The text of the page."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    module = import_module(MODULE)
    *most, last = (f"`{name}`" for name in sorted(import_module(PRESETS).PRESETS))
    head = HEAD.format(presets=f"{', '.join(most)} or {last}")
    lines = [head, "## Above the first section", "", *_table(module.RunFile)]
    for title, section in module.SECTIONS.items():
        lines += [f"## [{title}]", "", _summary(section), "", *_table(section)]
    return "\n".join(lines).rstrip() + "\n"


def _summary(section: Any) -> str:
    """Summary of a section, without what is for programs."""
    text = " ".join((getdoc(section) or "").partition("\n\n")[0].split())
    return re.sub(r" `of` makes .*", "", text)


def _table(section: Any) -> Iterator[str]:
    told = _attributes(section)
    defaults = {
        each.name: None if each.default is MISSING else each.default for each in fields(section)
    }
    needed = {each.name for each in fields(section) if _is_needed(each)}
    yield from ("| key | default | is | |", "|---|---|---|---|")
    for key, kind in section.keys.items():
        default = "" if key in needed else _shown(defaults[key])
        if (section.title, key) == ("", "name"):
            default = "the file's"
        yield f"| `{key}` | {default} | {_cell(kind.says)} | {_cell(told[key])} |"
    yield ""


def _is_needed(field: Any) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _attributes(section: Any) -> dict[str, str]:
    """Text of each attribute in the docstring; several may share a line."""
    told: dict[str, str] = {}
    names: list[str] = []
    for line in (getdoc(section) or "").partition("Attributes:\n")[2].splitlines():
        if found := re.match(r" {4}([a-z_]+(?:, [a-z_]+)*): (.*)", line):
            names = found[1].split(", ")
            told |= dict.fromkeys(names, found[2])
        else:
            told |= {name: f"{told[name]} {line.strip()}" for name in names}
    return told


def _shown(value: object) -> str:
    if value is None:
        return "none"
    from neurogrid.training.runs.run_file.values import written

    return f"`{written(value)}`"


def _cell(text: str) -> str:
    """Text of a cell, with names of the sources as the file has them."""
    text = re.sub(r"`OuterSection\.round_steps`", "`every` / `fragments`", text)
    text = re.sub(r"(?<=; )None", "none", text)
    return text.strip().replace("|", "\\|")
