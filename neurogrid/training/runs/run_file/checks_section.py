"""The section of a run file that is about checks: how much of what members compute is computed again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from neurogrid.training.runs.run_file.section import Section
from neurogrid.training.runs.run_file.values import Kind, number, whole

__all__ = ["ChecksSection"]


@dataclass(frozen=True, slots=True)
class ChecksSection(Section):
    """Audits and measurements of what members say that they have computed, with method "distro".

    Attributes:
        audit: share of the results of a round that are computed again; 0 for none.
        auditors: of each of these results.
        worth: share of the rounds in which it is measured what each result is worth: four losses for each member.
    """

    audit: float = 0.0
    auditors: int = 1
    worth: float = 0.0

    title: ClassVar[str] = "checks"
    keys: ClassVar[Mapping[str, Kind]] = {
        "audit": number("from 0 to 1", lambda value: 0 <= value <= 1),
        "auditors": whole(1, 16),
        "worth": number("from 0 to 1", lambda value: 0 <= value <= 1),
    }

    def _check(self) -> None:
        if self.worth and not self.audit:
            raise self.fault(
                "worth",
                "is above 0 only with audit above 0: who stands out by it is looked at by audits",
                self.place_of("audit"),
            )
