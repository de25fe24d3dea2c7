"""Scripts for `torch.distributed` as anybody writes them, for any backend.

    rank_programs PROGRAM BACKEND INIT_METHOD RANK SIZE DIRECTORY [TIMEOUT]

Nothing here knows NeuroGrid but the import that registers it. What a program returns is left in the directory as
`BACKEND-RANK.pt`, and how it failed as `BACKEND-RANK.txt`, with the seconds that the failing call took.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp

Results = dict[str, Any]

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
# Elements: one, a few, more than is sent directly, and more than a window.
SIZES = (1, 5, 100_003, 3_000_001)


def sample(dtype: torch.dtype, num_items: int, seed: int) -> torch.Tensor:
    """A tensor that is different on each rank, and small enough to be multiplied."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + seed)
    if dtype is torch.bool:
        return torch.rand(num_items, generator=generator) < 0.5
    if dtype.is_floating_point:
        return torch.randn(num_items, generator=generator).to(dtype)
    return torch.randint(0, 7, (num_items,), generator=generator).to(dtype)


def tried(results: Results, name: str, function: Callable[[], Any]) -> None:
    """Keep what a collective gives; None where the backend has it not, which it says before it sends anything."""
    try:
        results[name] = function()
    except (RuntimeError, ValueError, TypeError):
        if dist.get_backend() != "gloo":
            raise
        results[name] = None


def reductions() -> Results:
    """all_reduce, with all operations, dtypes and sizes."""
    results: Results = {}
    for op in ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR"):
        for dtype in (*FLOATS, *INTEGERS):
            if dtype.is_floating_point == op.startswith("B") or (
                op == "AVG" and not dtype.is_floating_point
            ):
                continue
            for num_items in SIZES if dtype is torch.float32 else SIZES[1:3]:
                tensor = sample(dtype, num_items, seed=num_items)

                def run(tensor: torch.Tensor = tensor, op: str = op) -> torch.Tensor:
                    dist.all_reduce(tensor, getattr(ReduceOp, op))
                    return tensor

                tried(results, f"{op} {dtype} {num_items}", run)
    return results


def _into_tensor(tensor: torch.Tensor) -> torch.Tensor:
    out = torch.empty(tensor.numel() * dist.get_world_size(), dtype=tensor.dtype)
    dist.all_gather_into_tensor(out, tensor)
    return out


def _gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    out = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(out, tensor)
    return out


def _broadcast(tensor: torch.Tensor, root: int) -> torch.Tensor:
    dist.broadcast(tensor, root)
    return tensor


def _gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    root = dist.get_world_size() - 1
    out = None
    if dist.get_rank() == root:
        out = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.gather(tensor, out, dst=root)
    return out or []


def _scatter(tensor: torch.Tensor) -> torch.Tensor:
    rows = None
    if dist.get_rank() == 1:
        rows = [tensor + i for i in range(dist.get_world_size())]
    out = torch.empty_like(tensor)
    dist.scatter(out, rows, src=1)
    return out


def _reduced(tensor: torch.Tensor) -> torch.Tensor:
    dist.reduce(tensor, 1)
    # What is there on the others is nobody's.
    return tensor if dist.get_rank() == 1 else torch.empty(0, dtype=torch.int8)


def _swapped(tensor: torch.Tensor) -> torch.Tensor:
    size, rank = dist.get_world_size(), dist.get_rank()
    tensor = tensor[: tensor.numel() // size * size]
    out = torch.empty_like(tensor)
    dist.all_to_all_single(out, tensor)
    uneven = torch.empty(sum(rank + other for other in range(size)), dtype=tensor.dtype)
    rows = torch.arange(sum(rank + other for other in range(size))).to(tensor.dtype) + 100 * rank
    splits = [rank + other for other in range(size)]
    dist.all_to_all_single(uneven, rows, splits, splits)
    return torch.cat([out, uneven])


def _reduce_scattered(tensor: torch.Tensor) -> torch.Tensor:
    size = dist.get_world_size()
    tensor = tensor[: tensor.numel() // size * size]
    out = torch.empty(tensor.numel() // size, dtype=tensor.dtype)
    dist.reduce_scatter_tensor(out, tensor)
    return out


def _ring(tensor: torch.Tensor) -> torch.Tensor:
    size, rank = dist.get_world_size(), dist.get_rank()
    out = torch.empty_like(tensor)
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, (rank + 1) % size),
            dist.P2POp(dist.irecv, out, (rank - 1) % size),
        ]
    ):
        work.wait()
    return out


