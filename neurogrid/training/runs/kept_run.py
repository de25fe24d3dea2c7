"""The run file as a run keeps it, with the hash of which its journal begins: its text, and what another differs in.

The text stays what it was when the run began. A version of NeuroGrid that has keys of which it says nothing goes on as
it did before there were any; one that says otherwise is told by its keys.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

from neurogrid.errors import ConfigurationError
from neurogrid.training.runs.run_directory import RunDirectory
from neurogrid.training.runs.run_file import RunFile, parse_kept_run_file
from neurogrid.training.runs.run_file.parsing import MAX_BYTES
from neurogrid.training.runs.run_file.run_file import SECTIONS
from neurogrid.training.runs.run_file.sections import EMBEDDED
from neurogrid.training.runs.run_file.values import written

__all__ = ["check_kept", "differing_keys", "kept_text", "text_of_before"]

# Of the keys that differ, as many as a line has room for.
_MAX_TOLD = 4
# Places in sections, beside the mixture's.
_PLACES = frozenset({"[model] config", "[data] path", "[data] tokenizer", "[checkpoints] dir"})


def kept_text(run: RunFile, directory: RunDirectory) -> str:
    """A run file as TOML, with every default, for the directory of its run: relative places begin there."""
    here, folder = os.path.realpath(directory.path), os.path.realpath(run.folder)

    def moved(told: str) -> str:
        # What begins with a home stays so: members get the text, and whose home it is is not their business.
        is_absolute = os.path.isabs(os.path.expanduser(told))
        return told if is_absolute else os.path.relpath(os.path.join(folder, told), here)

    config = run.model.config
    if config != EMBEDDED and os.path.lexists(run.place(config)):
        config = moved(config)
    return run.with_places(moved, config=config, folder=str(directory.path)).text()


def check_kept(run: RunFile, directory: RunDirectory) -> None:
    """Refuse a run file that nobody could read again as its run keeps it, though it can be read as it is.

    Raises:
        ConfigurationError: it is too long.
    """
    num_bytes = len(kept_text(run, directory).encode())
    if num_bytes > MAX_BYTES:
        raise ConfigurationError(
            f"the run file has {num_bytes} bytes with every default, and with places as {directory.path} sees them: "
            f"members and --resume read at most {MAX_BYTES}. Give shorter places, or fewer in [data] mixture"
        )


def text_of_before(run: RunFile, directory: RunDirectory, digest: bytes) -> str:
    """The text that a run began with, if another run file says the same.

    Args:
        run: the one that it is to go on with.
        digest: SHA-256 of the text, by the journal.

    Raises:
        ConfigurationError: it says otherwise, and in which keys; or the text is lost.
    """
    path = directory.run_file
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as exc:
        raise ConfigurationError(f"{path}: {exc.strerror or exc}") from exc
    if hashlib.sha256(data).digest() == digest:
        text = data.decode()
        kept = directory.placed(parse_kept_run_file(text, name=str(path)))
        if found := list(differing_keys(kept, run)):
            told = ", ".join(found[:_MAX_TOLD])
            more = f", and {len(found) - _MAX_TOLD} more" if len(found) > _MAX_TOLD else ""
            raise ConfigurationError(
                f"the run was begun with another run file, {path}: {told}{more}. Go on with that one"
            )
        return text
    # Versions of before kept places as they were given.
    for text in (kept_text(run, directory), run.text()):
        if hashlib.sha256(text.encode()).digest() == digest:
            return text
    what = "was altered since" if data else "is not there"
    raise ConfigurationError(
        f"the run was begun with another run file, and {path}, which had it, {what}: put it back"
    )


def differing_keys(kept: RunFile, run: RunFile) -> Iterator[str]:
    """Yield the keys in which two run files differ, in words, with the value of `kept` and that of `run`.

    The names of presets are not looked at: what they stand for is.
    """
    for title in ("", *SECTIONS):
        old, new = (getattr(each, title) if title else each for each in (kept, run))
        for key in old.keys:
            was, now = getattr(old, key), getattr(new, key)
            called = old.called(key)
            if was == now or key == "preset":
                continue
            if called in _PLACES and _is_same_place(kept, was, run, now):
                continue
            if called == "[data] mixture" and len(was) == len(now):
                pairs = list(zip(was, now, strict=True))
                if all(
                    a.weight == b.weight and _is_same_place(kept, a.path, run, b.path)
                    for a, b in pairs
                ):
                    continue
            yield f"{called} was {_told(was)} and is {_told(now)}"


def _is_same_place(kept: RunFile, was: str, run: RunFile, now: str) -> bool:
    if not was or not now:
        return was == now
    # Before run files had a folder, places began where the command was started.
    before = {os.path.realpath(kept.place(was)), os.path.realpath(was)}
    return was == now or os.path.realpath(run.place(now)) in before


def _told(value: object) -> str:
    return "not given" if value is None else written(value)
