"""Do the stages of a chain compute at the same time, when each is on a machine of its own?

    python benchmarks/micro_batches.py

Two cores are too few for that, so nothing is computed here: a forward pass of a worker sleeps for as long as four
layers of Llama 512x8 take on one core, 4.7 ms and 0.5 ms a row (few_rows.py, cold caches), and everything else is as
it is. Sessions in micro-batches, as many as there are stages, against the same sessions in one batch.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import transformers
import trio
from report import spread, table, write_report
from sessions import rate

from neurogrid import CoordinatorSettings, open_coordinator
from neurogrid.assembly.worker import WorkerSettings, open_worker
from neurogrid.inference.generation import micro_batches
from neurogrid.inference.sessions import passes
from neurogrid.model.stages.stage import Row
from neurogrid.worker.held_model import HeldModel

STAGES = (1, 2, 4)
SESSIONS = (8, 16, 32)
TOKENS, PROMPT_TOKENS = 64, 4
ROUNDS = 3
PASS_SECONDS, ROW_SECONDS = 0.0047, 0.0005
IN_MICRO_BATCHES, IN_ONE = micro_batches.MIN_ROWS, 1 << 30


def main() -> None:
    if sys.argv[1:] == ["--worker"]:
        trio.run(_worker)
    else:
        _measure()


def _measure() -> None:
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        _save_model(Path(name))
        for num_stages in STAGES:
            with ExitStack() as stack:
                addresses = [stack.enter_context(_child()) for _ in range(num_stages)]
                figures = trio.run(_rates, Path(name), addresses)
            for num_sessions in SESSIONS:
                one, many = figures[IN_ONE, num_sessions], figures[IN_MICRO_BATCHES, num_sessions]
                ratio = spread([m / o for m, o in zip(many, one, strict=True)])
                shown = [spread(one).show(0), spread(many).show(0), ratio.show(2)]
                rows.append([str(num_stages), str(num_sessions), *shown])
    write_report(
        "micro_batches",
        (__doc__ or "").partition("\n    python")[0]
        + f"A forward pass of a worker sleeps for {1000 * PASS_SECONDS:g} ms and {1000 * ROW_SECONDS:g} ms a row; all "
        f"else is as it is, on this machine. Tokens a second while all sessions decode, {TOKENS} tokens each; median "
        f"(minimum to maximum) of {ROUNDS} rounds, both ways in turn.",
        table(["stages", "sessions", "in one batch", "in micro-batches", "ratio"], rows),
    )


async def _rates(model: Path, addresses: Sequence[str]) -> dict[tuple[int, int], list[float]]:
    settings = CoordinatorSettings(
        model=model,
        peers=tuple(addresses),
        stages=len(addresses),
        max_seq_len=PROMPT_TOKENS + TOKENS,
        max_sessions=max(SESSIONS),
        prefix_reuse=False,
    )
    ways = [(way, count) for count in SESSIONS for way in (IN_ONE, IN_MICRO_BATCHES)]
    rates: dict[tuple[int, int], list[float]] = {way: [] for way in ways}
    async with open_coordinator(settings) as coordinator:
        for number in range(ROUNDS + 1):
            for min_rows, count in ways:
                micro_batches.MIN_ROWS = min_rows
                prompts = [[3 + i] * PROMPT_TOKENS for i in range(count)]
                rated, _, _ = await rate(coordinator, prompts, TOKENS)
                print(f"{len(addresses)} stages, {count} sessions, {min_rows}: {rated:.0f}")
                if number:
                    rates[min_rows, count].append(rated)
    return rates


def _save_model(path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=max(STAGES),
        num_attention_heads=1,
        num_key_value_heads=1,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)


async def _worker() -> None:
    torch.set_num_threads(1)

    def sleep(model: HeldModel, hidden_BTD: torch.Tensor, **kwargs: object) -> torch.Tensor:
        time.sleep(PASS_SECONDS + ROW_SECONDS * hidden_BTD.shape[1])
        return hidden_BTD

    def sleep_rows(
        model: HeldModel, rows: Sequence[Row], **kwargs: object
    ) -> Sequence[torch.Tensor]:
        time.sleep(PASS_SECONDS + ROW_SECONDS * len(rows))
        return [row.hidden for row in rows]

    # To sleep in place of computing is how this benchmark gives each stage a machine of its own; nothing in the package
    # offers that, nor should it.
    passes.forward = sleep
    passes.forward_rows = sleep_rows
    async with open_worker(WorkerSettings(device="cpu")) as worker:
        print(worker.addresses[0], flush=True)
        await trio.sleep_forever()


@contextmanager
def _child() -> Iterator[str]:
    """A worker; its address."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--worker"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
