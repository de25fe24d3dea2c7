"""How fast does the HTTP server answer 1, 8 and 32 clients at once?

Two workers and a coordinator on this machine, one torch thread in each, float32, the embedded model unless --model says
otherwise. A client asks, reads the stream to its end, and asks again. Prompts differ, so that no answer is another's;
answers have all the same length. The clients are one process of their own.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles

import httpx
import trio
from report import table, write_report

CLIENT_COUNTS = (1, 8, 32)
WORDS = [
    "function",
    "class",
    "module",
    "statement",
    "expression",
    "exception",
    "object",
    "list",
    "value",
    "name",
]
# Far above anything that is measured; a server that hangs must not hang this. Seconds.
TIMEOUT = 300.0


@dataclass
class Timings:
    """Timings of all requests of one round, in seconds."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    num_tokens: int = 0
    seconds: float = 0.0


@contextlib.contextmanager
def server(model: Path | None, num_workers: int) -> Iterator[str]:
    command = [
        *(sys.executable, "-m", "neurogrid.cli.commands.coordinator"),
        *("--local-workers", str(num_workers), "--http-port", "0", "--dtype", "float32"),
        *("--listen", "/ip4/127.0.0.1/tcp/0", "--log-level", "warning"),
        *(("--model", str(model)) if model else ()),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise SystemExit("the server did not start; its own words stand above")
        yield url
    finally:
        process.terminate()
        process.wait()


def prompt_of(number: int) -> str:
    """Some thirty tokens, another one for each number."""
    words = [WORDS[(number * (i + 3) + i) % len(WORDS)] for i in range(24)]
    return f"{number} {' '.join(words)}"


async def ask(http: httpx.AsyncClient, number: int, num_tokens: int, timings: Timings) -> None:
    body = {
        "prompt": prompt_of(number),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = last = time.perf_counter()
    is_first = True
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line or line.endswith("[DONE]"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event["usage"] is not None:
                timings.num_tokens += event["usage"]["completion_tokens"]
                continue
            now = time.perf_counter()
            (timings.first if is_first else timings.between).append(now - last)
            is_first, last = False, now
    timings.whole.append(time.perf_counter() - started)


async def measure(url: str, num_clients: int, num_requests: int, num_tokens: int) -> Timings:
    timings = Timings()
    numbers = iter(range(num_requests))
    limits = httpx.Limits(max_connections=num_clients, max_keepalive_connections=num_clients)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits) as http:

        async def client() -> None:
            for number in numbers:
                await ask(http, number, num_tokens, timings)

        started = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(num_clients):
                nursery.start_soon(client)
        timings.seconds = time.perf_counter() - started
    return timings


def milliseconds(values: Sequence[float]) -> list[str]:
    """p50 and p99."""
    cuts = quantiles(values, n=100, method="inclusive")
    return [f"{1000 * cuts[49]:.1f}", f"{1000 * cuts[98]:.1f}"]


def row_of(num_clients: int, timings: Timings) -> list[str]:
    return [
        str(num_clients),
        f"{len(timings.whole) / timings.seconds:.1f}",
        f"{timings.num_tokens / timings.seconds:.0f}",
        *milliseconds(timings.first),
        *milliseconds(timings.between),
        *milliseconds(timings.whole),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--requests", type=int, default=200, help="for each number of clients")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENT_COUNTS))
    parser.add_argument("--dry", action="store_true", help="print, and write no file")
    options = parser.parse_args()
    rows = []
    with server(options.model, options.workers) as url:
        # What is slow once: connections, kernels, pages of memory.
        trio.run(measure, url, max(options.clients), 2 * max(options.clients), 4)
        for num_clients in options.clients:
            timings = trio.run(measure, url, num_clients, options.requests, options.tokens)
            rows.append(row_of(num_clients, timings))
    figures = ("first token", "between tokens", "whole answer")
    header = [
        *("clients", "requests/s", "tokens/s"),
        *(f"{name}, {p}, ms" for name in figures for p in ("p50", "p99")),
    ]
    body = table(header, rows)
    if options.dry:
        print(body)
        return
    write_report(
        "server",
        f"The HTTP server over {options.workers} workers on one machine: one torch thread in each process, float32, "
        f"greedy, streamed; {options.requests} requests for each number of clients, some thirty tokens of prompt and "
        f"{options.tokens} new ones each.",
        body,
    )


if __name__ == "__main__":
    main()
