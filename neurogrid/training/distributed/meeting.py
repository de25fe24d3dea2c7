"""The meeting of the ranks of a group: each says in a store where it is, and they connect.

The store is one of torch's (TCP, file, hash) or ours, and it is trusted as torch trusts it: whoever writes to it says
which peers are the ranks. From then on each is known by its key.

Each rank waits three times for all others: until it knows them all, until they know it, so that it is let in, and
until all are connected. So the first collective finds everybody there, and a rank that cannot be reached is named now.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import trio

from neurogrid.errors import ConfigurationError, NeuroGridError, RemoteProtocolError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.hosts.host import parse_peer_address
from neurogrid.p2p.trust import WORKER, AllowList
from neurogrid.p2p.wire.forms import Map, array, text, uint
from neurogrid.p2p.wire.maps import printable_line
from neurogrid.training.distributed.errors import RankError
from neurogrid.training.distributed.group import Group
from neurogrid.training.distributed.node import Node, NodeThread

__all__ = ["meet"]

MAX_ADDRESSES: Final = 64
MAX_ADDRESS_CHARS: Final = 1024
# Seconds between two looks at the store: the first, and the longest.
FIRST_LOOK: Final = 0.001
LONGEST_LOOK: Final = 0.05
MAX_REASON_CHARS: Final = 400

_RECORD = Map(
    "the record of a rank",
    {
        "peer": text(128, smallest=1),
        "addrs": array(text(MAX_ADDRESS_CHARS), MAX_ADDRESSES),
        "group": uint(2**64 - 1),
    },
    max_bytes=MAX_ADDRESSES * (MAX_ADDRESS_CHARS + 8),
)


class Store(Protocol):
    """Methods that are needed of a store of torch: bytes by key, which all ranks see."""

    def set(self, key: str, value: bytes, /) -> object:
        """Keep a value."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys have values."""
        ...


@dataclass(frozen=True, slots=True)
class Record:
    """Record of a rank in the store: what it says of itself.

    Attributes:
        peer_id: base58.
        addresses: full multiaddrs.
        group: the number of the group; rank 0's counts.
    """

    peer_id: str
    addresses: tuple[str, ...]
    group: int

    def encode(self) -> bytes:
        """Return the record as it stands in the store."""
        return _RECORD.encode((self.peer_id, self.addresses, self.group))

    @classmethod
    def decode(cls, data: bytes, rank: int) -> Record:
        """Read what a rank wrote.

        Raises:
            RankError: it makes no sense.
        """
        try:
            record = cls(*_RECORD.decode(data))
            if any(parse_peer_address(a)[1] != record.peer_id for a in record.addresses):
                raise RemoteProtocolError("an address in it is another peer's")
        except (RemoteProtocolError, ConfigurationError) as exc:
            raise RankError(
                f"what rank {rank} says of itself makes no sense: {exc}", ranks=[rank]
            ) from exc
        return record


def meet(
    thread: NodeThread,
    store: Store,
    rank: int,
    size: int,
    *,
    timeout: float,
    name: str,
    global_ranks: Sequence[int],
) -> Group:
    """Find the other ranks and connect to them; returns the group, whose posts the node takes from now on.

    Args:
        thread: the node of this process.
        store: where the ranks write; no other group writes to it.
        rank: ours, in the group.
        size: how many ranks there are.
        timeout: seconds for all of it.
        name: of the group, for people.
        global_ranks: what its ranks are called.

    Raises:
        RankError: ranks did not come, or cannot be reached; says which.
    """
    board = _Board(store, global_ranks, time.monotonic() + timeout, timeout)
    node = thread.node
    addresses = thread.call_sync(lambda: node.host.addresses)[:MAX_ADDRESSES]
    own = Record(thread.identity.peer_id, addresses, secrets.randbits(64) or 1)
    board.write("record", rank, own.encode())
    ranks = range(size)
    records = [
        Record.decode(data, global_ranks[of])
        for of, data in zip(ranks, board.read("record", ranks), strict=True)
    ]
    peer_ids = [record.peer_id for record in records]
    if len(set(peer_ids)) < size:
        raise ConfigurationError("two ranks are one peer: each needs a key of its own")
    group = Group(records[0].group, name, rank, peer_ids, global_ranks, node.exchange)
    thread.call_sync(partial(_let_in, node, group))
    try:
        board.write("ready", rank, b"")
        board.read("ready", ranks)
        _link(thread, group, records[:rank], board, rank)
    except BaseException:
        with contextlib.suppress(NeuroGridError):  # where the node is why
            thread.call_sync(partial(node.remove, group))
        raise
    return group


