"""What does PowerSGD send of a small Llama's gradients, and what does it leave out?

    python benchmarks/power_sgd.py

Members have the same weights and batches of their own, bytes of the sources of Python's library. The gradients are
exact and the weights follow their exact sum, so that all ranks see the same ones.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import time
from pathlib import Path

import torch
import transformers as tf
from report import spread, table, write_report

from neurogrid.training.optimizers import PowerSgd

RANKS = (4, 8, 16, 32, 64)
SEQUENCES, TOKENS = 4, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--before", type=int, default=20, help="steps before the first that counts")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(
        tf.LlamaConfig(
            hidden_size=options.hidden,
            intermediate_size=4 * options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=256,
        )
    )
    parameters = list(model.parameters())
    shapes = [parameter.shape for parameter in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    text = library()
    groups = {rank: [PowerSgd(shapes, rank) for _ in range(options.members)] for rank in RANKS}
    lost: dict[int, list[float]] = {rank: [] for rank in RANKS}
    seconds: dict[int, list[float]] = {rank: [] for rank in RANKS}
    applied = {rank: [torch.zeros(shape) for shape in shapes] for rank in RANKS}
    due = [torch.zeros(shape) for shape in shapes]
    for step in range(options.before + options.steps):
        gradients = []
        for _ in range(options.members):
            optimizer.zero_grad()
            starts = torch.randint(0, len(text) - TOKENS, (SEQUENCES,))
            ids_BT = torch.stack([text[start : start + TOKENS] for start in starts.tolist()])
            (model(input_ids=ids_BT, labels=ids_BT).loss / options.members).backward()
            gradients.append([parameter.grad.clone() for parameter in parameters])
        exact = [torch.stack(each).sum(0) for each in zip(*gradients, strict=True)]
        if step >= options.before:
            for total, each in zip(due, exact, strict=True):
                total += each
            for rank, members in groups.items():
                began = time.process_time()
                found = exchanged(members, gradients)
                seconds[rank].append((time.process_time() - began) / options.members)
                lost[rank].append(apart(found, exact))
                for total, each in zip(applied[rank], found, strict=True):
                    total += each
        for parameter, gradient in zip(parameters, exact, strict=True):
            parameter.grad = gradient
        optimizer.step()
    num_elements = sum(parameter.numel() for parameter in parameters)
    write_report(
        "power-sgd",
        f"PowerSGD of the gradients of a Llama of {options.layers} layers, hidden size {options.hidden}, "
        f"{num_elements:,} parameters, over {options.members} members; {options.steps} steps after {options.before} "
        "others, each with its error feedback. A step's distance is that of what was applied to the exact sum, by the "
        "norm of the sum; beside it, that of all that was applied in these steps to the sum of all exact ones. CPU "
        "time is a member's of a step, one thread, without the sums; median (minimum to maximum).",
        table(
            ["rank", "compressed", "bytes of f32's", "a step's distance", "of all steps", "CPU ms"],
            [
                [
                    str(rank),
                    f"{len(members[0].compressed)} of {len(shapes)}",
                    f"{100 * (members[0].first_elements + members[0].second_elements) / num_elements:.1f} %",
                    spread(lost[rank]).show(3),
                    f"{apart(applied[rank], due):.3f}",
                    spread([1e3 * each for each in seconds[rank]]).show(0),
                ]
                for rank, members in groups.items()
            ],
        ),
    )


def library() -> torch.Tensor:
    """The sources of Python's library, one after the other: int64 [bytes]."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(
        bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8
    ).long()


def exchanged(members: list[PowerSgd], gradients: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Exchange and commit a step of all members; return what all apply."""
    firsts = [torch.empty(member.first_elements) for member in members]
    for member, own, vector in zip(members, gradients, firsts, strict=True):
        member.first(own, vector)
    summed = torch.stack(firsts).sum(0)
    seconds = [torch.empty(member.second_elements) for member in members]
    for member, vector in zip(members, seconds, strict=True):
        member.second(summed, vector)
    summed = torch.stack(seconds).sum(0)
    found = [member.finish(summed) for member in members]
    for member in members:
        member.commit()
    return found[0]


def apart(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The norm of the difference over that of the exact ones."""
    differences = sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True))
    return float((differences / sum(float(b.square().sum()) for b in exact)) ** 0.5)


if __name__ == "__main__":
    main()
