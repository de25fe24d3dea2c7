"""The verdict on a journal, from the file alone: whether it is whole, and what the run came to.

    verdict = verify_journal(directory)     # of a run, or its journal file
    verdict.is_whole, verdict.line, verdict.rows()

Three things are checked: that each line is as it was signed and follows on the one before (`journal`), that each entry
follows from those before (`state`), and that each sample of an epoch was used exactly once (`audit`). Beside a journal
that lies in the directory of its run, the run file is compared with the hash in the first line; and by its rules the
epochs of a witnessed run are gone through again, with all that members have signed (`checks.fault_of_epochs`), where
whoever calls this knows how. Those rules no journal has: of one that lies alone only what members have signed is
checked, and the verdict says so.

Source: protocol_spec/training/runs.md, "The journal".
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from neurogrid.errors import ConfigurationError
from neurogrid.training.runs.audit import Audit, audit
from neurogrid.training.runs.changes import Changes
from neurogrid.training.runs.entries import (
    CheckpointEntry,
    EndEntry,
    Entry,
    EpochEntry,
    JoinedEntry,
    ResumedEntry,
    RunEntry,
    StoppingEntry,
)
from neurogrid.training.runs.journal import JournalError, Recorded, read_journal
from neurogrid.training.runs.run_directory import RunDirectory
from neurogrid.training.runs.run_file import RunFile
from neurogrid.training.runs.terms import Sitting

__all__ = ["Verdict", "verify_journal"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a journal: what it proves, and what its run came to.

    Attributes:
        journal: the file.
        problem: what is wrong first; empty in a journal that is whole.
        line: the first line that is wrong, from 1; None where none is, or only all lines together are.
        num_lines: that were read; 0 where the file could not be read to its end.
        run: the id of the run in hex; empty where it is not known.
        leader: the peer id that signed the last line.
        term: of that leader: so often a deputy took over, or more.
        began, last: when the first line and the last were written, seconds since 1970.
        audit: of the entries; None where lines are wrong.
        peers: that were members, each once.
        resumed: how often the run was resumed.
        checkpoint: the round of the newest checkpoint that the run has not gone back behind; None where there is none.
        num_changes: of the run file, as far as they hold.
        end: why the run has ended; None where it has not.
        stopping: why nothing is dealt any more; None where something is.
        unchecked: what could not be checked, and what that takes; empty where all was.
    """

    journal: Path
    problem: str
    line: int | None = None
    num_lines: int = 0
    run: str = ""
    leader: str = ""
    term: int = 0
    began: float = 0.0
    last: float = 0.0
    audit: Audit | None = None
    peers: int = 0
    resumed: int = 0
    checkpoint: int | None = None
    num_changes: int = 0
    end: str | None = None
    stopping: str | None = None
    unchecked: str = ""

    @property
    def is_whole(self) -> bool:
        """Nothing was altered, taken out or added, and all of it fits together."""
        return not self.problem

    def json(self) -> dict[str, Any]:
        """The verdict for JSON."""
        told = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "audit"}
        found = None if self.audit is None else asdict(self.audit)
        return {**told, "journal": str(self.journal), "is_whole": self.is_whole, "audit": found}

    def rows(self) -> Iterator[tuple[str, str]]:
        """Names and what stands for them, for people."""
        if self.is_whole:
            yield "journal", f"whole: {self.num_lines:,} lines, {self._proven()}"
        else:
            yield "journal", f"not whole: {self.problem}"
        found = self.audit
        if found is None:
            return
        term = f" in term {self.term}: a deputy took over" if self.term else ""
        yield "run", f"{self.run[:8]}, led by {self.leader}{term}"
        yield "time", f"from {_told_time(self.began)} to {_told_time(self.last)}"
        again = f", resumed {_times(self.resumed)}" if self.resumed else ""
        yield "rounds", f"{found.rounds:,}{again}"
        were = "machine was a member" if self.peers == 1 else "machines were members"
        yield (
            "members",
            f"{self.peers:,} {were}; joined {_times(found.joined)}, left {_times(found.left)}",
        )
        yield "samples", ", ".join(self._samples(found))
        if self.num_changes:
            yield "changed", f"the run file, {_times(self.num_changes)}"
        if self.checkpoint is not None:
            yield "checkpoint", f"of round {self.checkpoint:,}"
        if self.unchecked:
            yield "unchecked", self.unchecked
        yield "end", self._told_end()

    def _proven(self) -> str:
        found = self.audit
        if found is not None and found.epochs and not found.missing:
            times = "1 epoch" if found.epochs == 1 else f"{found.epochs:,} epochs"
            return f"each sample of {times} used exactly once"
        return "no sample used twice in an epoch"

    def _samples(self, found: Audit) -> Iterator[str]:
        yield f"{found.num_used:,} used, of {found.num_samples:,} in an epoch"
        for epoch, left in sorted(found.missing.items()):
            yield f"{left:,} of epoch {epoch + 1} not used"

    def _told_end(self) -> str:
        if self.end is not None:
            return f"the run has ended: {self.end}"
        if self.stopping is not None:
            return f"the run was stopping, and had not ended: {self.stopping}"
        return "the run had not ended when the last line was written"


