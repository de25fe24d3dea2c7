"""States for newcomers: a member shows the buffers that it has, and one that has joined fetches them from several.

A state is some vectors and a note, and the same for all members after the same round. Who asks is given a copy, which
stays for a while: rounds go on meanwhile, and a newcomer behind a slow line would never have all of what they change.

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
# Seconds for which a copy stays after it was last asked for, and how many there are at a time.
_KEPT_SECONDS: Final = 120.0
_MAX_KEPT: Final = 2
# Once one has told of its state: so long the others have, in seconds, and in what the first one took.
_OTHERS: Final = 0.5
_LONGER: Final = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """The state that all members share after a round.

    Attributes:
        round: the last round that is in it; 0 for none.
        vectors: float32 [n] each.
        note: bytes that mean something to the program.
    """

    round: int
    vectors: tuple[Tensor, ...]
    note: bytes = b""


@dataclass(slots=True)
class _Kept:
    """A copy of a state, as peers fetch it.

    Attributes:
        round: the last that is in it.
        results: its vectors.
        note: as of the state.
        until: when it may go.
    """

    round: int
    results: tuple[Result, ...]
    note: bytes
    until: float


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
        self._kept: list[_Kept] = []
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
        self._shown = state
        self.expire(trio.current_time())

    def take_back(self) -> None:
        """Its buffers are going to be written to. Copies stay."""
        self._shown = None

    def expire(self, now: float) -> None:
        """Let go of copies that nobody has asked for in a while."""
        for kept in [kept for kept in self._kept if kept.until <= now]:
            self._let_go(kept)

    def let_go(self) -> None:
        """Show nothing, and let go of all copies."""
        self._shown = None
        self._kept.clear()

    def _let_go(self, kept: _Kept) -> None:
        self._kept.remove(kept)
        # A vector that a round has not changed is in the copy of the next one, too.
        others = {result.digest for other in self._kept for result in other.results}
        for result in kept.results:
            if result.digest not in others:
                self._reductions.release(result.digest)

    async def _tell(self, message: TensorMessage) -> None:
        peer_id = message.from_peer or ""
        if not self._is_of_group(peer_id):
            raise RequestRefusedError("this peer is no member", code=ErrorCode.UNAUTHORIZED)
        kept = await self._copy()
        if kept is None:
            raise RequestRefusedError(
                "this member has no state to give at the moment",
                code=ErrorCode.BUSY,
                retry_after=0.5,
                is_expected=True,
            )
        answer = StateInfo(
            round=kept.round,
            digests=tuple(result.digest for result in kept.results),
            sizes=tuple(len(result.values) for result in kept.results),
            chunk_elements=_CHUNK_ELEMENTS,
            note=kept.note,
        )
        await self._exchange.send(
            peer_id,
            TensorMessage(
                TrainingMessage.STATE_INFO, request_id=message.request_id, data=answer.encode()
            ),
        )

    async def _copy(self) -> _Kept | None:
        """A copy of the state that is shown; None where none is."""
        async with self._hashing:
            state = self._shown
            if state is None:
                return None
            now = trio.current_time()
            for kept in self._kept:
                if kept.round == state.round:
                    kept.until = now + _KEPT_SECONDS
                    return kept
            # Before anybody else runs, and could write to it.
            vectors = tuple(vector.detach().clone() for vector in state.vectors)
            results = await trio.to_thread.run_sync(_as_results, vectors)
            while len(self._kept) >= _MAX_KEPT:
                self._let_go(min(self._kept, key=lambda kept: kept.until))
            kept = _Kept(state.round, results, state.note, trio.current_time() + _KEPT_SECONDS)
            self._kept.append(kept)
            for result in results:
                self._reductions.hold(result)
            return kept

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
                # It took too long, or they are gone.
                logger.info("the state after round %d is gone: %s", latest.round, exc)
                return None
            vectors.append(result.values)
        return State(latest.round, tuple(vectors), latest.note)

    async def _ask(self, peer_ids: Sequence[str]) -> dict[str, StateInfo]:
        """Ask peers about their states; return the answers by peer id.

        A peer that was cut off a moment ago looks connected: once one has answered, the others have but a moment.
        """
        told: dict[str, StateInfo] = {}
        began = trio.current_time()

        async def ask(peer_id: str) -> None:
            request = TensorMessage(TrainingMessage.STATE, request_id=new_request_id())
            try:
                answer = await self._exchange.request(
                    peer_id, request, TrainingMessage.STATE_INFO, timeout=30.0
                )
                told[peer_id] = StateInfo.decode(answer.data)
                if len(told) == 1:
                    now = trio.current_time()
                    nursery.cancel_scope.deadline = now + max(_OTHERS, _LONGER * (now - began))
            except NeuroGridError as exc:
                logger.info("%s has no state to give: %s", peer_id, exc)

        async with trio.open_nursery() as nursery:
            for peer_id in peer_ids:
                nursery.start_soon(ask, peer_id)
        return told


def _as_results(vectors: Sequence[Tensor]) -> tuple[Result, ...]:
    """Vectors as peers fetch them: nothing is copied, everything hashed."""
    results = []
    for vector in vectors:
        data = vector.numpy().data.cast("B")
        step = 4 * _CHUNK_ELEMENTS
        chunks = tuple(data[at : at + step] for at in range(0, len(data), step))
        digests = tuple(blake3(chunk).digest() for chunk in chunks)
        digest = result_digest(
            digests, num_elements=len(vector), chunk_elements=_CHUNK_ELEMENTS, codec=_CODEC
        )
        results.append(Result(digest, vector, _CHUNK_ELEMENTS, _CODEC, digests, chunks))
    return tuple(results)
