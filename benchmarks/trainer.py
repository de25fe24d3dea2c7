"""How much of a plain torch loop's speed does a trainer keep, by CPU seconds?

    python benchmarks/trainer.py [--turns 5] [--no-file]

Both learn from the same batches with one torch thread, each in a process of its own, and take turns. Counted is all
that a call takes: for the trainer its process and its owner's, with reading of slices, copying of weights and progress.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import trio
from report import spread, table, write_report
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from neurogrid.training.runs.run_file import InnerSection
from neurogrid.training.trainer import FileRange, TrainerSettings, open_trainer

INNER = InnerSection(lr=1e-3, schedule="constant", warmup=0)
EMBEDDED = Path(__file__).parents[1] / "neurogrid" / "model" / "embedded"
SMALL = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    tie_word_embeddings=True,
)
# Name, config, samples of a batch, tokens of each, batches of a turn.
CASES = (
    ("hidden 64, 2 layers", SMALL, 8, 64, 400),
    ("the embedded model", None, 16, 256, 6),
)


def main() -> None:
    if sys.argv[1:2] == ["--plain"]:
        plain_loop(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--no-file", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            rows += trio.run(measure, case, options.turns, Path(folder))
    header = ("model", "parameters", "way", "ms of CPU a batch", "of the plain loop's speed")
    body = table(header, rows)
    if options.no_file:
        print(body)
    else:
        write_report("trainer", (__doc__ or "").partition("\n")[0], body)


async def measure(case: Any, turns: int, folder: Path) -> list[tuple[str, ...]]:
    name, config, batch_samples, length, num_batches = case
    config = config or AutoConfig.from_pretrained(EMBEDDED)
    path = folder / "slice"
    num_samples = batch_samples * num_batches
    ids = torch.randint(config.vocab_size, (num_samples, length), dtype=torch.int32)
    save_file({"input_ids": ids}, path)
    text = json.dumps(config.to_dict())
    (folder / "config.json").write_text(text)
    told = {"folder": str(folder), "batch": batch_samples, "batches": num_batches}
    plain = subprocess.Popen(
        [sys.executable, __file__, "--plain", json.dumps(told)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert plain.stdin is not None
    assert plain.stdout is not None
    batches = [
        [FileRange(path, start, start + batch_samples)]
        for start in range(0, num_samples, batch_samples)
    ]
    ours, theirs, shares = [], [], []
    async with open_trainer(TrainerSettings("causal-lm", text, inner=INNER)) as trainer:
        num_parameters = trainer.layout.num_elements
        for turn in range(turns + 1):
            print("go", file=plain.stdin, flush=True)
            their_seconds = float(plain.stdout.readline())
            began = time.process_time()
            trained = await trainer.train(batches, step=turn * num_batches, seed=0)
            our_seconds = trained.cpu_seconds + time.process_time() - began
            if turn:  # the first finds micro-batches, and fills caches
                ours.append(1e3 * our_seconds / num_batches)
                theirs.append(1e3 * their_seconds / num_batches)
                shares.append(their_seconds / our_seconds)
    plain.stdin.close()
    plain.wait()
    size = f"{num_parameters:,}"
    return [
        (name, size, "plain loop", spread(theirs).show(2), ""),
        (name, size, "trainer", spread(ours).show(2), spread(shares).show(3)),
    ]


def plain_loop(told: dict[str, Any]) -> None:
    """The loop that everybody writes."""
    folder, size = Path(told["folder"]), told["batch"]
    config = AutoConfig.from_pretrained(folder)
    ids = load_file(folder / "slice")["input_ids"].clone()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=INNER.lr, betas=INNER.betas, weight_decay=INNER.weight_decay
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    while sys.stdin.readline():
        began = time.process_time()
        total = 0.0
        for start in range(0, size * told["batches"], size):
            batch = ids[start : start + size].long()
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), INNER.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total += loss.item()
        print(time.process_time() - began, flush=True)


if __name__ == "__main__":
    main()
