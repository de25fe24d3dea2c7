"""The payloads by which a leader finds members and keeps them, and nodes that have data find a leader.

Source: protocol_spec/training/runs.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from neurogrid.p2p.wire.blob_id import BLOB_ID_BYTES
from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.p2p.wire.faults import violation
from neurogrid.p2p.wire.forms import (
    BOOLEAN,
    Map,
    array,
    binary,
    line,
    nullable,
    optional,
    text,
    uint,
)
from neurogrid.p2p.wire.limits import MAX_ERROR_CHARS, MAX_MACHINE_CHARS
from neurogrid.p2p.wire.maps import MAX_U32, MAX_U64
from neurogrid.training.wire.runs.forms import (
    ADDRESSES,
    BLOB,
    COUNT,
    LEASE,
    MAX_CONFIG_BYTES,
    MAX_GPU_CHARS,
    MAX_RUN_FILE_BYTES,
    PRICE,
    RUN,
    UNTIL,
    long_text,
)
from neurogrid.training.wire.runs.types import DEFAULT_RUN_LIMITS

__all__ = [
    "MODEL_KINDS",
    "Ask",
    "Dismiss",
    "Held",
    "Hold",
    "Offer",
    "Renew",
    "Renewed",
    "Start",
    "Started",
]

MODEL_KINDS: Final = frozenset({"causal-lm", "image-classification"})
"""Kinds of models, by what one is trained for."""

MAX_PROGRAMS: Final = 32
MAX_PROGRAM_CHARS: Final = 64


def _pairs(values: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    if len(values) % 2:
        raise violation("versions of Offer has a program without its version")
    return tuple(zip(values[::2], values[1::2], strict=True))


def _flat(pairs: Any) -> list[str]:
    return [word for pair in pairs for word in pair]


@dataclass(frozen=True, slots=True)
class Ask(ControlPayload):
    """A leader asks a worker what it has to give.

    Attributes:
        run: the id of the run, 16 bytes.
        memory: bytes that a member needs at least, of main memory, or of the GPU's if it needs one.
        storage: bytes that it needs at least, for slices.
        cores: that it needs at least.
        gpu: whether it needs one.
        price: the most that is paid, in the unit that those who take part have agreed on; None for whatever is asked.
    """

    run: bytes
    memory: int = 0
    storage: int = 0
    cores: int = 0
    gpu: bool = False
    price: float | None = None

    _map = Map(
        "Ask",
        {
            "run": RUN,
            "memory": COUNT,
            "storage": COUNT,
            "cores": optional(uint(MAX_U32)),
            "gpu": optional(BOOLEAN),
            "price": nullable(PRICE),
        },
    )


@dataclass(frozen=True, slots=True)
class Offer(ControlPayload):
    """Offer of a worker: what it has, kept for the leader that asked until the time is over.

    Attributes:
        lease: u64, from 1: names the lease from here on.
        until: seconds that it is kept for.
        memory, storage, cores: as in `Ask`, what there is.
        gpu: the name of its GPU; empty for none.
        price: that is asked.
        versions: names of programs and libraries that bear on the result, each with its version.
        name: what people call the machine.
    """

    lease: int
    until: float
    memory: int = 0
    storage: int = 0
    cores: int = 0
    gpu: str = ""
    price: float = 0.0
    versions: tuple[tuple[str, str], ...] = ()
    name: str = ""

    _map = Map(
        "Offer",
        {
            "lease": LEASE,
            "until": UNTIL,
            "memory": COUNT,
            "storage": COUNT,
            "cores": optional(uint(MAX_U32)),
            "gpu": optional(line(MAX_GPU_CHARS)),
            "price": optional(PRICE),
            "versions": replace(
                optional(array(line(MAX_PROGRAM_CHARS, smallest=1), 2 * MAX_PROGRAMS)),
                read=_pairs,
                write=_flat,
            ),
            "name": optional(line(MAX_MACHINE_CHARS)),
        },
    )

    def _check(self) -> None:
        programs = [program for program, _ in self.versions]
        if len(set(programs)) != len(programs):
            raise violation("Offer gives a program two versions")
        if not all(word.isprintable() for pair in self.versions for word in pair):
            raise violation("Offer has a version that is not printable")


@dataclass(frozen=True, slots=True)
class Start(ControlPayload):
    """A leader takes an offer: the worker is a member from here on, and gets ready.

    Attributes:
        run: the id of the run.
        lease: of the offer.
        seat: u32, the member's number in the run, of nobody else's; a member that comes back may get it again.
        run_file: the run file as TOML, with all that it may leave out.
        config: the model's config, as JSON.
        kind: one of `MODEL_KINDS`.
        manifest: the blob that is the manifest of the data, 32 bytes.
        num_parameters: that are trained.
        total_steps: u64, inner steps that the schedule counts on; 0 where the run has no end that is known.
        group: multiaddrs of members of the group that averages, with their peer ids.
        state: the blob of the member's own optimiser, as it was saved; empty for none.
    """

    run: bytes
    lease: int
    seat: int
    run_file: str
    config: str
    kind: str
    manifest: bytes
    num_parameters: int
    total_steps: int = 0
    group: tuple[str, ...] = ()
    state: bytes = b""

    _map = Map(
        "Start",
        {
            "run": RUN,
            "lease": LEASE,
            "seat": uint(MAX_U32),
            "run_file": long_text(MAX_RUN_FILE_BYTES, smallest=1),
            "config": long_text(MAX_CONFIG_BYTES, smallest=1),
            "kind": replace(text(32), names=MODEL_KINDS),
            "manifest": BLOB,
            "num_parameters": uint(MAX_U64, smallest=1),
            "total_steps": COUNT,
            "group": ADDRESSES,
            "state": optional(binary(BLOB_ID_BYTES)),
        },
        max_bytes=DEFAULT_RUN_LIMITS.start,
    )

    def _check(self) -> None:
        if len(self.state) not in (0, BLOB_ID_BYTES):
            raise violation("Start has half the id of a state")


@dataclass(frozen=True, slots=True)
class Started(ControlPayload):
    """The worker is a member.

    Attributes:
        until: seconds that its lease lasts, if it is not renewed.
    """

    until: float

    _map = Map("Started", {"until": UNTIL})


@dataclass(frozen=True, slots=True)
class Renew(ControlPayload):
    """A leader needs its member for longer.

    Attributes:
        run: the id of the run.
        lease: the member's.
    """

    run: bytes
    lease: int

    _map = Map("Renew", {"run": RUN, "lease": LEASE})


@dataclass(frozen=True, slots=True)
class Renewed(ControlPayload):
    """The lease goes on.

    Attributes:
        until: seconds from here that it lasts.
    """

    until: float

    _map = Map("Renewed", {"until": UNTIL})


@dataclass(frozen=True, slots=True)
class Dismiss(ControlPayload):
    """A leader needs a member no more: its lease ends, and what it holds for the run goes.

    Attributes:
        run: the id of the run.
        reason: one line, for people; empty for none.
    """

    run: bytes
    reason: str = ""

    _map = Map("Dismiss", {"run": RUN, "reason": optional(line(MAX_ERROR_CHARS))})


@dataclass(frozen=True, slots=True)
class Hold(ControlPayload):
    """A node has data, and tells a leader.

    Attributes:
        manifest: the blob that is the manifest of the data, 32 bytes; the node has it, too.
        num_slices: how many of its slices the node has: all, or the first so many.
        addresses: multiaddrs that it can be dialled at; empty where nobody can.
    """

    manifest: bytes
    num_slices: int
    addresses: tuple[str, ...] = ()

    _map = Map(
        "Hold",
        {"manifest": BLOB, "num_slices": uint(MAX_U32, smallest=1), "addresses": ADDRESSES},
    )


@dataclass(frozen=True, slots=True)
class Held(ControlPayload):
    """The leader's run uses that data.

    Attributes:
        run: the id of the run.
    """

    run: bytes

    _map = Map("Held", {"run": RUN})
