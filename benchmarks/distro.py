"""DisTrO against data parallel training: what do they cost in quality, and what does a member send?

    python benchmarks/distro.py --seeds 0 1

The pilot of `diloco.py`: a Llama of a million parameters learns the sources of Python's standard library, byte by byte,
from a checkpoint of some data parallel steps. Members are in one process; their momenta and steps are those of
`Distro`, and a step's bytes the length of the result that goes over the wire. The learning rate of each kind of result,
signs or values, is the best of a few with the first seed, at `--tuned-with` coefficients a chunk.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import math
from dataclasses import dataclass, replace

import diloco
import torch
from diloco import Member, Pilot, Result
from report import table, write_report
from torch import Tensor

from neurogrid.training.optimizers import Distro
from neurogrid.training.witnessed import ResultPlan


@dataclass(frozen=True)
class Kind:
    """Form in which members send a step."""

    top_k: int
    one_bit: bool
    lr: float

    @property
    def name(self) -> str:
        return f"DisTrO, {self.top_k} {'signs' if self.one_bit else 'values'} a chunk"


class DistroPilot(Pilot):
    """The pilot with one more way."""

    def distro(self, kind: Kind) -> Result:
        members = self.members(self.num_members)
        shapes = [tuple(weights.shape) for weights in members[0].parameters.values()]
        states = [
            Distro(member.theta, shapes, top_k=kind.top_k, one_bit=kind.one_bit)
            for member in members
        ]
        plan = ResultPlan(
            tuple((chunks, size) for chunks, size, _ in states[0].chunks), kind.top_k, kind.one_bit
        )
        num_bytes, total = 0, self.num_warm + self.num_steps
        for number in range(self.num_warm, total):
            cosine = 0.5 * (1 + math.cos(math.pi * number / total))
            lr = kind.lr * (0.1 + 0.9 * cosine)
            sent = [
                state.encode(gradient(member), lr)
                for member, state in zip(members, states, strict=True)
            ]
            if number == self.num_warm:
                num_bytes = len(plan.encode(sent[0].positions.numpy(), sent[0].values.numpy()))
                assert num_bytes == plan.num_bytes
            mean = states[0].mean(sent)
            for member, state in zip(members, states, strict=True):
                state.commit(mean)
                member.put(state.theta)
        assert all(torch.equal(states[0].theta, state.theta) for state in states)
        return Result(self.loss(states[0].theta), num_bytes * self.num_steps)


def gradient(member: Member) -> Tensor:
    """Gradient of a batch of the member's own, float32 [n]."""
    member.optimizer.zero_grad()
    batch = member.draw()
    member.model(input_ids=batch, labels=batch).loss.backward()
    found = torch.empty(member.layout.num_elements)
    member.layout.flatten({name: each.grad for name, each in member.parameters.items()}, found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warm", type=int, default=150, help="data parallel steps before")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--adamw-lr", type=float, nargs="+", default=[3e-3, 1e-2])
    parser.add_argument("--top-k", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--tuned-with", type=int, default=8)
    parser.add_argument("--others", nargs="+", default=["single_b4", "dp4", "diloco_h20"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    pilots = [DistroPilot(options, seed) for seed in options.seeds]
    known: dict[tuple[Kind, int], Result] = {}

    def run(kind: Kind, which: int) -> Result:
        if (kind, which) not in known:
            known[kind, which] = pilots[which].distro(kind)
            print(f"seed {which}, {kind}: {known[kind, which].loss:.4f}", flush=True)
        return known[kind, which]

    rows = []
    for name in options.others:
        for lr in options.adamw_lr:
            found = []
            for pilot in pilots:
                found.append(_with_adamw(pilot, name, lr))
                print(f"{name}, {lr:g}: {found[-1].loss:.4f}", flush=True)
            rows.append(_row(name, f"{lr:g}", found))
    tuned = []
    for one_bit in (True, False):
        kinds = [Kind(options.tuned_with, one_bit, lr) for lr in options.lr]
        tuned += [(kind, run(kind, 0)) for kind in kinds]
        best = min(kinds, key=lambda kind: run(kind, 0).loss)
        for top_k in options.top_k:
            kind = replace(best, top_k=top_k)
            results = [run(kind, which) for which in range(len(pilots))]
            rows.append(_row(kind.name, f"{kind.lr:g}", results))
    header = ("way", "lr", *(f"seed {seed}" for seed in options.seeds), "MB sent a member")
    text = (
        f"{table(header, rows)}\n\n`single_b4` is one member alone, `dp4` the mean of gradients and AdamW, "
        "`diloco_h20` DiLoCo with a sync each 20 steps: as in `diloco.py`. What a member sends is "
        "counted once; with DisTrO it goes to each of the others, with gradients and DiLoCo into a mean.\n\n"
        "The learning rates that were tried, with the first seed:\n\n"
        + table(
            ("kind", "lr", "loss"),
            [(kind.name, f"{kind.lr:g}", f"{result.loss:.4f}") for kind, result in tuned],
        )
    )
    write_report(
        "distro",
        f"Held-out loss (nats a byte) after {options.steps} steps of {options.members} members, {options.warm} data "
        "parallel steps before; and what a member sends.",
        text,
    )


def _with_adamw(pilot: Pilot, name: str, lr: float) -> Result:
    """A way of `diloco.py` with another learning rate, from the same checkpoint."""
    before, diloco.LEARNING_RATE = diloco.LEARNING_RATE, lr
    try:
        return pilot.run(name)
    finally:
        diloco.LEARNING_RATE = before


def _row(name: str, lr: str, results: list[Result]) -> tuple[str, ...]:
    losses = [f"{result.loss:.4f}" for result in results]
    return name, lr, *losses, f"{results[0].num_bytes / 1e6:.3f}"


if __name__ == "__main__":
    main()
