"""Does every client get its own answer, whole, while a server is full, a worker joins, and another is killed?

    python benchmarks/load.py                1,000 requests, 64 at once, over 3 workers
    python benchmarks/load.py adapters       400 requests, 32 at once, over 2 models with 4 adapters each, 3 workers

A coordinator that serves OpenAI's API and its workers are processes of this machine, on 127.0.0.1, one torch thread
each, the embedded model in float32; workers join by a ticket. A fourth joins when a quarter of the answers are there.
When half are, one that computes a stage gets SIGKILL. Prompts and lengths differ; half of the requests are sampled
with a seed, more than half streamed, a fifth are chats, and one in sixteen is given up by its client on the way. What
is compared: each answer with that of the same request, sent alone and whole to a server that nothing happens to, which
computes all layers itself, without speculation and without prefixes of earlier ones.

A request that is refused by a limit (429 or 503 with Retry-After) is sent again after that time, and told apart from
one that is lost: that ends with an error, or is cut short, or is not answered at all. Exits with status 1 where
anything is lost or is not what it was alone.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import bisect
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx
import trio
from load_cluster import (
    HEADERS,
    MAX_SEQ_LEN,
    NUM_WORKERS,
    Cluster,
    alone,
    cluster,
    serve_one,
    serve_two,
)
from report import table, write_report

# Far above anything that is measured; what hangs must not hang this. Seconds.
ANSWER_TIMEOUT = 600.0
# For which what follows the kill is told apart from what was before and after. Seconds.
AFTERMATH = 15.0
# Between two looks at how many tokens there are. Seconds.
LOOK = 0.5
TOKENS = "neurogrid_generated_tokens_total "
WORDS = (
    *("function", "class", "module", "statement", "expression", "exception", "object", "list"),
    *("value", "name", "the", "a", "of", "is", "returns", "raises", "defines", "import", "def"),
)
SHARES = (0.5, 0.9, 0.99)


# ------------------------------------------------------------------ what is asked


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        body: without what is about streams.
        is_streamed: the client reads it as it is written.
        give_up: pieces of a stream after which the client goes, or seconds; None where it stays.
    """

    number: int
    path: str
    body: dict[str, Any]
    is_streamed: bool
    give_up: float | None


