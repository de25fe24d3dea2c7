"""The collectives, as tasks of the loop: what each rank sends to which, and what it does with what comes.

A tensor is a `Flat`: its elements and its bytes, in one piece of memory. Sums are made chunk by chunk, beside
sending; every rank that makes one makes it in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import trio

from neurogrid.p2p.wire import Data
from neurogrid.training.distributed.chunks import Span, chunks_of, parts_of
from neurogrid.training.distributed.operation import Incoming, Operation, Outgoing
from neurogrid.training.distributed.sums import Reduction

__all__ = [
    "Flat",
    "all_reduce",
    "broadcast",
    "meet",
    "reduce",
    "reduce_scatter",
    "swap",
]

# Up to this many bytes every rank gets every tensor and adds by itself: half the way there and back.
DIRECT_BYTES = 64 * 1024


class Flat:
    """A dense tensor of the CPU, as one row of elements and as bytes.

    Attributes:
        elements: [numel], sharing memory with the tensor if that is contiguous, else a copy.
        memory: its bytes.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self.elements = self._tensor.contiguous().view(-1)
        self.memory = self.elements.view(torch.uint8).numpy().data

    def take(self, other: Flat) -> None:
        """Copy the elements of another one of this size."""
        with torch.inference_mode():  # as in `Reduction.reduce`
            self.elements.copy_(other.elements)

    def give_back(self) -> None:
        """Copy the elements to the tensor, if they are a copy."""
        if not self._tensor.is_contiguous():
            with torch.inference_mode():
                self._tensor.copy_(self.elements.view(self._tensor.shape))

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return len(self.memory)

    def items(self, span: Span) -> torch.Tensor:
        """The elements in a span of bytes."""
        item_bytes = self.elements.element_size()
        return self.elements[span[0] // item_bytes : span[1] // item_bytes]

    def parts(self, num_parts: int) -> Sequence[Span]:
        """Divide the tensor into parts, one for each rank, as spans of bytes."""
        return parts_of(self.elements.numel(), self.elements.element_size(), num_parts)

    def row(self, data: Data) -> torch.Tensor:
        """View bytes that came for this tensor as elements of its dtype."""
        if not len(data):
            return self.elements[:0]
        return torch.frombuffer(data, dtype=self.elements.dtype)


class _Progress:
    """Number of chunks that are done, for tasks that go on with them."""

    def __init__(self) -> None:
        self._done = 0
        self._more = trio.Event()

    def step(self) -> None:
        self._done += 1
        self._more.set()
        self._more = trio.Event()

    async def wait(self, index: int) -> None:
        while self._done <= index:
            await self._more.wait()


async def meet(operation: Operation) -> None:
    """Return when all ranks have come here."""
    await swap(operation, {}, {})


async def swap(
    operation: Operation, outgoing: Mapping[int, Flat], incoming: Mapping[int, Flat]
) -> None:
    """Send a tensor to some of the others, and take one from some.

    With neither, every rank sends every other nothing, which it waits for: a barrier.
    """
    others = operation.group.others
    if not outgoing and not incoming:
        empty = Flat(torch.empty(0, dtype=torch.uint8))
        outgoing = incoming = dict.fromkeys(others, empty)
    takes = {r: operation.incoming(r, 0, incoming[r].num_bytes) for r in others if r in incoming}
    sends = {r: operation.outgoing(r, 0, outgoing[r].num_bytes) for r in others if r in outgoing}
    async with trio.open_nursery() as nursery:
        for rank, send in sends.items():
            nursery.start_soon(send.send_all, outgoing[rank].memory)
        for rank, take in takes.items():
            nursery.start_soon(take.take_all, incoming[rank].memory)


async def all_reduce(operation: Operation, tensor: Flat, reduction: Reduction) -> None:
    """Put the reduction of all ranks' tensors in the place of each."""
    size = operation.group.size
    # Between two the direct way has no more bytes, and no second half.
    if size == 2 or tensor.num_bytes <= DIRECT_BYTES:
        await _all_reduce_directly(operation, tensor, reduction)
    else:
        await _all_reduce_in_parts(operation, tensor, reduction)


async def _all_reduce_directly(operation: Operation, tensor: Flat, reduction: Reduction) -> None:
    others = operation.group.others
    takes = {rank: operation.incoming(rank, 0, tensor.num_bytes) for rank in others}
    sends = {rank: operation.outgoing(rank, 0, tensor.num_bytes) for rank in others}
    sent = {rank: _Progress() for rank in others}

    async def send(rank: int) -> None:
        for index in range(len(sends[rank].chunks)):
            await sends[rank].send(index, tensor.memory)
            sent[rank].step()

    async with trio.open_nursery() as nursery:
        for rank in others:
            nursery.start_soon(send, rank)
        for index, chunk in enumerate(chunks_of(0, tensor.num_bytes)):
            own = tensor.items(chunk)
            rows = await _rows(operation, takes, index, tensor, own)
            for rank in others:  # what is not sent yet must not be written over
                await sent[rank].wait(index)
            reduction.reduce(rows, own)


async def _rows(
    operation: Operation,
    takes: Mapping[int, Incoming],
    index: int,
    tensor: Flat,
    own: torch.Tensor,
) -> list[torch.Tensor]:
    """A chunk from all ranks, in their order."""
    group = operation.group
    return [
        own if rank == group.rank else tensor.row(await takes[rank].take(index))
        for rank in range(group.size)
    ]


async def _all_reduce_in_parts(operation: Operation, tensor: Flat, reduction: Reduction) -> None:
    """Each rank reduces a part of the tensor, and sends it to all."""
    group = operation.group
    parts = tensor.parts(group.size)
    mine = parts[group.rank]
    rows_in = {rank: operation.incoming(rank, *mine) for rank in group.others}
    sums_in = {r: operation.incoming(r, *parts[r], is_derived=True) for r in group.others}
    rows_out = {rank: operation.outgoing(rank, *parts[rank]) for rank in group.others}
    sums_out = {rank: operation.outgoing(rank, *mine) for rank in group.others}
    reduced = _Progress()

    async def send_sums(sends: Outgoing) -> None:
        for index in range(len(sends.chunks)):
            await reduced.wait(index)
            await sends.send(index, tensor.memory)

    async with trio.open_nursery() as nursery:
        for rank in group.others:
            nursery.start_soon(rows_out[rank].send_all, tensor.memory)
            nursery.start_soon(send_sums, sums_out[rank])
            # A sum comes once its row is there, so nothing is written over before it is sent.
            nursery.start_soon(sums_in[rank].take_all, tensor.memory)
        for index, chunk in enumerate(chunks_of(*mine)):
            own = tensor.items(chunk)
            reduction.reduce(await _rows(operation, rows_in, index, tensor, own), own)
            reduced.step()


async def reduce_scatter(
    operation: Operation, inputs: Sequence[Flat], output: Flat, reduction: Reduction
) -> None:
    """Reduce `inputs[r]` of all ranks at rank r, into its `output`. All have one size."""
    group = operation.group
    num_bytes = output.num_bytes
    takes = {rank: operation.incoming(rank, 0, num_bytes) for rank in group.others}
    sends = {rank: operation.outgoing(rank, 0, num_bytes) for rank in group.others}
    async with trio.open_nursery() as nursery:
        for rank in group.others:
            nursery.start_soon(sends[rank].send_all, inputs[rank].memory)
        for index, chunk in enumerate(chunks_of(0, num_bytes)):
            own = inputs[group.rank].items(chunk)
            rows = await _rows(operation, takes, index, output, own)
            reduction.reduce(rows, output.items(chunk))


async def reduce(operation: Operation, tensor: Flat, root: int, reduction: Reduction) -> None:
    """Reduce the tensors of all ranks at one of them, in the place of its own."""
    group = operation.group
    if group.rank != root:
        await operation.outgoing(root, 0, tensor.num_bytes).send_all(tensor.memory)
        return
    takes = {rank: operation.incoming(rank, 0, tensor.num_bytes) for rank in group.others}
    for index, chunk in enumerate(chunks_of(0, tensor.num_bytes)):
        own = tensor.items(chunk)
        reduction.reduce(await _rows(operation, takes, index, tensor, own), own)


async def broadcast(operation: Operation, tensor: Flat, root: int) -> None:
    """Put one rank's tensor in the place of all.

    A large one goes out once, a part to each of the others, and they pass their parts on: the time does not grow with
    their number.
    """
    group = operation.group
    if group.size == 2 or tensor.num_bytes <= DIRECT_BYTES:
        if group.rank == root:
            await swap(operation, dict.fromkeys(group.others, tensor), {})
        else:
            await swap(operation, {}, {root: tensor})
        return
    holders = [rank for rank in range(group.size) if rank != root]
    parts = dict(zip(holders, tensor.parts(len(holders)), strict=True))
    async with trio.open_nursery() as nursery:
        if group.rank == root:
            for rank in holders:
                send = operation.outgoing(rank, *parts[rank])
                nursery.start_soon(send.send_all, tensor.memory)
            return
        take = operation.incoming(root, *parts[group.rank])
        came = _Progress()

        async def pass_on(sends: Outgoing) -> None:
            for index in range(len(sends.chunks)):
                await came.wait(index)
                await sends.send(index, tensor.memory)

        for rank in holders:
            if rank != group.rank:
                nursery.start_soon(pass_on, operation.outgoing(rank, *parts[group.rank]))
                derived = operation.incoming(rank, *parts[rank], is_derived=True)
                nursery.start_soon(derived.take_all, tensor.memory)
        for index, (start, stop) in enumerate(take.chunks):
            tensor.memory[start:stop] = await take.take(index)
            came.step()
