"""Values of a run file that its leader changes while the run goes on: which may be, and what holds at each round. Pure.

The run file stays as it is, as members have it. What is changed stands in the journal, from the round on at which it
holds; a run that is resumed before that round comes to it again.

Source: protocol_spec/training/runs.md.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from neurogrid.training.runs.entries import ChangedEntry, Entry, ResumedEntry
from neurogrid.training.runs.run_file import RunFile, WrongValueError
from neurogrid.training.runs.run_file.parsing import check_keys
from neurogrid.training.runs.run_file.run_file import SECTIONS
from neurogrid.training.runs.run_file.section import Section
from neurogrid.training.runs.run_file.values import shown, written

__all__ = [
    "Changes",
    "Values",
    "changed_run",
    "changes_text",
    "differing",
    "run_at",
    "told",
    "values_of",
    "words_of",
]

Values = dict[str, str]
"""Keys with their sections, as "inner.lr", and their values as TOML has them."""

_OF_ALL: Final = (
    *("stop.tokens", "stop.steps", "stop.rounds", "stop.hours", "stop.epochs"),
    *("eval.every", "eval.samples"),
)
_OF_STAGES: Final = (
    *("inner.lr", "inner.clip", "inner.batch_tokens", *_OF_ALL, "checkpoints.every"),
    *("outer.grace", "layout.micro_batches", "layout.state_every"),
)
# Replicas have taken their batches, and how these are cut, into a round that goes on.
_OF_REPLICAS: Final = tuple(
    word for word in _OF_STAGES if word not in ("inner.batch_tokens", "layout.micro_batches")
)


class Changes:
    """The changes of a run, as its journal has them.

    Attributes:
        made: those that hold, oldest first.
        due: those that were taken back, and come again at their rounds.
    """

    def __init__(self) -> None:
        self.made: list[ChangedEntry] = []
        self.due: list[ChangedEntry] = []

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Changes:
        """The changes that a journal has."""
        changes = cls()
        for entry in entries:
            if isinstance(entry, ChangedEntry):
                changes.take(entry)
            elif isinstance(entry, ResumedEntry):
                changes.take_back(entry.round)
        return changes

    def take(self, entry: ChangedEntry) -> None:
        """Something was changed: anew, or what was due."""
        if self.due and self.due[0] == entry:
            del self.due[0]
        else:
            keys = {key for key, _ in entry.changes}
            left = [(e, tuple(c for c in e.changes if c[0] not in keys)) for e in self.due]
            self.due = [replace(e, changes=changes) for e, changes in left if changes]
        self.made.append(entry)

    def take_back(self, round_number: int) -> None:
        """The run goes on after this round, as it did before."""
        self.due = [each for each in self.made if each.round > round_number] + self.due
        self.made = [each for each in self.made if each.round <= round_number]

    def next_due(self, round_number: int) -> ChangedEntry | None:
        """The first change that is due before this round is made; None if there is none."""
        return self.due[0] if self.due and self.due[0].round <= round_number else None

    def at(self, round_number: int) -> Values:
        """Changed values that hold in a round."""
        made = (each for each in self.made if each.round <= round_number)
        return {key: value for each in made for key, value in each.changes}

    @property
    def last(self) -> Values:
        """Changed values that hold once all changes are made, those that are due included."""
        return {key: value for each in (*self.made, *self.due) for key, value in each.changes}


def run_at(run: RunFile, changes: Changes, round_number: int) -> RunFile:
    """A run file as it holds in a round."""
    return changed_run(run, changes.at(round_number))


def changed_run(run: RunFile, values: Mapping[str, str]) -> RunFile:
    """A run file with other values.

    Raises:
        WrongValueError: a key is none that may be changed in such a run, or its value is not what it may be.
    """
    if not values:
        return run
    sections: dict[str, dict[str, Any]] = {}
    for word, text in values.items():
        section, key = _place(run, word)
        sections.setdefault(section.title, {})[key] = _value(text)
    made = {title: replace(getattr(run, title), **own) for title, own in sections.items()}
    return replace(run, **made)


def values_of(words: Iterable[str]) -> Values:
    """Read changed values from words such as `inner.lr=1e-4`.

    Raises:
        WrongValueError: one of them is nothing of the kind.
    """
    values: Values = {}
    for word in words:
        key, is_there, text = word.partition("=")
        if not is_there:
            raise WrongValueError(f"{shown(word)} is no KEY=VALUE, as inner.lr=1e-4")
        values[key.strip()] = text.strip()
    return values


def words_of(text: str) -> Values:
    """Read changed values from a text in TOML that `changes_text` made.

    Raises:
        WrongValueError: it is no such text.
    """
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as exc:
        raise WrongValueError(f"this is no TOML: {str(exc).splitlines()[0][:200]}") from exc
    values: Values = {}
    for title, table in tables.items():
        if not isinstance(table, dict):
            raise WrongValueError(f"{shown(title)} stands in no section, as [inner]")
        values |= {f"{title}.{key}": written(value) for key, value in table.items()}
    return values


def changes_text(run: RunFile, values: Mapping[str, str]) -> str:
    """Values as TOML, each as a run file has it; `words_of` gives them again.

    Args:
        run: the run file with them.
    """
    titles = dict.fromkeys(word.partition(".")[0] for word in sorted(values))
    lines = []
    for title in titles:
        keys = [word.partition(".")[2] for word in sorted(values) if word.startswith(f"{title}.")]
        own = getattr(run, title)
        lines += [f"[{title}]", *(f"{key} = {written(getattr(own, key))}" for key in keys), ""]
    return "\n".join(lines)


def differing(before: RunFile, after: RunFile) -> tuple[tuple[str, str], ...]:
    """Keys that may be changed and have other values in `after`, with those values, sorted by key."""
    found = []
    for word in sorted(_OF_STAGES):
        title, _, key = word.partition(".")
        value = getattr(getattr(after, title), key)
        if value != getattr(getattr(before, title), key):
            found.append((word, written(value)))
    return tuple(found)


def told(entry: ChangedEntry, run: RunFile) -> str:
    """A change in words, and from which round or step on it holds."""
    what = "step" if run.rounds_are_steps else "round"
    values = ", ".join(f"{key} = {value}" for key, value in entry.changes)
    return f"from {what} {entry.round} on: {values}"


def _place(run: RunFile, word: str) -> tuple[type[Section], str]:
    """The section and the key of something that may be changed in this run."""
    title, is_there, key = word.partition(".")
    if not is_there:
        raise WrongValueError(f"{shown(word)} is no key of a section, as inner.lr")
    if title not in SECTIONS:
        raise WrongValueError(
            f"there is no section {shown(title)}: there are {', '.join(SECTIONS)}"
        )
    section = SECTIONS[title]
    check_keys(section, [key], section.keys)
    allowed: tuple[str, ...] = _OF_ALL
    if run.is_chain:
        allowed = _OF_STAGES if run.rounds_are_steps else _OF_REPLICAS
    if word not in allowed:
        told = f"changed may be {', '.join(allowed)}"
        if word in _OF_STAGES and run.is_chain:
            raise section.fault(key, f"stays while a run of several replicas goes on; {told}")
        if word in _OF_STAGES:
            raise WrongValueError(
                f"while a run of whole models goes on, {section.called(key)} stays: members go by the run file that "
                f"they joined with; {told}",
                section.place_of(key),
            )
        raise section.fault(key, f"stays while a run goes on: it is what members agreed on; {told}")
    return section, key


def _value(text: str) -> object:
    """Read a value of TOML; a text that is none is returned as it is, for the check of its key."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return table["value"] if len(table) == 1 else text
