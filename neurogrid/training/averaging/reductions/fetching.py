"""Get the result of a reduction from peers that hold it: the digests of its chunks from one, the chunks from all.

Every chunk is verified when it comes, so a peer that lies is known by the chunk, and is asked no more; the others
get what it was to give.

Source: protocol_spec/training/reductions.md.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence

import trio

from neurogrid.errors import (
    LocalProtocolError,
    PeerRefusedError,
    RemoteProtocolError,
    TransportError,
)
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.exchange.exchange import Exchange, new_request_id
from neurogrid.p2p.wire import DIGEST_BYTES, TensorMessage, chunk_digest
from neurogrid.training.averaging.codecs import Codec, parse_codec
from neurogrid.training.averaging.reductions.errors import ResultUnavailableError
from neurogrid.training.averaging.reductions.result import (
    Result,
    ResultBuilder,
    result_digest,
)
from neurogrid.training.wire.types import MAX_CHUNK_BYTES, TrainingMessage

__all__ = ["Fetching"]

# Chunks that one holder is asked for at once.
WINDOW = 4
# Holders that are asked at once: behind a slow line more of them would only wait longer, each for its own.
NUM_HOLDERS = 4
# Seconds without any answer of a holder that owes some, before it is left and the others go on. Not for one answer: all
# that it was asked for at once comes one after the other by its line.
ANSWER_TIMEOUT = 15.0

_OF_THE_PEER = (PeerRefusedError, TransportError, RemoteProtocolError)


class Fetching:
    """The fetches of one exchange."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def fetch(
        self,
        digest: bytes,
        holders: Sequence[str],
        num_elements: int,
        chunk_elements: int,
        codec_name: str,
        *,
        timeout: float,
    ) -> Result:
        """`Reductions.fetch`: the same arguments, result and errors."""
        if not holders:
            raise LocalProtocolError("a result is fetched from at least one peer")
        codec = parse_codec(codec_name)
        if codec.num_bytes(min(chunk_elements, num_elements)) > MAX_CHUNK_BYTES:
            raise LocalProtocolError(f"a chunk of {chunk_elements} elements is too large")
        fetch = _Fetch(self._exchange, digest, num_elements, chunk_elements, codec)
        left = list(dict.fromkeys(holders))
        with trio.CancelScope(deadline=trio.current_time() + timeout):
            return await fetch.run(left, timeout)
        raise fetch.late(left, timeout)


