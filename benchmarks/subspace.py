"""What does it cost in learning to keep the hidden states between stages in a subspace?

    python benchmarks/subspace.py

A small Llama learns bytes of the sources of Python's library in two stages, in this process, from the same random
weights with the same batches: as it is, and with subspaces of some sizes. What travels is bfloat16, as in a run.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path

import torch
import transformers as tf
from report import table, write_report

from neurogrid.training.runs.run_file import InnerSection
from neurogrid.training.stages.stage_learner import StageLearner
from neurogrid.training.stages.stage_settings import StageSettings


class Chain:
    """Two stages, and what they sent each other.

    Attributes:
        num_bytes: that travelled in the last step, both ways, of tensors alone.
    """

    def __init__(
        self, config: tf.LlamaConfig, subspace: int, seed: int, steps: int, lr: float
    ) -> None:
        torch.manual_seed(seed)
        tensors = tf.LlamaForCausalLM(config).state_dict()
        inner = InnerSection(lr=lr, warmup=0.05, schedule="cosine")
        self.stages = [
            StageLearner(
                StageSettings(
                    json.dumps(config.to_dict()),
                    start,
                    stop,
                    inner,
                    total_steps=steps,
                    seed=seed,
                    subspace=subspace,
                ),
                tensors,
            )
            for start, stop in pairwise(
                (0, config.num_hidden_layers // 2, config.num_hidden_layers)
            )
        ]
        self.num_bytes = 0

    def step(self, number: int, ids_BT: torch.Tensor, labels_BT: torch.Tensor) -> float:
        first, last = self.stages
        sent = first.forward(0, ids_BT, step=number, tokens=ids_BT).bfloat16()
        loss = last.forward_loss(0, sent, labels_BT, labels_BT.numel(), step=number, tokens=ids_BT)
        gradient = last.backward(0)
        assert gradient is not None
        first.backward(0, gradient.bfloat16())
        self.num_bytes = sent.nbytes + gradient.bfloat16().nbytes
        norm = sum(stage.squared_norm() for stage in self.stages) ** 0.5
        for stage in self.stages:
            stage.apply(number, norm)
        return loss

    def held_out(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """The mean loss of a label."""
        first, last = self.stages
        total, num = 0.0, 0
        for ids_BT, labels_BT in batches:
            sent = first.evaluate(ids_BT, tokens=ids_BT)
            assert isinstance(sent, torch.Tensor)
            result = last.evaluate(sent.bfloat16(), labels_BT, ids_BT)
            assert isinstance(result, float)
            total, num = total + result, num + labels_BT.numel()
        return total / num


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument(
        "--parts", type=int, nargs="+", default=[2, 4, 8], help="K is hidden / these"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = tf.LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=256,
        max_position_embeddings=options.tokens,
    )
    text = library()
    learned, kept = text[: -len(text) // 20], text[-len(text) // 20 :]
    generator = torch.Generator().manual_seed(99)
    shape = options.sequences, options.tokens
    held = [batch_of(kept, shape, generator) for _ in range(8)]
    thirds = [options.steps * part // 3 for part in (1, 2, 3)]
    rows = []
    for subspace in (0, *(options.hidden // part for part in options.parts)):
        losses: list[list[float]] = []
        seconds, num_bytes = 0.0, 0
        for seed in options.seeds:
            chain = Chain(config, subspace, seed, options.steps, options.lr)
            generator = torch.Generator().manual_seed(seed)
            losses.append([])
            began = time.process_time()
            for number in range(options.steps):
                chain.step(number, *batch_of(learned, shape, generator))
                if number + 1 in thirds:
                    losses[-1].append(chain.held_out(held))
            seconds += (time.process_time() - began) / options.steps / len(options.seeds)
            num_bytes = chain.num_bytes
            print(f"subspace {subspace}, seed {seed}: {losses[-1]}", flush=True)
        rows.append(
            [
                str(subspace) if subspace else "none",
                f"{num_bytes:,}",
                *(" and ".join(f"{each[i]:.3f}" for each in losses) for i in range(3)),
                f"{seconds:.2f}",
            ]
        )
    seeds = " and ".join(map(str, options.seeds))
    write_report(
        "subspace",
        f"Held-out loss (nats a byte) of a Llama of {options.layers} layers, hidden size {options.hidden}, in two "
        f"stages, AdamW at {options.lr:g}, {options.sequences} x {options.tokens} bytes a step; seeds {seeds}. Bytes "
        "are those that travel in a step between the stages, both ways. CPU seconds are of both stages.",
        table(
            [
                "subspace",
                "bytes a step",
                *(f"after {step} steps" for step in thirds),
                "CPU s a step",
            ],
            rows,
        ),
    )


def library() -> torch.Tensor:
    """The sources of Python's library, one after the other: int64 [bytes]."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    data = bytearray(b"".join(file.read_bytes() for file in files))
    return torch.frombuffer(data, dtype=torch.uint8).long()


def batch_of(
    text: torch.Tensor, shape: tuple[int, int], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, int64 [B, T] each."""
    starts = torch.randint(0, len(text) - shape[1] - 1, (shape[0],), generator=generator)
    rows = torch.stack([text[start : start + shape[1] + 1] for start in starts.tolist()])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


if __name__ == "__main__":
    main()
