"""Which aggregator holds off which attacker? A small model learns the standard library's sources, some members lie.

    python benchmarks/aggregators.py

Each member draws batches of its own and puts in its gradient; attackers put in something else. They are the last ones
of the order, know what the honest put in, and never change. One step of SGD a round, all else equal; the loss is that
of bytes that nobody trained on.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import math
import sysconfig
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from report import table, write_report
from torch.nn import functional

from neurogrid.errors import NotFiniteError
from neurogrid.training.averaging.aggregators import Aggregator, parse_aggregator

CONTEXT, WIDTH, HIDDEN = 8, 16, 64
BATCH = 16
GROUPS = ((5, 1), (10, 2))
AGGREGATORS = (
    "mean",
    "trimmed_mean",
    "trimmed_mean:0.2",
    "median",
    "krum",
    "multi_krum",
    "geometric_median",
    "mean_of_signs",
)
# An attack is held off where the loss is at most so much above that of the same aggregator without one.
HELD_OFF = 0.2
RATE, RATE_OF_SIGNS = 2.0, 0.01
UNIFORM = math.log(256)

Attack = Callable[[torch.Tensor, torch.Tensor, torch.Generator], torch.Tensor]


def _random(own: torch.Tensor, honest: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(own.shape, generator=generator)
    return noise * (10 * own.norm(dim=1) / noise.norm(dim=1))[:, None]


def _drift(share: float) -> Attack:
    """The honest mean, and a share of the honest ones' standard deviation further, always on the same side."""

    def attack(own: torch.Tensor, honest: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        side = torch.randn(own.shape[1], generator=torch.Generator().manual_seed(1)).sign()
        return (honest.mean(0) + share * side * honest.std(0)).expand_as(own)

    return attack


# From the attackers' own gradients [attackers, n] and the honest ones' [honest, n].
ATTACKS: Mapping[str, Attack] = {
    "none": lambda own, honest, generator: own,
    "sign flipped": lambda own, honest, generator: -own,
    "scaled by 10": lambda own, honest, generator: 10 * own,
    "minus 10": lambda own, honest, generator: -10 * own,
    "random, 10 x": _random,
    "zeros": lambda own, honest, generator: torch.zeros_like(own),
    "all alike": lambda own, honest, generator: -honest.mean(0).expand_as(own),
    "drift, 0.2": _drift(0.2),
    "drift, 1": _drift(1.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    learned, unseen = corpus()
    begin = time.perf_counter()
    parts = []
    held_off: dict[str, list[set[str]]] = {name: [] for name in AGGREGATORS}
    for num_members, num_bad in GROUPS:
        alone = [
            train("mean", "none", num_members - num_bad, 0, options.steps, seed, learned, unseen)
            for seed in range(options.seeds)
        ]
        rows = []
        for name in AGGREGATORS:
            row = [name]
            held = []
            for attack in ATTACKS:
                losses = [
                    train(name, attack, num_members, num_bad, options.steps, seed, learned, unseen)
                    for seed in range(options.seeds)
                ]
                row.append(_show(losses))
                plain = float(row[1]) if attack != "none" else math.inf
                if sum(losses) / len(losses) <= plain + HELD_OFF and attack != "none":
                    held.append(attack)
            rows.append(row)
            held_off[name].append(set(held))
        parts.append(
            f"{num_bad} of {num_members} attack; the others alone, by their mean: {_show(alone)}\n\n"
            + table(["aggregator", *ATTACKS], rows)
        )
    attacks = [attack for attack in ATTACKS if attack != "none"]
    verdicts = table(
        ["aggregator", "holds off, in both groups", "does not, in one or both"],
        [
            [
                name,
                "; ".join(each for each in attacks if all(each in found for found in groups)),
                "; ".join(each for each in attacks if not all(each in found for found in groups)),
            ]
            for name, groups in held_off.items()
        ],
    )
    num_parameters = sum(math.prod(shape) for shape in SHAPES.values())
    write_report(
        "aggregators",
        f"Losses (nats a byte, unseen text) after {options.steps} steps of SGD at {RATE:g} (signs: {RATE_OF_SIGNS:g}), "
        f"a model of {num_parameters:,} parameters that guesses the byte after {CONTEXT}, batches of {BATCH} a member; "
        f"mean of {options.seeds} seeds. {UNIFORM:.2f} is to know nothing; `-` is worse than that, or not finite. "
        "`minus 10` is the sign flipped and ten times as large; `random, 10 x` noise of ten times the gradient's norm; "
        "`all alike` minus the mean of the honest, from each attacker; `drift` the mean of the honest and that much of "
        "their standard deviation more, always to the same side.",
        "\n\n".join(parts)
        + f"\n\nHeld off is what leaves the loss at most {HELD_OFF} above that of the same aggregator without attack; "
        "the price of an aggregator is its loss without one. Of these attackers, of this model and no further:\n\n"
        + verdicts
        + f"\n\nAll of it took {time.perf_counter() - begin:.0f} s.",
    )


SHAPES = {
    "embedding": (256, WIDTH),
    "hidden": (CONTEXT * WIDTH, HIDDEN),
    "hidden_bias": (HIDDEN,),
    "head": (HIDDEN, 256),
    "head_bias": (256,),
}


def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Sources of the standard library, as bytes: to learn from, and to be measured on."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(root.glob("*.py"))
    learned, unseen = bytearray(), bytearray()
    for number, file in enumerate(files):
        (unseen if number % 10 == 3 else learned).extend(file.read_bytes())
    return (
        torch.frombuffer(learned, dtype=torch.uint8).long(),
        torch.frombuffer(unseen, dtype=torch.uint8).long(),
    )


def loss_of(vector: torch.Tensor, contexts: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    parts = dict(
        zip(SHAPES, vector.split([math.prod(shape) for shape in SHAPES.values()]), strict=True)
    )
    weights = {name: part.view(SHAPES[name]) for name, part in parts.items()}
    embedded = weights["embedding"][contexts].flatten(1)
    hidden = torch.tanh(embedded @ weights["hidden"] + weights["hidden_bias"])
    logits = hidden @ weights["head"] + weights["head_bias"]
    return functional.cross_entropy(logits, following)


def draw(text: torch.Tensor, number: int, generator: torch.Generator) -> torch.Tensor:
    """[number, context + 1]"""
    starts = torch.randint(0, len(text) - CONTEXT - 1, (number,), generator=generator)
    return text[starts[:, None] + torch.arange(CONTEXT + 1)]


GRADIENTS = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))


def train(
    name: str,
    attack: str,
    num_members: int,
    num_bad: int,
    steps: int,
    seed: int,
    learned: torch.Tensor,
    unseen: torch.Tensor,
) -> float:
    """The loss in the end; infinite where there is none."""
    aggregator: Aggregator = parse_aggregator(name)
    generator = torch.Generator().manual_seed(seed)
    vector = torch.cat(
        [
            torch.randn(shape, generator=generator).flatten() * (shape[0] ** -0.5)
            if len(shape) == 2
            else torch.zeros(shape)
            for shape in SHAPES.values()
        ]
    )
    rate = RATE_OF_SIGNS if name == "mean_of_signs" else RATE
    try:
        for step in range(steps):
            batch = draw(learned, num_members * BATCH, generator).view(num_members, BATCH, -1)
            gradients = GRADIENTS(vector, batch[..., :-1], batch[..., -1])
            if num_bad:
                honest, own = gradients[:-num_bad], gradients[-num_bad:]
                gradients = torch.cat((honest, ATTACKS[attack](own, honest, generator)))
            update = aggregator.aggregate(list(gradients), [1.0] * num_members)
            vector -= rate * (1 - step / steps) * update
    except NotFiniteError:
        return math.inf
    batch = draw(unseen, 4096, torch.Generator().manual_seed(99))
    return float(loss_of(vector, batch[:, :-1], batch[:, -1]))


def _show(losses: list[float]) -> str:
    mean = sum(losses) / len(losses)
    return f"{mean:.2f}" if mean < UNIFORM else "-"


if __name__ == "__main__":
    main()
