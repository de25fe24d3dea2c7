"""The payloads by which a deputy copies a run's journal, and by which it comes to lead.

Source: protocol_spec/training/terms.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from neurogrid.p2p.wire.blob_id import BLOB_ID_BYTES
from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.p2p.wire.faults import violation
from neurogrid.p2p.wire.forms import Map, array, binary, fixed, optional, text, uint
from neurogrid.p2p.wire.limits import MAX_PEER_ID_CHARS
from neurogrid.p2p.wire.maps import MAX_U64
from neurogrid.training.wire.runs.forms import (
    ADDRESSES,
    BLOB,
    COUNT,
    MAX_CONFIG_BYTES,
    MAX_RUN_FILE_BYTES,
    RUN,
    RUN_ID_BYTES,
    long_text,
)
from neurogrid.training.wire.runs.types import DEFAULT_RUN_LIMITS

__all__ = [
    "MAX_COPIED_FILES",
    "MAX_LINES_BYTES",
    "Appoint",
    "Appointed",
    "Claim",
    "Claimed",
    "Copied",
    "Follow",
    "Followed",
    "Lines",
]

MAX_LINES_BYTES: Final = 512 * 1024
"""Bytes of a journal in one message: a line may come in several."""

MAX_COPIED_FILES: Final = 1024
"""Files beside the journal that a deputy is told of: those of a tokenizer and of a checkpoint."""

MAX_FILE_CHARS: Final = 256
SIGNATURE_BYTES: Final = 64
_DIGEST_BYTES: Final = 32

_DIGEST: Final = fixed(_DIGEST_BYTES)
_PEER: Final = text(MAX_PEER_ID_CHARS, smallest=1)
_NOBODY: Final = optional(text(MAX_PEER_ID_CHARS))


@dataclass(frozen=True, slots=True)
class Follow(ControlPayload):
    """A program asks a leader to be its deputy.

    Attributes:
        run: whose journal it has, 16 bytes; empty for none.
        line: the last line of its copy; 0 for none.
        digest: SHA-256 of that line, 32 bytes; zeros for none.
        num_bytes: of its copy.
        addresses: multiaddrs at which members can dial it.
    """

    run: bytes = b""
    line: int = 0
    digest: bytes = bytes(_DIGEST_BYTES)
    num_bytes: int = 0
    addresses: tuple[str, ...] = ()

    _map = Map(
        "Follow",
        {
            "run": optional(binary(RUN_ID_BYTES)),
            "line": COUNT,
            "digest": _DIGEST,
            "num_bytes": COUNT,
            "addresses": ADDRESSES,
        },
    )

    def _check(self) -> None:
        if len(self.run) not in (0, RUN_ID_BYTES):
            raise violation("Follow has half the id of a run")


@dataclass(frozen=True, slots=True)
class Followed(ControlPayload):
    """The leader takes it: what it needs besides the journal to lead.

    Attributes:
        run: the id of the run.
        term: of the leader.
        run_file, config, manifest: as in `Start`.
        num_bytes: of the journal, as it stands.
    """

    run: bytes
    run_file: str
    config: str
    manifest: bytes
    term: int = 0
    num_bytes: int = 0

    _map = Map(
        "Followed",
        {
            "run": RUN,
            "run_file": long_text(MAX_RUN_FILE_BYTES, smallest=1),
            "config": long_text(MAX_CONFIG_BYTES, smallest=1),
            "manifest": BLOB,
            "term": COUNT,
            "num_bytes": COUNT,
        },
        max_bytes=DEFAULT_RUN_LIMITS.start,
    )


@dataclass(frozen=True, slots=True)
class Lines(ControlPayload):
    """Bytes that were written into the journal, and a sign that the leader is there.

    Attributes:
        run: the id of the run.
        term: of the leader.
        offset: bytes of the journal before `data`.
        data: bytes of the journal; none where there is nothing new.
        files, blobs: files beside the journal that the deputy is to have, and the blob that each is; none where that
            is as it was told last.
    """

    run: bytes
    offset: int
    term: int = 0
    data: bytes = b""
    files: tuple[str, ...] = ()
    blobs: tuple[bytes, ...] = ()

    _map = Map(
        "Lines",
        {
            "run": RUN,
            "offset": uint(MAX_U64),
            "term": COUNT,
            "data": optional(binary(MAX_LINES_BYTES)),
            "files": optional(array(text(MAX_FILE_CHARS, smallest=1), MAX_COPIED_FILES)),
            "blobs": optional(array(fixed(BLOB_ID_BYTES), MAX_COPIED_FILES)),
        },
    )

    def _check(self) -> None:
        if len(self.files) != len(self.blobs) or len(set(self.files)) != len(self.files):
            raise violation("Lines has files without their blobs, or a file twice")


@dataclass(frozen=True, slots=True)
class Copied(ControlPayload):
    """Answer of a deputy to `Lines`: how far it has copied; and where it leads by now, its term and peer id.

    Attributes:
        run: the id of the run.
        line: the last line that is whole on its disk.
        num_bytes: of the journal that have come.
        term, leader: the greatest term that it knows, and who leads in it; empty where it only copies.
    """

    run: bytes
    line: int = 0
    num_bytes: int = 0
    term: int = 0
    leader: str = ""

    _map = Map(
        "Copied",
        {"run": RUN, "line": COUNT, "num_bytes": COUNT, "term": COUNT, "leader": _NOBODY},
    )


@dataclass(frozen=True, slots=True)
class Appoint(ControlPayload):
    """A leader tells a member who its deputy is.

    Attributes:
        run: the id of the run.
        number: u64, from 1: greater than before, where the deputy is another.
        term: of the leader.
        deputy: peer id; empty for nobody.
        addresses: multiaddrs of the deputy.
    """

    run: bytes
    number: int
    term: int = 0
    deputy: str = ""
    addresses: tuple[str, ...] = ()

    _map = Map(
        "Appoint",
        {
            "run": RUN,
            "number": uint(MAX_U64, smallest=1),
            "term": COUNT,
            "deputy": _NOBODY,
            "addresses": ADDRESSES,
        },
    )


@dataclass(frozen=True, slots=True)
class Appointed(ControlPayload):
    """Answer of a member to `Appoint`: the leader that it obeys, and the newest deputy that it was told of.

    Attributes:
        run: the id of the run.
        leader: peer id of whom it obeys.
        incarnation: its own in the group; 0 where it is no member yet.
        term: since which it obeys.
        number, deputy: the newest that the leader has told it.
    """

    run: bytes
    leader: str
    incarnation: int = 0
    term: int = 0
    number: int = 0
    deputy: str = ""

    _map = Map(
        "Appointed",
        {
            "run": RUN,
            "leader": _PEER,
            "incarnation": COUNT,
            "term": COUNT,
            "number": COUNT,
            "deputy": _NOBODY,
        },
    )


@dataclass(frozen=True, slots=True)
class Claim(ControlPayload):
    """A deputy asks a member for a term.

    Attributes:
        run: the id of the run.
        term: u64, from 1: greater than any that it knows of.
        line, digest: where its copy of the journal ends, as in `Follow`.
    """

    run: bytes
    term: int
    line: int
    digest: bytes

    _map = Map(
        "Claim",
        {
            "run": RUN,
            "term": uint(MAX_U64, smallest=1),
            "line": uint(MAX_U64, smallest=1),
            "digest": _DIGEST,
        },
    )


@dataclass(frozen=True, slots=True)
class Claimed(ControlPayload):
    """Answer of a member to `Claim`: the leader that it obeys, and what it has promised.

    Attributes:
        run, leader, incarnation, term, number, deputy: as in `Appointed`.
        line, digest: of the Claim by which it promised the term; 0 and zeros where nobody claimed it.
        signature: of the promise, 64 bytes; empty where there is none.
    """

    run: bytes
    leader: str
    incarnation: int = 0
    term: int = 0
    number: int = 0
    deputy: str = ""
    line: int = 0
    digest: bytes = bytes(_DIGEST_BYTES)
    signature: bytes = b""

    _map = Map(
        "Claimed",
        {
            "run": RUN,
            "leader": _PEER,
            "incarnation": COUNT,
            "term": COUNT,
            "number": COUNT,
            "deputy": _NOBODY,
            "line": COUNT,
            "digest": _DIGEST,
            "signature": optional(binary(SIGNATURE_BYTES)),
        },
    )

    def _check(self) -> None:
        if len(self.signature) not in (0, SIGNATURE_BYTES) or bool(self.signature) != bool(
            self.line
        ):
            raise violation("Claimed has a promise without its signature, or half of one")
