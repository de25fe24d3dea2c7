"""Train one model on several machines: each has all of it, and they sync every few steps.

python examples/train_together.py              # prints what the others join it by
python examples/train_together.py WHERE        # the others, on this machine

For other machines leave out `listen`: then it prints a ticket, which leads there.
"""

import sys
import sysconfig
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import neurogrid

LENGTH, BATCH, STEPS = 64, 8, 40


def text() -> torch.Tensor:
    """Bytes of Python's own library, which every machine has."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def main(ticket: str | None) -> None:
    torch.set_num_threads(1)
    config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = text()
    opened = (
        neurogrid.join_run(ticket, model, optimizer)
        if ticket
        else neurogrid.open_run(model, optimizer, every=10, listen=["/ip4/127.0.0.1/tcp/0"])
    )
    with opened as run:
        if not ticket:
            run.wait_members(2)
        for _ in range(STEPS):
            starts = torch.randint(len(data) - LENGTH, (BATCH,))
            batch = torch.stack([data[start : start + LENGTH] for start in starts]).long()
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            outcome = run.step(samples=BATCH)
            if outcome is not None:
                members = len(outcome.contributors)
                print(f"round {outcome.round} of {members} members, loss {loss:.2f}", flush=True)


main(sys.argv[1] if len(sys.argv) > 1 else None)
