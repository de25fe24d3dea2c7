"""What do the ways to train together cost in quality, and what do they save in bytes?

    python benchmarks/diloco.py --seeds 0 1 2

The pilot: a Llama of a million parameters learns the sources of Python's standard library, byte by byte. Members start
from one checkpoint (some steps of data parallel training), and train the same number of steps in one process; what they
exchange goes through the codecs of the wire. Held-out loss and the bytes that a member sends, for each way by name.
`train` asks for averages alone: whoever gives them may as well be a network.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import copy
import math
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from report import table, write_report
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from neurogrid.training.averaging.codecs import ErrorFeedback, parse_codec
from neurogrid.training.averaging.parts import Fragments, Layout
from neurogrid.training.optimizers import (
    OuterOptimizer,
    StreamingOuter,
    StreamingSchedule,
    clipping_factor,
    square_of_norm,
)

BATCH, SEQUENCE = 4, 128
LEARNING_RATE, MAX_NORM = 3e-3, 1.0
HELD_OUT = 128


@dataclass(frozen=True)
class Way:
    """One way to train together.

    Attributes:
        every: steps from sync to sync of a fragment; None for gradients averaged each step.
        drop: the share of contributions that are lost.
        feedback: of what the codec lost, the share that is sent next time; 0 for none.
        is_uneven: the last member takes every other step, and weighs half.
    """

    every: int | None = 20
    num_fragments: int = 1
    overlap: int = 0
    codec: str = "f32"
    lr: float = 0.7
    momentum: float = 0.9
    feedback: float = 0.0
    drop: float = 0.0
    is_uneven: bool = False


WAYS = {
    "single_b4": Way(every=None),
    "dp4": Way(every=None),
    "diloco_h20": Way(),
    "diloco_h50": Way(every=50),
    "diloco_h100": Way(every=100),
    "diloco_h20_fp16": Way(codec="f16"),
    "diloco_h20_int8": Way(codec="int8"),
    "diloco_h20_int4": Way(codec="int4"),
    "diloco_h20_int4_ef": Way(codec="int4", feedback=1.0),
    "diloco_h20_sign_ef": Way(codec="sign", feedback=1.0),
    "diloco_h20_drop30": Way(drop=0.3),
    "diloco_h20_uneven": Way(is_uneven=True),
    "avg_h20": Way(lr=1.0, momentum=0.0),
    "stream4_h20": Way(num_fragments=4),
    "stream4_h20_tau5_int4": Way(num_fragments=4, overlap=5, codec="int4"),
    "sparseloco_h20": Way(codec="topk:64", feedback=0.95, lr=1.0, momentum=0.0),
    "sparse12_h20": Way(codec="topk:512", feedback=0.95, lr=1.0, momentum=0.0),
}


def corpus() -> tuple[Tensor, Tensor]:
    """The bytes that are trained on, and those that are held out: every tenth file. uint8."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = ("site-packages", "/test", "idlelib", "encodings")
    files = sorted(str(file) for file in root.rglob("*.py"))
    parts = bytearray(), bytearray()
    for number, file in enumerate(f for f in files if not any(name in f for name in skipped)):
        parts[number % 10 == 3].extend(Path(file).read_bytes())
    trained, held_out = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
    return trained, held_out


def draw(data: Tensor, num: int, generator: torch.Generator) -> Tensor:
    """Sequences from anywhere: int64 [num, SEQUENCE]."""
    starts = torch.randint(0, len(data) - SEQUENCE, (num,), generator=generator)
    return torch.stack([data[start : start + SEQUENCE] for start in starts.tolist()]).long()


