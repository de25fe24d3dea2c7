"""States for newcomers: a member shows the buffers that it has, and one that has joined fetches them from several.

A state is some vectors and a note, and the same for all members after the same round. Its buffers are served where they
lie: whoever writes to them takes them back first.

Source: protocol_spec/training/groups.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import trio
from blake3 import blake3
from torch import Tensor

from neurogrid.errors import ConfigurationError, NeuroGridError, RequestRefusedError
from neurogrid.p2p.exchange.exchange import Exchange, new_request_id
from neurogrid.p2p.wire import ErrorCode, TensorMessage
from neurogrid.training.averaging.reductions import Reductions, Result, result_digest
from neurogrid.training.wire import (
    MAX_NOTE_BYTES,
    MAX_STATE_VECTORS,
    StateInfo,
    TrainingMessage,
)

__all__ = ["State", "States"]

logger = logging.getLogger(__name__)

_CHUNK_ELEMENTS: Final = 262_144
_CODEC: Final = "f32"


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """What all members have after a round.

    Attributes:
        round: the last round that is in it; 0 for none.
        vectors: float32 [n] each.
        note: bytes that mean something to the program.
    """

    round: int
    vectors: tuple[Tensor, ...]
    note: bytes = b""


class States:
    """The state that this member shows, and those of others.

    Args:
        is_of_group: whether a peer may be told.
    """

    def __init__(
        self, exchange: Exchange, reductions: Reductions, *, is_of_group: Callable[[str], bool]
    ) -> None:
        self._exchange, self._reductions = exchange, reductions
        self._is_of_group = is_of_group
        self._shown: State | None = None
        self._results: tuple[Result, ...] = ()
        self._hashing = trio.Lock()
        exchange.on_message(TrainingMessage.STATE, self._tell)

    def show(self, state: State) -> None:
        """Give this state to newcomers from now on, until it is taken back.

        Raises:
            ConfigurationError: it has too many vectors, or too long a note.
        """
        if len(state.vectors) > MAX_STATE_VECTORS or len(state.note) > MAX_NOTE_BYTES:
            raise ConfigurationError(
                f"a state has at most {MAX_STATE_VECTORS} vectors and {MAX_NOTE_BYTES} bytes besides"
            )
        self.take_back()
        self._shown = state

    def take_back(self) -> None:
        """Its buffers are going to be written to: whoever was fetching them begins again with the next."""
        self._shown = None
        for result in self._results:
            self._reductions.release(result.digest)
        self._results = ()

    async def _tell(self, message: TensorMessage) -> None:
        peer_id = message.from_peer or ""
        if not self._is_of_group(peer_id):
            raise RequestRefusedError("this peer is no member", code=ErrorCode.UNAUTHORIZED)
        state = self._shown
        async with self._hashing:
            if state is not None and state is self._shown and not self._results:
                results = await trio.to_thread.run_sync(_as_results, state)
                if state is self._shown:
                    self._results = results
                    for result in results:
                        self._reductions.hold(result)
        if state is None or state is not self._shown:
            raise RequestRefusedError(
                "this member has no state to give at the moment",
                code=ErrorCode.BUSY,
                retry_after=0.5,
                is_expected=True,
            )
        answer = StateInfo(
            round=state.round,
            digests=tuple(result.digest for result in self._results),
            sizes=tuple(len(result.values) for result in self._results),
            chunk_elements=_CHUNK_ELEMENTS,
            note=state.note,
        )
        await self._exchange.send(
            peer_id,
            TensorMessage(
                TrainingMessage.STATE_INFO, request_id=message.request_id, data=answer.encode()
            ),
        )

    async def fetch(
        self, peer_ids: Sequence[str], sizes: Sequence[int], *, oldest: int, timeout: float
    ) -> State | None:
        """The state of the others, from all that have the same; None where nobody has one for now.

        Args:
            peer_ids: members that may have it.
            sizes: float32 elements of its vectors, as this program has them.
            oldest: the first round that will do.
            timeout: seconds for the vectors.

        Raises:
            ConfigurationError: the others' state has other vectors.
        """
        told = await self._ask(peer_ids)
        told = {peer: info for peer, info in told.items() if info.round >= oldest}
        if not told:
            return None
        latest = max(told.values(), key=lambda info: info.round)
        if list(latest.sizes) != list(sizes):
            raise ConfigurationError(
                f"the state of the group has vectors of {list(latest.sizes)} elements, and here are "
                f"{list(sizes)}: the outer optimisers differ"
            )
        holders = [peer for peer, info in told.items() if info.digests == latest.digests]
        vectors: list[Tensor] = []
        for digest, size in zip(latest.digests, latest.sizes, strict=True):
            try:
                result = await self._reductions.fetch(
                    digest, holders, size, latest.chunk_elements, _CODEC, timeout=timeout
                )
            except NeuroGridError as exc:
                # A round was decided meanwhile, and they have gone on.
                logger.info("the state after round %d is gone: %s", latest.round, exc)
                return None
            vectors.append(result.values)
        return State(latest.round, tuple(vectors), latest.note)

    async def _ask(self, peer_ids: Sequence[str]) -> dict[str, StateInfo]:
        told: dict[str, StateInfo] = {}

        async def ask(peer_id: str) -> None:
            request = TensorMessage(TrainingMessage.STATE, request_id=new_request_id())
            try:
                answer = await self._exchange.request(
                    peer_id, request, TrainingMessage.STATE_INFO, timeout=30.0
                )
                told[peer_id] = StateInfo.decode(answer.data)
            except NeuroGridError as exc:
                logger.info("%s has no state to give: %s", peer_id, exc)

        async with trio.open_nursery() as nursery:
            for peer_id in peer_ids:
                nursery.start_soon(ask, peer_id)
        return told


def _as_results(state: State) -> tuple[Result, ...]:
    """The vectors as peers fetch them: nothing is copied, everything hashed."""
    results = []
    for vector in state.vectors:
        data = vector.detach().numpy().data.cast("B")
        step = 4 * _CHUNK_ELEMENTS
        chunks = tuple(data[at : at + step] for at in range(0, len(data), step))
        digests = tuple(blake3(chunk).digest() for chunk in chunks)
        digest = result_digest(
            digests, num_elements=len(vector), chunk_elements=_CHUNK_ELEMENTS, codec=_CODEC
        )
        results.append(Result(digest, vector, _CHUNK_ELEMENTS, _CODEC, digests, chunks))
    return tuple(results)