class _Fetch:
    """One fetch.

    Attributes:
        failures: what was wrong with the holders that were left, by peer id.
    """

    def __init__(
        self,
        exchange: Exchange,
        digest: bytes,
        num_elements: int,
        chunk_elements: int,
        codec: Codec,
    ) -> None:
        self.failures: dict[str, str] = {}
        self._exchange = exchange
        self._digest = digest
        self._num_elements = num_elements
        self._chunk_elements = chunk_elements
        self._codec = codec
        self._num_chunks = math.ceil(num_elements / chunk_elements)
        self._builder = ResultBuilder(
            num_elements=num_elements,
            chunk_elements=chunk_elements,
            codec=codec,
        )
        self._digests: list[bytes] = []
        self._left: deque[int] = deque(range(self._num_chunks))  # not asked of anybody
        self._num_missing = self._num_chunks
        self._changed = trio.Event()
        self._owed: Counter[str] = Counter()  # chunks asked of a holder that have not come

    async def run(self, holders: Sequence[str], timeout: float) -> Result:
        """Fetch the digests, and then the chunks."""
        for holder in holders:
            try:
                self._digests = await self._fetch_digests(holder)
                break
            except _OF_THE_PEER as error:
                self.failures[holder] = str(error)
        left = iter([holder for holder in holders if holder not in self.failures])
        with unwrap_errors():
            async with trio.open_nursery() as nursery:
                for _ in range(min(NUM_HOLDERS, len(holders))):
                    nursery.start_soon(self._fetch_from_each, left, timeout)
        if self._num_missing:
            raise self.unavailable()
        return self._builder.finish()

    def late(self, holders: Sequence[str], timeout: float) -> ResultUnavailableError:
        """The error that says that the time is over."""
        for holder in holders:
            self.failures.setdefault(holder, f"not done within {timeout:g} s")
        return self.unavailable()

    def unavailable(self) -> ResultUnavailableError:
        """The error that says what was wrong with each holder."""
        reasons = "; ".join(f"{peer_id}: {reason}" for peer_id, reason in self.failures.items())
        return ResultUnavailableError(
            f"no peer gave result {self._digest.hex()}: {reasons}", failures=self.failures
        )

    async def _fetch_digests(self, holder: str) -> list[bytes]:
        data = await self._ask(holder, TrainingMessage.FETCH_DIGESTS, 0, TrainingMessage.DIGESTS)
        if len(data) != DIGEST_BYTES * self._num_chunks:
            raise RemoteProtocolError(f"{len(data)} B are not {self._num_chunks} digests")
        view = memoryview(data)
        digests = [bytes(view[at : at + DIGEST_BYTES]) for at in range(0, len(view), DIGEST_BYTES)]
        digest = result_digest(
            digests,
            num_elements=self._num_elements,
            chunk_elements=self._chunk_elements,
            codec=self._codec.name,
        )
        if digest != self._digest:
            raise RemoteProtocolError("its digests are those of another result")
        return digests

    async def _fetch_from_each(self, holders: Iterator[str], timeout: float) -> None:
        """Ask one holder after another, the next where one fails, until all chunks are there."""
        for holder in holders:
            await self._fetch_from(holder, timeout)
            if not self._num_missing:
                return

    async def _fetch_from(self, holder: str, timeout: float) -> None:
        """Ask one holder for chunks until all are there, or it fails."""
        async with trio.open_nursery() as nursery:
            for _ in range(WINDOW):
                nursery.start_soon(self._fetch_chunks, holder, nursery.cancel_scope, timeout)
        if nursery.cancel_scope.cancelled_caught:
            self.failures.setdefault(holder, f"silent for {ANSWER_TIMEOUT:g} s")

    async def _fetch_chunks(self, holder: str, of_holder: trio.CancelScope, timeout: float) -> None:
        while self._num_missing:
            if not self._left:
                await self._changed.wait()  # another holder may leave some
                continue
            chunk = self._left.popleft()
            if not self._owed[holder]:
                of_holder.deadline = trio.current_time() + ANSWER_TIMEOUT
            self._owed[holder] += 1
            try:
                await self._fetch_chunk(holder, chunk, timeout)
            except _OF_THE_PEER as error:
                self.failures.setdefault(holder, str(error))
                of_holder.cancel()
                return
            finally:
                self._owed[holder] -= 1
                if self._digests[chunk]:
                    self._left.appendleft(chunk)
                self._note_change()
            patience = ANSWER_TIMEOUT if self._owed[holder] else math.inf
            of_holder.deadline = trio.current_time() + patience

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _fetch_chunk(self, holder: str, chunk: int, timeout: float) -> None:
        data = await self._ask(holder, TrainingMessage.FETCH, chunk, TrainingMessage.PIECE, timeout)
        start = chunk * self._chunk_elements
        num_elements = min(self._chunk_elements, self._num_elements - start)
        digest = self._digests[chunk]
        if len(data) != self._codec.num_bytes(num_elements) or chunk_digest(data) != digest:
            raise RemoteProtocolError(f"its chunk {chunk} is another")
        self._builder.set_chunk(chunk, data, digest=digest)
        self._digests[chunk] = b""  # it is there
        self._num_missing -= 1

    async def _ask(
        self,
        holder: str,
        request: TrainingMessage,
        chunk: int,
        answer: TrainingMessage,
        timeout: float = ANSWER_TIMEOUT,
    ) -> bytes | bytearray | memoryview:
        message = TensorMessage(request, chunk, 0, new_request_id(), self._digest)
        came = await self._exchange.request(holder, message, answer, timeout=timeout)
        if came.layer_id != chunk:
            raise RemoteProtocolError(f"it was asked for chunk {chunk} and sent {came.layer_id}")
        return came.data