class Member:
    """A model, its AdamW, and the data that it draws.

    Attributes:
        weight: of its contributions.
        pace: it makes a step where others make so many.
    """

    def __init__(self, model: LlamaForCausalLM, seed: int, data: Tensor, total: int) -> None:
        self.weight, self.pace = 1.0, 1
        self.model = model
        self.parameters = dict(model.named_parameters())
        self.layout = Layout.of(self.parameters)
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1
        )
        self._generator = torch.Generator().manual_seed(seed)
        self._data = data
        self._total = total

    def copy(self, seed: int) -> Member:
        """A member with the same weights and the same state of AdamW, and data of its own."""
        other = Member(copy.deepcopy(self.model), seed, self._data, self._total)
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return other

    def draw(self) -> Tensor:
        return draw(self._data, BATCH, self._generator)

    def step(
        self, number: int, batch: Tensor, exchange: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """One step of AdamW, the `number`-th of the whole run.

        Args:
            exchange: gives the mean of all members' gradients, of these alone; None where they are those of all.
        """
        self.optimizer.zero_grad()
        self.model(input_ids=batch, labels=batch).loss.backward()
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if exchange is not None:
            mean = exchange(torch.cat([gradient.flatten() for gradient in gradients]))
            parts = mean.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        factor = clipping_factor([square_of_norm(gradients)], MAX_NORM)
        for gradient in gradients:
            gradient.mul_(factor)
        warm_up = min(1.0, (number + 1) / 50)
        cosine = 0.5 * (1 + math.cos(math.pi * number / self._total))
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * warm_up * (0.1 + 0.9 * cosine)
        self.optimizer.step()

    @property
    def theta(self) -> Tensor:
        theta = torch.empty(self.layout.num_elements)
        self.layout.flatten(self.parameters, theta)
        return theta

    @torch.no_grad()
    def put(self, theta: Tensor) -> None:
        for name, weights in self.layout.views(theta).items():
            self.parameters[name].copy_(weights)


@dataclass
class Result:
    """Held-out loss at the end, in nats a byte, and the bytes that a member has sent."""

    loss: float
    num_bytes: int


class Pilot:
    """The data, and the checkpoint of one seed that all ways start from."""

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        self.num_steps, self.num_warm = options.steps, options.warm
        self.num_members, self.seed = options.members, seed
        trained, held_out = corpus()
        self._held_out = draw(held_out, HELD_OUT, torch.Generator().manual_seed(99))
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=options.hidden,
            intermediate_size=options.hidden * 8 // 3,
            num_hidden_layers=options.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            use_cache=False,
        )
        total = self.num_warm + self.num_steps
        self._start = Member(LlamaForCausalLM(config), 0, trained, total)
        drawing = [self._start.copy(1000 * seed + 100 + k) for k in range(self.num_members)]
        for number in range(self.num_warm):
            self._start.step(number, torch.cat([member.draw() for member in drawing]))

    def members(self, num: int, way: Way) -> list[Member]:
        members = [self._start.copy(1000 * self.seed + k) for k in range(num)]
        if way.is_uneven:
            members[-1].weight, members[-1].pace = 0.5, 2
        return members

    @torch.no_grad()
    def loss(self, theta: Tensor) -> float:
        judge = self._start.copy(0)
        judge.put(theta)
        batches = self._held_out.split(32)
        losses = [judge.model(input_ids=batch, labels=batch).loss.item() for batch in batches]
        return math.fsum(losses) / len(batches)

    def run(self, name: str) -> Result:
        way = WAYS[name]
        if way.every is None:
            return self._data_parallel(way, 1 if name == "single_b4" else self.num_members)
        members = self.members(self.num_members, way)
        rounds = Rounds(way, [member.weight for member in members], self.seed)
        theta = train(way, members, rounds.mean, self.num_warm, self.num_steps)
        return Result(self.loss(theta), rounds.num_bytes)

    def _data_parallel(self, way: Way, num: int) -> Result:
        first, *others = self.members(num, way)
        for number in range(self.num_steps):
            batch = torch.cat([first.draw(), *(member.draw() for member in others)])
            first.step(self.num_warm + number, batch)
        theta = first.theta
        return Result(self.loss(theta), 4 * theta.numel() * self.num_steps * (num > 1))


class Losses:
    """Contributions that are lost, drawn alike by whoever has the seed."""

    def __init__(self, way: Way, num_members: int, seed: int) -> None:
        self._drop, self._num_members = way.drop, num_members
        self._drawn = torch.Generator().manual_seed(seed)

    def of_next_round(self) -> list[bool]:
        """Whether each member's is lost; never all of them."""
        lost: list[bool] = []
        for number in range(self._num_members):
            is_only_one = number == self._num_members - 1 and all(lost)
            lost.append(bool(self._drop) and not is_only_one and self._is_lost())
        return lost

    def _is_lost(self) -> bool:
        return torch.rand(1, generator=self._drawn).item() < self._drop


