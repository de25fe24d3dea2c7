"""Data parallel training over two machines: a script for torch.distributed as it is, but for the name of the backend.

python examples/data_parallel.py 0 2                          # prints a ticket, and waits
NEUROGRID_TICKET=ngt1… python examples/data_parallel.py 1 2   # on the other machine, or on this one
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import neurogrid.training.distributed  # noqa: F401 - the backend


def main(rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "neurogrid",
        init_method="neurogrid://",
        rank=rank,
        world_size=world_size,
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.Generator().manual_seed(rank)
    for step in range(101):
        inputs = torch.randn(16, 8, generator=batches)
        loss = (model(inputs).squeeze() - inputs.sum(1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            dist.all_reduce(loss, dist.ReduceOp.AVG)
            print(f"step {step}: loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