def make_asks(count: int, names: Sequence[str], seed: int) -> list[Ask]:
    rng = random.Random(seed)
    asks = []
    for number in range(count):
        text = " ".join([str(number), *rng.choices(WORDS, k=rng.randint(2, 100))])
        max_tokens = rng.randint(8, 48)
        body: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        if rng.random() < 0.5:
            body |= {"temperature": 0.8, "top_p": 0.95, "seed": number}
        body["model"] = names[number % len(names)]
        is_streamed = rng.random() < 0.6
        give_up = None
        if rng.random() < 1 / 16:
            give_up = rng.randint(1, max_tokens // 2) if is_streamed else rng.uniform(0.1, 2.0)
        if rng.random() < 0.2:
            path, asked = "chat/completions", {"messages": [{"role": "user", "content": text}]}
        else:
            path, asked = "completions", {"prompt": text}
        asks.append(Ask(number, f"/v1/{path}", {**body, **asked}, is_streamed, give_up))
    return asks


def text_of(choice: dict[str, Any]) -> str:
    """The text in a choice, be it of a chat, of a completion, or of a stream of either."""
    if "text" in choice:
        return str(choice["text"])
    return str(choice.get("message", choice.get("delta", {})).get("content") or "")


# ------------------------------------------------------------------ clients


@dataclass
class Answer:
    """Outcome of a request. Times are seconds since it was sent the first time.

    Attributes:
        lost: how, in words; empty where it is answered.
        num_refused: times that a limit refused it.
    """

    text: str = ""
    lost: str = ""
    is_given_up: bool = False
    num_refused: int = 0
    first: float | None = None
    whole: float | None = None


@dataclass
class Load:
    """Clients that ask, and what they see.

    Attributes:
        pieces: when one of a stream came, of all streams.
        refused: how requests were refused by limits, by status and code.
        marks: what happened to the cluster, and when.
    """

    answers: dict[int, Answer] = field(default_factory=dict)
    pieces: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    marks: dict[str, float] = field(default_factory=dict)
    counts: list[tuple[float, float]] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0

    async def ask(self, http: httpx.AsyncClient, ask: Ask) -> None:
        began, answer = time.monotonic(), Answer()
        with trio.move_on_after(ANSWER_TIMEOUT) as scope:
            while (wait := await self._try(http, ask, answer, began)) is not None:
                answer.num_refused += 1
                await trio.sleep(wait)
        if scope.cancelled_caught:
            answer.lost = f"not answered within {ANSWER_TIMEOUT:g} s"
        if not (answer.lost or answer.is_given_up):
            answer.whole = time.monotonic() - began
        self.answers[ask.number] = answer

    async def _try(
        self, http: httpx.AsyncClient, ask: Ask, answer: Answer, began: float
    ) -> float | None:
        """Send a request once; seconds after which to send it again, None where that is over."""
        answer.text = ""
        try:
            if ask.is_streamed:
                return await self._stream(http, ask, answer, began)
            with trio.move_on_after(float("inf") if ask.give_up is None else ask.give_up) as scope:
                came = await http.post(ask.path, json=ask.body)
                if came.status_code != 200:
                    return self._refusal(came, answer)
                answer.text = text_of(came.json()["choices"][0])
            answer.is_given_up = scope.cancelled_caught
        except httpx.HTTPError as exc:
            answer.lost = type(exc).__name__
        return None

    async def _stream(
        self, http: httpx.AsyncClient, ask: Ask, answer: Answer, began: float
    ) -> float | None:
        body, reason, num_pieces = {**ask.body, "stream": True}, None, 0
        async with http.stream("POST", ask.path, json=body) as came:
            if came.status_code != 200:
                await came.aread()
                return self._refusal(came, answer)
            async for line in came.aiter_lines():
                if not line.startswith("data: ") or line.endswith("[DONE]"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    answer.lost = f"in its stream: {event['error']['code']}"
                    return None
                choice = event["choices"][0]
                reason = choice["finish_reason"] or reason
                if text := text_of(choice):
                    now = time.monotonic()
                    self.pieces.append(now)
                    num_pieces += 1
                    answer.text += text
                    answer.first = now - began if answer.first is None else answer.first
                    if num_pieces == ask.give_up:
                        answer.is_given_up = True
                        return None
        if reason is None:
            answer.lost = "cut short"
        return None

    def _refusal(self, came: httpx.Response, answer: Answer) -> float | None:
        error = came.json()["error"]
        kind = f"{came.status_code} {error['code']}"
        if "retry-after" in came.headers and came.status_code in (429, 503):
            self.refused[kind] += 1
            return float(came.headers["retry-after"])
        answer.lost = f"{kind}: {error['message'][:100]}"
        return None

    async def count(self, http: httpx.AsyncClient) -> None:
        """Note how many tokens the server has made, until cancelled."""
        while True:
            text = (await http.get("/metrics")).text
            line = next(line for line in text.splitlines() if line.startswith(TOKENS))
            self.counts.append((time.monotonic(), float(line.split()[-1])))
            await trio.sleep(LOOK)

    def tokens_per_second(self, begin: float, end: float) -> float:
        """Rate of tokens between two moments, by the looks that are next to them."""
        times = [at for at, _ in self.counts]
        first = max(bisect.bisect_right(times, begin) - 1, 0)
        last = min(bisect.bisect_left(times, end), len(times) - 1)
        (since, before), (until, after) = self.counts[first], self.counts[last]
        return (after - before) / (until - since) if until > since else 0.0

    def longest_pause(self, begin: float, end: float) -> tuple[float, float]:
        """The longest time in which no piece of any stream came, and when it began."""
        inside = [begin, *(at for at in sorted(self.pieces) if begin <= at <= end), end]
        return max(((b - a, a) for a, b in pairwise(inside)), default=(0.0, begin))


async def run_load(made: Cluster, asks: Sequence[Ask], options: argparse.Namespace) -> Load:
    load = Load()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=options.clients)
    async with httpx.AsyncClient(
        base_url=made.url, timeout=ANSWER_TIMEOUT, limits=limits, headers=HEADERS
    ) as http:
        waiting = iter(asks)

        async def client() -> None:
            for ask in waiting:
                await load.ask(http, ask)

        async def reach(share: float) -> None:
            while len(load.answers) < share * len(asks):
                await trio.sleep(0.02)

        async def join() -> None:
            await reach(options.join_at)
            load.marks["a worker starts to join"] = time.monotonic()
            worker = made.join()
            await trio.to_thread.run_sync(worker.wait, abandon_on_cancel=True)
            while worker.peer_id not in (await cluster_info(http))["connected_peers"]:
                await trio.sleep(0.1)
            load.marks["it is there"] = time.monotonic()

        async def kill() -> None:
            await reach(options.kill_at)
            first = (await cluster_info(http))["status"]["stages"][0]["peer_id"]
            victim = next(worker for worker in made.workers if worker.peer_id == first)
            load.marks["a worker is killed"] = time.monotonic()
            victim.process.send_signal(signal.SIGKILL)

        async with trio.open_nursery() as looking:
            looking.start_soon(load.count, http)
            looking.start_soon(join)
            load.began = time.monotonic()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(kill)
                async with trio.open_nursery() as clients:
                    for _ in range(options.clients):
                        clients.start_soon(client)
                load.ended = time.monotonic()
            looking.cancel_scope.cancel()
        await check_rest(http)
    return load


async def cluster_info(http: httpx.AsyncClient) -> Any:
    """Ask the server what it knows of the workers of the first model."""
    answer = await http.get("/v1/cluster/info")
    answer.raise_for_status()
    return answer.json()


async def check_rest(http: httpx.AsyncClient) -> None:
    """The server holds nothing any more of clients that are gone."""
    with trio.move_on_after(30):
        while (await cluster_info(http))["status"]["num_running"]:
            await trio.sleep(0.1)
        return
    raise SystemExit("generations run on though no client waits for any")


async def run_alone(url: str, asks: Sequence[Ask]) -> dict[int, str]:
    """The text of each request, one after the other."""
    texts = {}
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_TIMEOUT, headers=HEADERS) as http:
        for ask in asks:
            answer = await http.post(ask.path, json=ask.body)
            answer.raise_for_status()
            texts[ask.number] = text_of(answer.json()["choices"][0])
    return texts