class Rounds:
    """Averages in one process, of what the codec of a way leaves of each vector."""

    def __init__(self, way: Way, weights: Sequence[float], seed: int) -> None:
        self._way = way
        self._codec = parse_codec(way.codec)
        self._feedback: dict[tuple[int, int], ErrorFeedback] = {}
        self._losses = Losses(way, len(weights), seed)
        self._weights = weights
        self.num_bytes = 0

    def mean(self, fragment: int, vectors: Sequence[Tensor]) -> Tensor:
        """The mean of the members' vectors, float32 [n], weighted, without those that are lost."""
        total, weight = torch.zeros_like(vectors[0]), 0.0
        lost = self._losses.of_next_round()
        for number, vector in enumerate(vectors):
            arrived = self._sent(fragment, number, vector)
            if lost[number]:
                continue
            total.add_(arrived, alpha=self._weights[number])
            weight += self._weights[number]
        self.num_bytes += self._codec.num_bytes(len(total))
        return total.div_(weight)

    def _sent(self, fragment: int, number: int, vector: Tensor) -> Tensor:
        if not self._way.feedback:
            return self._codec.decode(self._codec.encode(vector), len(vector))
        if (key := (fragment, number)) not in self._feedback:
            state = torch.zeros_like(vector)
            self._feedback[key] = ErrorFeedback(self._codec, state, decay=self._way.feedback)
        feedback = self._feedback[key]
        arrived = self._codec.decode(feedback.encode(vector), len(vector))
        feedback.commit()
        return arrived


def train(
    way: Way,
    members: Sequence[Member],
    mean: Callable[[int, Sequence[Tensor]], Tensor],
    first_step: int,
    num_steps: int,
    mean_of_weights: Callable[[Sequence[Tensor]], Tensor] = lambda all_of_it: torch.stack(
        list(all_of_it)
    ).mean(0),
) -> Tensor:
    """Trains the members of this process, and returns the mean of their weights, or those that all agreed on.

    Args:
        mean: gives the mean of a fragment over all members, for the differences of the members here.
        first_step: steps that were taken before, for the learning rate.
        mean_of_weights: gives that of all members, for the weights of those here.
    """
    assert way.every is not None
    last_step = num_steps if way.num_fragments > 1 else None
    schedule = StreamingSchedule(way.num_fragments, way.every, way.overlap, last_step)
    turns = Fragments(members[0].layout, way.num_fragments)
    fragments = [turns.spans(number) for number in range(way.num_fragments)]
    outers = [
        StreamingOuter(
            OuterOptimizer(member.theta, lr=way.lr, momentum=way.momentum), fragments, schedule
        )
        for member in members
    ]
    for step in range(1, num_steps + 1):
        for member in members:
            if member.pace == 1 or step % member.pace == 1:
                member.step(first_step + step - 1, member.draw())
        if not schedule.due(step) and not schedule.apply(step):
            continue
        thetas = [member.theta for member in members]
        sent = [outer.send(step, theta) for outer, theta in zip(outers, thetas, strict=True)]
        for of_all in zip(*sent, strict=True):
            fragment = of_all[0][0]
            agreed = mean(fragment, [difference for _, difference in of_all])
            for outer in outers:
                outer.receive(fragment, agreed)
        for member, outer, theta in zip(members, outers, thetas, strict=True):
            outer.apply(step, theta)
            member.put(theta)
    if way.num_fragments == 1 and not way.overlap and num_steps % way.every == 0:
        return outers[0].outer.theta0
    return mean_of_weights([member.theta for member in members])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--names", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warm", type=int, default=150, help="data parallel steps before")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[Result]] = {name: [] for name in options.names}
    for seed in options.seeds:
        pilot = Pilot(options, seed)
        for name, results in found.items():
            results.append(pilot.run(name))
            print(f"seed {seed}, {name}: {results[-1].loss:.6f}", flush=True)
    rows = [
        [name, *(f"{result.loss:.4f}" for result in results), f"{results[0].num_bytes / 1e6:.3f}"]
        for name, results in found.items()
    ]
    header = ["way", *(f"seed {seed}" for seed in options.seeds), "MB sent a member"]
    write_report(
        "diloco",
        f"Held-out loss (nats a byte) after {options.steps} steps of {options.members} members, "
        f"{options.warm} data parallel steps before; and what a member sends.",
        table(header, rows),
    )


if __name__ == "__main__":
    main()
