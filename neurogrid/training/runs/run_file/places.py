"""The line of each key in a text of TOML, which Python's reader does not tell.

Statement by statement: as soon as the lines of one are TOML by themselves, it is complete.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Final

from neurogrid.training.runs.run_file.section import Path

__all__ = ["key_lines"]

# Of a statement, which is read again with each: no value that is allowed needs as many.
_MAX_LINES: Final = 64
# Keys below one another that are looked at: those that are allowed are two.
_MAX_DEPTH: Final = 4


def key_lines(text: str) -> dict[Path, int]:
    """Find the line at which each key, table and section of a valid text begins, counted from 1.

    A statement that goes on for more lines than any that is allowed ends the search: it stands below the empty path.
    """
    lines: dict[Path, int] = {}
    section: Path = ()
    begin, statement = 1, ""
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        statement += f"{line}\n"
        try:
            table = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            if number - begin >= _MAX_LINES:
                lines[()] = begin
                break
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


def _paths(table: object, depth: int = _MAX_DEPTH) -> Iterator[Path]:
    """Yield the paths of all keys in a table, and in the tables below it."""
    if depth == 0:
        return
    if isinstance(table, list):
        for item in table:
            yield from _paths(item, depth - 1)
    elif isinstance(table, dict):
        for key, value in table.items():
            yield (key,)
            for path in _paths(value, depth - 1):
                yield (key, *path)
