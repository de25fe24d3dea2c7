"""One reduction under way at one peer: it hands chunks to their reducers, and aggregates those that are its own.

A chunk is a request to its reducer, and the aggregate its answer. Everything is counted by the peer that it is waited
for from, so that who is missing can be told at any moment, and the loss of a peer ends the reduction at once if
anything was still to come from it.

Strategy: a few chunks are under way to each reducer, in order; rows are added in the order of the plan's members as
they come, so no row is kept longer than the slowest member before it takes. The codec f32 costs less than the way to
a thread and back: it is dealt with where it stands, and its bytes are the tensor's own.

Source: protocol_spec/training/reductions.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch
import trio
from torch import Tensor

from neurogrid.errors import (
    LocalProtocolError,
    NeuroGridError,
    NotFiniteError,
    PeerRefusedError,
    RemoteProtocolError,
    RequestRefusedError,
    TooLargeForPeerError,
    TransportError,
)
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.exchange.exchange import Exchange, new_request_id
from neurogrid.p2p.streams.message_forms import refusal, sender_of
from neurogrid.p2p.wire import Data, ErrorCode, TensorMessage
from neurogrid.training.averaging.aggregators import Aggregator, DistanceAggregator, Mean
from neurogrid.training.averaging.codecs import Codec
from neurogrid.training.averaging.plan import ReductionPlan, Way
from neurogrid.training.averaging.reductions.errors import MembersLostError
from neurogrid.training.averaging.reductions.gathering import (
    MAX_WINDOW,
    OF_ROWS,
    ChunkRows,
    Gathering,
    Row,
    gather,
)
from neurogrid.training.averaging.reductions.result import (
    PLAIN,
    Result,
    ResultBuilder,
)
from neurogrid.training.wire.types import MAX_CHUNK_BYTES, TrainingMessage

__all__ = ["ENDED", "GIVE_UP_GRACE", "Reduction", "ended"]

ENDED = ErrorCode.SESSION_UNKNOWN
"""The code of an Error that says that a reduction is over, not that anything was wrong with what was sent."""

GIVE_UP_GRACE = 1.0
"""Seconds from when a peer has given up until this one does: it may notice by itself who is lost."""

# Bytes of chunks that are under way to one reducer: what a fast network takes while an answer is computed.
WINDOW_BYTES = 8 * 1024 * 1024
# Of the time for a reduction: a reducer that waits for rows gives up then, and says for whom it has waited, before
# those that wait for its aggregates can take it for the one that is lost. In a grid those wait for rows, too: of two
# gatherings the one whose rows are members' gives up the earlier.
_ROWS_SHARES = (0.75, 0.5625)
# Threads that decode and add at once.
NUM_THREADS = 2

# What goes wrong with a peer, as opposed to with this program.
_OF_THE_PEER = (PeerRefusedError, TransportError, RemoteProtocolError, TooLargeForPeerError)


def ended(reason: str) -> RequestRefusedError:
    """The refusal of a chunk whose reduction is over."""
    return RequestRefusedError(reason, code=ENDED, is_expected=True)


class Reduction:
    """One reduction. `run` carries it out, once; `take` and `lose` are told what happens.

    Args:
        exchange: of the training protocol.
        plan: what is to be done.
        values: float32 [num_elements], contiguous, on the CPU; None where this peer is no member.
        codec, result_codec, aggregator: those that the plan names.
        out: memory for the result, as the values; new if None.
        on_waiting: called with the peers that are waited for, whenever they change.

    Raises:
        LocalProtocolError: this peer has no place in the plan, the values are not what it says, or the aggregator is
            one that no part can do by itself.
    """

    def __init__(
        self,
        exchange: Exchange,
        plan: ReductionPlan,
        values: Tensor | None,
        *,
        codec: Codec,
        result_codec: Codec,
        aggregator: Aggregator,
        out: Tensor | None = None,
        on_waiting: Callable[[frozenset[str]], None] | None = None,
    ) -> None:
        self._exchange = exchange
        self._own = exchange.host.peer_id
        self._plan = plan
        self._codec = codec
        self._result_codec = result_codec
        self._aggregator = aggregator
        self._senders = frozenset(plan.members)
        self._is_member = self._own in plan.members
        if (values is not None) != self._is_member:
            wanted = "has values" if self._is_member else "is no member, and has no values"
            raise LocalProtocolError(f"this peer {wanted} by the plan")
        if isinstance(aggregator, DistanceAggregator):
            raise LocalProtocolError(f"{plan.aggregator} needs distances of whole vectors")
        self._require_small_chunks()
        self._values = self._checked(values, "values")
        self._answers_have_data = plan.way is not Way.EVERYBODY
        self._row, self._gathering, self._sums = gather(plan, self._own, codec, aggregator)
        self._gatherings = [each for each in (self._gathering, self._sums) if each is not None]
        if not self._is_member and not self._gathering.chunks:
            raise LocalProtocolError("this peer is neither member nor reducer of the plan")
        self._has_all = self._is_member or len(self._gathering.chunks) == plan.num_chunks
        self._builder = ResultBuilder(
            num_elements=plan.num_elements,
            chunk_elements=plan.chunk_elements,
            codec=result_codec,
            out=self._checked(out, "memory for the result"),
        )
        # The mean of one's own chunks is made where it belongs; of f32, what is sent are its bytes.
        self._gatherings[-1].memory_of = self._builder.memory_of
        self._on_waiting = on_waiting
        self._told: frozenset[str] = frozenset()
        # What is still to happen, by the peer that is to do it.
        self._rows: Counter[str] = Counter()  # that are to come here; one's own: aggregates
        self._owed: Counter[str] = Counter()  # answers that are to come
        self._untaken: Counter[str] = Counter()  # answers that are to go
        # Whose answers have not gone out, by member and chunk.
        self._requests: dict[tuple[str, int], int] = {}
        self._lost: dict[str, str] = {}
        self._gave_up: dict[str, str] = {}
        self._gone: set[str] = set()  # peers that are lost, and nothing is to come from
        self._is_over = False
        self._changed = trio.Event()
        self._scope = trio.CancelScope()
        self._ready, self._next_ready = trio.open_memory_channel[ChunkRows](math.inf)
        self._own_done: dict[int, trio.Event] = {}
        self._nursery: trio.Nursery | None = None
        self._timeout = 0.0  # for each request
        self._threads = trio.CapacityLimiter(NUM_THREADS)
        self._await_all()
        self._answers = {
            peer_id: trio.open_memory_channel[TensorMessage](math.inf)
            for peer_id in self._rows
            if peer_id != self._own
        }

    def _checked(self, tensor: Tensor | None, what: str) -> Tensor | None:
        if tensor is not None and (
            tensor.dtype != torch.float32
            or tensor.shape != (self._plan.num_elements,)
            or tensor.device.type != "cpu"
            or not tensor.is_contiguous()
        ):
            raise LocalProtocolError(
                f"the {what}: {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, and not "
                f"contiguous float32 [{self._plan.num_elements}] on the CPU"
            )
        return tensor.detach() if tensor is not None else None

    def _require_small_chunks(self) -> None:
        of_rows = [OF_ROWS] if self._plan.way is Way.GRID else []
        for codec in (self._codec, self._result_codec, *of_rows):
            num_bytes = codec.num_bytes(min(self._plan.chunk_elements, self._plan.num_elements))
            if num_bytes > MAX_CHUNK_BYTES:
                raise LocalProtocolError(f"a chunk is {num_bytes} B, above {MAX_CHUNK_BYTES}")

    # Who is waited for

    @property
    def waiting_for(self) -> frozenset[str]:
        """The peers that are waited for.

        Those whose rows are missing here, if any are: another peer that owes an answer may be waiting for the same.
        Else those that owe answers, and then those that have not taken theirs.
        """
        for gathering in self._gatherings:
            if missing := gathering.missing(self._own):
                return missing
        for counter in (self._owed, self._untaken):
            if peers := counter.keys() - {self._own}:
                return frozenset(peers)
        return frozenset()

    @property
    def _is_complete(self) -> bool:
        """Whether all that belongs to the result is here."""
        return not self._rows and not self._owed

    def _await_all(self) -> None:
        if self._gathering.chunks:
            for peer in {*self._row.members, self._own}:
                self._rows[peer] = len(self._gathering.chunks)
        if self._sums is not None:
            for chunk in self._gathering.chunks:
                if (home := self._plan.home_of(chunk)) != self._own:
                    self._owed[home] += 1
            for chunk in self._sums.chunks:
                self._rows.update(set(self._plan.row_reducers_of(chunk)) - {self._own})
        if self._is_member:
            for peers, chunks in self._ways():
                for peer in peers:
                    if peer != self._own and chunks:
                        self._owed[peer] += len(chunks)

    def _ways(self) -> list[tuple[tuple[str, ...], range]]:
        """Destinations of this member's chunks: peers, and the chunks that each of them gets."""
        row = self._row
        if not self._answers_have_data:
            return [(row.members, range(row.num_chunks))]
        return [((reducer,), row.chunks_of(reducer)) for reducer in row.reducers]

    def _came(self, peer_id: str, counter: Counter[str]) -> None:
        counter[peer_id] -= 1
        if not counter[peer_id]:
            del counter[peer_id]
            self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
        waiting = self.waiting_for
        if self._on_waiting is not None and waiting != self._told:
            self._told = waiting
            self._on_waiting(waiting)

    # What happens

    def take(self, message: TensorMessage) -> None:
        """Take a chunk of a peer, or refuse it.

        Raises:
            RequestRefusedError: with the reason; if its sender is a member, that ends the reduction.
        """
        peer_id, chunk = sender_of(message), message.layer_id
        if self._is_over:
            raise ended(f"reduction {self._plan.reduction:016x} is over")
        if peer_id not in self._senders:
            raise RequestRefusedError(
                f"{peer_id} is no member of this reduction", code=ErrorCode.UNAUTHORIZED
            )
        gathering = self._gathering
        if self._sums is not None and self._plan.row_of(peer_id) != self._plan.row_of(self._own):
            gathering = self._sums
        try:
            rows = gathering.put(peer_id, chunk, message.data, message.request_id)
        except RequestRefusedError as error:
            self._fail(peer_id, f"it sent what is wrong: {error}")
            raise
        self._requests[peer_id, chunk] = message.request_id
        self._note_ready(rows)

    def lose(self, peer_id: str, reason: str) -> None:
        """A stream of a peer broke, or its connection ended."""
        if self._rows[peer_id] or self._owed[peer_id]:
            self._fail(peer_id, reason)
        elif self._untaken[peer_id]:
            self._forget_answers(peer_id)

    def _fail(self, peer_id: str, reason: str) -> None:
        if not self._is_over:
            self._lost.setdefault(peer_id, reason)
            self._scope.cancel()

    def _note_refusal(self, peer_id: str, error: PeerRefusedError) -> None:
        if error.code != ENDED:
            self._fail(peer_id, f"it refused: {error.text}")
            return
        self._gave_up.setdefault(peer_id, error.text)
        grace = trio.current_time() + GIVE_UP_GRACE
        self._scope.deadline = min(self._scope.deadline, grace)

    async def run(self, timeout: float) -> Result | None:
        """Carry the reduction out, in `timeout` seconds.

        Returns:
            The result; None for a reducer that is no member and has only a part of it.

        Raises:
            MembersLostError: a peer was lost that something was still to come from, or was silent to the end.

        Whatever the end, peers that wait for something here are told that it is over. A chunk whose sending has begun
        goes out whole, also after cancellation.
        """
        deadline = trio.current_time() + timeout
        self._scope.deadline = deadline
        try:
            with unwrap_errors(), self._scope:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    # Not the requests find out that the time is over, since they do not know who is waited for.
                    self._start(nursery, timeout + GIVE_UP_GRACE)
                    for gathering, share in zip(
                        reversed(self._gatherings), _ROWS_SHARES, strict=False
                    ):
                        nursery.start_soon(self._watch_rows, gathering, share * timeout)
                    self._note_change()
                    while not self._is_complete or self._untaken:
                        await self._changed.wait()
                    nursery.cancel_scope.cancel()
        finally:
            self._is_over = True
            self._refuse_rest()
        if self._lost or not self._is_complete:
            raise self._error(timeout)
        return self._builder.finish() if self._has_all else None

    def _error(self, timeout: float) -> MembersLostError:
        lost = self._lost
        if not lost and not self._gave_up:
            lost = dict.fromkeys(sorted(self.waiting_for), f"silent for {timeout:g} s")
        return MembersLostError(lost, self._gave_up)

    def _start(self, nursery: trio.Nursery, timeout: float) -> None:
        self._timeout = timeout
        num_adding = 1 if self._plan.codec == PLAIN else NUM_THREADS
        for _ in range(num_adding):
            nursery.start_soon(self._add_rows)
        for member, (_, answers) in self._answers.items():
            nursery.start_soon(self._send_answers, member, answers)
        if self._values is not None:
            for peers, chunks in self._ways():
                left = iter(chunks)
                for _ in range(min(self._window, len(chunks))):
                    nursery.start_soon(self._hand_over, peers, left)

    async def _watch_rows(self, gathering: Gathering, timeout: float) -> None:
        """Give up those that have not sent their rows in time."""
        await trio.sleep(timeout)
        for peer_id in gathering.missing(self._own):
            self._fail(peer_id, f"it has not sent its part within {timeout:g} s")

    @property
    def _window(self) -> int:
        """Chunks under way to one reducer."""
        chunk_bytes = self._codec.num_bytes(self._plan.chunk_elements)
        return max(2, min(MAX_WINDOW, WINDOW_BYTES // max(1, chunk_bytes)))

    # A member: chunks to their reducers

    async def _hand_over(self, peers: tuple[str, ...], left: Iterator[int]) -> None:
        for chunk in left:
            try:
                data = await self._encoded(chunk)
            except NotFiniteError as error:
                self._fail(self._own, f"chunk {chunk}: {error}")
                return
            if len(peers) == 1:
                await self._hand(peers[0], chunk, data)
                continue
            async with trio.open_nursery() as nursery:
                for peer_id in peers:
                    nursery.start_soon(self._hand, peer_id, chunk, data)

    async def _encoded(self, chunk: int) -> Data:
        assert self._values is not None
        start, stop = self._plan.chunk_span(chunk)
        values = self._values[start:stop]
        if self._plan.codec == PLAIN:
            return self._codec.encode(values)
        return await trio.to_thread.run_sync(self._codec.encode, values, limiter=self._threads)

    async def _hand(self, peer_id: str, chunk: int, data: Data) -> None:
        if peer_id == self._own:
            await self._keep_own(chunk, data)
        else:
            await self._request(peer_id, chunk, data)

    async def _request(self, peer_id: str, chunk: int, data: Data) -> Data | None:
        """Send a chunk, and keep the aggregate that is the answer; None where none came, and the reduction ends."""
        request = TensorMessage(
            TrainingMessage.CHUNK, chunk, self._plan.reduction, new_request_id(), data
        )
        try:
            answer = await self._exchange.request(
                peer_id, request, TrainingMessage.MEAN, timeout=self._timeout
            )
            await self._take_answer(peer_id, chunk, answer)
        except PeerRefusedError as error:
            self._note_refusal(peer_id, error)
        except _OF_THE_PEER as error:
            self._fail(peer_id, str(error))
        else:
            self._came(peer_id, self._owed)
            return answer.data
        return None

    async def _keep_own(self, chunk: int, data: Data) -> None:
        """Have one's own row added here, as everybody's is."""
        done = self._own_done[chunk] = trio.Event()
        self._note_ready(self._gathering.put(self._own, chunk, data, 0))
        await done.wait()

    async def _take_answer(self, peer_id: str, chunk: int, answer: TensorMessage) -> None:
        """Check the answer to a chunk, and keep the aggregate.

        Raises:
            RemoteProtocolError: it is not what it must be.
        """
        if (answer.layer_id, answer.seq_id) != (chunk, self._plan.reduction):
            raise RemoteProtocolError(f"the answer to chunk {chunk} is that to {answer.layer_id}")
        start, stop = self._plan.chunk_span(chunk)
        num_bytes = self._result_codec.num_bytes(stop - start)
        expected = num_bytes if self._answers_have_data else 0
        if len(answer.data) != expected:
            raise RemoteProtocolError(
                f"the answer to chunk {chunk} has {len(answer.data)} B instead of {expected}"
            )
        if self._answers_have_data:
            await self._set_chunk(chunk, answer.data)

    async def _set_chunk(self, chunk: int, data: Data) -> None:
        if self._plan.result_codec == PLAIN:
            self._builder.set_chunk(chunk, data)
        else:
            await trio.to_thread.run_sync(
                self._builder.set_chunk, chunk, data, limiter=self._threads
            )

    # A reducer: rows to aggregates

    def _note_ready(self, rows: ChunkRows) -> None:
        if rows.is_ready and not rows.is_busy:
            rows.is_busy = True
            self._ready.send_nowait(rows)

    async def _add_rows(self) -> None:
        async for rows in self._next_ready:
            while (row := rows.take()) is not None:
                try:
                    await self._add(rows, row)
                except (RemoteProtocolError, NotFiniteError) as error:
                    self._refuse_row(rows, row, error)
                    return
                row.data = b""
                self._note_added(rows, row)
            rows.is_busy = False
            if rows.is_complete:
                await self._finish(rows)

    def _is_sum(self, rows: ChunkRows) -> bool:
        """Whether these are the rows' aggregates in a grid, not those of members."""
        return self._sums is not None and rows.senders != self._row.members

    async def _add(self, rows: ChunkRows, row: Row) -> None:
        if self._plan.codec != PLAIN and not self._is_sum(rows):
            await trio.to_thread.run_sync(rows.add, row, limiter=self._threads)
        else:
            # A row takes a tenth of a millisecond, and there may be many.
            await trio.lowlevel.checkpoint()
            rows.add(row)

    def _refuse_row(
        self, rows: ChunkRows, row: Row, error: RemoteProtocolError | NotFiniteError
    ) -> None:
        """A row cannot be added: end the reduction, and tell the member whose it is, if it is its fault."""
        chunk = rows.chunk
        at_fault = error.index if isinstance(error, NotFiniteError) else row.place
        peer_id = rows.senders[at_fault]
        if row.request_id and at_fault == row.place:
            del self._requests[peer_id, chunk]
            code = getattr(error, "code", ErrorCode.NOT_FINITE)
            refused = RequestRefusedError(f"chunk {chunk}: {error}", code=code)
            self._refuse(peer_id, chunk, row.request_id, refused)
        self._fail(peer_id, f"chunk {chunk}: {error}")

    def _note_added(self, rows: ChunkRows, row: Row) -> None:
        peer_id = rows.senders[row.place]
        if peer_id == self._own:
            return
        if not self._answers_have_data:
            self._answer(self._gathering, peer_id, rows.chunk, b"")
        self._came(peer_id, self._rows)

    async def _finish(self, rows: ChunkRows) -> None:
        """All rows were added: tell those that wait for what came of it, or hand it on to where rows come together."""
        chunk = rows.chunk
        is_of_row = self._sums is not None and not self._is_sum(rows)
        data = await self._aggregate(rows, OF_ROWS if is_of_row else self._result_codec)
        if data is None:
            return
        if self._sums is None or not is_of_row:
            await self._set_chunk(chunk, data)
            if self._sums is not None:
                self._tell(self._sums, rows.senders, chunk, data)
            self._tell_row(chunk, data)
        elif chunk in self._sums.chunks:
            self._note_ready(self._sums.put(self._own, chunk, data, 0))
        else:
            # Not here: the task that adds has others to add, for which that one may be waiting.
            assert self._nursery is not None
            self._nursery.start_soon(self._hand_on, self._plan.home_of(chunk), chunk, data)

    async def _hand_on(self, home: str, chunk: int, data: Data) -> None:
        """Hand what a row gave to where the rows come together, and tell the row what came of all."""
        answer = await self._request(home, chunk, data)
        if answer is not None:
            self._tell_row(chunk, answer)

    def _tell_row(self, chunk: int, data: Data) -> None:
        """The aggregate of a chunk is known that this peer's row waits for."""
        if chunk in self._own_done:
            self._own_done.pop(chunk).set()
        self._tell(
            self._gathering, self._row.members if self._answers_have_data else (), chunk, data
        )
        self._came(self._own, self._rows)

    def _tell(self, gathering: Gathering, senders: Sequence[str], chunk: int, data: Data) -> None:
        """A chunk is done: answer those that rows came from."""
        gathering.close(chunk)
        for peer_id in senders:
            if peer_id != self._own:
                self._answer(gathering, peer_id, chunk, data)

    async def _aggregate(self, rows: ChunkRows, codec: Codec) -> Data | None:
        """The encoded aggregate of a chunk; None where there is none, which ends the reduction."""
        is_plain = codec.name == PLAIN and (self._plan.codec == PLAIN or self._is_sum(rows))
        is_cheap = is_plain and isinstance(self._aggregator, Mean)
        at_fault = self._own
        try:
            if is_cheap:
                return codec.encode(rows.finish())
            try:
                aggregate = await trio.to_thread.run_sync(rows.finish, limiter=self._threads)
            except NotFiniteError as error:
                at_fault = rows.senders[error.index]
                raise
            return await trio.to_thread.run_sync(codec.encode, aggregate, limiter=self._threads)
        except NotFiniteError as error:
            self._fail(at_fault, f"the aggregate of chunk {rows.chunk}: {error}")
            return None

    def _answer(self, gathering: Gathering, peer_id: str, chunk: int, data: Data) -> None:
        request_id = self._requests[peer_id, chunk]
        gathering.unanswered[peer_id] -= 1
        if peer_id in self._gone:
            del self._requests[peer_id, chunk]
            return
        message = TensorMessage(TrainingMessage.MEAN, chunk, self._plan.reduction, request_id, data)
        self._untaken[peer_id] += 1
        self._answers[peer_id][0].send_nowait(message)

    async def _send_answers(
        self, peer_id: str, answers: trio.MemoryReceiveChannel[TensorMessage]
    ) -> None:
        async for message in answers:
            if peer_id not in self._gone:
                try:
                    await self._exchange.send(peer_id, message)
                except _OF_THE_PEER as error:
                    self.lose(peer_id, str(error))
            # Until then it counts as unanswered: the reduction may end before its answer is on its way.
            self._requests.pop((peer_id, message.layer_id), None)
            if peer_id not in self._gone:
                self._came(peer_id, self._untaken)

    def _forget_answers(self, peer_id: str) -> None:
        """A member is gone that has done its part: the others need nothing of it."""
        self._gone.add(peer_id)
        del self._untaken[peer_id]
        self._note_change()

    # The end

    def _refuse_rest(self) -> None:
        words = "; ".join(f"lost {peer_id}: {reason}" for peer_id, reason in self._lost.items())
        error = ended(words or "the reduction was given up")
        for (peer_id, chunk), request_id in self._requests.items():
            self._refuse(peer_id, chunk, request_id, error)
        self._requests.clear()

    def _refuse(
        self, peer_id: str, chunk: int, request_id: int, error: RequestRefusedError
    ) -> None:
        request = TensorMessage(
            TrainingMessage.CHUNK,
            chunk,
            self._plan.reduction,
            request_id,
            from_peer=peer_id,
        )
        # A task of the host's: whoever waits for the end of the reduction need not wait for a slow peer. A host that is
        # closing takes no tasks, and has told its peers more than this.
        with suppress(RuntimeError):
            self._exchange.host.start_soon(self._send_refusal, peer_id, refusal(request, error))

    async def _send_refusal(self, peer_id: str, message: TensorMessage) -> None:
        with suppress(NeuroGridError):  # then it is gone, and waits for nothing
            await self._exchange.send(peer_id, message)
