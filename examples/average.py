"""Average tensors with other processes, in a loop of one's own.

python examples/average.py 1                # the first; prints its address
python examples/average.py 5 ADDRESS        # the others
"""

import sys

import torch

import neurogrid

value, addresses = float(sys.argv[1]), sys.argv[2:]
tensors = {"weight": torch.full((2, 3), value), "bias": torch.full((3,), 10 * value)}
settings = neurogrid.GroupSettings(min_members=2, grace=5.0)
with neurogrid.open_group(
    tensors, join=addresses, settings=None if addresses else settings
) as group:
    if not addresses:
        print(group.addresses[0], flush=True)
    for _ in range(3):
        outcome = group.all_reduce(tensors, weight=1.0, timeout=60)
    print(f"round {outcome.round} of {len(outcome.contributors)}: {tensors['bias'].tolist()}")
