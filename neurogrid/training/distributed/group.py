"""A group of ranks, in the loop's thread: who they are, the channels between them, and what became of them.

A group knows posts, and no tensors. Once anything in it failed all of it has: the numbers of posts would not agree. A
rank for which it did tells the others why before it ends, so that all name the same one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import trio

from neurogrid.errors import NeuroGridError, RemoteProtocolError, TransportError
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.wire import Data, ErrorCode, TensorMessage
from neurogrid.renewed_event import RenewedEvent
from neurogrid.training.distributed.errors import RankError
from neurogrid.training.distributed.posts import IncomingPosts, OutgoingPosts
from neurogrid.training.wire import MAX_FAILURE_CHARS, MAX_RANKS, GroupFailure, TrainingMessage

__all__ = ["COLLECTIVES", "Channel", "Group", "MAX_TAG"]

logger = logging.getLogger(__name__)

COLLECTIVES: Final = 0
"""The tag of collectives; those of `send` and `recv` stand one higher than their callers give them."""

MAX_TAG: Final = 2**32 - 2
"""The highest tag that a caller may give."""

# A notice has this bit in its number.
NOTICE: Final = 1 << 63
# Channels from one rank: programs use a handful of tags, and a hostile rank costs some megabytes with as many.
MAX_CHANNELS_PER_RANK: Final = 4096
# Cost of what one rank may have sent unasked under all tags together: sixteen full windows.
MAX_UNASKED_PER_RANK: Final = 64 * 1024 * 1024
# Seconds to tell the others of a failure: one that hangs takes nothing more.
TELL_TIMEOUT: Final = 1.0


class Channel:
    """Posts to and from one rank, under one tag."""

    def __init__(self, group: Group, rank: int, tag: int) -> None:
        self.group = group
        self.rank = rank
        self.tag = tag
        self.outgoing = OutgoingPosts()
        self.incoming = IncomingPosts()
        self.counted_cost = 0  # of what came unasked, as its group has counted it
        self.changed = RenewedEvent()

    async def send(self, number: int, data: Data) -> None:
        """Send a post once it may be; returns when it is on the connection. However it ends, `data` may change.

        Raises:
            RankError: the rank is gone, or something else in the group failed.
        """
        while not self.outgoing.may_send(number, len(data)):
            self._check()
            await self.changed.wait()
        self._check()
        self.outgoing.sent(number, len(data))
        # A copy: what was begun goes out whole, also after an operation that failed has given its tensor back.
        await self._send(number, bytes(data))

    async def take(self, number: int) -> Data:
        """Wait for a post that has a place, and take it.

        Raises:
            RankError: it can come no more.
        """
        while (data := self.incoming.take(number)) is None:
            self._check()
            await self.changed.wait()
        return data

    def expect(self, sizes: Sequence[int]) -> int:
        """Make places for the next posts; returns the number of the first.

        Raises:
            RankError: one of another size is here.
        """
        try:
            first, notice = self.incoming.reserve(sizes)
        except RemoteProtocolError as exc:
            raise self.group.lose(self.rank, exc) from exc
        finally:
            self.group.count_unasked(self)
        if notice is not None:
            self.group.exchange.host.start_soon(self._tell, notice)
        return first

    async def _tell(self, number: int) -> None:
        try:
            await self._send(NOTICE | number, b"")
        except RankError:
            logger.debug("no notice to rank %d, which is gone", self.rank)

    async def _send(self, number: int, data: Data) -> None:
        group = self.group
        message = TensorMessage(
            msg_type=TrainingMessage.POST,
            layer_id=self.tag,
            seq_id=number,
            request_id=group.number,
            data=data,
        )
        try:
            await group.exchange.send(group.peer_ids[self.rank], message)
        except TransportError as exc:
            raise group.lose(self.rank, exc) from exc

    def _check(self) -> None:
        error = self.group.failure or self.group.lost.get(self.rank)
        if error is not None:
            raise error


class Group:
    """The ranks of one process group, as one of them sees it.

    Attributes:
        number: u64, chosen by rank 0 at random; it stands as the request id in each post.
        name: for people.
        rank: ours.
        peer_ids: of all ranks, in their order (base58).
        global_ranks: what they are called in the whole program, in the same order.
        exchange: of this process.
        lost: ranks that are gone, and why.
        failure: why nothing more can be done in this group; None while it is whole.
        tail: the collective that was called last.
    """

    def __init__(
        self,
        number: int,
        name: str,
        rank: int,
        peer_ids: Sequence[str],
        global_ranks: Sequence[int],
        exchange: Exchange,
    ) -> None:
        self.number = number
        self.name = name
        self.rank = rank
        self.peer_ids = tuple(peer_ids)
        self.global_ranks = tuple(global_ranks)
        self.exchange = exchange
        self.lost: dict[int, RankError] = {}
        self.failure: NeuroGridError | None = None
        self.tail: trio.Event | None = None
        self._ranks = {peer_id: rank for rank, peer_id in enumerate(peer_ids)}
        self._channels: dict[tuple[int, int], Channel] = {}
        self._num_channels = [0] * len(peer_ids)
        self._unasked_cost = [0] * len(peer_ids)
        self._came = RenewedEvent()
        self._told: trio.Event | None = None  # set when the others were told of the failure

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.peer_ids)

    @property
    def others(self) -> list[int]:
        """The other ranks, those after ours first, so that not all begin with the same one."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def channel(self, rank: int, tag: int) -> Channel:
        """The channel of a rank and a tag.

        Raises:
            RankError: it would be one more than there may be.
        """
        channel = self._channels.get((rank, tag))
        if channel is None:
            if self._num_channels[rank] >= MAX_CHANNELS_PER_RANK:
                raise RankError(f"{_too_many_tags()} with {self.called(rank)}")
            channel = self._channels[rank, tag] = Channel(self, rank, tag)
            self._num_channels[rank] += 1
        return channel

    def called(self, rank: int) -> str:
        """A rank by name, for people."""
        return f"rank {self.global_ranks[rank]} ({self.peer_ids[rank]})"

    async def early_rank(self, tag: int) -> int:
        """Wait for a rank that has sent something under a tag that nobody asked for; returns which.

        Raises:
            RankError: something in the group failed, or all others are gone.
        """
        while True:
            came = self._came.next
            for rank in self.others:
                channel = self._channels.get((rank, tag))
                if channel is not None and channel.incoming.has_early:
                    return rank
            if self.failure is not None:
                raise self.failure
            if len(self.lost) == self.size - 1:
                raise next(iter(self.lost.values()))
            await came.wait()

    # What becomes of it

    def lose(self, rank: int, reason: NeuroGridError) -> RankError:
        """A rank is gone, or as good as gone: what waits for it fails. Returns its first error."""
        error = self.lost.get(rank)
        if error is None:
            error = RankError(
                f"{self.called(rank)} was lost: {reason}", ranks=[self.global_ranks[rank]]
            )
            error.__cause__ = reason
            self.lost[rank] = error
            self._wake()
        return error

    def fail(self, error: NeuroGridError) -> None:
        """Nothing more can be done in this group; all that waits in it fails."""
        if self.failure is None:
            self.failure = error
            self._wake()

    async def tell_failure(self) -> None:
        """Tell the other ranks why nothing more can be done here; returns when all that take it have it."""
        if self.failure is None:
            return
        if self._told is not None:
            # Another operation does: the caller of this one may end the program, too.
            await self._told.wait()
            return
        self._told = trio.Event()
        reason = str(self.failure)[:MAX_FAILURE_CHARS] or type(self.failure).__name__
        message = TensorMessage(
            msg_type=TrainingMessage.FAILED,
            request_id=self.number,
            data=GroupFailure(reason, getattr(self.failure, "ranks", ())[:MAX_RANKS]).encode(),
        )
        try:
            with trio.move_on_after(TELL_TIMEOUT):
                async with trio.open_nursery() as nursery:
                    for rank in self.others:
                        nursery.start_soon(self._tell_failure, self.peer_ids[rank], message)
        finally:
            self._told.set()

    async def _tell_failure(self, peer_id: str, message: TensorMessage) -> None:
        if self.exchange.hello_of(peer_id) is None:
            return
        try:
            await self.exchange.send(peer_id, message)
        except NeuroGridError as exc:
            logger.debug("did not tell %s of the failure: %s", peer_id, exc)

    def peer_lost(self, peer_id: str, reason: NeuroGridError) -> None:
        """A peer is gone; it may be of this group."""
        rank = self._ranks.get(peer_id)
        if rank is not None:
            self.lose(rank, reason)

    def _wake(self) -> None:
        for channel in self._channels.values():
            channel.changed.set()
        self._came.set()

    # What comes

    def receive_failure(self, message: TensorMessage) -> None:
        """A rank can do nothing more, and says why: what waits for it fails as it did.

        Raises:
            RemoteProtocolError: its sender is not of this group, or names ranks that are not.
        """
        rank = self._rank_of(message)
        failure = GroupFailure.decode(message.data)
        if not set(failure.ranks) <= set(self.global_ranks):
            raise RemoteProtocolError(
                f"{self.called(rank)} names ranks that {self.name} does not have",
                code=ErrorCode.PROTOCOL_VIOLATION,
            )
        error = RankError(
            f"{self.called(rank)} failed: {failure.reason}",
            ranks=failure.ranks or [self.global_ranks[rank]],
        )
        if self.lost.setdefault(rank, error) is error:
            self._wake()

    def receive(self, message: TensorMessage) -> None:
        """Take a post or a notice.

        Raises:
            RemoteProtocolError: its sender is not of this group, or may not send it.
        """
        rank = self._rank_of(message)
        try:
            self._receive(rank, message)
        except RemoteProtocolError as exc:
            self.lose(rank, exc)
            raise

    def _rank_of(self, message: TensorMessage) -> int:
        rank = self._ranks.get(message.from_peer or "")
        if rank is None:
            raise RemoteProtocolError(
                f"{message.from_peer} is no rank of group {self.number:x}",
                code=ErrorCode.PROTOCOL_VIOLATION,
            )
        return rank

    def _receive(self, rank: int, message: TensorMessage) -> None:
        is_new = (rank, message.layer_id) not in self._channels
        if is_new and self._num_channels[rank] >= MAX_CHANNELS_PER_RANK:
            raise RemoteProtocolError(_too_many_tags(), code=ErrorCode.LIMIT_EXCEEDED)
        channel = self.channel(rank, message.layer_id)
        if message.seq_id & NOTICE:
            if len(message.data):
                raise RemoteProtocolError("a notice has Data", code=ErrorCode.PROTOCOL_VIOLATION)
            channel.outgoing.grant(message.seq_id ^ NOTICE)
        else:
            channel.incoming.arrive(message.seq_id, message.data)
            self.count_unasked(channel)
            self._check_unasked(rank)
        channel.changed.set()
        if channel.incoming.has_early:
            self._came.set()

    def count_unasked(self, channel: Channel) -> None:
        """Count anew what has come unasked in a channel."""
        cost = channel.incoming.early_cost
        self._unasked_cost[channel.rank] += cost - channel.counted_cost
        channel.counted_cost = cost

    def _check_unasked(self, rank: int) -> None:
        unasked = self._unasked_cost[rank]
        if unasked > MAX_UNASKED_PER_RANK:
            raise RemoteProtocolError(
                f"{unasked} B under {self._num_channels[rank]} tags came unasked",
                code=ErrorCode.LIMIT_EXCEEDED,
            )


def _too_many_tags() -> str:
    return f"more than {MAX_CHANNELS_PER_RANK} tags: take the same ones again"
