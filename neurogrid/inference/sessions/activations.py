"""The activations that come to a worker: checked, computed, and their results handed on.

Where a session has a route, its activations come from the worker before this one, and the results go to the next
(`worker.links`). An error goes to the peer that waits for the result, which may be another than the sender.

Source: protocol_spec/sessions.md, "Activations" and "Routes".

T = tokens, D = hidden size.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch
import trio

from neurogrid.errors import NeuroGridError, RequestRefusedError, TransportError
from neurogrid.inference.sessions.step_queue import Extension, WorkerSteps
from neurogrid.inference.sessions.table import Session, SessionTable
from neurogrid.node.hidden_states import pack, unpack, width
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.wire import (
    MAX_LAYERS,
    ErrorCode,
    MessageType,
    TensorEnvelope,
    TensorMessage,
    encode_envelope_parts,
)
from neurogrid.p2p.wire.limits import MAX_MAP_BYTES
from neurogrid.p2p.wire.maps import MAX_U64
from neurogrid.planner import name_range
from neurogrid.worker.links import WorkerLinks
from neurogrid.worker.state import WorkerState

__all__ = ["WorkerActivations"]

logger = logging.getLogger(__name__)


class WorkerActivations:
    """Serves activations for the sessions of a table."""

    def __init__(
        self,
        state: WorkerState,
        links: WorkerLinks,
        sessions: SessionTable,
        steps: WorkerSteps,
    ) -> None:
        self._state = state
        self._links = links
        self._sessions = sessions
        self._steps = steps

    async def extend(
        self,
        session_id: int,
        owner: str,
        hidden_BTD: torch.Tensor,
        *,
        position: int,
        batch: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, int]:
        """Extend a session of a coordinator in this process, which need not send what it has in memory.

        Args:
            batch: number and size of the batch that it goes with; empty for none.

        Returns:
            the result, and the nanoseconds that it took.

        Raises:
            RequestRefusedError: as an activation would be.
        """
        # Where all layers are here, nothing else in a generation may have to wait for anything.
        await trio.lowlevel.checkpoint()
        session = self._sessions.of(session_id, owner)
        if session is None:
            raise RequestRefusedError(
                f"session {session_id} is not open", code=ErrorCode.SESSION_UNKNOWN
            )
        came = time.perf_counter_ns()
        done = await self._extend(session, position, hidden_BTD, batch)
        return done.hidden, _nanos_since(came, done)

    async def _extend(
        self, session: Session, position: int, hidden_BTD: torch.Tensor, batch: tuple[int, ...]
    ) -> Extension:
        """Compute a step, while whose tenant gives its memory to nobody."""
        room = self._state.room
        promise = room.begin(session.owner)
        try:
            return await self._steps.extend(session, position, hidden_BTD, batch)
        finally:
            room.end(promise, trio.current_time())

    async def serve(self, message: TensorMessage) -> None:
        """The handler of activations."""
        came = time.perf_counter_ns()
        assert message.envelope is not None, "a tensor of 1.1.0 has one"
        session = self._session_of(message, message.envelope)
        if session is None:
            await self._tell_of_end(message, message.envelope)
            return
        try:
            hidden_BTD = self._check(session, message.envelope)
            self._require_taken(session, message.envelope)
            position, batch = message.envelope.position, message.envelope.batch
            done = await self._extend(session, position, hidden_BTD, batch)
            # Without a route somebody waits for just this, though the session be over.
            if session.place is None or session in self._sessions:
                result = _result(session, message, message.envelope, done, _nanos_since(came, done))
                # As nearly always: without a lock and a deadline, which would cost more than the sending does.
                if session.passing.locked() or not self._pass_on_nowait(session, result):
                    async with session.passing:
                        await self._pass_on(session, result)
                if hidden_BTD.shape[1] == 1:  # it decodes
                    await self._steps.prepare(session)
        except RequestRefusedError as exc:
            if session.place is not None and session not in self._sessions:
                return
            if session.source == session.owner:
                raise
            logger.warning("refused an activation of %s: %s", session.source, exc)
            await self._tell_owner(session.owner, message.request_id, exc)
        except TransportError as exc:
            if session.source == session.owner:
                raise
            logger.debug("%s is gone: %s", session.owner, exc)
        except Exception:
            # A bug, or the device. The Error that would be sent goes to the predecessor, which can do nothing with it.
            if session.source == session.owner:
                raise
            logger.exception("an activation of %s failed", session.source)
            error = RequestRefusedError("internal error", code=ErrorCode.COMPUTE_FAILED)
            await self._tell_owner(session.owner, message.request_id, error)

    async def link_lost(self, peer_id: str, reason: NeuroGridError) -> None:
        """The stream to a peer ended: tell the coordinators whose activations may be lost in it."""
        for session in self._sessions:
            if session.successor == peer_id and session.handed_on:
                error = self._links.unreachable(peer_id, reason)
                await self._tell_owner(session.owner, session.handed_on, error)
        # A peer that has taken its last activation waits for the next, which should not have to wait for a dial.
        place = next((s.place for s in self._sessions if s.successor == peer_id), None)
        try:
            await self._links.prepare(place)
        except RequestRefusedError as exc:
            logger.debug("%s", exc)

    def _session_of(self, message: TensorMessage, envelope: TensorEnvelope) -> Session | None:
        """The session that an activation extends; None where it comes too late for one that was closed.

        A coordinator is told also then, since it may wait for what comes of it; a client that has left it in the
        middle of a step is no reason to warn anybody.
        """
        sender = sender_of(message)
        session = self._sessions.find(envelope.session_id, sender)
        if session is not None:
            return session
        if self._sessions.was_closed(envelope.session_id, sender):
            return None
        self._state.require_tenant(sender)
        is_expected = self._sessions.was_open(envelope.session_id, sender)
        raise _not_open(envelope, is_expected=is_expected)

    def _check(self, session: Session, envelope: TensorEnvelope) -> torch.Tensor:
        model = session.model
        if (envelope.start_layer, envelope.stop_layer) != (session.start, session.stop):
            asked = range(envelope.start_layer, envelope.stop_layer)
            raise RequestRefusedError(
                f"a session over {name_range(range(session.start, session.stop))} was asked for {name_range(asked)}",
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

    def _require_taken(self, session: Session, envelope: TensorEnvelope) -> None:
        """Check that the receiver of the result accepts as much, before it is computed: then it would be lost.

        Raises:
            RequestRefusedError: it does not (LIMIT_EXCEEDED).
        """
        receiver = session.successor or session.owner
        hello = self._state.protocol.hello_of(receiver)
        # The result has the same shape and element type.
        num_bytes = memoryview(envelope.data).nbytes
        if hello is None or num_bytes + MAX_MAP_BYTES < hello.max_data:
            return
        head, _ = encode_envelope_parts(
            replace(
                envelope,
                start_layer=MAX_LAYERS - 1,
                stop_layer=MAX_LAYERS,
                stage_nanos=(MAX_U64,) * (len(envelope.stage_nanos) + 1),
            )
        )
        if len(head) + num_bytes > hello.max_data:
            raise RequestRefusedError(
                f"what comes of this activation has up to {len(head) + num_bytes} B, and {receiver} accepts "
                f"{hello.max_data} B in one message: send fewer tokens at once",
                code=ErrorCode.LIMIT_EXCEEDED,
            )

    def _pass_on_nowait(self, session: Session, result: TensorMessage) -> bool:
        """As `_pass_on`, if nothing has to be waited for; else False, and nothing is sent."""
        successor = session.successor
        if successor is None:
            return self._state.protocol.send_nowait(session.owner, result)
        try:
            is_sent = self._state.protocol.send_nowait(successor, result)
        except NeuroGridError as exc:
            raise self._links.unreachable(successor, exc) from exc
        if is_sent:
            session.handed_on = result.request_id
        return is_sent

    async def _pass_on(self, session: Session, result: TensorMessage) -> None:
        """Send a result to the successor, or as the answer to the coordinator."""
        if session.place is None or session.place.successor is None:
            await self._state.protocol.send(session.owner, result)
        else:
            await self._links.hand_on(session.place, result)
            session.handed_on = result.request_id

    async def _tell_owner(self, owner: str, request_id: int, error: RequestRefusedError) -> None:
        """Refuse an activation to the coordinator that waits for what becomes of it, if it still does."""
        asked = TensorMessage(
            msg_type=MessageType.ACTIVATION, request_id=request_id, from_peer=owner
        )
        try:
            await self._state.protocol.refuse(asked, error)
        except NeuroGridError as exc:
            logger.debug("could not tell %s of it: %s", owner, exc)

    async def _tell_of_end(self, message: TensorMessage, envelope: TensorEnvelope) -> None:
        """Tell a coordinator of an activation that came too late for a session which it has not closed."""
        owner = self._sessions.untold_owner(envelope.session_id, sender_of(message))
        if owner is not None:
            await self._tell_owner(owner, message.request_id, _not_open(envelope, is_expected=True))


def _not_open(envelope: TensorEnvelope, *, is_expected: bool) -> RequestRefusedError:
    return RequestRefusedError(
        f"session {envelope.session_id} is not open",
        code=ErrorCode.SESSION_UNKNOWN,
        is_expected=is_expected,
    )


def _result(
    session: Session,
    message: TensorMessage,
    envelope: TensorEnvelope,
    done: Extension,
    nanos: int,
) -> TensorMessage:
    """The message that passes on what came of `message`, which took `nanos`."""
    place, start, stop = session.place, session.start, session.stop
    msg_type = MessageType.RESPONSE
    batch: tuple[int, ...] = ()
    if place is not None and place.successor is not None:
        msg_type, batch = MessageType.ACTIVATION, done.batch
        start, stop = place.route.layers_of(place.index + 1)
    # One worker before this one that tells nothing makes the rest worth nothing.
    is_told = len(envelope.stage_nanos) == (place.index if place is not None else 0)
    return TensorMessage(
        msg_type=msg_type,
        layer_id=message.layer_id,
        seq_id=message.seq_id,
        request_id=message.request_id,
        envelope=pack(
            done.hidden,
            session_id=session.session_id,
            start=start,
            stop=stop,
            position=envelope.position,
            wire=session.wire,
            stage_nanos=(*envelope.stage_nanos, nanos) if is_told else (),
            batch=batch,
        ),
    )


def _nanos_since(came: int, done: Extension) -> int:
    """Nanoseconds of a step since it came, but for the turns of others."""
    return max(time.perf_counter_ns() - came - int(done.seconds_waited * 1e9), 0)
