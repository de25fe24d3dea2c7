"""Does the memory of coordinator and workers stay flat over a thousand sessions?

The embedded model over two worker processes on this machine, eight sessions at once, of many lengths; one in five is
cancelled on its way. What is told, every hundred sessions, is memory that belongs to a process alone (`RssAnon`), what
of it is in use and what the C library keeps (`memory_probe.py`), and the slopes from the fifth hundred on, when every
pool and buffer has its size: a leak shows in what is in use, holes between blocks in what is kept.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import contextlib
import json
import math
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path

import torch
import trio
from memory_probe import Memory, memory
from report import table, write_report

from neurogrid import Coordinator, CoordinatorSettings, open_coordinator

NUM_WORKERS = 2
MAX_SEQ_LEN = 256
# Sessions between two looks at the memory, and before the first that counts for the slope.
STEP, WARM_UP = 100, 500
CANCELLED = 0.2


Look = Callable[[], Memory]


@contextlib.contextmanager
def workers(count: int) -> Iterator[tuple[list[str], list[Look]]]:
    """Start workers; gives their addresses, and what asks each for its memory."""
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(_worker()) for _ in range(count)]
        yield [address for address, _ in started], [look for _, look in started]


@contextlib.contextmanager
def _worker() -> Iterator[tuple[str, Look]]:
    told, telling = os.pipe()
    probe = Path(__file__).with_name("memory_probe.py")
    command = [sys.executable, str(probe), str(telling), "--port", "0", "--no-cache"]
    process = subprocess.Popen(
        [*command, "--log-level", "error"], stdout=subprocess.PIPE, text=True, pass_fds=[telling]
    )
    os.close(telling)
    try:
        with os.fdopen(told) as lines:

            def look() -> Memory:
                process.send_signal(signal.SIGUSR1)
                return Memory(**json.loads(lines.readline()))

            assert process.stdout is not None
            yield process.stdout.readline().strip(), look
    finally:
        process.terminate()
        process.wait()


def slope(counts: Sequence[int], values: Sequence[float]) -> str:
    """Slope of the straight line through the points with the least squares, and its standard error."""
    mean_x, mean_y = sum(counts) / len(counts), sum(values) / len(values)
    spread = sum((x - mean_x) ** 2 for x in counts)
    points = list(zip(counts, values, strict=True))
    rise = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    off = sum((y - mean_y - rise * (x - mean_x)) ** 2 for x, y in points)
    return f"{rise:.0f} ± {math.sqrt(off / max(len(points) - 2, 1) / spread):.0f}"


async def sessions(
    coordinator: Coordinator, count: int, at_once: int, looks: Sequence[Look]
) -> list[tuple[int, list[Memory]]]:
    """Run so many sessions; gives the memory of each process each time that another hundred has ended."""
    numbers = random.Random(1)
    vocab_size = coordinator.model.ends.vocab_size
    taken: list[tuple[int, list[Memory]]] = []
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
                taken.append((num_ended, [look() for look in looks]))
                print(f"{num_ended} sessions: {', '.join(map(show, taken[-1][1]))} MiB", flush=True)

    async with trio.open_nursery() as nursery:
        for _ in range(at_once):
            nursery.start_soon(one_after_another)
    return taken


def show(taken: Memory) -> str:
    """Text of the memory in MiB: all, what is in use, what is kept."""
    return " / ".join(f"{value / 2**20:.1f}" for value in (taken.own, taken.in_use, taken.free))


async def measure(
    addresses: list[str], looks: list[Look], count: int, at_once: int, prefix_reuse: bool
) -> str:
    settings = CoordinatorSettings(
        peers=tuple(addresses),
        stages=len(addresses),
        dtype="float32",
        max_seq_len=MAX_SEQ_LEN,
        max_sessions=at_once,
        prefix_reuse=prefix_reuse,
    )
    async with open_coordinator(settings) as coordinator:
        taken = await sessions(coordinator, count, at_once, [memory, *looks])
    names = ["coordinator", *(f"worker {number + 1}" for number in range(len(looks)))]
    rows = [[str(ended), *map(show, each)] for ended, each in taken]
    late = [(ended, each) for ended, each in taken if ended >= WARM_UP]
    counts = [ended for ended, _ in late]
    for what, part in (("all", "own"), ("in use", "in_use"), ("kept", "free")):
        slopes = [
            slope(counts, [getattr(each[i], part) for _, each in late]) for i in range(len(names))
        ]
        rows.append([f"slope from {WARM_UP} on, {what}, bytes a session", *slopes])
    return table(["sessions ended", *(f"{name}, MiB" for name in names)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--no-prefix-reuse", action="store_true")
    options = parser.parse_args()
    if options.sessions < WARM_UP + 3 * STEP:
        parser.error(f"a slope takes {WARM_UP + 3 * STEP} sessions")
    torch.set_num_threads(1)
    with workers(NUM_WORKERS) as (addresses, looks):
        body = trio.run(
            measure,
            addresses,
            looks,
            options.sessions,
            options.at_once,
            not options.no_prefix_reuse,
        )
    write_report(
        "memory",
        f"Memory of a coordinator and {NUM_WORKERS} workers over {options.sessions} sessions, {options.at_once} at "
        "once, with the embedded model in float32: prompts of 4 to 200 tokens, one in three of which goes on with an "
        "earlier session, 8 to 23 new tokens, every fifth cancelled after three. In MiB: what a process has for itself "
        "alone / what of it is in use, without Python's small objects / what the C library keeps for the next that "
        "asks. Slopes with their standard error.",
        body,
    )


if __name__ == "__main__":
    main()