def _across(tensor: torch.Tensor) -> torch.Tensor:
    """What is sent first is received last, beside a collective; it is more than a window."""
    out = [torch.empty_like(tensor), torch.empty_like(tensor)]
    if dist.get_rank() == 0:
        works = [dist.isend(tensor + tag, 1, tag=tag) for tag in (7, 8)]
        dist.barrier()
        for work in works:
            work.wait()
    else:
        dist.barrier()
        if dist.get_rank() == 1:
            dist.recv(out[1], 0, tag=8)
            dist.recv(out[0], 0, tag=7)
    return torch.stack(out) if dist.get_rank() == 1 else torch.empty(0)


def _from_any(tensor: torch.Tensor) -> list[torch.Tensor]:
    out = []
    if dist.get_rank() == 0:
        for _ in range(1, dist.get_world_size()):
            came = torch.empty_like(tensor)
            rank = dist.recv(came)
            out.append((rank, came))
    else:
        dist.send(tensor, 0)
    return [came for _, came in sorted(out, key=lambda item: item[0])]


def movements() -> Results:
    """Everything that moves tensors."""
    results: Results = {}
    for dtype in (*FLOATS, *INTEGERS, torch.bool):
        for num_items in SIZES if dtype is torch.float32 else SIZES[1:3]:
            tensor = sample(dtype, num_items, seed=num_items)
            name = f"{dtype} {num_items}"
            last = dist.get_world_size() - 1
            tried(results, f"all_gather {name}", lambda t=tensor: _gathered(t))
            tried(results, f"all_gather_into_tensor {name}", lambda t=tensor: _into_tensor(t))
            for root in (0, last):
                tried(
                    results,
                    f"broadcast {root} {name}",
                    lambda t=tensor, r=root: _broadcast(t.clone(), r),
                )
            tried(results, f"gather {name}", lambda t=tensor: _gather(t))
            tried(results, f"ring {name}", lambda t=tensor: _ring(t))
            tried(results, f"any source {name}", lambda t=tensor: _from_any(t))
            if dtype is not torch.bool:
                tried(results, f"scatter {name}", lambda t=tensor: _scatter(t))
                tried(results, f"reduce {name}", lambda t=tensor: _reduced(t.clone()))
                tried(results, f"all_to_all {name}", lambda t=tensor: _swapped(t))
                tried(results, f"reduce_scatter {name}", lambda t=tensor: _reduce_scattered(t))
    tensor = sample(torch.float32, SIZES[-1], seed=1)
    tried(results, "across", lambda: _across(tensor))
    results["callbacks"] = _in_callbacks()
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, {"rank": dist.get_rank()})
    results["objects"] = objects
    strided = sample(torch.float32, 200_000, seed=2).view(400, 500).t()
    dist.all_reduce(strided)
    results["strided"] = strided
    results["groups"] = _in_groups()
    return results


def _in_callbacks() -> torch.Tensor:
    """A callback that calls a collective, and waits for another callback."""

    def again(future: torch.futures.Future[Any]) -> torch.Tensor:
        (tensor,) = future.value()
        work = dist.all_reduce(tensor, async_op=True)
        doubled = work.get_future().then(lambda future: 2 * future.value()[0])
        result: torch.Tensor = doubled.wait()
        return result

    work = dist.all_reduce(sample(torch.int64, 50, seed=9), async_op=True)
    result: torch.Tensor = work.get_future().then(again).wait()
    return result


def _in_groups() -> list[torch.Tensor]:
    """Groups of some ranks, in another order than theirs, beside the group of all."""
    size, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, size - 1], list(range(1, size)))]
    out = []
    works = []
    for group in groups:
        if dist.get_rank(group) >= 0:
            tensor = torch.full((70_000,), float(rank))
            works.append(dist.all_reduce(tensor, group=group, async_op=True))
            out.append(tensor)
    whole = torch.ones(3)
    dist.all_reduce(whole)
    for work in works:
        work.wait()
    for group in groups:
        if dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)
    return [*out, whole]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 8)
    )


