"""The directory of a run: what its files are called, and how far the run is by what stands in them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from neurogrid.errors import ConfigurationError
from neurogrid.training.runs.run_file import RunFile, parse_kept_run_file, parse_run_file
from neurogrid.training.runs.run_file.parsing import MAX_BYTES

__all__ = ["Figures", "RunDirectory", "read_changes", "read_run_file"]

# A line of metrics.jsonl has some hundred bytes: the last lines are in these.
_MAX_TAIL_BYTES: Final = 256 * 1024
# Beside checkpoints that are not in the directory of their run: says where that is.
_OWNER: Final = "run"

Figures = dict[str, float]
"""A line of metrics.jsonl: names and numbers. `tokens` and `seconds` count from the beginning of the run."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of a run.

    Attributes:
        path: of the directory, which need not exist.
    """

    path: Path

    @property
    def run_file(self) -> Path:
        """The run file, with every default filled in, as it was when the run began."""
        return self.path / "run.toml"

    @property
    def journal(self) -> Path:
        """The journal: what was decided, entry by entry."""
        return self.path / "journal"

    @property
    def changes(self) -> Path:
        """Values of the run file that somebody wants changed while the run goes on."""
        return self.path / "changes.toml"

    @property
    def pause(self) -> Path:
        """File that pauses a witnessed run while it is there."""
        return self.path / "pause"

    def write_changes(self, text: str) -> None:
        """Write what is wanted, whole or not at all.

        Raises:
            ConfigurationError: it cannot be written.
        """
        _write_whole(self.changes, text)

    def write_run(self, text: str) -> None:
        """Write the run file, whole or not at all.

        Raises:
            ConfigurationError: it cannot be written.
        """
        _write_whole(self.run_file, text)

    @property
    def metrics(self) -> Path:
        """Figures, one object a line."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The directory of checkpoints, `step-N` each; a link where the run file has them elsewhere."""
        return self.path / "checkpoints"

    def place_checkpoints(self, folder: Path) -> None:
        """Have the checkpoints of a run that is about to begin in another directory, which `checkpoints` is then.

        Raises:
            ConfigurationError: something else is in it, or it cannot be made.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            folder = folder.resolve()
            if self.checkpoints.is_symlink():  # of a run that did not begin
                self.checkpoints.unlink()
            if folder == self.checkpoints.resolve():
                return
            if self.checkpoints.exists():
                raise ConfigurationError(
                    f"{self.checkpoints} is there already, and [checkpoints] dir says {folder}: remove the one, or "
                    "leave out the other"
                )
            owner, own = folder / _OWNER, f"{self.path.resolve()}\n"
            if any(folder.iterdir()):
                if not owner.is_file() or owner.read_text(encoding="utf-8") != own:
                    raise ConfigurationError(
                        f"[checkpoints] dir is for one run alone, and {folder} is not empty: name a directory that is "
                        "new or empty"
                    )
            else:
                with owner.open("x", encoding="utf-8") as stream:
                    stream.write(own)
            self.checkpoints.symlink_to(folder, target_is_directory=True)
        except OSError as exc:
            raise ConfigurationError(
                f"[checkpoints] dir: {folder} cannot be used: {exc.strerror or exc}"
            ) from exc

    def check_checkpoints(self) -> None:
        """See that the directory of checkpoints is there where the run has them elsewhere: the disk may be another.

        Raises:
            ConfigurationError: it is not.
        """
        if self.checkpoints.is_symlink() and not self.checkpoints.exists():
            raise ConfigurationError(
                f"the checkpoints of {self.path} are in {self.checkpoints.readlink()}, which is not there: is its disk "
                f"mounted? If they have moved, let {self.checkpoints} be a link to where they are"
            )

    def latest_checkpoint(self) -> Path | None:
        """The directory of the newest checkpoint; None where there is none yet."""
        link = self.checkpoints / "latest"
        try:
            return link.resolve(strict=True)
        except OSError:
            return None

    @property
    def data(self) -> Path:
        """The directory of the data, where they are prepared for the run."""
        return self.path / "data"

    @property
    def data_asked(self) -> Path:
        """A digest of what `data` is prepared from, which is written before that."""
        return self.path / ".data.json"

    def write_data_asked(self, text: str) -> None:
        """Write it, whole or not at all.

        Raises:
            ConfigurationError: it cannot be written.
        """
        _write_whole(self.data_asked, text)

    def read_data_asked(self) -> str:
        """The one that was written; nothing where none was.

        Raises:
            ConfigurationError: it cannot be read.
        """
        path = self.data_asked
        return _read_text(path, "note on data") if path.exists() else ""

    @property
    def track(self) -> Path:
        """The directory for trackers that keep files."""
        return self.path / "track"

    @property
    def cluster(self) -> Path:
        """The directory of the cluster that members join."""
        return self.path / "cluster"

    @property
    def has_run(self) -> bool:
        """Whether it is the directory of a run."""
        return self.journal.exists()

    @property
    def has_begun(self) -> bool:
        """Whether a run has begun in it: one that failed before that leaves an empty journal."""
        return self.has_run and self.journal.stat().st_size > 0

    def read_run(self) -> RunFile:
        """The run that is kept here.

        Raises:
            ConfigurationError: there is none, or its run file is wrong.
        """
        if not self.run_file.exists():
            raise ConfigurationError(f"{self.path} has no run in it: there is no {self.run_file}")
        text = _read_text(self.run_file, "run file")
        return self.placed(parse_kept_run_file(text, name=str(self.run_file)))

    def placed(self, run: RunFile) -> RunFile:
        """A run file whose relative places begin here."""
        return replace(run, folder=str(self.path))

    def figures(self) -> list[Figures]:
        """The last lines of the metrics, the newest last; none where there are none yet.

        Lines that are no figures are left out: whoever writes may be in the middle of one. So are those of rounds that
        a run was resumed before, once it has lines of the rounds in their place.

        Raises:
            ConfigurationError: the file cannot be read.
        """
        try:
            with self.metrics.open("rb") as stream:
                size = stream.seek(0, os.SEEK_END)
                start = stream.seek(max(0, size - _MAX_TAIL_BYTES))
                lines = stream.read().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise ConfigurationError(
                f"{self.metrics} cannot be read: {exc.strerror or exc}"
            ) from exc
        # What precedes the first line break may be the end of a line, and what follows the last its beginning.
        found: list[Figures] = []
        for line in lines[start > 0 : -1]:
            if (each := _figures(line)) is None:
                continue
            number = each.get("round", math.inf)
            if found and _round_of(found[-1]) > number:
                while found and _round_of(found[-1]) >= number:
                    found.pop()
            found.append(each)
        return found

    def all_figures(self) -> Iterator[Figures]:
        """Each line of the metrics that is whole, oldest first, also those of rounds that were taken back.

        Raises:
            ConfigurationError: the file cannot be read.
        """
        try:
            with self.metrics.open("rb") as stream:
                for line in stream:
                    if line.endswith(b"\n") and (each := _figures(line)) is not None:
                        yield each
        except FileNotFoundError:
            return
        except OSError as exc:
            raise ConfigurationError(
                f"{self.metrics} cannot be read: {exc.strerror or exc}"
            ) from exc

    def add_figures(self, figures: Figures) -> None:
        """Write a line of the metrics.

        Raises:
            ConfigurationError: it cannot be written.
        """
        try:
            with self.metrics.open("a+b") as stream:
                # Part of a line may be left by a full disk, or a leader that was killed: it takes no whole one with it.
                is_torn = stream.seek(0, os.SEEK_END) > 0
                if is_torn:
                    stream.seek(-1, os.SEEK_END)
                    is_torn = stream.read(1) != b"\n"
                stream.write(b"\n" * is_torn + json.dumps(figures).encode() + b"\n")
        except OSError as exc:
            raise ConfigurationError(
                f"cannot write {self.metrics}: {exc.strerror}. Make room, and go on with --resume"
            ) from exc

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, ascending."""
        found = (each.name.removeprefix("step-") for each in self.checkpoints.glob("step-*"))
        return sorted(int(step) for step in found if step.isascii() and step.isdecimal())


