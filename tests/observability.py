"""What docs/observability.md says there is: metrics and spans, read from its tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "DOCUMENT",
    "OBSERVABILITY",
    "DocumentedMetric",
    "documented_metrics",
    "documented_spans",
]

ROOT = Path(__file__).parents[1]
OBSERVABILITY = ROOT / "observability"
DOCUMENT = ROOT / "docs" / "observability.md"


@dataclass(frozen=True)
class DocumentedMetric:
    """A row of a table of metrics."""

    name: str
    kind: str
    labels: tuple[str, ...]
    roles: tuple[str, ...]
    meaning: str


def documented_metrics() -> list[DocumentedMetric]:
    """Every metric that the document names."""
    return [
        DocumentedMetric(name, kind, tuple(re.findall(r"`(\w+)`", labels)), _roles(roles), meaning)
        for name, kind, labels, roles, meaning in _rows(r"`(neurogrid_\w+)`", 5)
    ]


def documented_spans(*kinds: str, under: str = "") -> dict[str, frozenset[str]]:
    """Every span that the document names, of these kinds, with its attributes.

    Args:
        under: the heading of the third level that they stand under; empty for none.
    """
    return {
        name: frozenset(re.findall(r"`([\w.]+)`", attributes))
        for name, _, attributes in _rows(rf"`((?:{'|'.join(kinds)})\.\w+)`", 3, under)
    }


def _rows(first: str, num_columns: int, under: str | None = None) -> Iterator[tuple[str, ...]]:
    columns = r" \| ".join([first, *[r"(.*?)"] * (num_columns - 1)])
    heading = ""
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("## "):
            heading = ""
        elif line.startswith("### "):
            heading = line.removeprefix("### ")
        if under is not None and heading != under:
            continue
        found = re.fullmatch(rf"\| {columns} \|", line)
        if found is not None:
            yield found.groups()


def _roles(text: str) -> tuple[str, ...]:
    return ("coordinator", "worker") if text == "both" else (text,)