def _train(model: nn.Module, parameters: Any) -> list[float]:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(12):
        loss = model(torch.randn(16, 64, generator=generator)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ddp() -> Results:
    """Data parallel training with several buckets: plain, and in float16 on the wire."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    results: Results = {}
    for name, hook in (("plain", None), ("fp16", fp16_compress_hook)):
        model = _model()
        wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.25)
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        results[f"losses {name}"] = _train(wrapped, model.parameters())
        results[f"state {name}"] = model.state_dict()
    return results


def fsdp() -> Results:
    """Fully sharded training."""
    from torch.distributed.fsdp import fully_shard

    model = _model()
    for module in model:
        if isinstance(module, nn.Linear):
            fully_shard(module)
    fully_shard(model)
    results: Results = {"losses": _train(model, model.parameters())}
    results["state"] = {k: v.full_tensor() for k, v in model.state_dict().items()}
    return results


def pipelining() -> Results:
    """Two stages, four micro-batches, by two schedules, as the tutorial of torch.distributed.pipelining has it."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank = dist.get_rank()
    results: Results = {}
    for schedule_class in (ScheduleGPipe, Schedule1F1B):
        layers = list(_model())
        module = nn.Sequential(*(layers[:2] if rank == 0 else layers[2:]))
        stage = PipelineStage(module, rank, dist.get_world_size(), torch.device("cpu"))
        schedule = schedule_class(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        torch.manual_seed(5)
        inputs, targets = torch.randn(32, 64), torch.randn(32, 8)
        losses: list[torch.Tensor] = []
        for _ in range(3):
            if rank == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=targets, losses=losses)
        name = schedule_class.__name__
        results[f"{name} losses"] = losses
        results[f"{name} grads"] = [p.grad for p in module.parameters()]
    return results


def endless() -> Results:
    """all_reduce until somebody ends it, large ones."""
    print("begun", flush=True)
    tensor = torch.ones(4_000_000)
    while True:
        dist.all_reduce(tensor)
        tensor.fill_(1.0)


def endless_ddp() -> Results:
    """Data parallel training until somebody ends it."""
    model = nn.parallel.DistributedDataParallel(_model(), bucket_cap_mb=0.25)
    print("begun", flush=True)
    while True:
        model(torch.ones(16, 64)).sum().backward()


def leaves() -> Results:
    """Send the last thing, and end without a word."""
    tensor = torch.full((2_000_000,), 7.0)
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor.zero_(), 0)
    results = {"sum": tensor.sum().item()}
    torch.save(results, Path(sys.argv[6]) / f"{sys.argv[2]}-{dist.get_rank()}.pt")
    raise SystemExit(0)


def hears_nothing() -> Results:
    """A receive for which nothing is sent, on rank 0; the others wait for a barrier."""
    print("begun", flush=True)
    if dist.get_rank() == 0:
        dist.recv(torch.empty(3), 1)
    dist.barrier()
    return {}


def other_shapes() -> Results:
    """Rank 1 has another idea of the tensor."""
    dist.all_reduce(torch.ones(5 if dist.get_rank() == 1 else 4))
    return {}


def barrier() -> Results:
    """Meet, and no more."""
    dist.barrier()
    return {"rank": dist.get_rank()}


PROGRAMS = {
    program.__name__: program
    for program in (
        reductions,
        movements,
        ddp,
        fsdp,
        pipelining,
        endless,
        endless_ddp,
        leaves,
        hears_nothing,
        other_shapes,
        barrier,
    )
}


def main(
    program: str,
    backend: str,
    init_method: str,
    rank: str,
    size: str,
    directory: str,
    timeout: str = "120",
) -> None:
    torch.set_num_threads(1)
    if backend == "neurogrid":
        import neurogrid.training.distributed  # noqa: F401 - registers it
    place = Path(directory) / f"{backend}-{rank}"
    begun = time.monotonic()
    try:
        dist.init_process_group(
            backend,
            init_method=init_method,
            rank=int(rank),
            world_size=int(size),
            timeout=timedelta(seconds=float(timeout)),
        )
        results = PROGRAMS[program]()
    except Exception as exc:
        seconds = time.monotonic() - begun
        text = "".join(traceback.format_exception(exc))
        place.with_suffix(".txt").write_text(f"{seconds:.1f} {type(exc).__name__}: {exc}\n\n{text}")
        raise SystemExit(3) from exc
    torch.save(results, place.with_suffix(".pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
