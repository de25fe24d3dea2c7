"""The line of each key in a text of TOML, which Python's reader does not tell.

Statement by statement: as soon as the lines of one are TOML by themselves, it is complete.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator

from neurogrid.training.runs.run_file.section import Path

__all__ = ["key_lines"]


def key_lines(text: str) -> dict[Path, int]:
    """Where each key, table and section of a valid text begins, lines counted from 1."""
    lines: dict[Path, int] = {}
    section: Path = ()
    begin, statement = 1, ""
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        statement += f"{line}\n"
        try:
            table = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue  # goes on in the next line
        paths = list(_paths(table))
        if statement.lstrip().startswith("["):
            section = paths[-1]
            paths = [section[:length] for length in range(1, len(section) + 1)]
        else:
            paths = [(*section, *path) for path in paths]
        for path in paths:
            lines.setdefault(path, begin)
        begin, statement = number + 1, ""
    return lines


def _paths(table: object) -> Iterator[Path]:
    """Of all keys in a table, below their own."""
    if isinstance(table, list):
        for item in table:
            yield from _paths(item)
    elif isinstance(table, dict):
        for key, value in table.items():
            yield (key,)
            for path in _paths(value):
                yield (key, *path)
