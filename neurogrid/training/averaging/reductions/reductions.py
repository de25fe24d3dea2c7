"""Reductions over an exchange: those under way, chunks that come before their plan, and results that others may fetch.

Decides nothing: who is in a reduction, when it is tried again, and whether a result counts is the matter of `rounds`.

Source: protocol_spec/training/reductions.md.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio
from torch import Tensor

from neurogrid.errors import LocalProtocolError, NeuroGridError, RequestRefusedError
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.wire import Data, ErrorCode, TensorMessage
from neurogrid.training.averaging.aggregators import parse_aggregator
from neurogrid.training.averaging.codecs import parse_codec
from neurogrid.training.averaging.plan import ReductionPlan
from neurogrid.training.averaging.reductions.fetching import Fetching
from neurogrid.training.averaging.reductions.reduction import Reduction, ended
from neurogrid.training.averaging.reductions.result import EncodedResult, Result
from neurogrid.training.wire.types import TrainingMessage

__all__ = ["MAX_HELD", "Reductions"]

MAX_HELD = 128
"""Results that are held for others at once: of rounds, and the vectors of states."""

EARLY_TIMEOUT = 30.0
"""Seconds that a chunk waits for its plan: the leader tells all members at about the same time."""

MAX_EARLY = 4
"""Reductions without a plan here that chunks of one peer wait for."""

# Reductions that are over, whose late chunks are told from early ones.
MAX_REMEMBERED = 1024


class _Early:
    """Chunks that wait for the plan of one reduction."""

    def __init__(self) -> None:
        self.begun = trio.Event()
        self.num_waiting = 0
        self.peers: set[str] = set()


class Reductions:
    """The reductions of one exchange.

    Args:
        exchange: of `training_table()`.
        admit: whether a peer is of the group; chunks of others are refused, and they are given nothing.
        early_timeout: seconds that a chunk waits for its plan.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        admit: Callable[[str], bool],
        early_timeout: float = EARLY_TIMEOUT,
    ) -> None:
        self._exchange = exchange
        self._admit = admit
        self._early_timeout = early_timeout
        self._running: dict[int, Reduction] = {}
        self._over: dict[int, None] = {}  # in the order of their ends
        self._early: dict[int, _Early] = {}
        self._held: dict[bytes, EncodedResult] = {}
        self._fetching = Fetching(exchange)
        exchange.on_message(TrainingMessage.CHUNK, self._take_chunk)
        exchange.on_message(TrainingMessage.FETCH_DIGESTS, self._give_digests)
        exchange.on_message(TrainingMessage.FETCH, self._give_chunk)
        exchange.on_stream_broken(self._lose)
        exchange.host.on_disconnected(self._note_disconnected)

    async def reduce(
        self,
        plan: ReductionPlan,
        values: Tensor | None,
        *,
        timeout: float,
        out: Tensor | None = None,
        on_waiting: Callable[[frozenset[str]], None] | None = None,
    ) -> Result | None:
        """Carry a plan out with the others.

        Args:
            values: float32 [num_elements], contiguous, on the CPU; None for a reducer that is no member. Not to be
                written to meanwhile.
            timeout: seconds.
            out: memory for the values of the result, as `values` and not the same; new if None. Memory that is used
                again saves the system a page fault for each 4 KiB.
            on_waiting: called with the peers that are waited for, whenever they change.

        Returns:
            The result; None for a reducer that is no member and has only a part of it.

        Raises:
            MembersLostError: a peer was lost that something was still to come from, or was silent to the end.
            LocalProtocolError: this peer has no place in the plan, the values are not what it says, or a reduction of
                this number has been.
            ConfigurationError: the plan names a codec or an aggregator that there is not.

        Cancellation leaves everything whole: peers that wait for something here are told that the reduction is over.
        """
        number = plan.reduction
        if number in self._running or number in self._over:
            raise LocalProtocolError(f"reduction {number:016x} was begun before")
        reduction = Reduction(
            self._exchange,
            plan,
            values,
            codec=parse_codec(plan.codec),
            result_codec=parse_codec(plan.result_codec),
            aggregator=parse_aggregator(plan.aggregator),
            out=out,
            on_waiting=on_waiting,
        )
        self._running[number] = reduction
        if number in self._early:
            self._early[number].begun.set()
        try:
            return await reduction.run(timeout)
        finally:
            del self._running[number]
            self._over[number] = None
            while len(self._over) > MAX_REMEMBERED:
                del self._over[next(iter(self._over))]

    def waiting_for(self, reduction: int) -> frozenset[str]:
        """The peers that a reduction waits for at this moment; none where it is not under way."""
        running = self._running.get(reduction)
        return running.waiting_for if running is not None else frozenset()

    def hold(self, result: Result) -> None:
        """Let peers of the group fetch a result.

        Raises:
            LocalProtocolError: `MAX_HELD` are held.
        """
        if len(self._held) >= MAX_HELD and result.digest not in self._held:
            raise LocalProtocolError(f"{MAX_HELD} results are held: release one first")
        self._held[result.digest] = result.encoded

    def held(self, digest: bytes) -> Result | None:
        """A result that is held, its values decoded anew; None where it is not."""
        encoded = self._held.get(digest)
        return encoded.decode() if encoded is not None else None

    def release(self, digest: bytes) -> None:
        """Hold a result no longer; nothing happens where it is not held."""
        self._held.pop(digest, None)

    def let_go(self) -> None:
        """Hold nothing any longer."""
        self._held.clear()

    async def fetch(
        self,
        digest: bytes,
        holders: Sequence[str],
        num_elements: int,
        chunk_elements: int,
        result_codec: str,
        *,
        timeout: float,
    ) -> Result:
        """Get a result from peers that hold it, in pieces from all of them.

        Args:
            digest: what it is known by; every piece is verified.
            holders: peer ids, at least one.
            num_elements, chunk_elements, result_codec: as in the plan that it came of.
            timeout: seconds.

        Raises:
            ResultUnavailableError: none of the holders is left; says what was wrong with each.
            LocalProtocolError: no holder was named, or the chunks are too large.
            ConfigurationError: there is no such codec.
        """
        return await self._fetching.fetch(
            digest, holders, num_elements, chunk_elements, result_codec, timeout=timeout
        )

    # Chunks

    def _take_chunk(self, message: TensorMessage) -> Awaitable[None] | None:
        self._require_admitted(message)
        number = message.seq_id
        running = self._running.get(number)
        if running is not None:
            running.take(message)
            return None
        if number in self._over:
            raise ended(f"reduction {number:016x} is over")
        return self._take_early(message)

    async def _take_early(self, message: TensorMessage) -> None:
        """Keep a chunk until its plan is known. What waits so is bounded by its sender's credit."""
        number = message.seq_id
        if number not in self._running and number not in self._over:
            await self._wait_plan(number, sender_of(message))
        running = self._running.get(number)
        if running is None:
            raise ended(f"reduction {number:016x} is over, or never began here")
        running.take(message)

    async def _wait_plan(self, number: int, peer_id: str) -> None:
        """Wait until a reduction has begun here, as long as may be."""
        early = self._early.get(number)
        if early is None or peer_id not in early.peers:
            if sum(peer_id in other.peers for other in self._early.values()) >= MAX_EARLY:
                raise RequestRefusedError(
                    f"chunks of {MAX_EARLY} other reductions wait for their plans",
                    code=ErrorCode.LIMIT_EXCEEDED,
                )
            early = self._early.setdefault(number, _Early())
            early.peers.add(peer_id)
        early.num_waiting += 1
        try:
            with trio.move_on_after(self._early_timeout):
                await early.begun.wait()
        finally:
            early.num_waiting -= 1
            if not early.num_waiting:
                del self._early[number]

    def _require_admitted(self, message: TensorMessage) -> None:
        if not self._admit(sender_of(message)):
            raise RequestRefusedError(
                f"{sender_of(message)} is not of this group", code=ErrorCode.UNAUTHORIZED
            )

    def _lose(self, peer_id: str, reason: NeuroGridError) -> None:
        for running in tuple(self._running.values()):
            running.lose(peer_id, str(reason))

    def _note_disconnected(self, peer_id: str) -> None:
        for running in tuple(self._running.values()):
            running.lose(peer_id, "its connection is gone")

    # Results

    def _result_for(self, message: TensorMessage) -> EncodedResult:
        self._require_admitted(message)
        result = self._held.get(bytes(message.data))
        if result is None:
            raise RequestRefusedError("no such result is held here", code=ErrorCode.BLOB_UNKNOWN)
        return result

    async def _give_digests(self, message: TensorMessage) -> None:
        digests = b"".join(self._result_for(message).chunk_digests)
        await self._give(message, TrainingMessage.DIGESTS, digests)

    async def _give_chunk(self, message: TensorMessage) -> None:
        chunks = self._result_for(message).chunks
        if message.layer_id >= len(chunks):
            raise RequestRefusedError(
                f"the result has {len(chunks)} chunks, and none of index {message.layer_id}",
                code=ErrorCode.POSITION_MISMATCH,
            )
        await self._give(message, TrainingMessage.PIECE, chunks[message.layer_id])

    async def _give(self, message: TensorMessage, answer: TrainingMessage, data: Data) -> None:
        await self._exchange.send(
            sender_of(message),
            TensorMessage(answer, message.layer_id, message.seq_id, message.request_id, data),
        )
