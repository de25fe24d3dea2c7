"""Parser of run files; what is wrong is told in one line, with its place and what is allowed."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from pathlib import PurePath
from typing import Any, Final

from neurogrid.errors import ConfigurationError
from neurogrid.training.runs.run_file.places import key_lines
from neurogrid.training.runs.run_file.presets import preset_values
from neurogrid.training.runs.run_file.run_file import SECTIONS, RunFile
from neurogrid.training.runs.run_file.section import Section, WrongValueError
from neurogrid.training.runs.run_file.sections import METHODS, OuterSection
from neurogrid.training.runs.run_file.values import shown

__all__ = [
    "MAX_BYTES",
    "MAX_LINES",
    "RunFileError",
    "check_keys",
    "parse_kept_run_file",
    "parse_run_file",
]

MAX_BYTES: Final = 16 * 1024
"""Bytes of a run file, which members are sent: six times what all keys take."""

MAX_LINES: Final = 1000
"""Lines of a run file: room for some lines of comment on every key."""

_DEFAULT_NAME: Final = "run"

_Make = Callable[[type[Section], Mapping[str, Any], Mapping[str, Any]], Section]
"""Makes a section of what is given of it, and of what a preset has."""


class RunFileError(ConfigurationError):
    """A run file is wrong: one line with file, line and what is allowed."""


def parse_run_file(text: str, *, name: str = "run.toml") -> RunFile:
    """Read a run file.

    Args:
        text: in TOML, at most 16 KiB and 1,000 lines.
        name: of the file, for errors; and for the run, where the file does not name it.

    Raises:
        RunFileError: it is no TOML, or a key, a type, a value or a combination is wrong.
    """
    return _parsed(text, name, _given_section)


def parse_kept_run_file(text: str, *, name: str = "run.toml") -> RunFile:
    """Read what `RunFile.text` wrote, of this version or of one before.

    A key that it lacks is newer than the run. It has the default of its section, with which a run goes on as it did
    before there was such a key; what presets and methods have by now does not count.

    Args:
        text, name: as with `parse_run_file`.

    Raises:
        RunFileError: it is no TOML, or a key, a type, a value or a combination is wrong.
    """
    return _parsed(text, name, lambda section, given, preset: section(**given))


def _parsed(text: str, name: str, make: _Make) -> RunFile:
    table = _table(text, name)
    try:
        return _run_file(table, _run_name(name), make)
    except WrongValueError as exc:
        lines = key_lines(text)
        # It is in what was not looked into, where there is such; what is missing is told where its section begins.
        tried = [*exc.paths, (), *(path[:1] for path in exc.paths)]
        line = next((lines[path] for path in tried if path in lines), 1)
        raise RunFileError(f"{name}:{line}: {exc}") from exc


def _table(text: str, name: str) -> dict[str, Any]:
    num_bytes, num_lines = len(text.encode(errors="replace")), text.count("\n") + 1
    if num_bytes > MAX_BYTES or num_lines > MAX_LINES:
        raise RunFileError(
            f"{name}: {num_bytes} bytes in {num_lines} lines are no run file: those have at most {MAX_BYTES} bytes and "
            f"{MAX_LINES} lines"
        )
    try:
        return tomllib.loads(text)
    except RecursionError as exc:
        raise RunFileError(f"{name}: nothing in a run file is nested so deeply") from exc
    except (
        ValueError
    ) as exc:  # a number of thousands of digits gives one that is no TOMLDecodeError
        told = str(exc)
        place = re.search(r" \(at line (\d+), column (\d+)\)$", told)
        line = int(place[1]) if place else text.count("\n") + (not text.endswith("\n"))
        what = re.sub(r" \(at [^()]*\)$", "", told)
        column = f", at column {place[2]}" if place else ""
        raise RunFileError(f"{name}:{max(1, line)}: this is no TOML: {what}{column}") from exc


def _run_file(table: Mapping[str, Any], default_name: str, make: _Make) -> RunFile:
    check_keys(RunFile, table, [*RunFile.keys, *SECTIONS])
    own = {key: table[key] for key in RunFile.keys if key in table}
    preset = own.get("preset", "")
    if not isinstance(preset, str):
        raise RunFile.fault("preset", f"is the name of a preset, not {shown(preset)}")
    values = preset_values(preset)
    sections = {
        title: _section(section, table.get(title, {}), values.get(title, {}), make)
        for title, section in SECTIONS.items()
    }
    return RunFile(**{"name": default_name, **own, **sections})


def _section(
    section: type[Section], given: object, preset: Mapping[str, Any], make: _Make
) -> Section:
    if not isinstance(given, dict):
        raise WrongValueError(
            f"{section.title} is a section, [{section.title}], not {shown(given)}",
            section.place_of(),
        )
    check_keys(section, given, section.keys)
    for key in _needed(section):
        if key not in given:
            raise section.fault(key, f"is needed: {section.keys[key].says}")
    return make(section, given, preset)


def _given_section(
    section: type[Section], given: Mapping[str, Any], preset: Mapping[str, Any]
) -> Section:
    values = {**preset, **given}
    if section is OuterSection:
        method = values.get("method", OuterSection().method)
        # One that is none is told of where the values are checked.
        defaults = METHODS.get(method, {}) if isinstance(method, str) else {}
        values = {**defaults, **values}
    return section(**values)


def _needed(section: type[Section]) -> list[str]:
    """Keys that have no default."""
    return [
        each.name
        for each in fields(section)  # type: ignore[arg-type]
        if each.default is MISSING and each.default_factory is MISSING
    ]


def check_keys(section: type[Section], given: Iterable[str], known: Iterable[str]) -> None:
    """See that a section has all of these keys.

    Raises:
        WrongValueError: it has not; says which there are.
    """
    for key in given:
        if key not in (names := list(known)):
            nearest = difflib.get_close_matches(key, names, n=3, cutoff=0.5)
            told = ", ".join(dict.fromkeys([*nearest, *names]))
            where = f"[{section.title}] has no key" if section.title else "a run file has no"
            raise WrongValueError(f"{where} {shown(key)}: there are {told}", section.place_of(key))


def _run_name(file: str) -> str:
    """The name of a run by that of its file: with - for what a name cannot have."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", PurePath(file).stem)
    return stem.lstrip("._-")[:64] or _DEFAULT_NAME
