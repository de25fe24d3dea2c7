"""The journal of a run: what happened, one line an entry, each with the hash of the one before and signed.

Signed by the run's leader; where a deputy has taken over, by that from there on.

    with Journal.open(directory / "journal", identity) as journal:
        journal.append(RoundEntry(...))         # on the disk when it returns
    entries = read_journal(directory / "journal")

A crash may leave part of a last line, whose `append` never returned: that is cut off. All else that is not as it was
written is refused, by its line. What no journal shows is that whole lines are missing at its end.

Source: protocol_spec/training/runs.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from neurogrid.errors import ConfigurationError, LocalProtocolError
from neurogrid.p2p.hosts.identity import Identity, signing_key
from neurogrid.p2p.trust.directory_lock import held_alone
from neurogrid.training.runs.entries import Entry, LedEntry, RunEntry, entry_of
from neurogrid.training.runs.terms import Place, promise_bytes

__all__ = [
    "Journal",
    "JournalCopy",
    "JournalError",
    "Recorded",
    "check_unled",
    "read_journal",
]

_DOMAIN: Final = b"neurogrid run journal 1\0"
_SIGNATURE: Final = b',"signature":"'
# What stands behind the body of a line: a signature of 64 bytes in hex.
_SIGNATURE_CHARS: Final = len(_SIGNATURE) + 128 + 2
_NOTHING: Final = "0" * 64
# A round of 1,024 members with thousands of ranges each; what is longer is no line of ours.
_MAX_LINE_BYTES: Final = 256 * 1024 * 1024
# The year 10,000: no date can be told of what is later.
_END_OF_TIME: Final = 253_402_300_800


class JournalError(ConfigurationError):
    """A journal is not as it was written, or is somebody else's; the text names the line.

    Attributes:
        line: the first that is wrong, from 1; None where the journal is another leader's.
    """

    def __init__(self, text: str, line: int | None = None) -> None:
        super().__init__(text)
        self.line = line


@dataclass(frozen=True, slots=True)
class Recorded:
    """An entry of a journal.

    Attributes:
        line: its number in the file, from 1.
        time: when it was written, in seconds since 1970.
        entry: what it says.
    """

    line: int
    time: float
    entry: Entry


@dataclass(slots=True)
class _Found:
    """Contents of a journal's file: its lines, the ids of the run and of the last leader, the hash of the last line,
    and the bytes of all lines."""

    recorded: list[Recorded]
    run: bytes = b""
    leader: str = ""
    last: str = _NOTHING
    num_bytes: int = 0


class Journal:
    """A journal that is written to; `open` makes one."""

    def __init__(
        self,
        path: Path,
        identity: Identity,
        descriptor: int,
        found: _Found,
        stack: ExitStack,
        clock: Callable[[], float],
    ) -> None:
        self.path = path
        self.entries: list[Recorded] = found.recorded
        """All that is in it, in order."""
        self._identity = identity
        self._descriptor = descriptor
        self._last = found.last
        self._num_bytes = found.num_bytes
        self._stack = stack
        self._clock = clock
        self._is_open = True
        self._failure = ""  # why it could not be written
        self._place = Place(len(found.recorded), bytes.fromhex(found.last))
        self.on_append: Callable[[Recorded], None] = lambda recorded: None
        """Callback for each entry that is appended from now on."""

    @classmethod
    def open(
        cls, path: Path, identity: Identity, *, clock: Callable[[], float] = time.time
    ) -> Journal:
        """Open a journal, made if it is not there, and let nobody else write to it until it is closed.

        Args:
            identity: the leader's, which signs.

        Raises:
            DirectoryInUseError: another process writes to it; says which.
            JournalError: it was altered, or is another leader's.
            ConfigurationError: the file cannot be used.
        """
        return cls._open(path, identity, clock, may_take_over=False)

    @classmethod
    def take_over(
        cls,
        path: Path,
        identity: Identity,
        entry: LedEntry,
        *,
        clock: Callable[[], float] = time.time,
    ) -> Journal:
        """Open the copy of a journal, and lead its run from here on: `entry` is its next line.

        Args:
            identity: of the deputy, which signs from here on.

        Raises: as `open` and `append`.
        """
        journal = cls._open(path, identity, clock, may_take_over=True)
        try:
            journal.append(entry)
        except BaseException:
            journal.close()
            raise
        return journal

    @classmethod
    def _open(
        cls, path: Path, identity: Identity, clock: Callable[[], float], *, may_take_over: bool
    ) -> Journal:
        with ExitStack() as stack:
            stack.enter_context(_held(path))
            if _partial(path).exists():
                raise JournalError(
                    f"{path} is a copy of another leader's journal that is not whole: nobody leads by it. Go on with "
                    "it as a deputy (`neurogrid train deputy`)"
                )
            try:
                is_new = not path.exists()
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                stack.callback(os.close, descriptor)
                with os.fdopen(os.dup(descriptor), "rb") as file:
                    found = _read(path, file)
                if found.leader not in ("", identity.peer_id) and not may_take_over:
                    raise JournalError(
                        f"{path} is the journal of a run that {found.leader} leads; this is {identity.peer_id}. "
                        "Lead it with the identity that it was begun with, which its directory `cluster` had, or begin "
                        "another run (--dir)"
                    )
                os.ftruncate(descriptor, found.num_bytes)
                os.fsync(descriptor)
                if is_new:
                    _sync_directory(path.parent)
            except OSError as exc:
                raise ConfigurationError(f"cannot use the journal {path}: {exc.strerror}") from exc
            return cls(path, identity, descriptor, found, stack.pop_all(), clock)

    def append(self, entry: Entry) -> Recorded:
        """Write an entry; it is on the disk when this returns. Blocks for as long as the disk takes.

        Raises:
            LocalProtocolError: the journal is closed, or it does not begin with the `RunEntry` of this leader, or that
                comes a second time.
            ConfigurationError: it cannot be written. Nothing of it is left, or what is cut off when the journal is
                opened again, and it is closed; whoever writes to it all the same hears the same again.
        """
        if self._failure:
            raise ConfigurationError(self._failure)
        if not self._is_open:
            raise LocalProtocolError(f"the journal {self.path} is closed")
        if isinstance(entry, RunEntry) == bool(self.entries):
            raise LocalProtocolError("a journal begins with its run, and has no other")
        if isinstance(entry, RunEntry | LedEntry) and entry.leader != self._identity.peer_id:
            raise LocalProtocolError(
                f"the journal is written by its leader, not for {entry.leader}"
            )
        recorded = Recorded(len(self.entries) + 1, round(self._clock(), 3), entry)
        body = _body(recorded, self._last)
        signature = self._identity.key_pair.private_key.sign(_DOMAIN + body)
        line = body[:-1] + _SIGNATURE + signature.hex().encode() + b'"}'
        try:
            _write(self._descriptor, line + b"\n", self._num_bytes)
        except OSError as exc:
            self._failure = (
                f"cannot write the journal {self.path}: {exc.strerror}. The run stands where it stood: make room, "
                "and resume it"
            )
            with suppress(OSError):  # as on a disk that takes nothing any more
                os.ftruncate(self._descriptor, self._num_bytes)
            self.close()
            raise ConfigurationError(self._failure) from exc
        self._num_bytes += len(line) + 1
        self._last = hashlib.sha256(line).hexdigest()
        self._place = Place(recorded.line, bytes.fromhex(self._last))
        self.entries.append(recorded)
        self.on_append(recorded)
        return recorded

    @property
    def place(self) -> Place:
        """Its last line."""
        return self._place

    @property
    def num_bytes(self) -> int:
        """Bytes of all its lines."""
        return self._num_bytes

    def close(self) -> None:
        """Let others write to it. Closing twice is nothing."""
        self._is_open = False
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_unled(path: Path) -> None:
    """See that nobody leads the run of a journal at the moment.

    Raises:
        DirectoryInUseError: somebody does; says which process.
        ConfigurationError: the file cannot be used.
    """
    with _held(path):
        pass


def _held(path: Path) -> AbstractContextManager[None]:
    return held_alone(
        path.with_name(f"{path.name}.lock"),
        lambda holder: (
            f"another leader writes to {path}: {holder}. Two with one journal would each undo what the other decides: "
            "end that one first, or begin a run in another directory (--dir)"
        ),
    )


def read_journal(path: Path) -> tuple[Recorded, ...]:
    """The entries of a journal, also while its leader writes to it.

    Raises:
        JournalError: it was altered since its leader signed it, or is no journal.
        ConfigurationError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            found = _read(path, file)
    except OSError as exc:
        raise ConfigurationError(f"cannot read the journal {path}: {exc.strerror}") from exc
    return tuple(found.recorded)