# ------------------------------------------------------------------ figures


def judge(load: Load, asks: Sequence[Ask], expected: dict[int, str]) -> Counter[str]:
    """Count answers by what became of them; show each that is not as it was alone."""
    found: Counter[str] = Counter()
    for ask in asks:
        answer, text = load.answers.get(ask.number, Answer(lost="never sent")), expected[ask.number]
        if answer.lost:
            found["lost"] += 1
            found[f"lost: {answer.lost}"] += 1
        elif answer.is_given_up and text.startswith(answer.text):
            found["given up by the client"] += 1
        elif answer.text == text and not answer.is_given_up:
            found["equal"] += 1
        else:
            others = (n for n, other in expected.items() if answer.text and other == answer.text)
            whose = next(others, None)
            found["mixed"] += 1
            print(
                f"request {ask.number} ({ask.body}): expected {text!r}, got {answer.text!r}, which is that of "
                f"{'nobody' if whose is None else whose}",
                file=sys.stderr,
            )
    return found


def share_row(name: str, values: Sequence[float]) -> list[str]:
    if len(values) < 2:
        return [name, str(len(values)), *("" for _ in SHARES)]
    cuts = quantiles(values, n=100, method="inclusive")
    return [name, str(len(values)), *(f"{cuts[round(100 * share) - 1]:.2f}" for share in SHARES)]


def latency_table(answers: Sequence[Answer]) -> str:
    rows = []
    for name, chosen in (
        ("all", answers),
        ("never refused", [answer for answer in answers if not answer.num_refused]),
    ):
        first = [each.first for each in chosen if each.first is not None]
        whole = [each.whole for each in chosen if each.whole is not None]
        rows.append(share_row(f"first token, streamed, {name}", first))
        rows.append(share_row(f"whole answer, {name}", whole))
    return table(["", "answers", "p50, s", "p90, s", "p99, s"], rows)


