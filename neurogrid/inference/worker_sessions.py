"""What a worker computes: sessions with a KV cache each, and activations that extend them.

Over 1.1.0 a session is opened, extended by activations at its own length, and closed. Where it has a route, its
activations come from the worker before this one, and the results go to the next (`worker_links`). 1.0.0 has no
sessions: there one cache is kept for each peer and layer, begun anew at position 0.

Source: protocol_spec/sessions.md; wire.md for 1.0.0.

T = tokens, D = hidden size.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress

import torch
import trio

from neurogrid.errors import (
    NeuroGridError,
    RemoteProtocolError,
    RequestRefusedError,
    TransportError,
)
from neurogrid.inference.activations import pack, unpack, width
from neurogrid.inference.batching import Batcher, Step, next_steps, run_steps
from neurogrid.inference.burst import Burst
from neurogrid.inference.compute_statistics import ComputeStatistics
from neurogrid.inference.served_model import ServedModel
from neurogrid.inference.session_table import Session, SessionTable
from neurogrid.inference.spans import stage_span
from neurogrid.inference.worker_links import WorkerLinks
from neurogrid.inference.worker_load import WorkerLoad, worker_load
from neurogrid.inference.worker_state import Assignment, WorkerState, name_layers, sender_of
from neurogrid.model.tensors import dtype_name, is_finite, tensor_from_bytes, tensor_to_bytes
from neurogrid.p2p.routes import Place, place_in
from neurogrid.p2p.wire import (
    ErrorCode,
    GPUInfo,
    LayerIds,
    MessageType,
    SessionAck,
    SessionClose,
    SessionOpen,
    SessionQuery,
    TensorEnvelope,
    TensorMessage,
)

__all__ = ["SessionService"]

logger = logging.getLogger(__name__)

# Seconds between looks at sessions that may be over, and at those that are to be gone before this worker ends.
EXPIRY_INTERVAL, DRAIN_INTERVAL = 5.0, 0.05

# Steps that wait for the torch thread: one of each of hundreds of sessions, and a few of those of 1.0.0.
MAX_WAITING_STEPS = 1024


class SessionService:
    """The handlers that compute. `register` puts them on the worker's protocol.

    Attributes:
        statistics: of what was computed.
    """

    def __init__(self, state: WorkerState, links: WorkerLinks, *, device_name: str) -> None:
        self._state = state
        self.statistics = ComputeStatistics()
        self._links = links
        self._device_name = device_name
        self._sessions = SessionTable(on_drop=self._withdraw)
        self._v10_caches: dict[tuple[str, int], Session] = {}
        self._prefilled_last = True
        self._is_leaving = False
        self._burst = Burst()
        self._steps: Batcher[Step, torch.Tensor] = Batcher(
            self._choose,
            self._compute,
            state.run_torch,
            max_waiting=MAX_WAITING_STEPS,
            linger=self._burst.delay,
        )
        state.on_layers_changed = self.forget_all

    def register(self) -> None:
        """Serve the messages of this service on the worker's protocol."""
        protocol = self._state.protocol
        protocol.on_message(MessageType.GPU_INFO_REQUEST, self._on_gpu_info_request)
        protocol.on_message(MessageType.SESSION_OPEN, self._on_open)
        protocol.on_message(MessageType.SESSION_CLOSE, self._on_close)
        protocol.on_message(MessageType.SESSION_QUERY, self._on_query)
        protocol.on_message(MessageType.ACTIVATION, self._on_activation)

    @property
    def load(self) -> WorkerLoad:
        """What has been taken on."""
        return worker_load(self._state, self._sessions, num_waiting=self._steps.num_waiting)

    async def drain(self) -> None:
        """Open no session any more, say so to the coordinator, and wait until it has taken the open ones elsewhere."""
        self._is_leaving = True
        coordinator = self._state.coordinator
        if coordinator is None or not self._sessions:
            return
        none_left = TensorMessage(msg_type=MessageType.LAYER_STATUS, data=LayerIds(()).encode())
        with suppress(TransportError):
            await self._state.protocol.send(coordinator, none_left)
            while len(self._sessions):
                await trio.sleep(DRAIN_INTERVAL)

    def forget(self, peer_id: str) -> None:
        """Drop the sessions of a peer, and their caches."""
        self._sessions.forget(peer_id)
        for key in [key for key in self._v10_caches if key[0] == peer_id]:
            del self._v10_caches[key]

    def forget_all(self) -> None:
        """Drop all sessions: their layers are being replaced."""
        self._sessions.clear()
        self._v10_caches.clear()

    async def run(self) -> None:
        """Compute what comes; runs as long as the worker."""
        await self._steps.run()

    def _choose(self, waiting: Sequence[Step]) -> list[Step]:
        steps = next_steps(waiting, after_prefill=self._prefilled_last)
        self._prefilled_last = not steps[0].is_decoded
        logger.debug("%d of %d steps that wait run together", len(steps), len(waiting))
        return steps

    def _compute(self, steps: Sequence[Step]) -> list[torch.Tensor | Exception | None]:
        # A session that is alone keeps nobody waiting: in one go it gets the bits of the whole model.
        chunk = None if self._is_alone else self._state.settings.prefill_chunk
        is_decoded, num_tokens = steps[0].is_decoded, sum(step.num_tokens for step in steps)
        started = time.perf_counter()
        results = run_steps(steps, chunk=chunk)
        ended = time.perf_counter()
        if is_decoded:
            self._burst.step_seconds = ended - started
        else:
            num_tokens -= steps[0].num_tokens  # what is left for further chunks
        call = self.statistics.called(
            is_decoded=is_decoded,
            num_rows=len(steps),
            num_tokens=num_tokens,
            seconds=ended - started,
        )
        for step in steps:
            waited = started - step.waits_since
            self.statistics.queue.observe(waited)
            step.queue_seconds += waited
            step.waits_since = ended
            step.calls.append(call)
        return results

    @property
    def _is_alone(self) -> bool:
        """Whether one session at most is open: nobody is kept waiting, and nobody comes to share a forward."""
        return len(self._sessions) + len(self._v10_caches) <= 1

    def _withdraw(self, session: Session) -> None:
        """Compute nothing more for a session that is over."""
        self._burst.gone(id(session.cache))
        self._steps.withdraw(lambda step: step.cache is session.cache)

    async def expire(self) -> None:
        """Drop the sessions that nobody has used or may use any more; runs as long as the worker."""
        while True:
            await trio.sleep(EXPIRY_INTERVAL)
            for session, reason in self._sessions.expired(idle=self._state.settings.session_ttl):
                logger.warning(
                    "closed session %d of %s: %s", session.session_id, session.owner, reason
                )
                self._sessions.drop(session)

    async def link_lost(self, peer_id: str, reason: NeuroGridError) -> None:
        """The stream to a peer ended: tell the coordinators whose activations may be lost in it."""
        for session in self._sessions:
            if session.successor == peer_id and session.handed_on:
                error = self._links.unreachable(peer_id, reason)
                await self._tell_owner(session, session.handed_on, error)
        # Who has taken its last activation waits for the next: that should not have to wait for a dial.
        place = next((s.place for s in self._sessions if s.successor == peer_id), None)
        try:
            await self._links.prepare(place)
        except RequestRefusedError as exc:
            logger.debug("%s", exc)

    async def _on_gpu_info_request(self, message: TensorMessage) -> None:
        memory = self._state.memory()
        info = GPUInfo(
            total_bytes=memory.total_bytes, used_bytes=memory.used_bytes, name=self._device_name
        )
        await self._state.answer(message, MessageType.GPU_INFO, info.encode())

    # Sessions (1.1.0)

    async def _on_open(self, message: TensorMessage) -> None:
        state = self._state
        model = state.require_coordinator(message.from_peer)
        if self._is_leaving:
            raise RequestRefusedError("this worker is about to end", code=ErrorCode.SHUTTING_DOWN)
        opened = SessionOpen.decode(message.data)
        missing = set(range(opened.start_layer, opened.stop_layer))
        if state.assignment is not None:
            missing -= state.assignment.confirmed
        if missing:
            raise RequestRefusedError(
                f"this worker is not ready for {name_layers(missing)}",
                code=ErrorCode.LAYER_NOT_HELD,
            )
        assert state.assignment is not None
        if not 0 < opened.max_length <= state.assignment.max_length:
            raise RequestRefusedError(
                f"a session of {opened.max_length} tokens was asked for, and "
                f"{state.assignment.max_length} were agreed",
                code=ErrorCode.LIMIT_EXCEEDED,
            )
        if self._sessions.has(opened.session_id):
            raise RequestRefusedError(
                f"session {opened.session_id} is open already", code=ErrorCode.PROTOCOL_VIOLATION
            )
        self._require_room(model, state.assignment, opened.max_length)
        session = Session(
            session_id=opened.session_id,
            owner=sender_of(message),
            model=model,
            start=opened.start_layer,
            stop=opened.stop_layer,
            max_length=opened.max_length,
            cache=model.new_cache(),
            place=self._place(opened, sender_of(message)),
            wire=opened.wire or dtype_name(model.dtype),
        )
        self._sessions.add(session)
        try:
            await self._links.prepare(session.place)
        except BaseException:
            self._sessions.drop(session)
            raise
        ack = SessionAck(session_id=opened.session_id)
        await self._state.answer(message, MessageType.SESSION_ACK, ack.encode())

    def _require_room(self, model: ServedModel, assignment: Assignment, max_length: int) -> None:
        """Check that a session fits in the memory that was agreed: short ones take less of it."""
        start, stop = assignment.start, assignment.stop
        agreed = assignment.max_sessions * model.cache_bytes(start, stop, assignment.max_length)
        taken = sum(model.cache_bytes(s.start, s.stop, s.max_length) for s in self._sessions)
        needed = model.cache_bytes(start, stop, max_length)
        num_open = len(self._sessions)
        if taken + needed > agreed or num_open >= self._state.settings.max_sessions:
            raise RequestRefusedError(
                f"{num_open} session{'s are' if num_open != 1 else ' is'} open and take {taken:,} B of "
                f"the {agreed:,} B that were agreed, too much for one of {max_length} tokens more",
                code=ErrorCode.SESSION_LIMIT,
                retry_after=1.0,
            )

    def _place(self, opened: SessionOpen, coordinator: str) -> Place | None:
        if not opened.route:
            return None
        try:
            return place_in(
                opened.route,
                coordinator=coordinator,
                own_id=self._state.protocol.host.peer_id,
                session_id=opened.session_id,
                start=opened.start_layer,
                stop=opened.stop_layer,
            )
        except RemoteProtocolError as exc:
            raise RequestRefusedError(str(exc), code=exc.code) from exc

    async def _on_close(self, message: TensorMessage) -> None:
        closed = SessionClose.decode(message.data)
        self._sessions.close(closed.session_id, sender_of(message))
        ack = SessionAck(session_id=closed.session_id)
        await self._state.answer(message, MessageType.SESSION_ACK, ack.encode())

    async def _on_query(self, message: TensorMessage) -> None:
        query = SessionQuery.decode(message.data)
        session = self._sessions.of(query.session_id, sender_of(message))
        if session is None:
            raise RequestRefusedError(
                f"session {query.session_id} is not open", code=ErrorCode.SESSION_UNKNOWN
            )
        ack = SessionAck(session_id=query.session_id, length=session.length)
        await self._state.answer(message, MessageType.SESSION_ACK, ack.encode())

    # Activations

    async def extend(
        self, session_id: int, owner: str, hidden_BTD: torch.Tensor, *, position: int
    ) -> torch.Tensor:
        """Extend a session of a coordinator in this process, which need not send what it has in memory.

        Raises:
            RequestRefusedError: as an activation would be.
        """
        session = self._sessions.of(session_id, owner)
        if session is None or session.model is not self._state.model:
            raise RequestRefusedError(
                f"session {session_id} is not open", code=ErrorCode.SESSION_UNKNOWN
            )
        return await self._extend(session, position, hidden_BTD)

    async def _on_activation(self, message: TensorMessage) -> None:
        came = time.perf_counter_ns()
        # Only 1.1.0 has envelopes.
        if message.envelope is None:
            data = await self._compute_v10(message)
            await self._state.answer(message, MessageType.RESPONSE, data)
            return
        session = self._session_of(message, message.envelope)
        if session is None:
            return
        try:
            hidden_BTD = self._check(session, message.envelope)
            result_BTD = await self._extend(session, message.envelope.position, hidden_BTD)
            # Without a route somebody waits for just this, though the session be over.
            if session.place is None or session in self._sessions:
                taken = time.perf_counter_ns() - came
                await self._pass_on(session, message, message.envelope, result_BTD, taken)
        except RequestRefusedError as exc:
            if session.place is not None and session not in self._sessions:
                return
            if session.source == session.owner:
                raise
            logger.warning("refused an activation of %s: %s", session.source, exc)
            await self._tell_owner(session, message.request_id, exc)
        except TransportError as exc:
            if session.source == session.owner:
                raise
            logger.debug("%s is gone: %s", session.owner, exc)
        except Exception:
            if session.source == session.owner:
                raise
            # The predecessor could do nothing with the Error that would otherwise be sent to it.
            logger.exception("an activation of %s failed", session.source)
            error = RequestRefusedError("internal error", code=ErrorCode.COMPUTE_FAILED)
            await self._tell_owner(session, message.request_id, error)

    def _session_of(self, message: TensorMessage, envelope: TensorEnvelope) -> Session | None:
        """The session that an activation extends; None where it comes too late for one that was closed."""
        sender = sender_of(message)
        session = self._sessions.find(envelope.session_id, sender)
        if session is not None and session.model is self._state.model:
            return session
        if self._sessions.was_closed(envelope.session_id, sender):
            return None
        self._state.require_coordinator(sender)
        raise RequestRefusedError(
            f"session {envelope.session_id} is not open", code=ErrorCode.SESSION_UNKNOWN
        )

    def _check(self, session: Session, envelope: TensorEnvelope) -> torch.Tensor:
        model = session.model
        if (envelope.start_layer, envelope.stop_layer) != (session.start, session.stop):
            raise RequestRefusedError(
                f"layers {envelope.start_layer} to {envelope.stop_layer - 1} were asked of a session "
                f"over layers {session.start} to {session.stop - 1}",
                code=ErrorCode.LAYER_NOT_HELD,
            )
        shape, row = envelope.shape, width(session.wire, model.hidden_size)
        if len(shape) != 3 or shape[0] != 1 or shape[2] != row or shape[1] < 1:
            raise RequestRefusedError(
                f"an activation of shape {list(shape)} came instead of [1, tokens, {row}]",
                code=ErrorCode.SHAPE_MISMATCH,
            )
        if envelope.dtype != session.wire:
            raise RequestRefusedError(
                f"an activation in {envelope.dtype} came; this session's are in {session.wire}",
                code=ErrorCode.SHAPE_MISMATCH,
            )
        return unpack(envelope, hidden_size=model.hidden_size, dtype=model.dtype)

    async def _pass_on(
        self,
        session: Session,
        message: TensorMessage,
        envelope: TensorEnvelope,
        result_BTD: torch.Tensor,
        nanos: int,
    ) -> None:
        """Send a result, which took `nanos`, to the successor, or as the answer to the coordinator."""
        start, stop = session.start, session.stop
        index = session.place.index if session.place is not None else 0
        # Who is before this worker and tells nothing makes the rest worth nothing.
        is_told = len(envelope.stage_nanos) == index
        if session.place is not None and session.successor is not None:
            start, stop = session.place.route.layers_of(session.place.index + 1)
        passed_on = TensorMessage(
            msg_type=MessageType.ACTIVATION if session.successor else MessageType.RESPONSE,
            layer_id=message.layer_id,
            seq_id=message.seq_id,
            request_id=message.request_id,
            envelope=pack(
                result_BTD,
                session_id=session.session_id,
                start=start,
                stop=stop,
                position=envelope.position,
                wire=session.wire,
                stage_nanos=(*envelope.stage_nanos, nanos) if is_told else (),
            ),
        )
        if session.successor is None:
            await self._state.protocol.send(session.owner, passed_on)
        else:
            assert session.place is not None
            await self._links.hand_on(session.place, passed_on)
            session.handed_on = message.request_id

    async def _tell_owner(
        self, session: Session, request_id: int, error: RequestRefusedError
    ) -> None:
        """Refuse an activation to the coordinator that waits for what becomes of it, if it still does."""
        asked = TensorMessage(
            msg_type=MessageType.ACTIVATION, request_id=request_id, from_peer=session.owner
        )
        try:
            await self._state.protocol.refuse(asked, error)
        except NeuroGridError as exc:
            logger.debug("could not tell %s of it: %s", session.owner, exc)

    async def _compute_v10(self, message: TensorMessage) -> bytes:
        """1.0.0: FP16, exactly the layer that the header names, position in SeqID."""
        model = self._state.require_coordinator(message.from_peer)
        layer_id, position = message.layer_id, message.seq_id
        if layer_id not in model.held:
            raise RequestRefusedError(
                f"layer {layer_id} was asked for, and is not held here",
                code=ErrorCode.LAYER_NOT_HELD,
            )
        num_tokens, rest = divmod(len(message.data), model.hidden_size * torch.float16.itemsize)
        if rest or not num_tokens:
            raise RequestRefusedError(
                f"an activation of {len(message.data)} B is no FP16 [1, tokens, {model.hidden_size}]",
                code=ErrorCode.SHAPE_MISMATCH,
            )
        key = (sender_of(message), layer_id)
        session = self._v10_caches.get(key)
        if position == 0 or session is None or session.model is not model:
            self._require_room_v10(model, key)
            session = Session(
                session_id=0,
                owner=key[0],
                model=model,
                start=layer_id,
                stop=layer_id + 1,
                max_length=self._state.settings.max_seq_len,
                cache=model.new_cache(),
            )
            self._v10_caches[key] = session
        hidden_BTD = tensor_from_bytes(
            message.data, torch.float16, (1, num_tokens, model.hidden_size)
        )
        result_BTD = await self._extend(session, position, hidden_BTD)
        return bytes(tensor_to_bytes(result_BTD.to(torch.float16)))

    def _require_room_v10(self, model: ServedModel, key: tuple[str, int]) -> None:
        """Check that one more layer's cache fits beside the weights and the other caches."""
        caches = {layer_id for peer_id, layer_id in self._v10_caches if (peer_id, layer_id) != key}
        max_length = self._state.settings.max_seq_len
        needed = model.held_bytes + sum(
            model.cache_bytes(layer_id, layer_id + 1, max_length) for layer_id in (*caches, key[1])
        )
        available = self._state.memory().free_bytes
        if needed > available:
            raise RequestRefusedError(
                f"no room for a cache of {max_length} tokens for layer {key[1]}: {needed:,} B needed "
                f"in all, {available:,} B available",
                code=ErrorCode.OUT_OF_MEMORY,
            )

    async def _extend(
        self, session: Session, position: int, hidden_BTD: torch.Tensor
    ) -> torch.Tensor:
        """Run the session's layers on new tokens, which must continue it."""
        num_tokens = hidden_BTD.shape[1]
        try:
            session.lock.acquire_nowait()  # `async with` would give way to others first, in vain
        except trio.WouldBlock:
            await session.lock.acquire()
        try:
            if position != session.length:
                raise RequestRefusedError(
                    f"an activation for position {position} came to a session of "
                    f"{session.length} tokens",
                    code=ErrorCode.POSITION_MISMATCH,
                )
            if position + num_tokens > session.max_length:
                raise RequestRefusedError(
                    f"{position + num_tokens} tokens are more than the {session.max_length} "
                    "that were agreed",
                    code=ErrorCode.LIMIT_EXCEEDED,
                )
            if not await self._is_finite(hidden_BTD):
                raise RequestRefusedError(
                    f"{session.origin} gave NaN or infinity", code=ErrorCode.NOT_FINITE
                )
            step = Step(
                session.model, session.start, session.stop, position, hidden_BTD, session.cache
            )
            self._burst.came(id(session.cache))
            with stage_span(step, session.session_id):
                result_BTD = await self._steps.submit(step)
            if result_BTD is None:
                raise RequestRefusedError(
                    f"session {session.session_id} ended before its turn came",
                    code=ErrorCode.SESSION_UNKNOWN,
                )
            session.length += num_tokens
            session.last_used = trio.current_time()
        finally:
            session.lock.release()
        return result_BTD

    async def _is_finite(self, hidden_BTD: torch.Tensor) -> bool:
        """Look at a token here, which takes some microseconds, and at more of them where torch runs."""
        if hidden_BTD.shape[1] == 1:
            return is_finite(hidden_BTD)
        return await self._state.run_torch(is_finite, hidden_BTD)
