"""The payloads by which a leader trains a model through a chain of stages, and the tensors that stages send each other.

Who is a stage, and what the leader wants of a step, are maps. A tensor has an envelope, and in its header the
micro-batch (LayerID), the step (SeqID) and the chain (RequestID) that it belongs to. When each is sent, and what is
done with it, is not known here.

Source: protocol_spec/training/stages.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, NamedTuple, Self

from neurogrid.errors import LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.wire import ErrorCode, TensorEnvelope, TensorMessage
from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.p2p.wire.faults import violation
from neurogrid.p2p.wire.forms import (
    BOOLEAN,
    Map,
    array,
    binary,
    fixed,
    line,
    nullable,
    one_of,
    optional,
    text,
    uint,
)
from neurogrid.p2p.wire.limits import (
    MAX_ADDRESS_CHARS,
    MAX_ERROR_CHARS,
    MAX_LAYERS,
    MAX_PEER_ID_CHARS,
)
from neurogrid.p2p.wire.maps import MAX_U32, MAX_U64
from neurogrid.p2p.wire.messages import Data
from neurogrid.training.wire.forms import number as real
from neurogrid.training.wire.group import DIGEST_BYTES
from neurogrid.training.wire.runs.forms import BLOB, COUNT, RUN, long_text, visible
from neurogrid.training.wire.runs.types import RunMessage

__all__ = [
    "MAX_CHAIN_MEMBERS",
    "MAX_CHAIN_STAGES",
    "MAX_MICRO_BATCHES",
    "MAX_STATE_PIECES",
    "PIECE_BLOBS",
    "PIECE_NAMES",
    "STAGE_STATES",
    "Applied",
    "Apply",
    "StageOrder",
    "StageReport",
    "StageTensor",
    "Step",
    "StepDone",
    "check_once",
    "check_pieces",
    "session_of",
]

STAGE_STATES: Final = frozenset({"loading", "ready", "working", "failed"})
"""States of a member that is a stage."""

MAX_CHAIN_STAGES: Final = 64
"""Stages of a chain: past a few, more replicas are quicker."""

MAX_CHAIN_MEMBERS: Final = 256
"""Members of a chain, over all stages."""

MAX_MICRO_BATCHES: Final = 1024
"""Micro-batches of a step: sixteen for each of 64 stages, of which the ends then wait for 6 % of it."""

MAX_STATE_PIECES: Final = 4096
"""Pieces of state in one message: four of each of a thousand layers."""

_MICRO_BATCHES: Final = optional(uint(MAX_MICRO_BATCHES))
_MAX_PIECE_CHARS: Final = 64
# Of a checkpoint whose matrices have two hundred forms, layer by layer.
_MAX_RECORD_BYTES: Final = 256 * 1024
_MAX_STEP_SECONDS: Final = 86_400.0

# Squares of large numbers are larger: whatever is finite may be sent.
_LARGEST: Final = sys.float_info.max
# As run files have them.
_MAX_RATE: Final = 1000.0
_MAX_CLIP: Final = 1e9


_CHAIN: Final = uint(MAX_U64, smallest=1)
_STEP: Final = uint(MAX_U64)
_PEER: Final = text(MAX_PEER_ID_CHARS, smallest=1)
_PEERS: Final = array(_PEER, MAX_CHAIN_MEMBERS)
# Which member of a stage: a byte.
_WIDTH: Final = uint(MAX_CHAIN_MEMBERS, smallest=1)
_PROVIDERS: Final = optional(array(_PEER, MAX_CHAIN_STAGES))
_ROUTES: Final = optional(binary(MAX_MICRO_BATCHES * MAX_CHAIN_STAGES))
_DIGEST: Final = optional(fixed(DIGEST_BYTES))
PIECE_NAMES: Final = optional(array(visible(_MAX_PIECE_CHARS), MAX_STATE_PIECES))
"""Names of pieces of state, each once."""

PIECE_BLOBS: Final = optional(array(BLOB, MAX_STATE_PIECES))
"""The blob that each of them is."""


def check_pieces(what: str, names: tuple[str, ...], blobs: tuple[bytes, ...]) -> None:
    """Raises RemoteProtocolError where names and blobs are not those of pieces."""
    if len(names) != len(blobs):
        raise violation(f"{what} has {len(names)} names of pieces and {len(blobs)} blobs")
    check_once(what, names)


def check_once(what: str, names: tuple[str, ...]) -> None:
    """Raises RemoteProtocolError where a name is there twice."""
    if len(set(names)) != len(names):
        raise violation(f"{what} names something twice")


@dataclass(frozen=True, slots=True)
class StageOrder(ControlPayload):
    """A leader makes a member a stage of a chain.

    Attributes:
        run: the id of the run.
        chain: u64, from 1: each arrangement of stages has a greater number than the one before.
        step: u64, steps that the state has made.
        index: u32, the member's place in `peers`, from 0.
        peers: peer ids of the members, stage by stage, 1 to `MAX_CHAIN_MEMBERS`.
        addresses: a multiaddr for each, where it can be dialled; empty where nobody can.
        bounds: one more than there are stages, which are `MAX_CHAIN_STAGES` at most; from 0 and rising: stage i has
            layers [bounds[i], bounds[i + 1]).
        names: of the pieces of the state that the stage has, at most `MAX_STATE_PIECES`; none for a new state, or
            where `step` is above 0 for that which the member has.
        blobs: the blob that each piece is, 32 bytes.
        providers: peer ids of those that have the blobs, beside the leader.
        quantization: which matrices of the layers are codes, as `Quantization.record` has it, in JSON; empty for none.
        widths: members of each stage, which add up to those of `peers`; empty where each stage is one.
        is_preparation: the member loads layers and state, and does not yet reach the others, which do not know of it.
    """

    run: bytes
    chain: int
    step: int
    index: int
    peers: tuple[str, ...]
    addresses: tuple[str, ...]
    bounds: tuple[int, ...]
    names: tuple[str, ...] = ()
    blobs: tuple[bytes, ...] = ()
    providers: tuple[str, ...] = ()
    quantization: str = ""
    widths: tuple[int, ...] = ()
    is_preparation: bool = False

    _map = Map(
        "StageOrder",
        {
            "run": RUN,
            "chain": _CHAIN,
            "step": _STEP,
            "index": uint(MAX_U32),
            "peers": _PEERS,
            "addresses": array(text(MAX_ADDRESS_CHARS), MAX_CHAIN_MEMBERS),
            "bounds": array(uint(MAX_LAYERS), MAX_CHAIN_STAGES + 1),
            "names": PIECE_NAMES,
            "blobs": PIECE_BLOBS,
            "providers": _PROVIDERS,
            "quantization": optional(long_text(_MAX_RECORD_BYTES)),
            "widths": optional(array(_WIDTH, MAX_CHAIN_STAGES)),
            "is_preparation": optional(BOOLEAN),
        },
    )

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """The peer ids of each stage."""
        starts = accumulate(self.widths or (1,) * len(self.peers), initial=0)
        return tuple(self.peers[start:stop] for start, stop in pairwise(starts))

    def _check(self) -> None:
        if self.index >= len(self.peers):
            raise violation(f"StageOrder is for member {self.index} of {len(self.peers)}")
        check_once("StageOrder", self.peers)
        check_once("StageOrder", self.providers)
        if len(self.addresses) != len(self.peers):
            raise violation("StageOrder does not have one address for each member")
        if self.widths and sum(self.widths) != len(self.peers):
            raise violation(
                f"widths of StageOrder add up to {sum(self.widths)} of {len(self.peers)}"
            )
        num_stages = len(self.widths or self.peers)
        rises = all(start < stop for start, stop in pairwise(self.bounds))
        if len(self.bounds) != num_stages + 1 or self.bounds[0] != 0 or not rises:
            raise violation("bounds of StageOrder do not give each stage layers, from 0 on")
        check_pieces("StageOrder", self.names, self.blobs)


@dataclass(frozen=True, slots=True)
class StageReport(ControlPayload):
    """Report of a member that is a stage: its state, its step, and the pieces that can be fetched from it.

    Attributes:
        run: the id of the run.
        chain: u64, from 1, of the last `StageOrder`.
        state: one of `STAGE_STATES`.
        step: u64, steps that its state has made.
        reason: why it failed, or what it waits for; one line, for people.
        memory_bytes: u64, the most that it has taken.
        lost: the peer id of the neighbour that cannot be reached; empty for none.
        names, blobs: pieces of the state after `step` that can be fetched from it, as in `StageOrder`.
        holds: whether it can go on from the state after `step` in another chain that has the same layers for it.
        micro_batches: of the step that is under way, those that go through this member; 0 where none is.
        done: of those, that it has computed backward, or in an evaluation forward.
        under_way: of those, that it has computed forward and has yet to compute backward.
    """

    run: bytes
    chain: int
    state: str
    step: int
    reason: str = ""
    memory_bytes: int = 0
    lost: str = ""
    names: tuple[str, ...] = ()
    blobs: tuple[bytes, ...] = ()
    holds: bool = False
    micro_batches: int = 0
    done: int = 0
    under_way: int = 0

    _map = Map(
        "StageReport",
        {
            "run": RUN,
            "chain": _CHAIN,
            "state": one_of(STAGE_STATES),
            "step": _STEP,
            "reason": optional(line(MAX_ERROR_CHARS)),
            "memory_bytes": COUNT,
            "lost": optional(text(MAX_PEER_ID_CHARS)),
            "names": PIECE_NAMES,
            "blobs": PIECE_BLOBS,
            "holds": optional(BOOLEAN),
            "micro_batches": _MICRO_BATCHES,
            "done": _MICRO_BATCHES,
            "under_way": _MICRO_BATCHES,
        },
    )

    def _check(self) -> None:
        if self.state == "failed" and not self.reason:
            raise violation("StageReport has failed without a reason")
        if self.done + self.under_way > self.micro_batches:
            raise violation(
                f"StageReport has {self.done} + {self.under_way} micro-batches of {self.micro_batches}"
            )
        check_pieces("StageReport", self.names, self.blobs)


@dataclass(frozen=True, slots=True)
class Step(ControlPayload):
    """A leader has its chain compute a batch.

    Attributes:
        run: the id of the run.
        chain: u64, from 1.
        step: u64, steps that the state has made before.
        micro_batches: that the batch goes in, 1 to `MAX_MICRO_BATCHES`, numbered from 0.
        labels: u64, from 1: label tokens of the whole batch.
        is_evaluation: only forward; nothing is learned, and nothing is to be applied.
        routes: a byte for each micro-batch and stage, in this order: which member of the stage it goes to, from 0;
            empty where each stage is one.
    """

    run: bytes
    chain: int
    step: int
    micro_batches: int
    labels: int
    is_evaluation: bool = False
    routes: bytes = b""

    _map = Map(
        "Step",
        {
            "run": RUN,
            "chain": _CHAIN,
            "step": _STEP,
            "micro_batches": uint(MAX_MICRO_BATCHES, smallest=1),
            "labels": uint(MAX_U64, smallest=1),
            "is_evaluation": optional(BOOLEAN),
            "routes": _ROUTES,
        },
    )

    def _check(self) -> None:
        if len(self.routes) % self.micro_batches:
            raise violation(
                f"{len(self.routes)} bytes of routes for {self.micro_batches} micro-batches"
            )


@dataclass(frozen=True, slots=True)
class StepDone(ControlPayload):
    """A stage has computed its part of a batch.

    Attributes:
        run: the id of the run.
        chain: u64, from 1.
        step: u64, of the `Step`.
        squared_norm: of the gradients of its parameters; each parameter counts in one stage. 0 where `not_finite` says
            why, and of an evaluation.
        not_finite: what is no finite number; one line, for people; empty for nothing.
        loss: of the last stage the mean over the label tokens of the batch, of an evaluation the sum; None of others,
            and where it is no finite number.
        seconds: that it computed.
        waited: seconds that it waited for others.
        digest: 32 bytes, of the gradients that the members of its stage have in common; empty where it is the only one.
    """

    run: bytes
    chain: int
    step: int
    squared_norm: float
    not_finite: str = ""
    loss: float | None = None
    seconds: float = 0.0
    waited: float = 0.0
    digest: bytes = b""

    _map = Map(
        "StepDone",
        {
            "run": RUN,
            "chain": _CHAIN,
            "step": _STEP,
            "squared_norm": real(0.0, _LARGEST),
            "not_finite": optional(line(MAX_ERROR_CHARS)),
            "loss": nullable(real(-_LARGEST, _LARGEST)),
            "seconds": optional(real(0.0, _MAX_STEP_SECONDS)),
            "waited": optional(real(0.0, _MAX_STEP_SECONDS)),
            "digest": _DIGEST,
        },
    )

    def _check(self) -> None:
        if self.not_finite and self.squared_norm:
            raise violation("StepDone has a norm of gradients that are not finite")


@dataclass(frozen=True, slots=True)
class Apply(ControlPayload):
    """A leader tells its chain what becomes of the gradients.

    Attributes:
        run: the id of the run.
        chain: u64, from 1.
        step: u64, of the `Step`.
        norm: of the gradients of all stages, before clipping; 0 where it is not finite.
        is_applied: the optimiser makes a step; else the gradients are dropped, and the state has made a step all the
            same.
        keeps: the state after it is to be offered.
        rate: the learning rate of this step; None for that of the run file's schedule.
        clip: the norm that gradients are clipped to, 0 for no clipping; None for what the run file says.
    """

    run: bytes
    chain: int
    step: int
    norm: float
    is_applied: bool
    keeps: bool = False
    rate: float | None = None
    clip: float | None = None

    _map = Map(
        "Apply",
        {
            "run": RUN,
            "chain": _CHAIN,
            "step": _STEP,
            "norm": real(0.0, _LARGEST),
            "is_applied": BOOLEAN,
            "keeps": optional(BOOLEAN),
            "rate": nullable(real(0.0, _MAX_RATE)),
            "clip": nullable(real(0.0, _MAX_CLIP)),
        },
    )


@dataclass(frozen=True, slots=True)
class Applied(ControlPayload):
    """A stage has done what `Apply` says.

    Attributes:
        run: the id of the run.
        chain: u64, from 1.
        step: u64, of the `Step`.
        memory_bytes: u64, the most that it has taken.
        names, blobs: pieces of the state after the step, as in `StageOrder`; none where it is not kept.
    """

    run: bytes
    chain: int
    step: int
    memory_bytes: int = 0
    names: tuple[str, ...] = ()
    blobs: tuple[bytes, ...] = ()

    _map = Map(
        "Applied",
        {
            "run": RUN,
            "chain": _CHAIN,
            "step": _STEP,
            "memory_bytes": COUNT,
            "names": PIECE_NAMES,
            "blobs": PIECE_BLOBS,
        },
    )

    def _check(self) -> None:
        check_pieces("Applied", self.names, self.blobs)


class _TensorForm(NamedTuple):
    dtypes: tuple[str, ...]
    num_dims: int


_FORMS: Final = {
    RunMessage.TOKENS: _TensorForm(("I32",), 2),
    RunMessage.LABELS: _TensorForm(("I32",), 2),
    RunMessage.HIDDEN: _TensorForm(("F32", "BF16"), 3),
    RunMessage.GRADIENT: _TensorForm(("F32", "BF16"), 3),
    RunMessage.TIED: _TensorForm(("F32",), 2),
}


class StageTensor(NamedTuple):
    """A tensor of a step, as it goes to a stage.

    Attributes:
        code: TOKENS and LABELS, [samples, tokens]; HIDDEN and GRADIENT, [samples, tokens, hidden size]; TIED, rows of
            the gradient of tied embeddings, [rows, hidden size].
        session: u64, the run: see `session_of`.
        chain: u64, from 1.
        step: u64, of the `Step`.
        number: of the micro-batch, below `MAX_MICRO_BATCHES`; of TIED the first of its rows, u32.
        dtype: I32 of token ids and labels; F32 or BF16 of hidden states and their gradients; F32 of TIED.
        shape: without a 0 in it.
        data: the elements in C order, little-endian.
    """

    code: RunMessage
    session: int
    chain: int
    step: int
    number: int
    dtype: str
    shape: tuple[int, ...]
    data: Data

    def message(self) -> TensorMessage:
        """The message that carries it.

        Raises:
            LocalProtocolError: it is not what its code says, or a number is out of its range.
        """
        try:
            self._check()
        except RemoteProtocolError as error:
            raise LocalProtocolError(str(error)) from error
        return TensorMessage(
            msg_type=self.code,
            layer_id=self.number,
            seq_id=self.step,
            request_id=self.chain,
            envelope=TensorEnvelope(self.session, 0, 0, 1, self.dtype, self.shape, self.data),
        )

    @classmethod
    def of(cls, message: TensorMessage) -> Self:
        """The tensor of a received message, whose envelope the exchange has opened.

        Raises:
            RemoteProtocolError: it belongs to no chain, or to no micro-batch that there can be, or has another dtype
                (PROTOCOL_VIOLATION) or other dimensions than its code says (SHAPE_MISMATCH).
        """
        code, envelope = message.msg_type, message.envelope
        if not isinstance(code, RunMessage) or code not in _FORMS or envelope is None:
            raise LocalProtocolError(f"message {code} is no tensor of a stage")
        tensor = cls(
            code,
            envelope.session_id,
            message.request_id,
            message.seq_id,
            message.layer_id,
            envelope.dtype,
            envelope.shape,
            envelope.data,
        )
        tensor._check()
        return tensor

    def _check(self) -> None:
        what, form = self.code.name.lower(), _FORMS[self.code]
        if not self.chain:
            raise violation(f"a {what} message of no chain")
        if self.code is not RunMessage.TIED and self.number >= MAX_MICRO_BATCHES:
            raise violation(
                f"a {what} message of micro-batch {self.number}; a step has at most {MAX_MICRO_BATCHES}"
            )
        if self.dtype not in form.dtypes:
            raise violation(
                f"a {what} message in {self.dtype}; it must be in {' or '.join(form.dtypes)}"
            )
        if len(self.shape) != form.num_dims or not all(self.shape):
            raise RemoteProtocolError(
                f"a {what} message of shape {list(self.shape)}; "
                f"it must have {form.num_dims} dimensions, none of them 0",
                code=ErrorCode.SHAPE_MISMATCH,
            )


def session_of(run: bytes) -> int:
    """Return the number by which tensors name a run: the first 8 bytes of its id."""
    return int.from_bytes(run[:8], "big")
