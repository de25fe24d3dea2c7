"""A run of stages whose workers hand on to each other, and what went wrong in it, seen from the coordinator.

One activation goes to the first worker, one response comes from the last; an Error may come from any. Whatever
ends a step other than a response becomes a `NoRouteError` that names layers and peer, also where the one that
complains is not the one that is lost.

T = tokens, D = hidden size.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
import trio

from neurogrid.errors import (
    ModelError,
    NeuroGridError,
    NoRouteError,
    PeerRefusedError,
    RemoteProtocolError,
    ResponseTimeout,
    StreamBrokenError,
    TransportError,
)
from neurogrid.inference.pipeline.pipeline_stage import PipelineStage
from neurogrid.inference.pipeline.slow_watch import SlowWatch
from neurogrid.model.files.tensors import is_finite
from neurogrid.node.hidden_states import check_answer, pack, unpack
from neurogrid.p2p.exchange.exchange import Exchange, new_request_id
from neurogrid.p2p.wire import ErrorCode, MessageType, TensorEnvelope, TensorMessage

__all__ = ["AskedAlone", "Chain", "Observe"]

Observe: TypeAlias = Callable[[int, torch.Tensor], Callable[[torch.Tensor], None]]
"""Observer of steps: it is told of one that goes out, and gives what is told of its outcome."""

# Seconds for an answer to a question that costs nothing: a worker that does not give it is taken for lost.
PROBE_TIMEOUT = 5.0


def _nothing() -> None:
    """Do nothing, where it does not matter when something was sent."""


class AskedAlone(ABC):
    """A worker that is asked for its stage in a way of its own, and so is never in a chain with others."""

    @abstractmethod
    async def forward(
        self,
        session_id: int,
        hidden_BTD: torch.Tensor,
        *,
        start: int,
        stop: int,
        position: int,
        batch: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, int | None]:
        """Send [1, T, D] through layers [start, stop) of the session; `batch` as in `Chain.forward`.

        Returns:
            [1, T, D], and the nanoseconds that it took there; None from one that does not tell.
        """


class Chain:
    """Stages of one session that activations go through without coming back in between.

    Args:
        protocol: the coordinator's.
        stages: in order; one whose worker is `AskedAlone` is alone.
        wire: in what activations travel; empty for what the stages compute in.
        watch: gives up a step whose stages take far longer than before; None for no such watch.

    Attributes:
        observe: called with position and hidden state of each step, in the order in which they go out; what it returns
            is called with what comes of the step, if that comes. None for nobody.
    """

    def __init__(
        self,
        protocol: Exchange,
        stages: Sequence[PipelineStage],
        *,
        wire: str = "",
        watch: SlowWatch | None = None,
    ) -> None:
        self.wire = wire
        self.observe: Observe | None = None
        self._watch = watch
        self.stages = tuple(stages)
        self._protocol = protocol
        self._peer_ids = tuple(item.peer_id for item in stages)
        # Each stage has its time, in the worst case.
        self._timeout = sum(item.worker.timeouts.step for item in stages)

    async def forward(
        self,
        session_id: int,
        hidden_BTD: torch.Tensor,
        *,
        position: int,
        batch: tuple[int, ...] = (),
        on_sent: Callable[[], None] = _nothing,
    ) -> torch.Tensor:
        """Extend the session by [1, T, D]; returns what leaves the last of the stages, [1, T, D].

        Args:
            batch: number and size of the batch that it goes with; empty for none.
            on_sent: called when what follows these tokens may be sent, too. One stage alone has nothing else to do
                meanwhile: there it is not called.

        Raises:
            NoRouteError: it did not come, or not while it was worth waiting for, or holds NaN or infinity; names
                layers and peer.
            ModelError: what went in holds NaN or infinity.
        """
        on_sent = on_sent if len(self.stages) > 1 else _nothing
        came = self.observe(position, hidden_BTD) if self.observe is not None else None
        step = self._step(session_id, hidden_BTD, position, batch, on_sent)
        if self._watch is None:
            result_BTD = await step
        else:
            with self._watch.step(self.stages, session_id, position, hidden_BTD.shape[1]):
                result_BTD = await step
        if not is_finite(result_BTD):
            last = self.stages[-1]
            raise last.lost(ModelError("its answer holds NaN or infinity"))
        if came is not None:
            came(result_BTD)
        return result_BTD

    async def _step(
        self,
        session_id: int,
        hidden_BTD: torch.Tensor,
        position: int,
        batch: tuple[int, ...],
        on_sent: Callable[[], None],
    ) -> torch.Tensor:
        first, num_tokens = self.stages[0], hidden_BTD.shape[1]
        started = time.perf_counter()
        if isinstance(first.worker, AskedAlone):
            start, stop = first.stage.start, first.stage.stop
            try:
                result_BTD, one_nanos = await first.worker.forward(
                    session_id, hidden_BTD, start=start, stop=stop, position=position, batch=batch
                )
            except (TransportError, PeerRefusedError, RemoteProtocolError) as exc:
                raise await self._blame(0, exc) from exc
            nanos: Sequence[int] = () if one_nanos is None else (one_nanos,)
        else:
            answer = await self._ask(session_id, hidden_BTD, position, batch, on_sent)
            nanos = answer.stage_nanos
            result_BTD = unpack(answer, hidden_size=hidden_BTD.shape[2], dtype=hidden_BTD.dtype)
        computed = [n / 1e9 for n in nanos]
        if len(self.stages) == 1:  # with the way there and back
            seconds = time.perf_counter() - started
            its = computed[0] if len(computed) == 1 else None
            first.times.observe(num_tokens, _num_layers(first), seconds, computed=its)
        elif len(computed) == len(self.stages):  # all have told
            for item, seconds in zip(self.stages, computed, strict=True):
                item.times.observe(num_tokens, _num_layers(item), seconds, computed=seconds)
        return result_BTD

    async def _ask(
        self,
        session_id: int,
        hidden_BTD: torch.Tensor,
        position: int,
        batch: tuple[int, ...],
        on_sent: Callable[[], None],
    ) -> TensorEnvelope:
        first, last = self.stages[0], self.stages[-1]
        self._require_streams()
        asked = pack(
            hidden_BTD,
            session_id=session_id,
            start=first.stage.start,
            stop=first.stage.stop,
            position=position,
            wire=self.wire,
            batch=batch,
        )
        message = TensorMessage(
            msg_type=MessageType.ACTIVATION, request_id=new_request_id(), envelope=asked
        )
        with self._protocol.expect_through(
            self._peer_ids, MessageType.RESPONSE, request_id=message.request_id
        ) as waiter:
            try:
                reply = await waiter.send_and_wait(
                    partial(self._send_first, message, on_sent),
                    send_nowait=partial(self._send_first_nowait, message, on_sent),
                    timeout=self._timeout,
                )
                return check_answer(
                    reply.envelope,
                    asked,
                    start=last.stage.start,
                    stop=last.stage.stop,
                    peer_id=last.peer_id,
                )
            except _NotSentError as exc:
                raise first.lost(exc.reason) from exc.reason
            except ResponseTimeout as exc:
                raise await self._out_of_time(exc) from exc
            except (TransportError, PeerRefusedError, RemoteProtocolError) as exc:
                index = self._peer_ids.index(waiter.ended_by)
                raise await self._blame(index, exc) from exc

    async def _send_first(self, message: TensorMessage, on_sent: Callable[[], None]) -> None:
        try:
            await self._protocol.send(self._peer_ids[0], message)
        except NeuroGridError as exc:
            raise _NotSentError(exc) from exc
        on_sent()

    def _send_first_nowait(self, message: TensorMessage, on_sent: Callable[[], None]) -> bool:
        try:
            is_sent = self._protocol.send_nowait(self._peer_ids[0], message)
        except NeuroGridError as exc:
            raise _NotSentError(exc) from exc
        if is_sent:
            on_sent()
        return is_sent

    def _require_streams(self) -> None:
        """Check that no worker was lost since the last step, when nobody waited for it.

        Raises:
            NoRouteError: one was.
        """
        for item in self.stages:
            if self._protocol.hello_of(item.peer_id) is None:
                raise item.lost(StreamBrokenError(f"there is no stream to {item.peer_id}"))

    async def _blame(self, index: int, exc: NeuroGridError) -> NeuroGridError:
        """Make the error that blames the right stage for what stage `index` said, or for its silence."""
        item = self.stages[index]
        code = exc.code if isinstance(exc, PeerRefusedError) else None
        if code == ErrorCode.PEER_UNREACHABLE and index + 1 < len(self.stages):
            successor = self.stages[index + 1]
            silence = await self._probe(successor)
            return successor.cut_off(item, exc) if silence is None else successor.lost(silence)
        if code == ErrorCode.NOT_FINITE:
            if index:
                return self.stages[index - 1].lost(exc)
            return ModelError(f"NaN or infinity went into {item.name}: the embedding is at fault")
        return item.lost(exc)

    async def _out_of_time(self, exc: ResponseTimeout) -> NoRouteError:
        """Ask all stages, of which none said anything, and name those that go on saying nothing."""
        if len(self.stages) == 1:
            return self.stages[0].lost(exc)
        silent: dict[int, NeuroGridError] = {}

        async def ask(index: int) -> None:
            exc = await self._probe(self.stages[index])
            if exc is not None:
                silent[index] = exc

        async with trio.open_nursery() as nursery:
            for index in range(len(self.stages)):
                nursery.start_soon(ask, index)
        if silent:
            index = min(silent)
            return self.stages[index].lost(silent[index])
        names = ", ".join(item.name for item in self.stages)
        return NoRouteError(
            f"no answer within {self._timeout:g} s from the chain of {names}, who are all there",
            layers=range(self.stages[0].stage.start, self.stages[-1].stage.stop),
        )

    async def _probe(self, item: PipelineStage) -> NeuroGridError | None:
        """Probe a worker: return the error if it does not answer, None if it does."""
        try:
            await item.worker.held_layers(timeout=PROBE_TIMEOUT)
        except (TransportError, RemoteProtocolError) as exc:
            return exc
        except PeerRefusedError:
            return None
        return None


def _num_layers(item: PipelineStage) -> int:
    return item.stage.stop - item.stage.start


class _NotSentError(NeuroGridError):
    """The activation did not get out of the coordinator."""

    def __init__(self, reason: NeuroGridError) -> None:
        super().__init__(str(reason))
        self.reason = reason
