"""The sessions of a worker: opened, closed, and over when nobody uses them any more.

What extends them is in `activations`, the order in which that is computed in `step_queue`. A session may
begin with what another one has in its caches.

Source: protocol_spec/sessions.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import trio

from neurogrid.errors import RemoteProtocolError, RequestRefusedError, TransportError
from neurogrid.inference.sessions.activations import WorkerActivations
from neurogrid.inference.sessions.load import WorkerLoad, worker_load
from neurogrid.inference.sessions.step_queue import WorkerSteps
from neurogrid.inference.sessions.table import Session, SessionTable
from neurogrid.model.adapters import Adapter
from neurogrid.model.files.tensors import dtype_name
from neurogrid.model.images.places import ImagePlaces, ImageWay
from neurogrid.p2p.exchange.routes import Place, place_in
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.wire import (
    ErrorCode,
    GPUInfo,
    LayerIds,
    MessageType,
    SessionAck,
    SessionClose,
    SessionOpen,
    SessionQuery,
    TensorMessage,
    decode_image_spans,
)
from neurogrid.planner import name_range
from neurogrid.worker.adapters import WorkerAdapters
from neurogrid.worker.held_model import HeldModel
from neurogrid.worker.links import WorkerLinks
from neurogrid.worker.prefixes import PrefixIdentity
from neurogrid.worker.state import WorkerState, name_layers
from neurogrid.worker.tenant import Assignment, Tenant
from neurogrid.worker.transfers import TransferService

__all__ = ["SessionService"]

logger = logging.getLogger(__name__)

# Seconds between looks at sessions that may be over, and at those that are to be gone before this worker ends.
EXPIRY_INTERVAL, DRAIN_INTERVAL = 5.0, 0.05


class SessionService:
    """The handlers of sessions. `register` puts them, and that of activations, on the worker's protocol.

    Attributes:
        steps: the queue before the torch thread.
        activations: what extends the sessions.
        statistics: of what was computed.
    """

    def __init__(
        self,
        state: WorkerState,
        links: WorkerLinks,
        transfers: TransferService,
        *,
        device_name: str,
    ) -> None:
        self._state = state
        self._links = links
        self._device_name = device_name
        self._is_leaving = False
        self.steps = WorkerSteps(state)
        self._sessions = SessionTable(on_drop=self.steps.withdraw)
        self._transfers = transfers
        self._adapters: dict[str, WorkerAdapters] = {}
        self.activations = WorkerActivations(state, links, self._sessions, self.steps)
        self.statistics = self.steps.statistics

    def register(self) -> None:
        """Serve the messages of this service on the worker's protocol."""
        protocol = self._state.protocol
        protocol.on_message(MessageType.GPU_INFO_REQUEST, self._on_gpu_info_request)
        protocol.on_message(MessageType.SESSION_OPEN, self._on_open)
        protocol.on_message(MessageType.SESSION_CLOSE, self._on_close)
        protocol.on_message(MessageType.SESSION_QUERY, self._on_query)
        protocol.on_message(MessageType.ACTIVATION, self.activations.serve)

    @property
    def load(self) -> WorkerLoad:
        """The load that has been taken on."""
        return worker_load(self._state, self._sessions, num_waiting=self.steps.num_waiting)

    def num_sessions(self, owner: str) -> int:
        """Sessions that a tenant has open."""
        return len(self._sessions.of_owner(owner))

    async def drain(self) -> None:
        """Open no session any more, say so to the tenants, and wait until they have taken the open ones elsewhere."""
        self._is_leaving = True
        none_left = TensorMessage(msg_type=MessageType.LAYER_STATUS, data=LayerIds(()).encode())
        told = [s for s in self._state.tenants if self._sessions.of_owner(s)]
        for owner in told:
            with suppress(TransportError):  # it is gone, and its sessions go with it
                await self._state.protocol.send(owner, none_left)
        while any(self._sessions.of_owner(owner) for owner in told):
            await trio.sleep(DRAIN_INTERVAL)

    def forget(self, peer_id: str) -> None:
        """Drop the sessions of a peer, and their caches."""
        self._sessions.forget(peer_id)
        adapters = self._adapters.pop(peer_id, None)
        if adapters is not None:
            adapters.clear()

    def forget_sessions(self, owner: str) -> None:
        """Drop all sessions of a tenant: their layers are being replaced."""
        self._sessions.forget(owner)
        if owner in self._adapters:
            self._adapters[owner].clear()

    def caches_in_use(self, owner: str) -> int:
        """Bytes of the caches of a tenant's sessions, by the tokens that are in them."""
        return sum(
            s.model.cache_bytes(s.start, s.stop, s.length) for s in self._sessions.of_owner(owner)
        )

    async def announce_memory(self, owner: str) -> None:
        """Tell a tenant what memory there is for it now."""
        info = self._gpu_info(owner)
        with suppress(TransportError):  # it is gone, and need not know
            await self._state.protocol.send(
                owner, TensorMessage(msg_type=MessageType.GPU_INFO, data=info.encode())
            )

    async def expire(self) -> None:
        """Drop the sessions that nobody has used or may use any more; runs as long as the worker."""
        while True:
            await trio.sleep(EXPIRY_INTERVAL)
            for session, reason in self._sessions.expired(idle=self._state.settings.session_ttl):
                logger.warning(
                    "closed session %d of %s: %s", session.session_id, session.owner, reason
                )
                self._sessions.drop(session)

    async def _on_gpu_info_request(self, message: TensorMessage) -> None:
        info = self._gpu_info(sender_of(message))
        await self._state.answer(message, MessageType.GPU_INFO, info.encode())

    def _gpu_info(self, peer_id: str) -> GPUInfo:
        memory = self._state.memory_for(peer_id)
        return GPUInfo(
            total_bytes=memory.total_bytes, used_bytes=memory.used_bytes, name=self._device_name
        )

    async def _on_open(self, message: TensorMessage) -> None:
        state = self._state
        opened = SessionOpen.decode(message.data)
        tenant, model = state.require_tenant(message.from_peer)
        if self._is_leaving:
            raise RequestRefusedError("this worker is about to end", code=ErrorCode.SHUTTING_DOWN)
        assignment = self._require_ready(tenant, opened)
        adapter = None
        if opened.adapter:
            adapter = await self._adapters_of(tenant.owner).take(model, opened)
            assignment = self._require_ready(tenant, opened)
        if not 0 < opened.max_length <= assignment.max_length:
            raise RequestRefusedError(
                f"a session of {opened.max_length} tokens was asked for, and "
                f"{assignment.max_length} were agreed",
                code=ErrorCode.LIMIT_EXCEEDED,
            )
        prior = self._prior(opened, sender_of(message), adapter)
        if prior is None:
            session = self._add(opened, tenant, model, None, adapter)
            if opened.stored:
                async with session.turn:
                    await self._begin_with_stored(session, opened)
        else:
            # After what came for it before this.
            async with prior.turn:
                self._require_tokens(prior, opened.prior_length)
                session = self._add(opened, tenant, model, prior, adapter)
                await self._begin_with(session, prior, opened)
        with self._dropped_on_error(session):
            await self._links.prepare(session.place)
        # A peer that names no prior knows how long the session is.
        ack = SessionAck(
            opened.session_id,
            length=session.length if prior or opened.stored else None,
            adapter=adapter is not None,
            cuts=session.takes_cuts,
            images=session.images is not None,
        )
        await self._state.answer(message, MessageType.SESSION_ACK, ack.encode())

    def _adapters_of(self, owner: str) -> WorkerAdapters:
        def in_use() -> Iterator[Adapter]:
            return (s.adapter for s in self._sessions.of_owner(owner) if s.adapter is not None)

        if owner not in self._adapters:
            self._adapters[owner] = WorkerAdapters(self._state, self._transfers, owner, in_use)
        return self._adapters[owner]

    def _require_ready(self, tenant: Tenant, opened: SessionOpen) -> Assignment:
        """The assignment, with the layers of a session confirmed."""
        assignment = tenant.assignment
        missing = set(range(opened.start_layer, opened.stop_layer))
        if assignment is not None:
            missing -= assignment.confirmed
        if missing or assignment is None:
            reason = (
                ": it had nothing to compute for a while, and another coordinator has its memory; assign it again"
                if tenant.has_given_way
                else ""
            )
            raise RequestRefusedError(
                f"this worker is not ready for {name_layers(missing)}{reason}",
                code=ErrorCode.LAYER_NOT_HELD,
                is_expected=tenant.has_given_way,
            )
        return assignment

    def _add(
        self,
        opened: SessionOpen,
        tenant: Tenant,
        model: HeldModel,
        prior: Session | None,
        adapter: Adapter | None,
    ) -> Session:
        """Open a session, which has no tokens yet."""
        owner = tenant.owner
        if self._sessions.of(opened.session_id, owner) is not None:
            raise _open_already(opened)
        if self._sessions.was_open(opened.session_id, owner):
            # Each message is a task: the close that was sent after this, in vain, would never come again.
            raise RequestRefusedError(
                f"session {opened.session_id} was closed before it was open",
                code=ErrorCode.SESSION_UNKNOWN,
                is_expected=True,
            )
        # The prior may have been waited for: meanwhile the tenant may have given way.
        assignment = self._require_ready(tenant, opened)
        self._require_room(
            model,
            assignment,
            opened.max_length,
            others=[
                s for s in self._sessions.of_owner(owner) if s is not prior or opened.keep_prior
            ],
        )
        cache = model.stage.new_cache(max_length=opened.max_length)
        session = Session(
            session_id=opened.session_id,
            owner=owner,
            model=model,
            start=opened.start_layer,
            stop=opened.stop_layer,
            max_length=opened.max_length,
            cache=cache,
            place=self._place(opened, owner),
            wire=opened.wire or dtype_name(model.dtype),
            adapter=adapter,
            adapter_ids=opened.adapter,
            takes_cuts=opened.cuts and model.traits.rolls_back and cache.can_go_back,
            images=_images(opened, model),
        )
        if self._sessions.is_taken(session):
            # Of another coordinator: whoever hands on or gets activations of this id could not tell the two apart.
            raise _open_already(opened)
        cache.images = session.images
        self._sessions.add(session)
        self._state.room.used(owner, trio.current_time())
        return session

    @contextmanager
    def _dropped_on_error(self, session: Session) -> Iterator[None]:
        try:
            yield
        except BaseException:  # also where its opener was cancelled
            self._sessions.drop(session, was_opened=False)
            raise

    def _prior(self, opened: SessionOpen, owner: str, adapter: Adapter | None) -> Session | None:
        """The session whose tokens a new one begins with, if it names one: what they gave depends on its adapter."""
        if not opened.prior:
            return None
        prior = self._sessions.of(opened.prior, owner)
        layers = range(opened.start_layer, opened.stop_layer)
        is_alike = prior is not None and prior.adapter is adapter
        if prior is None or range(prior.start, prior.stop) != layers or not is_alike:
            raise RequestRefusedError(
                f"session {opened.prior} is not open over {name_range(layers)} with this adapter",
                code=ErrorCode.SESSION_UNKNOWN,
                is_expected=self._sessions.was_open(opened.prior, owner),
            )
        return prior

    def _require_tokens(self, prior: Session, length: int) -> None:
        """Check that another session can begin with so many tokens of this one."""
        if prior not in self._sessions:
            raise RequestRefusedError(
                f"session {prior.session_id} is over",
                code=ErrorCode.SESSION_UNKNOWN,
                is_expected=True,
            )
        shortest = prior.cache.shortest_cut(prior.length)
        if prior.cache.is_spoiled or not prior.cache.can_be_cut(length):
            raise RequestRefusedError(
                f"session {prior.session_id} has {prior.length} tokens, and no other can begin with {length} "
                f"of them: {'its computation failed' if prior.cache.is_spoiled else f'{shortest} at least'}",
                code=ErrorCode.POSITION_MISMATCH,
            )

    async def _begin_with(self, session: Session, prior: Session, opened: SessionOpen) -> None:
        """Give a session the first tokens of another one, or of a copy of it."""
        length = opened.prior_length
        with self._dropped_on_error(session):
            if opened.keep_prior:
                session.cache = await self._state.run_torch(prior.cache.copy, length)
            else:
                session.cache = prior.cache
                self._sessions.drop(prior, is_asked=True)
                if length < prior.length:
                    await self._state.run_torch(session.cache.cut, length)
        session.cache.allow(session.max_length)
        session.cache.images = session.images
        session.length = length

    async def _begin_with_stored(self, session: Session, opened: SessionOpen) -> None:
        """Give a session the first tokens of a prefix on disk."""
        length, cache = opened.prior_length, session.cache
        device = session.model.device
        with self._dropped_on_error(session):
            identity = self._identity(session, opened.stored)
            loaded = None
            if cache.can_go_back:
                loaded = await trio.to_thread.run_sync(self._state.prefixes.load, identity)
            if loaded is None:
                raise RequestRefusedError(
                    "there is no such prefix on this disk, for these layers",
                    code=ErrorCode.SESSION_UNKNOWN,
                    is_expected=True,
                )
            states, num_tokens = loaded

            def restore() -> None:
                there = {
                    layer_id: (keys.to(device), values.to(device))
                    for layer_id, (keys, values) in states.items()
                }
                with torch.inference_mode():
                    cache.restore(there, session.start, session.stop, num_tokens)
                    if length < num_tokens:
                        cache.cut(length)

            try:
                if length > num_tokens:
                    raise ValueError(f"it has {num_tokens} tokens")
                await self._state.run_torch(restore)
            except ValueError as exc:
                raise RequestRefusedError(
                    f"no session can begin with {length} tokens of this prefix: {exc}",
                    code=ErrorCode.POSITION_MISMATCH,
                ) from exc
        session.length = length

    def _identity(self, session: Session, name: bytes) -> PrefixIdentity:
        """Everything on which the numbers of a session depend, under a name for its tokens."""
        model, layers = session.model, range(session.start, session.stop)
        return PrefixIdentity(
            name=name,
            owner=session.owner,
            start=session.start,
            stop=session.stop,
            layers=tuple(model.held[layer_id].blob_id for layer_id in layers),
            form=f"{dtype_name(model.dtype)} {'I8' if session.cache.is_coded else ''}",
            adapter=session.adapter_ids,
        )

    async def _store(self, session: Session, name: bytes) -> bool:
        """Write what a session has to disk, after what came for it; False where that cannot be."""
        async with session.turn:
            cache, length = session.cache, session.length
            if (
                session not in self._sessions
                or cache.is_spoiled
                or not length
                or not cache.can_go_back
                or cache.length != length
            ):
                return False
            identity = self._identity(session, name)
            states = await self._state.run_torch(cache.states)
            return await trio.to_thread.run_sync(
                self._state.prefixes.store, identity, states, length
            )

    def _require_room(
        self,
        model: HeldModel,
        assignment: Assignment,
        max_length: int,
        *,
        others: Sequence[Session],
    ) -> None:
        """Check that a session fits in the memory that was agreed: short ones take less of it."""
        start, stop = assignment.start, assignment.stop
        agreed = assignment.max_sessions * model.cache_bytes(start, stop, assignment.max_length)
        taken = sum(model.cache_bytes(s.start, s.stop, s.max_length) for s in others)
        needed = model.cache_bytes(start, stop, max_length)
        num_open = len(others)
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
        closed, sender = SessionClose.decode(message.data), sender_of(message)
        is_stored = False
        if sender in self._state.tenants:
            session = self._sessions.of(closed.session_id, sender)
            if closed.store and session is not None:
                is_stored = await self._store(session, closed.store)
            self._sessions.close(closed.session_id, sender)
        ack = SessionAck(session_id=closed.session_id, stored=is_stored)
        await self._state.answer(message, MessageType.SESSION_ACK, ack.encode())

    async def _on_query(self, message: TensorMessage) -> None:
        query = SessionQuery.decode(message.data)
        sender = sender_of(message)
        session = self._sessions.of(query.session_id, sender)
        if session is None:
            raise RequestRefusedError(
                f"session {query.session_id} is not open",
                code=ErrorCode.SESSION_UNKNOWN,
                is_expected=self._sessions.was_open(query.session_id, sender),
            )
        ack = SessionAck(
            query.session_id, length=session.length, last_position=session.last_position
        )
        await self._state.answer(message, MessageType.SESSION_ACK, ack.encode())


def _open_already(opened: SessionOpen) -> RequestRefusedError:
    return RequestRefusedError(
        f"session {opened.session_id} is open already", code=ErrorCode.PROTOCOL_VIOLATION
    )


def _images(opened: SessionOpen, model: HeldModel) -> ImagePlaces | None:
    """Places of a session's images, if its peer says and the layers make something of that; else None."""
    way = model.stage.image_way
    if not opened.images or way is ImageWay.AS_TEXT:
        return None
    return ImagePlaces(decode_image_spans(opened.images, max_length=opened.max_length), way)