def _body(recorded: Recorded, before: str) -> bytes:
    said = {
        "line": recorded.line,
        "before": before,
        "time": recorded.time,
        "entry": recorded.entry.json(),
    }
    return json.dumps(said, separators=(",", ":")).encode()


def _time(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("time is no number")
    if not 0 <= value < _END_OF_TIME:  # nor is NaN
        raise ValueError("time is no number of seconds since 1970")
    return float(value)


def _write(descriptor: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written
    os.fsync(descriptor)


def _partial(path: Path) -> Path:
    """The file that stands beside a copy as long as it is not whole."""
    return path.with_name(f"{path.name}.partial")


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, file: BinaryIO) -> _Found:
    """Read and verify all whole lines.

    Each has the hash of the one before, so the signature of the last one is over all. Only where something is wrong the
    others are looked at, to name the line.
    """
    found = _Found([])
    last = b""
    for line in _lines(path, file):
        number = len(found.recorded) + 1
        try:
            said = json.loads(line)
            entry = entry_of(said["entry"])
            recorded = Recorded(number, _time(said["time"]), entry)
            if isinstance(entry, RunEntry) != (number == 1):
                raise ValueError("a journal begins with its run, and has no other")
            follows = (said["line"], said["before"]) == (number, found.last)
        except (ValueError, LookupError, TypeError, RecursionError) as exc:
            _refuse_unsigned(path, file)
            raise JournalError(
                f"{path}, line {number}: no entry of a journal: {exc}", number
            ) from exc
        if not follows:
            _refuse_unsigned(path, file)
            raise JournalError(
                f"{path}, line {number} does not follow on the line before it: lines were taken out or added",
                number,
            )
        if isinstance(entry, RunEntry):
            found.run, found.leader = entry.run, entry.leader
        elif isinstance(entry, LedEntry):
            # From here on another one signs: what was signed before ends here.
            if not _is_signed(last, signing_key(found.leader)):
                _refuse_unsigned(path, file)
            _check_promises(path, number, entry, found)
            found.leader = entry.leader
        found.recorded.append(recorded)
        found.num_bytes += len(line) + 1
        found.last = hashlib.sha256(line).hexdigest()
        last = line
    if last and not _is_signed(last, signing_key(found.leader)):
        _refuse_unsigned(path, file)
    return found


def _next_key(line: bytes, key: Ed25519PublicKey) -> Ed25519PublicKey:
    """The key that signs a line: a new leader's where the line says that it takes over, else `key`."""
    try:
        entry = entry_of(json.loads(line)["entry"])
        return signing_key(entry.leader) if isinstance(entry, LedEntry) else key
    except (ValueError, LookupError, TypeError, RecursionError, ConfigurationError):
        return key


def _check_promises(path: Path, number: int, entry: LedEntry, found: _Found) -> None:
    """See that members have signed what a line says that they promised; whether they are most, the audit says.

    Raises:
        JournalError: one has not.
    """
    place = Place(number - 1, bytes.fromhex(found.last))
    for peer, incarnation, signature in entry.promises:
        said = promise_bytes(found.run, entry.term, entry.leader, incarnation, place)
        try:
            signing_key(peer).verify(signature, said)
        except (InvalidSignature, ConfigurationError) as exc:
            raise JournalError(
                f"{path}, line {number} has a promise that {peer} did not sign: it was altered",
                number,
            ) from exc


def _lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Whole lines, without their ends."""
    file.seek(0)
    number = 0
    while line := file.readline(_MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > _MAX_LINE_BYTES:
            raise JournalError(
                f"{path}, line {number} is longer than {_MAX_LINE_BYTES} bytes", number
            )
        if not line.endswith(b"\n"):
            return
        yield line[:-1]


def _refuse_unsigned(path: Path, file: BinaryIO) -> None:
    """Name the first line that its leader has not signed.

    Raises:
        JournalError: there is one.
    """
    key: Ed25519PublicKey | None = None
    for number, line in enumerate(_lines(path, file), 1):
        if key is None:
            try:
                key = signing_key(json.loads(line)["entry"]["leader"])
            except (
                ValueError,
                LookupError,
                TypeError,
                AttributeError,
                RecursionError,
                ConfigurationError,
            ):
                raise JournalError(
                    f"{path}, line 1 does not say whose journal it is: it was altered, or is none",
                    1,
                ) from None
        key = _next_key(line, key)
        if not _is_signed(line, key):
            raise JournalError(
                f"{path}, line {number} is not as its leader signed it: it was altered", number
            )


def _is_signed(line: bytes, key: Ed25519PublicKey) -> bool:
    body, rest = line[:-_SIGNATURE_CHARS] + b"}", line[-_SIGNATURE_CHARS:]
    if not (rest.startswith(_SIGNATURE) and rest.endswith(b'"}')):
        return False
    try:
        told = rest[len(_SIGNATURE) : -2].decode()
        signature = bytes.fromhex(told)
        key.verify(signature, _DOMAIN + body)
    except (InvalidSignature, ValueError):
        return False
    # Digits in capitals stand for the same bytes, and are not what was written.
    return told == signature.hex()


class JournalCopy:
    """A copy of a journal, which another program writes: its bytes come in pieces, and whole lines are kept.

    While it is not whole a file `NAME.partial` stands beside it: what its lines say of now is history then, as lines
    are still to come that were written before it was begun.

    Args:
        path: the file; made if it is not there.
        on_entry: is told of each entry that is in it, once the line is on the disk; first of those that are there.

    Raises:
        DirectoryInUseError: another process writes to it; says which.
        JournalError: it is no journal, or was altered.
        ConfigurationError: the file cannot be used.

    Attributes:
        is_whole: it has had all lines that there were when it was begun, or gone on with after a restart.
    """

    def __init__(self, path: Path, on_entry: Callable[[Recorded], None]) -> None:
        self.path, self._on_entry = path, on_entry
        self._partial = _partial(path)
        self._num_written: int | None = None
        with ExitStack() as stack:
            stack.enter_context(_held(path))
            try:
                is_new = not path.exists()
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                stack.callback(os.close, self._descriptor)
                with os.fdopen(os.dup(self._descriptor), "rb") as file:
                    self._found = _read(path, file)
                os.ftruncate(self._descriptor, self._found.num_bytes)
                os.fsync(self._descriptor)
                if not self._found.num_bytes:
                    self._partial.touch()
                if is_new or not self._found.num_bytes:
                    _sync_directory(path.parent)
            except OSError as exc:
                raise ConfigurationError(f"cannot use the journal {path}: {exc.strerror}") from exc
            self._stack = stack.pop_all()
        self.is_whole = not self._partial.exists()
        self._rest = b""
        for recorded in self._found.recorded:
            on_entry(recorded)

    @property
    def place(self) -> Place:
        """Its last line."""
        return Place(len(self._found.recorded), bytes.fromhex(self._found.last))

    @property
    def num_bytes(self) -> int:
        """Bytes of whole lines, which are on the disk."""
        return self._found.num_bytes

    @property
    def num_received(self) -> int:
        """Bytes of whole lines, and of what has come of one that is not whole yet."""
        return self._found.num_bytes + len(self._rest)

    @property
    def leader(self) -> str:
        """The peer id that signed the last line; empty where there is none."""
        return self._found.leader

    @property
    def run(self) -> bytes:
        """The id of the run; empty where no line says it yet."""
        return self._found.run

    def follow(self, num_bytes: int) -> None:
        """Go on with a journal that has so many bytes by now: with all of them the copy is whole.

        Raises:
            ConfigurationError: that cannot be noted.
        """
        self._num_written = num_bytes
        self._note_whole()

    def _note_whole(self) -> None:
        if self.is_whole or self._num_written is None or self.num_bytes < self._num_written:
            return
        try:
            self._partial.unlink(missing_ok=True)
            _sync_directory(self.path.parent)
        except OSError as exc:
            raise ConfigurationError(
                f"{self._partial} cannot be removed: {exc.strerror}. It says that the journal is not whole, which it is"
            ) from exc
        self.is_whole = True

    def forget_rest(self) -> None:
        """Drop the bytes of a line that is not whole: they are to come again."""
        self._rest = b""

    def take(self, data: bytes) -> None:
        """Go on by the bytes that follow. Blocks for as long as the disk takes.

        Raises:
            JournalError: they are not what the leader has signed. Nothing of that line is kept.
            ConfigurationError: they cannot be written.
        """
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = b""
        if len(rest) > _MAX_LINE_BYTES:
            raise JournalError(f"{self.path}: a line is longer than {_MAX_LINE_BYTES} bytes")
        for line in lines:
            self._take(line)
        self._rest = rest
        self._note_whole()

    def _take(self, line: bytes) -> None:
        found = self._found
        number = len(found.recorded) + 1
        try:
            said = json.loads(line)
            entry = entry_of(said["entry"])
            recorded = Recorded(number, _time(said["time"]), entry)
            follows = (said["line"], said["before"]) == (number, found.last)
            if isinstance(entry, RunEntry) != (number == 1):
                raise ValueError("a journal begins with its run, and has no other")
        except (ValueError, LookupError, TypeError, RecursionError) as exc:
            raise JournalError(
                f"{self.path}, line {number}: no entry of a journal: {exc}", number
            ) from exc
        leader = entry.leader if isinstance(entry, RunEntry | LedEntry) else found.leader
        if not follows or not _is_signed(line, signing_key(leader)):
            raise JournalError(
                f"{self.path}, line {number} is not as its leader signed it, or does not follow on the line before",
                number,
            )
        if isinstance(entry, LedEntry):
            _check_promises(self.path, number, entry, found)
        elif isinstance(entry, RunEntry):
            found.run = entry.run
        try:
            _write(self._descriptor, line + b"\n", found.num_bytes)
        except OSError as exc:
            raise ConfigurationError(
                f"cannot write the journal {self.path}: {exc.strerror}. Make room, and begin again"
            ) from exc
        found.recorded.append(recorded)
        found.leader, found.last = leader, hashlib.sha256(line).hexdigest()
        found.num_bytes += len(line) + 1
        self._on_entry(recorded)

    def close(self) -> None:
        """Let others write to it. Closing twice is nothing."""
        self._stack.close()