def _let_in(node: Node, group: Group) -> None:
    node.add(group)
    if isinstance(node.admission, AllowList):
        for peer_id in group.peer_ids:
            node.admission.allow(peer_id, WORKER)


def _link(
    thread: NodeThread, group: Group, lower: Sequence[Record], board: _Board, rank: int
) -> None:
    """Connect to the ranks below ours, and see that all others do."""
    reason = ""
    try:
        thread.call(partial(_dial_all, thread.node, group, lower, board.left()))
    except NeuroGridError as exc:
        # The others wait: they are told why it is in vain.
        reason = str(exc)
        raise
    finally:
        board.write("linked", rank, reason[:MAX_REASON_CHARS].encode())
    for other, data in enumerate(board.read("linked", range(group.size))):
        if data:
            said = printable_line(data[: 4 * MAX_REASON_CHARS].decode(errors="replace"))
            raise RankError(
                f"{group.called(other)} cannot take part: {said}",
                ranks=[group.global_ranks[other]],
            )


async def _dial_all(node: Node, group: Group, records: Iterable[Record], seconds: float) -> None:
    with unwrap_errors():
        async with trio.open_nursery() as nursery:
            for rank, record in enumerate(records):
                nursery.start_soon(_dial, node, group, rank, record, seconds)


async def _dial(node: Node, group: Group, rank: int, record: Record, seconds: float) -> None:
    with trio.move_on_after(seconds) as scope:
        try:
            await node.host.connect_any(record.addresses)
            await node.exchange.open(record.peer_id)
        except NeuroGridError as exc:
            raise RankError(
                f"cannot connect to {group.called(rank)}: {exc}",
                ranks=[group.global_ranks[rank]],
            ) from exc
    if scope.cancelled_caught:
        raise RankError(
            f"{group.called(rank)} did not answer within {seconds:.0f} s",
            ranks=[group.global_ranks[rank]],
        )


class _Board:
    """The store, with a deadline, as ranks write to it and wait for each other."""

    def __init__(
        self, store: Store, global_ranks: Sequence[int], deadline: float, timeout: float
    ) -> None:
        self._store = store
        self._global_ranks = global_ranks
        self._deadline = deadline
        self._timeout = timeout

    def left(self) -> float:
        """Seconds to the deadline."""
        return max(0.0, self._deadline - time.monotonic())

    def write(self, what: str, rank: int, data: bytes) -> None:
        """Say something; it begins with a byte that tells it from nothing."""
        self._store.set(f"neurogrid/{what}/{rank}", b"+" + data)

    def read(self, what: str, ranks: Sequence[int]) -> list[bytes]:
        """Wait for what all ranks say.

        Raises:
            RankError: some did not within the time.
        """
        keys = [f"neurogrid/{what}/{rank}" for rank in ranks]
        self._wait(keys, ranks)
        return [bytes(self._store.get(key))[1:] for key in keys]

    def _wait(self, keys: Sequence[str], ranks: Sequence[int]) -> None:
        pause = FIRST_LOOK
        missing = list(zip(keys, ranks, strict=True))
        # Not the store's own wait: it does not say which are missing, and Ctrl-C waits for it.
        while missing := [(key, rank) for key, rank in missing if not self._store.check([key])]:
            if not self.left():
                late = [self._global_ranks[rank] for _, rank in missing]
                called = f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
                raise RankError(f"waited {self._timeout:g} s for {called}", ranks=late)
            time.sleep(min(pause, self.left()))
            pause = min(2 * pause, LONGEST_LOOK)
