"""How many tokens a second do 8, 16 and 64 sessions at once get, against one, over the same workers?

Everything on this machine, loopback, one torch thread in every process, float32, greedy. Each round takes all
numbers of sessions in turn, so that a machine that drifts drifts for all. The tokens of the first session are
compared with those that it gets alone.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import contextlib
import tempfile
import time
from pathlib import Path

import torch
import trio
from decode import SIZES, make_model, workers
from report import spread, table, write_report

from neurogrid import Coordinator, CoordinatorSettings, open_coordinator

PROMPT_TOKENS = 32
COUNTS = (1, 8, 16, 64)
NUM_WORKERS = 2


async def rate(
    coordinator: Coordinator, prompts: list[list[int]], num_tokens: int
) -> tuple[float, float, list[list[int]]]:
    """Tokens a second while all sessions decode, seconds until each had its first, and the tokens."""
    tokens: list[list[int]] = [[] for _ in prompts]
    times: list[list[float]] = [[] for _ in prompts]
    started = time.perf_counter()

    async def generate(i: int) -> None:
        async for token in coordinator.generate(prompts[i], max_tokens=num_tokens):
            times[i].append(time.perf_counter())
            tokens[i].append(token)

    async with trio.open_nursery() as nursery:
        for i in range(len(prompts)):
            nursery.start_soon(generate, i)
    # Between the last first token and the first last one all decode.
    begun, ended = max(each[0] for each in times), min(each[-1] for each in times)
    num_decoded = sum(begun < moment <= ended for each in times for moment in each)
    return num_decoded / (ended - begun), begun - started, tokens


async def compare(
    path: Path, addresses: list[str], counts: list[int], rounds: int, num_tokens: int
) -> dict[int, list[tuple[float, float]]]:
    """Each number of sessions in turn, `rounds` times, after one round that warms up."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, 32_000, (max(counts), PROMPT_TOKENS), generator=generator).tolist()
    settings = CoordinatorSettings(
        model=path,
        peers=tuple(addresses),
        stages=len(addresses),
        max_seq_len=PROMPT_TOKENS + num_tokens,
        max_sessions=max(counts),
        prefix_reuse=False,
    )
    figures: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    async with open_coordinator(settings) as coordinator:
        for number in range(rounds + 1):
            alone: list[int] = []
            for count in counts:
                rated, first, tokens = await rate(coordinator, prompts[:count], num_tokens)
                alone = alone or tokens[0]
                if tokens[0] != alone:
                    raise SystemExit(f"{count} sessions: other tokens than alone")
                if any(len(each) != num_tokens for each in tokens):
                    raise SystemExit(f"{count} sessions: not all have {num_tokens} tokens")
                if number:
                    figures[count].append((rated, first))
                print(f"round {number}, {count} sessions: {rated:.1f} tokens/s", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["512x8"])
    parser.add_argument("--counts", nargs="+", type=int, default=list(COUNTS))
    parser.add_argument("--workers", type=int, default=NUM_WORKERS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
            make_model(SIZES[size], Path(directory))
            addresses = stack.enter_context(workers(options.workers))
            figures = trio.run(
                compare, Path(directory), addresses, options.counts, options.rounds, options.tokens
            )
        base = [rated for rated, _ in figures[options.counts[0]]]
        for count, taken in figures.items():
            ratio = spread([rated / one for (rated, _), one in zip(taken, base, strict=True)])
            rates, firsts = spread([r for r, _ in taken]), spread([f * 1000 for _, f in taken])
            rows.append([size, str(count), rates.show(), ratio.show(2), firsts.show(0)])
    write_report(
        "sessions",
        f"Sessions at once over {options.workers} workers on one machine, against one over the same workers: one "
        f"torch thread in each process, float32, greedy, prompts of {PROMPT_TOKENS} tokens, {options.tokens} new "
        "ones each; tokens a second of all together while all decode; median (minimum to maximum) of "
        f"{options.rounds} rounds. The first session gets the tokens that it gets alone, and none fails.",
        table(["model", "sessions", "tokens/s", "x one", "last first token, ms"], rows),
    )


if __name__ == "__main__":
    main()
