"""Does the memory of coordinator and workers stay flat over a thousand sessions?

The embedded model over two worker processes on this machine, eight sessions at once, of many lengths; one in five is
cancelled on its way. What is told is memory that belongs to a process alone (`RssAnon`), every hundred sessions, and
its slope from the second hundred on, when every pool and buffer has its size.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import contextlib
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from pathlib import Path

import torch
import trio
from report import table, write_report

from neurogrid import Coordinator, CoordinatorSettings, open_coordinator

NUM_WORKERS = 2
MAX_SEQ_LEN = 256
# Sessions between two looks at the memory, and before the first that counts for the slope.
STEP, WARM_UP = 100, 200
CANCELLED = 0.2


@contextlib.contextmanager
def workers(count: int) -> Iterator[tuple[list[str], list[int]]]:
    """Start workers; gives their addresses and process ids."""
    command = [sys.executable, "-m", "neurogrid.cli.worker", "--port", "0", "--no-cache"]
    command += ["--log-level", "error"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        addresses = []
        for process in processes:
            assert process.stdout is not None
            addresses.append(process.stdout.readline().strip())
        yield addresses, [process.pid for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def own_memory(pid: int) -> int:
    """Bytes of memory that a process has for itself alone."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not tell what memory a process has for itself")


def slope(counts: Sequence[int], values: Sequence[float]) -> float:
    """Of the straight line through the points with the least squares."""
    mean_x, mean_y = sum(counts) / len(counts), sum(values) / len(values)
    above = sum((x - mean_x) * (y - mean_y) for x, y in zip(counts, values, strict=True))
    return above / sum((x - mean_x) ** 2 for x in counts)


async def sessions(
    coordinator: Coordinator, count: int, at_once: int, pids: Sequence[int]
) -> list[tuple[int, list[int]]]:
    """Run so many sessions; gives the memory of each process each time that another hundred has ended."""
    numbers = random.Random(1)
    vocab_size = coordinator.model.ends.vocab_size
    taken: list[tuple[int, list[int]]] = []
    history: list[list[int]] = []
    num_begun = num_ended = 0

    def prompt() -> list[int]:
        # One in three goes on with what an earlier one had: a conversation.
        start = numbers.choice(history) if history and numbers.random() < 0.33 else []
        more = [numbers.randrange(3, vocab_size) for _ in range(numbers.randrange(4, 48))]
        return [*start[: MAX_SEQ_LEN - 100], *more]

    async def one(token_ids: list[int], num_tokens: int, stop_after: int) -> None:
        got = list(token_ids)
        async with aclosing(coordinator.generate(token_ids, max_tokens=num_tokens)) as tokens:
            async for token in tokens:
                got.append(token)
                if len(got) - len(token_ids) == stop_after:
                    break
        history.append(got)
        del history[:-16]

    async def one_after_another() -> None:
        nonlocal num_begun, num_ended
        while num_begun < count:
            num_begun += 1
            num_tokens = numbers.randrange(8, 24)
            is_cancelled = numbers.random() < CANCELLED
            await one(prompt(), num_tokens, 3 if is_cancelled else num_tokens)
            num_ended += 1
            if num_ended % STEP == 0:
                taken.append((num_ended, [own_memory(pid) for pid in pids]))
                mib = ", ".join(f"{value / 2**20:.1f}" for value in taken[-1][1])
                print(f"{num_ended} sessions: {mib} MiB", flush=True)

    async with trio.open_nursery() as nursery:
        for _ in range(at_once):
            nursery.start_soon(one_after_another)
    return taken


async def measure(addresses: list[str], pids: list[int], count: int, at_once: int) -> str:
    settings = CoordinatorSettings(
        peers=tuple(addresses),
        stages=len(addresses),
        dtype="float32",
        max_seq_len=MAX_SEQ_LEN,
        max_sessions=at_once,
    )
    async with open_coordinator(settings) as coordinator:
        taken = await sessions(coordinator, count, at_once, [os.getpid(), *pids])
    names = ["coordinator", *(f"worker {number + 1}" for number in range(len(pids)))]
    late = [(ended, values) for ended, values in taken if ended >= WARM_UP]
    rows = [[str(ended), *(f"{value / 2**20:.1f}" for value in values)] for ended, values in taken]
    slopes = [
        slope([ended for ended, _ in late], [values[i] for _, values in late])
        for i in range(len(names))
    ]
    rows.append([f"slope from {WARM_UP} on, bytes a session", *(f"{each:.0f}" for each in slopes)])
    return table(["sessions ended", *(f"{name}, MiB" for name in names)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with workers(NUM_WORKERS) as (addresses, pids):
        body = trio.run(measure, addresses, pids, options.sessions, options.at_once)
    write_report(
        "memory",
        f"Memory of a coordinator and {NUM_WORKERS} workers over {options.sessions} sessions, {options.at_once} at "
        "once, with the embedded model in float32: prompts of 4 to 200 tokens, one in three of which goes on with an "
        "earlier session, 8 to 23 new tokens, every fifth cancelled after three. Memory of each process alone.",
        body,
    )


if __name__ == "__main__":
    main()
