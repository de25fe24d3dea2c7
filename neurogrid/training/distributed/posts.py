"""The posts of one channel, counted: what may be sent unasked, what is expected, and what came early.

A channel is what one rank sends another under one tag. Its posts are numbered from 0 by both ends, and both know from
the collective that they call how many bytes each post has. So a post has no header of its own, and one that is not
what the program of its receiver says is known at once.

A receiver that is not there yet is sent `WINDOW_BYTES` and no more: what it has a place for it says in notices, which
name the number of the first post that it has none for. So nobody holds more than a window of what nobody asked for,
and a large tensor waits at its sender. Pure: no stream, task or clock.

Source: protocol_spec/training/process-groups.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.wire import Data, ErrorCode

__all__ = ["IncomingPosts", "OutgoingPosts", "WINDOW_BYTES", "cost_of"]

KIB = 1024
MIB = 1024 * KIB

WINDOW_BYTES: Final = 4 * MIB
"""Cost of the posts that may be under way to a receiver that has not said that it has a place for them."""

# What a post costs at least, so that empty ones are bounded by number as well: 1,024 in a window.
LEAST_COST: Final = 4 * KIB
# A notice for each half of a window: a sender whose posts have places never waits for one, as no post costs more.
NOTICE_COST: Final = WINDOW_BYTES // 2


def cost_of(num_bytes: int) -> int:
    """Return the cost of a post of so many bytes."""
    return max(num_bytes, LEAST_COST)


class OutgoingPosts:
    """The sender's side."""

    def __init__(self) -> None:
        self._next = 0
        self._granted = 0  # the receiver has a place for all before this one
        self._unasked: dict[int, int] = {}  # the cost of those sent that it may have no place for
        self._cost = 0

    def reserve(self, num_posts: int) -> int:
        """Number the next posts; returns the number of the first."""
        first = self._next
        self._next += num_posts
        return first

    def may_send(self, number: int, num_bytes: int) -> bool:
        """Whether a post may be sent now."""
        return number < self._granted or self._cost + cost_of(num_bytes) <= WINDOW_BYTES

    def sent(self, number: int, num_bytes: int) -> None:
        """Count a post that is being sent."""
        if number >= self._granted:
            self._unasked[number] = cost_of(num_bytes)
            self._cost += cost_of(num_bytes)

    def grant(self, number: int) -> None:
        """Take a notice: the receiver has a place for all posts before `number`."""
        if number > self._granted:
            self._granted = number
            for sent in [sent for sent in self._unasked if sent < number]:
                self._cost -= self._unasked.pop(sent)


class IncomingPosts:
    """The receiver's side."""

    def __init__(self) -> None:
        self._next = 0
        self._expected: dict[int, int] = {}  # bytes, of those that have a place and have not come
        self._here: dict[int, Data] = {}
        self._early_cost = 0
        self._since_notice = 0

    @property
    def early_cost(self) -> int:
        """Cost of the posts that came before they were expected."""
        return self._early_cost

    @property
    def has_early(self) -> bool:
        """Whether the next post has come, and nobody asked for it."""
        return self._next in self._here

    def reserve(self, sizes: Sequence[int]) -> tuple[int, int | None]:
        """Make a place for the next posts, of so many bytes each.

        Returns:
            The number of the first, and what to tell the sender in a notice; None where it need not be told.

        Raises:
            RemoteProtocolError: one is here already, and of another size.
        """
        first = self._next
        self._next += len(sizes)
        for number, size in enumerate(sizes, first):
            self._since_notice += cost_of(size)
            early = self._here.get(number)
            if early is None:
                self._expected[number] = size
                continue
            self._early_cost -= cost_of(len(early))
            _check_size(number, len(early), size)
        if self._since_notice < NOTICE_COST:
            return first, None
        self._since_notice = 0
        return first, self._next

    def arrive(self, number: int, data: Data) -> None:
        """Keep a post that has come.

        Raises:
            RemoteProtocolError: it came before, has not the size that is expected, or is more than may come unasked.
        """
        if number >= self._next:
            cost = cost_of(len(data))
            if number in self._here:
                raise _came_twice(number)
            if self._early_cost + cost > WINDOW_BYTES:
                raise RemoteProtocolError(
                    f"post {number} is more than the {WINDOW_BYTES} B that may come unasked",
                    code=ErrorCode.LIMIT_EXCEEDED,
                )
            self._early_cost += cost
        elif (size := self._expected.get(number)) is None:
            raise _came_twice(number)
        else:
            _check_size(number, len(data), size)
            del self._expected[number]
        self._here[number] = data

    def take(self, number: int) -> Data | None:
        """Take a post that has a place; None where it has not come."""
        return self._here.pop(number, None)


def _check_size(number: int, num_bytes: int, expected: int) -> None:
    if num_bytes != expected:
        raise RemoteProtocolError(
            f"post {number} has {num_bytes} B where {expected} B belong: "
            "all ranks call the same collectives, in one order, with tensors of one shape and dtype",
            code=ErrorCode.PROTOCOL_VIOLATION,
        )


def _came_twice(number: int) -> RemoteProtocolError:
    return RemoteProtocolError(f"post {number} came twice", code=ErrorCode.PROTOCOL_VIOLATION)