def rate_table(load: Load) -> str:
    killed = load.marks["a worker is killed"]
    over = min(killed + AFTERMATH, load.ended)
    spans = [
        ("before the kill", load.began, killed),
        (f"{AFTERMATH:g} s from the kill on", killed, over),
        ("after that", over, load.ended),
    ]
    rows = []
    for name, begin, end in spans:
        pause, at = load.longest_pause(begin, end)
        rate = load.tokens_per_second(begin, end)
        rows.append(
            [name, f"{end - begin:.1f}", f"{rate:.0f}", f"{pause:.2f}", f"{at - killed:+.1f}"]
        )
    header = ["", "seconds", "tokens/s", "longest time without a token, s", "which began at, s"]
    return table(header, rows)


def result_of(load: Load, asks: Sequence[Ask], found: Counter[str], memory: list[list[str]]) -> str:
    answers = [*load.answers.values()]
    sent_again = sum(bool(answer.num_refused) for answer in answers)
    counts = [
        ["requests", str(len(asks))],
        *(
            [kind, str(found[kind])]
            for kind in ("equal", "given up by the client", "mixed", "lost")
        ),
        *([kind, str(number)] for kind, number in sorted(found.items()) if ": " in kind),
        ["refused by a limit at first, and sent again", str(sent_again)],
        *([f"refusals, {kind}", str(number)] for kind, number in sorted(load.refused.items())),
    ]
    began = load.began
    marks = ", ".join(f"{name} at {at - began:.1f} s" for name, at in load.marks.items())
    return "\n\n".join(
        [
            table(["", "number"], counts),
            f"All of it took {load.ended - began:.1f} s: {marks}.",
            latency_table(answers),
            rate_table(load),
            "Memory that is a process's own (`RssAnon`), MiB, when all are ready and when the last answer is there:",
            table(["process", "at the start", "at the end"], memory),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=("requests", "adapters"), default="requests")
    parser.add_argument("--requests", type=int, help="default 1000, with adapters 400")
    parser.add_argument("--clients", type=int, help="at once; default 64, with adapters 32")
    parser.add_argument("--join-at", type=float, default=0.25, help="share of answers; of all")
    parser.add_argument("--kill-at", type=float, default=0.5)
    parser.add_argument("--max-sessions", type=int, default=4)
    parser.add_argument("--max-queue", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true", help="print, and write no file")
    options = parser.parse_args()
    with_adapters = options.what == "adapters"
    options.requests = options.requests or (400 if with_adapters else 1000)
    options.clients = options.clients or (32 if with_adapters else 64)
    with tempfile.TemporaryDirectory() as path:
        directory = Path(path)
        served = serve_two(directory / "models", 8) if with_adapters else serve_one()
        asks = make_asks(options.requests, served.names, options.seed)
        with alone(served) as url:
            began = time.monotonic()
            expected = trio.run(run_alone, url, asks)
        print(f"alone: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        limits = [f"--max-sessions={options.max_sessions}", f"--max-queue={options.max_queue}"]
        stages = ["--stages=2" if with_adapters else f"--stages={NUM_WORKERS}"]
        with cluster(served, directory / "cluster", *limits, *stages) as made:
            first = [made.server, *made.workers]
            before = [program.own_mib() for program in first]
            load = trio.run(run_load, made, asks, options)
            names = ["coordinator", *(f"worker {number}" for number in range(len(made.workers)))]
            programs = [made.server, *made.workers]
            memory = [
                [
                    name,
                    f"{before[number]:.0f}" if number < len(before) else "",
                    f"{own:.0f}" if (own := program.own_mib()) else "killed",
                ]
                for number, (name, program) in enumerate(zip(names, programs, strict=True))
            ]
    found = judge(load, asks, expected)
    body = result_of(load, asks, found, memory)
    if options.dry:
        print(body)
    else:
        what = (
            "two models (the embedded one, and it with other MLPs) in 2 stages each, with 4 adapters each"
            if with_adapters
            else f"the embedded model in {NUM_WORKERS} stages"
        )
        write_report(
            "load-adapters" if with_adapters else "load",
            f"{(__doc__ or '').partition(chr(10))[0]} {options.requests} requests, {options.clients} at once, over "
            f"{NUM_WORKERS} workers: {what}, in float32, one torch thread a process; prompts of 3 to 101 words, 8 to "
            f"48 new tokens, half sampled by a seed; `--max-sessions {options.max_sessions}` of {MAX_SEQ_LEN} tokens, "
            f"`--max-queue {options.max_queue}`. Clients and all processes share the machine.",
            body,
        )
    if found["lost"] or found["mixed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
