"""The process group that torch calls: its methods have the names and arguments that torch gives them.

Each method checks what it got, hands an operation to the loop, and returns what its caller waits for. Collectives run
one after another, in the order in which they were called; sends and receives run beside them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import trio

from neurogrid.errors import ConfigurationError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.training.distributed import collectives
from neurogrid.training.distributed.collectives import Flat
from neurogrid.training.distributed.errors import RankError
from neurogrid.training.distributed.group import COLLECTIVES, MAX_TAG, Group
from neurogrid.training.distributed.node import NodeThread
from neurogrid.training.distributed.operation import Operation
from neurogrid.training.distributed.sums import reduction_of
from neurogrid.training.distributed.work import Pending

__all__ = ["NeuroGridProcessGroup"]

Task = Callable[[Operation], Awaitable[None]]
Tensors = list[torch.Tensor]

# Its annotations have several forms of each method, of which torch calls one.
_ProcessGroup: Any = dist.ProcessGroup


class NeuroGridProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """One process group of the backend `neurogrid`. Made by `torch.distributed`, never by hand.

    Tensors are of the CPU and dense, of any dtype. One that is not contiguous is copied on the way.

    Raises:
        RankError: from each method and from waiting for what it returns: a rank did not do its part, now or before.
        ConfigurationError: from each method: a tensor or an operation that this backend has not.
    """

    def __init__(self, thread: NodeThread, group: Group, timeout: float) -> None:
        super().__init__(group.rank, group.size)
        self._thread = thread
        self._group = group
        self._timeout = timeout
        self._is_open = True
        # One at a time looks which rank sends something, for each tag.
        self._any_source: dict[int, trio.Lock] = {}
        # The send that was called last, by rank and tag.
        self._sends: dict[tuple[int, int], trio.Event] = {}

    # What torch asks it

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The name of the backend."""
        return "neurogrid"

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        """Take the name by which torch's registry knows the group."""
        self._registered_name = name

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """The name by which torch's registry knows the group."""
        return self._registered_name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - torch's name
        """Take the description of the group."""
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """The description of the group."""
        return self._description

    @property
    def group_name(self) -> str:
        """As `getGroupName`."""
        return self._registered_name

    @property
    def group_desc(self) -> str:
        """As `getGroupDesc`."""
        return self._description

    def set_timeout(self, timeout: timedelta) -> None:
        """Give operations this long, those that are called from now on."""
        self._timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """End it here: what is under way fails. The last group of a process ends its host."""
        if not self._is_open:
            return
        self._is_open = False
        if self._thread.is_here and self._thread.is_open:
            self._thread.call_sync(self._end)
            self._thread.release()

    abort = shutdown

    def _end(self) -> None:
        self._group.fail(RankError(f"{self._group.name} was destroyed"))
        self._thread.node.remove(self._group)

    # Collectives

    def barrier(self, opts: Any = None) -> Pending:
        """Wait for all ranks."""
        return self._call("barrier", [], collectives.meet, opts)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Pending:
        """Reduce the tensors of all ranks, into each of them."""
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        flats = self._flats(tensors)
        reductions = [reduction_of(op, t.dtype, self._group.size) for t in tensors]

        async def run(operation: Operation) -> None:
            for flat, reduction in zip(flats, reductions, strict=True):
                await collectives.all_reduce(operation, flat, reduction)

        return self._call("all_reduce", tensors, run, opts, flats)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Tensors, opts: Any) -> Pending:
        """Put the root's tensors in the places of all."""
        flats = self._flats(tensors)

        async def run(operation: Operation) -> None:
            for flat in flats:
                await collectives.broadcast(operation, flat, opts.rootRank)

        return self._call("broadcast", tensors, run, opts, flats)

    def reduce(self, tensors: Tensors, opts: Any) -> Pending:
        """Reduce the tensors of all ranks, into the root's."""
        flats = self._flats(tensors)
        reductions = [reduction_of(opts.reduceOp, t.dtype, self._group.size) for t in tensors]

        async def run(operation: Operation) -> None:
            for flat, reduction in zip(flats, reductions, strict=True):
                await collectives.reduce(operation, flat, opts.rootRank, reduction)

        return self._call("reduce", tensors, run, opts, flats)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Pending:
        """Put the tensors of all ranks into a list on each, in the order of ranks."""
        return self._gather_all("all_gather", outputs, inputs, opts)

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> Pending:
        """As `allgather`, of several tensors; the r-th list is for those of rank r."""
        for row in outputs:
            sizes = [tensor.numel() for tensor in inputs]
            self._check_sizes("all_gather_coalesced", row, sizes)
        rows = [list(row) for row in zip(*outputs, strict=True)]
        return self._gather_all("all_gather_coalesced", rows, inputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Pending:
        """Put the tensors of all ranks into one on each, one after the other."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Pending:
        """As `all_gather_single`, of several tensors."""
        rows = [self._rows(output) for output in outputs]
        return self._gather_all("all_gather_into_tensor", rows, inputs, opts, outputs)

    def _gather_all(
        self,
        name: str,
        outputs: list[Tensors],
        inputs: Tensors,
        opts: Any,
        result: Tensors | None = None,
    ) -> Pending:
        group = self._group
        for row, tensor in zip(outputs, inputs, strict=True):
            self._check_sizes(name, row, [tensor.numel()] * group.size)
            _check_dtypes(name, [*row, tensor])
        sent = self._flats(inputs)
        came = [self._flats(row) for row in outputs]

        async def run(operation: Operation) -> None:
            for flat, row in zip(sent, came, strict=True):
                row[group.rank].take(flat)
                theirs = {rank: row[rank] for rank in group.others}
                await collectives.swap(operation, dict.fromkeys(group.others, flat), theirs)

        written = [flat for row in came for flat in row]
        return self._call(name, result or [t for row in outputs for t in row], run, opts, written)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Pending:
        """Reduce the r-th of each rank's tensors at rank r."""
        return self._reduce_scatter("reduce_scatter", outputs, inputs, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any
    ) -> Pending:
        """Reduce the r-th part of each rank's tensor at rank r."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> Pending:
        """As `reduce_scatter_single`, of several tensors."""
        rows = [self._rows(tensor) for tensor in inputs]
        return self._reduce_scatter("reduce_scatter_tensor", outputs, rows, opts)

    def _reduce_scatter(
        self, name: str, outputs: Tensors, inputs: list[Tensors], opts: Any
    ) -> Pending:
        for output, row in zip(outputs, inputs, strict=True):
            self._check_sizes(name, row, [output.numel()] * self._group.size)
            _check_dtypes(name, [*row, output])
        flats = self._flats(outputs)
        rows = [self._flats(row) for row in inputs]
        reductions = [reduction_of(opts.reduceOp, t.dtype, self._group.size) for t in outputs]

        async def run(operation: Operation) -> None:
            for flat, row, reduction in zip(flats, rows, reductions, strict=True):
                await collectives.reduce_scatter(operation, row, flat, reduction)

        return self._call(name, outputs, run, opts, flats)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Pending:
        """Send the r-th tensor to rank r, and get one from each."""
        group = self._group
        sent, came = self._flats(inputs), self._flats(outputs)
        self._check_sizes("all_to_all", inputs, [None] * group.size)
        self._check_sizes("all_to_all", outputs, [None] * group.size)
        self._check_sizes("all_to_all", [outputs[group.rank]], [inputs[group.rank].numel()])
        _check_dtypes("all_to_all", [*outputs, *inputs])

        async def run(operation: Operation) -> None:
            came[group.rank].take(sent[group.rank])
            await collectives.swap(
                operation,
                {rank: sent[rank] for rank in group.others},
                {rank: came[rank] for rank in group.others},
            )

        return self._call("all_to_all", outputs, run, opts, came)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Pending:
        """Send the r-th part of a tensor to rank r, and get one from each. Splits are rows; none is equal parts."""
        if not output.is_contiguous():
            raise ConfigurationError("all_to_all_single wants a contiguous output")
        came = self._rows(output, output_splits)
        return self.alltoall(came, self._rows(input.contiguous(), input_splits), opts)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Pending:
        """Put the tensors of all ranks into a list at the root."""
        group = self._group
        (sent,) = self._flats(inputs)
        root = opts.rootRank
        row = outputs[0] if group.rank == root else []
        if group.rank == root:
            self._check_sizes("gather", row, [inputs[0].numel()] * group.size)
            _check_dtypes("gather", [*row, *inputs])
        came = self._flats(row)

        async def run(operation: Operation) -> None:
            if group.rank != root:
                await collectives.swap(operation, {root: sent}, {})
                return
            came[root].take(sent)
            theirs = {rank: came[rank] for rank in group.others}
            await collectives.swap(operation, {}, theirs)

        return self._call("gather", row, run, opts, came)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Pending:
        """Send the r-th of the root's tensors to rank r."""
        group = self._group
        (came,) = self._flats(outputs)
        root = opts.rootRank
        row = inputs[0] if group.rank == root else []
        if group.rank == root:
            self._check_sizes("scatter", row, [outputs[0].numel()] * group.size)
            _check_dtypes("scatter", [*row, *outputs])
        sent = self._flats(row)

        async def run(operation: Operation) -> None:
            if group.rank != root:
                await collectives.swap(operation, {}, {root: came})
                return
            came.take(sent[root])
            theirs = {rank: sent[rank] for rank in group.others}
            await collectives.swap(operation, theirs, {})

        return self._call("scatter", outputs, run, opts, [came])

    # What older versions of torch call them
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    # Between two ranks

    def send(self, tensors: Tensors, rank: int, tag: int) -> Pending:
        """Send a tensor to one rank."""
        (flat,) = self._flats(tensors)
        operation = self._operation("send", tag, rank)
        pending = self._pending("send", tensors)

        def start() -> None:
            outgoing = operation.outgoing(rank, 0, flat.num_bytes)

            async def run(operation: Operation) -> None:
                await outgoing.send_all(flat.memory)

            # In order: one that overtook the one before might have the window that this one waits for.
            before = self._sends.get((rank, tag))
            done = self._sends[rank, tag] = trio.Event()
            self._start(pending, operation, run, [], before, done)

        return self._soon(pending, start)

    def recv(self, tensors: Tensors, rank: int, tag: int) -> Pending:
        """Take a tensor from one rank."""
        flats = self._flats(tensors)
        operation = self._operation("recv", tag, rank)
        pending = self._pending("recv", tensors)

        def start() -> None:
            async def run(operation: Operation) -> None:
                await incoming.take_all(flats[0].memory)

            incoming = operation.incoming(rank, 0, flats[0].num_bytes)
            self._start(pending, operation, run, flats, None, trio.Event(), source=rank)

        return self._soon(pending, start)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Pending:
        """Take a tensor from the first rank that sends one."""
        flats = self._flats(tensors)
        operation = self._operation("recv", tag, None)
        pending = self._pending("recv", tensors)

        async def run(operation: Operation) -> None:
            async with self._any_source.setdefault(tag, trio.Lock()):
                rank = await operation.early_rank()
                incoming = operation.incoming(rank, 0, flats[0].num_bytes)
            pending.source = rank
            await incoming.take_all(flats[0].memory)

        def start() -> None:
            self._start(pending, operation, run, flats, None, trio.Event())

        return self._soon(pending, start)

    # How they run

    def _operation(self, name: str, tag: int, rank: int | None) -> Operation:
        group = self._group
        if not 0 <= tag <= MAX_TAG:
            raise ConfigurationError(f"a tag is from 0 to {MAX_TAG}, not {tag}")
        if group.size == 1:
            raise ConfigurationError(f"{name} is between two ranks, and {group.name} has one")
        if rank == group.rank or (rank is not None and not 0 <= rank < group.size):
            raise ConfigurationError(f"{name} is between two ranks, and rank {rank} is not another")
        return Operation(group, name, tag=tag + 1, timeout=self._timeout)

    def _call(
        self, name: str, tensors: Tensors, run: Task, opts: Any, written: Sequence[Flat] = ()
    ) -> Pending:
        """Have a collective run when those before it are done."""
        timeout = opts.timeout.total_seconds() if opts is not None else 0.0
        operation = Operation(
            self._group, name, tag=COLLECTIVES, timeout=timeout if timeout > 0 else self._timeout
        )
        pending = self._pending(name, tensors)

        def start() -> None:
            before, done = self._group.tail, trio.Event()
            self._group.tail = done
            self._start(pending, operation, run, written, before, done)

        return self._soon(pending, start)

    def _pending(self, name: str, tensors: Tensors) -> Pending:
        return Pending(name, tensors, self._thread.futures, self._thread.check)

    def _soon(self, pending: Pending, start: Callable[[], None]) -> Pending:
        if not self._is_open or not self._thread.is_here:
            raise RankError(f"{self._group.name} was destroyed, or is another process's")

        def start_or_fail() -> None:
            try:
                start()
            # The loop has no part in it, whatever it is.
            except Exception as exc:  # noqa: BLE001
                self._group.fail(RankError(str(exc), ranks=getattr(exc, "ranks", ())))
                self._thread.node.host.start_soon(self._end_failed, pending, exc)

        self._thread.soon(start_or_fail)
        return pending

    async def _end_failed(self, pending: Pending, error: BaseException) -> None:
        """End an operation with an error that the other ranks are told first: its caller may end with it."""
        try:
            await self._group.tell_failure()
        finally:
            pending.end(error)

    def _start(
        self,
        pending: Pending,
        operation: Operation,
        run: Task,
        written: Sequence[Flat],
        before: trio.Event | None,
        done: trio.Event,
        *,
        source: int = -1,
    ) -> None:
        pending.source = source
        self._thread.node.host.start_soon(
            partial(self._run, pending, operation, run, written, before, done)
        )

    async def _run(
        self,
        pending: Pending,
        operation: Operation,
        run: Task,
        written: Sequence[Flat],
        before: trio.Event | None,
        done: trio.Event,
    ) -> None:
        error: BaseException | None = RankError(f"{operation.group.name} was destroyed")
        try:
            if before is not None:
                await before.wait()
            await self._run_within(operation, run)
            for flat in written:
                flat.give_back()
            error = None
        # Whatever it is, it belongs to the caller; the host has no part in it.
        except Exception as exc:  # noqa: BLE001
            error = exc
        finally:
            if error is None:
                done.set()
                pending.end()
            else:
                operation.group.fail(RankError(str(error), ranks=getattr(error, "ranks", ())))
                done.set()
                await self._end_failed(pending, error)

    async def _run_within(self, operation: Operation, run: Task) -> None:
        group = operation.group
        if group.failure is not None:
            raise RankError(
                f"{operation.name} in {group.name}: it failed before, and is of no more use: "
                f"{group.failure}",
                ranks=getattr(group.failure, "ranks", ()),
            ) from group.failure
        with trio.move_on_after(operation.timeout) as scope, unwrap_errors():
            await run(operation)
        if scope.cancelled_caught:
            raise operation.late()

    # Tensors

    def _flats(self, tensors: Tensors) -> list[Flat]:
        for tensor in tensors:
            if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                raise ConfigurationError(
                    f"the backend neurogrid moves dense tensors of the CPU, not {tensor.layout} on "
                    f"{tensor.device}: move it there and back (.cpu(), .to_dense())"
                )
        return [Flat(tensor) for tensor in tensors]

    def _rows(self, tensor: torch.Tensor, splits: Sequence[int] = ()) -> Tensors:
        """The parts of a tensor along its first dimension, one for each rank."""
        size = self._group.size
        if not splits:
            if tensor.numel() % size:
                raise ConfigurationError(f"{tuple(tensor.shape)} has no {size} equal parts")
            if tensor.is_contiguous():
                return list(tensor.view(size, -1).unbind())
            if tensor.shape[0] % size:
                raise ConfigurationError(
                    f"{tuple(tensor.shape)} is not contiguous, and has no {size} equal parts of whole rows: "
                    "make it contiguous (.contiguous())"
                )
            return list(tensor.chunk(size))
        if len(splits) != size or sum(splits) != tensor.shape[0]:
            raise ConfigurationError(
                f"{list(splits)} is no split of {tensor.shape[0]} rows in {size}"
            )
        return list(tensor.split(list(splits)))

    def _check_sizes(self, name: str, tensors: Tensors, num_items: Sequence[int | None]) -> None:
        sizes = [tensor.numel() for tensor in tensors]
        fits = len(sizes) == len(num_items) and all(
            wanted is None or size == wanted for size, wanted in zip(sizes, num_items, strict=True)
        )
        if not fits:
            raise ConfigurationError(
                f"{name} wants {len(num_items)} tensors of {list(num_items)} elements, not {sizes}"
            )


def _check_dtypes(name: str, tensors: Tensors) -> None:
    dtypes = sorted({str(tensor.dtype) for tensor in tensors})
    if len(dtypes) > 1:
        raise ConfigurationError(f"{name} wants tensors of one dtype, not {', '.join(dtypes)}")