Look = Callable[[RunFile | None, bytes, Sequence[Entry]], str]
"""Check of a witnessed run's epochs, by its run file, if that is there, its id and the entries: the fault, or empty."""

_UNCHECKED: Final = (
    "whether each state of the epochs follows from the one before: the rules for that are in run.toml, which is to lie "
    "beside the journal"
)


def verify_journal(path: Path, look: Look | None = None) -> Verdict:
    """Judge the journal of a run.

    Args:
        path: the directory of the run, or its journal file.
        look: at the epochs of a witnessed run; None for nobody.

    Raises:
        ConfigurationError: there is no such file, or it cannot be read.
    """
    file = RunDirectory(path).journal if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise ConfigurationError(f"{path} has no run in it: there is no {file}")
    try:
        recorded = read_journal(file)
    except JournalError as exc:
        return Verdict(file, str(exc), exc.line)
    if not recorded:
        return Verdict(file, f"{file} has no whole line: no run has begun in it", 1)
    directory = RunDirectory(file.parent)
    begun = recorded[0].entry
    assert isinstance(begun, RunEntry)  # or it was not read
    has_other = _is_other_file(directory.run_file, begun.run_file)
    if not path.is_dir() and (has_other or not directory.run_file.is_file()):
        return _judged(file, recorded, None, look)  # a copy, which lies beside whatever it is
    return _judged(file, recorded, directory, look)


def _judged(
    file: Path,
    recorded: Sequence[Recorded],
    directory: RunDirectory | None,
    look: Look | None,
) -> Verdict:
    entries = [each.entry for each in recorded]
    found = audit(entries)
    problem, line, unchecked = "", None, ""
    has_epochs = any(isinstance(each, EpochEntry) for each in entries)
    begun = entries[0]
    assert isinstance(begun, RunEntry)  # or it was not read
    if not found.is_sound:
        first, *others = found.problems
        line = found.line
        where = f"line {line}: " if line is not None else ""
        more = f", and {len(others)} more" if others else ""
        problem = f"{where}{first}{more}"
    elif directory is not None and _is_other_file(directory.run_file, begun.run_file):
        line = 1
        problem = f"line 1 is of another run file than {directory.run_file}: that was altered"
    elif has_epochs and look is not None:
        has_rules = directory is not None and directory.run_file.is_file()
        run = directory.read_run() if directory is not None and has_rules else None
        problem = look(run, begun.run, entries)
        unchecked = "" if has_rules else _UNCHECKED
    checkpoint: int | None = None
    sitting = Sitting()
    for entry in entries:
        sitting.take(entry)
        if isinstance(entry, CheckpointEntry):
            checkpoint = entry.round
        elif isinstance(entry, ResumedEntry) and checkpoint is not None:
            checkpoint = min(checkpoint, entry.round) or None
    last_of = {type(each): each for each in _since_resumed(entries)}
    end, stopping = last_of.get(EndEntry), last_of.get(StoppingEntry)
    return Verdict(
        file,
        problem,
        line,
        num_lines=len(recorded),
        run=begun.run.hex(),
        leader=sitting.leader,
        term=sitting.term,
        began=recorded[0].time,
        last=recorded[-1].time,
        audit=found,
        peers=len({each.peer for each in entries if isinstance(each, JoinedEntry)}),
        resumed=sum(isinstance(each, ResumedEntry) for each in entries),
        checkpoint=checkpoint,
        num_changes=len(Changes.of(entries).made),
        end=end.reason if isinstance(end, EndEntry) else None,
        stopping=stopping.reason if isinstance(stopping, StoppingEntry) else None,
        unchecked=unchecked,
    )


def _is_other_file(path: Path, digest: bytes) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).digest() != digest


def _since_resumed(entries: Sequence[Any]) -> Sequence[Any]:
    """Entries after the last time that the run was resumed: before that it may have ended, too."""
    for number in range(len(entries) - 1, -1, -1):
        if isinstance(entries[number], ResumedEntry):
            return entries[number + 1 :]
    return entries


def _times(number: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(number, f"{number:,} times")


def _told_time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
