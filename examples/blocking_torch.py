"""A plain torch program, without trio and without async: the last half of a model runs in another process.

python examples/blocking_torch.py            # has the second half, and prints its address
python examples/blocking_torch.py ADDRESS    # has the first half, and computes the whole
"""

import sys
import threading

import torch

from neurogrid.p2p import TensorMessage, blocking

torch.manual_seed(0)
MODEL = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))).requires_grad_(False)


def as_torch(message: TensorMessage) -> torch.Tensor:
    return torch.frombuffer(message.data, dtype=torch.float32).reshape(message.envelope.shape)


def second_half() -> None:
    with blocking.open_host() as host:
        protocol = blocking.Protocol(host)
        # Handlers run in threads: they may compute, and may call other peers, without holding anybody up.
        protocol.on_activation_received(lambda message: MODEL[2:](as_torch(message)))
        print(host.addresses[0], flush=True)
        threading.Event().wait()


def first_half(address: str) -> None:
    hidden = torch.ones(1, 3, 8)
    with blocking.open_host() as host:
        protocol = blocking.Protocol(host)
        peer_id = host.connect(address)
        answer = protocol.request_activation(peer_id, 2, 0, MODEL[:2](hidden), timeout=60)
        print("equal to the whole:", torch.equal(as_torch(answer), MODEL(hidden)))


if __name__ == "__main__":
    first_half(sys.argv[1]) if len(sys.argv) > 1 else second_half()