def read_run_file(path: Path) -> RunFile:
    """Read and check a run file. Relative places in it begin at its folder.

    Raises:
        RunFileError: it is wrong.
        ConfigurationError: it cannot be read.
    """
    run = parse_run_file(_read_text(path, "run file"), name=str(path))
    return replace(run, folder=str(path.parent))


def read_changes(path: Path) -> str:
    """Read the changes that are wanted of a run, as `RunDirectory.write_changes` wrote them; empty without a file.

    Raises:
        ConfigurationError: it cannot be read, or is no such text.
    """
    return _read_text(path, "file of changes") if path.exists() else ""


def _write_whole(path: Path, text: str) -> None:
    draft = path.with_suffix(f".{os.getpid()}.partial")
    try:
        with draft.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
    except OSError as exc:
        draft.unlink(missing_ok=True)
        raise ConfigurationError(f"{path}: {exc.strerror or exc}") from exc


def _read_text(path: Path, what: str) -> str:
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        text = data.decode() if len(data) <= MAX_BYTES else None
    except OSError as exc:
        raise ConfigurationError(f"{path}: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        line = data[: exc.start].count(b"\n") + 1
        raise ConfigurationError(f"{path}:{line}: this is no text in UTF-8") from exc
    if text is None:
        raise ConfigurationError(f"{path} is no {what}: those have at most {MAX_BYTES} bytes")
    return text


def _round_of(figures: Figures) -> float:
    return figures.get("round", -math.inf)


def _figures(line: bytes) -> Figures | None:
    try:
        table = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(table, dict):
        return None
    return {key: value for key, value in table.items() if type(value) in (int, float)}
