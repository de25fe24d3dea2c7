"""One operation of a group: a collective, a send or a receive, with its deadline and the ranks that it waits for.

A rank is waited for in the first place where it has to send something of its own, and in the second where what it
sends is made of what others have sent. At the deadline those of the first place are named, if there are any: the
others may only wait in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from neurogrid.p2p.wire import Data
from neurogrid.training.distributed.chunks import Span, chunks_of
from neurogrid.training.distributed.errors import RankError
from neurogrid.training.distributed.group import COLLECTIVES, Channel, Group

__all__ = ["Incoming", "Operation", "Outgoing"]


class Operation:
    """Operation of a rank with others: what it sends and receives, and the ranks that it waits for.

    Args:
        group: whose.
        name: of the operation, for people.
        tag: under which it sends and receives.
        timeout: seconds that it may take.
    """

    def __init__(self, group: Group, name: str, *, tag: int = COLLECTIVES, timeout: float) -> None:
        self.group = group
        self.name = name
        self.tag = tag
        self.timeout = timeout
        self._awaited: dict[bool, Counter[int]] = {False: Counter(), True: Counter()}

    def outgoing(self, rank: int, start: int, stop: int) -> Outgoing:
        """Bytes [start, stop) of a tensor, to be sent to a rank."""
        chunks = chunks_of(start, stop)
        channel = self.group.channel(rank, self.tag)
        return Outgoing(self, channel, channel.outgoing.reserve(len(chunks)), chunks)

    def incoming(self, rank: int, start: int, stop: int, *, is_derived: bool = False) -> Incoming:
        """Bytes [start, stop) of a tensor, to come from a rank; `is_derived` if it waits for others first."""
        chunks = chunks_of(start, stop)
        channel = self.group.channel(rank, self.tag)
        first = channel.expect([end - begin for begin, end in chunks])
        return Incoming(self, channel, first, chunks, is_derived=is_derived)

    async def early_rank(self) -> int:
        """Wait for a rank that has sent something nobody asked for; as `Group.early_rank`."""
        with ExitStack() as stack:
            for rank in self.group.others:
                stack.enter_context(self.waits_for(rank))
            return await self.group.early_rank(self.tag)

    @contextmanager
    def waits_for(self, rank: int, *, is_derived: bool = False) -> Iterator[None]:
        """Wait for a rank in this block. Where the wait is cut off it stays counted, for `late`."""
        awaited = self._awaited[is_derived]
        awaited[rank] += 1
        yield
        awaited[rank] -= 1

    def late(self) -> RankError:
        """The error at the deadline."""
        awaited = +self._awaited[False] or +self._awaited[True]
        ranks = sorted(awaited)
        called = ", ".join(map(self.group.called, ranks)) or "its turn"
        return RankError(
            f"{self.name} in {self.group.name} did not end within {self.timeout:g} s: "
            f"waited for {called}",
            ranks=[self.group.global_ranks[rank] for rank in ranks],
        )


class Outgoing:
    """Chunks for one rank."""

    def __init__(
        self, operation: Operation, channel: Channel, first: int, chunks: Sequence[Span]
    ) -> None:
        self.chunks = chunks
        self._operation = operation
        self._channel = channel
        self._first = first

    async def send(self, index: int, memory: memoryview) -> None:
        """Send one chunk; returns when its memory may be changed.

        Args:
            index: of the chunk.
            memory: the bytes of the whole tensor.
        """
        start, stop = self.chunks[index]
        with self._operation.waits_for(self._channel.rank):
            await self._channel.send(self._first + index, memory[start:stop])

    async def send_all(self, memory: memoryview) -> None:
        """Send all chunks in order."""
        for index in range(len(self.chunks)):
            await self.send(index, memory)


class Incoming:
    """Chunks from one rank."""

    def __init__(
        self,
        operation: Operation,
        channel: Channel,
        first: int,
        chunks: Sequence[Span],
        *,
        is_derived: bool,
    ) -> None:
        self.chunks = chunks
        self._operation = operation
        self._channel = channel
        self._first = first
        self._is_derived = is_derived

    async def take(self, index: int) -> Data:
        """Wait for one chunk."""
        with self._operation.waits_for(self._channel.rank, is_derived=self._is_derived):
            return await self._channel.take(self._first + index)

    async def take_all(self, memory: memoryview) -> None:
        """Put all chunks into the tensor whose bytes these are."""
        for index, (start, stop) in enumerate(self.chunks):
            memory[start:stop] = await self.take(index)
