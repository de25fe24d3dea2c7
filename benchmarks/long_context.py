"""What does a long context cost: a prompt of 32,000 tokens over two workers, and caches as codes of 8 bits?

Five parts. `prompt`: seconds to the first token, tokens and memory of each process, of transformers in one process and
of two workers, with caches as they are and coded. `error`: how far the embedded model's next token is from what it is
with caches as they are, over a text. `decode`: what a token takes after so many. `rows`: the memory that the caches of
sessions of mixed lengths take which decode together, against what is in them. `disk`: a prefix computed, and read.

One torch thread a process. The Llama of random weights is saved in bfloat16 and computed in float32 by all. More than
600 lines, since the five parts are of one model.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import contextlib
import gc
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import trio
from report import table, write_report
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from neurogrid import CoordinatorSettings, open_coordinator
from neurogrid.model.embedded import embedded_model_path
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.config import build_config
from neurogrid.model.stages.stage import MAX_ROWS, Ends, Row, Stage
from neurogrid.node.cache_directory import CacheSettings
from neurogrid.worker.prefixes import PrefixIdentity, WorkerPrefixes
from tools.embedded.corpus import python_prose
from tools.embedded.train import Recipe, document_text, document_tokens, split_sections

MIB = 2**20
TICKS = os.sysconf("SC_CLK_TCK")
HEAD_SIZE = 64
LOOK_INTERVAL = 0.05
LOOKS_OF_A_SECOND = 20
# Tokens of a chunk, as prompts over several workers have them.
CHUNK = 512


@dataclass
class Watch:
    """A process while something runs: its memory, and its CPU's time."""

    pid: int
    before: int = 0
    peak: int = 0
    cpu: float = 0.0
    steps: list[float] = field(default_factory=list)
    _started: float = 0.0

    def begin(self) -> None:
        self.before = self.peak = own_bytes(self.pid)
        self._started = cpu_seconds(self.pid)

    def look(self) -> None:
        self.peak = max(self.peak, own_bytes(self.pid))
        self.cpu = cpu_seconds(self.pid) - self._started
        self.steps.append(self.cpu)

    def worked(self, number: int) -> list[bool]:
        """Whether it has computed in each second or so, of so many looks."""
        ends = self.steps[: number + 1 : LOOKS_OF_A_SECOND]
        return [after > before for before, after in pairwise(ends)]

    def show(self) -> str:
        return f"{self.before / MIB:.0f} to {self.peak / MIB:.0f} MiB, {self.cpu:.0f} s of CPU"


def own_bytes(pid: int) -> int:
    """Bytes of a process that are in RAM, and no other process's."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextlib.contextmanager
def watched(pids: Sequence[int]) -> Iterator[list[Watch]]:
    watches = [Watch(pid) for pid in pids]
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_INTERVAL):
            for each in watches:
                each.look()

    for each in watches:
        each.begin()
    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield watches
    finally:
        over.set()
        thread.join()
        for each in watches:
            each.look()


def config_of(hidden_size: int, num_layers: int, **more: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        intermediate_size=4 * hidden_size,
        num_attention_heads=hidden_size // HEAD_SIZE,
        num_key_value_heads=hidden_size // HEAD_SIZE // 2,
        **more,
    )


def make_model(directory: Path, hidden_size: int, num_layers: int, num_positions: int) -> None:
    torch.manual_seed(0)
    config = config_of(
        hidden_size,
        num_layers,
        vocab_size=32_000,
        max_position_embeddings=num_positions,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # as loud as makes attention and MLP count
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.to(torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)


@dataclass
class Outcome:
    """Outcome of a prompt."""

    seconds: float
    a_token: float
    tokens: list[int]
    logprobs: list[float]
    at_once: float = 1.0
    watches: dict[str, Watch] = field(default_factory=dict)


def by_transformers(path: Path, prompt: list[int], num_tokens: int) -> Outcome:
    """Run transformers in a process of its own, whose memory is then its."""
    code = (
        "import sys, json, time, os, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "torch.set_num_threads(1)\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()\n"
        "prompt, count = json.loads(sys.stdin.readline()), int(sys.argv[2])\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "tokens, logprobs, times, cache, fed = [], [], [time.perf_counter()], None, prompt\n"
        "with torch.inference_mode():\n"
        "    for _ in range(count):\n"
        "        out = model(torch.tensor([fed]), past_key_values=cache, use_cache=True, logits_to_keep=1)\n"
        "        cache, row = out.past_key_values, out.logits[0, -1].float().log_softmax(-1)\n"
        "        tokens.append(int(row.argmax())); logprobs.append(float(row.max())); fed = tokens[-1:]\n"
        "        times.append(time.perf_counter())\n"
        "print(json.dumps([tokens, logprobs, times]), flush=True)\n"
    )
    import json

    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path), str(num_tokens)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        process.stdin.write(json.dumps(prompt) + "\n")
        process.stdin.flush()
        assert process.stdout.readline().strip() == "ready"
        with watched([process.pid]) as (watch,):
            process.stdin.write("go\n")
            process.stdin.flush()
            tokens, logprobs, times = json.loads(process.stdout.readline())
    a_token = (times[-1] - times[1]) / (len(times) - 2)
    return Outcome(times[1] - times[0], a_token, tokens, logprobs, watches={"one process": watch})


@contextlib.contextmanager
def workers(count: int, max_seq_len: int) -> Iterator[list[tuple[str, int]]]:
    """Addresses and process ids."""
    command = [sys.executable, "-m", "neurogrid.cli.commands.worker", "--port", "0", "--no-cache"]
    command += ["--max-seq-len", str(max_seq_len), "--log-level", "warning"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        found = []
        for process in processes:
            assert process.stdout is not None
            found.append((process.stdout.readline().strip(), process.pid))
        yield found
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


async def by_workers(
    path: Path, prompt: list[int], num_tokens: int, count: int, kv_cache_dtype: str | None
) -> Outcome:
    max_seq_len = len(prompt) + num_tokens
    with workers(count, max_seq_len) as found:
        settings = CoordinatorSettings(
            model=path,
            peers=tuple(address for address, _ in found),
            stages=count,
            dtype="float32",
            max_seq_len=max_seq_len,
            kv_cache_dtype=kv_cache_dtype,
            speculate="off",
            prefix_reuse=False,
        )
        async with open_coordinator(settings) as coordinator:
            limit = coordinator.cache_bytes[1]
            # What takes its time once only is not the prompt's.
            async for _ in coordinator.generate(prompt[:40], max_tokens=4):
                pass
            tokens: list[int] = []
            logprobs: list[float] = []
            times = [time.perf_counter()]
            with watched([*(pid for _, pid in found), os.getpid()]) as watches:
                generating = coordinator.generate_tokens(
                    prompt, max_tokens=num_tokens, num_logprobs=0, ignore_eos=True
                )
                first: list[float] = []
                async for token in generating:
                    times.append(time.perf_counter())
                    tokens.append(token.token_id)
                    if not first:
                        first = [each.cpu for each in watches]
                        number = len(watches[0].steps)
                    assert token.logprobs is not None
                    logprobs.append(token.logprobs.chosen)
            seconds = zip(*(each.worked(number) for each in watches[:count]), strict=False)
            working = [each for each in seconds if any(each)]
            for each, cpu in zip(watches, first, strict=True):
                each.cpu = cpu  # of the prompt
    names = [*(f"worker {i + 1}" for i in range(count)), "coordinator"]
    print(f"agreed for caches: {limit / MIB:.0f} MiB")
    a_token = (times[-1] - times[1]) / (len(times) - 2)
    return Outcome(
        times[1] - times[0],
        a_token,
        tokens,
        logprobs,
        sum(map(all, working)) / max(len(working), 1),
        dict(zip(names, watches, strict=True)),
    )


def prompt_part(options: argparse.Namespace) -> str:
    """A long prompt, by all in turn."""
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(3, 31_990, (options.prompt,), generator=generator).tolist()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        make_model(path, options.hidden, options.layers, options.prompt + options.tokens)
        gc.collect()
        outcomes = {"transformers, one process": by_transformers(path, prompt, options.tokens)}
        print(outcomes)
        for name, count, dtype in (
            ("two workers", 2, None),
            ("two workers, int8", 2, "int8"),
        ):
            outcomes[name] = trio.run(by_workers, path, prompt, options.tokens, count, dtype)
            print(name, outcomes[name], flush=True)
    right = next(iter(outcomes.values()))
    for name, its in outcomes.items():
        same = next(
            (i for i, pair in enumerate(zip(its.tokens, right.tokens, strict=True)) if len(set(pair)) > 1),
            len(right.tokens),
        )  # fmt: skip
        off = max(
            abs(a - b) for a, b in zip(its.logprobs[: same or 1], right.logprobs[: same or 1], strict=True)
        )  # fmt: skip
        memory = "; ".join(f"{who}: {watch.show()}" for who, watch in its.watches.items())
        rows.append(
            [
                name,
                f"{its.seconds:.1f} s",
                f"{its.seconds / right.seconds:.2f}",
                f"{its.a_token * 1000:.0f} ms",
                f"{same} of {len(right.tokens)}",
                f"{off:.1g}",
                f"{its.at_once:.0%}" if len(its.watches) > 1 else "",
                memory,
            ]
        )
    header = [
        "",
        "first token",
        "of transformers",
        "each after it",
        "same tokens",
        "log p off",
        "at once",
        "memory",
    ]
    return (
        f"A prompt of {options.prompt:,} random tokens, Llama {options.hidden} x {options.layers}, "
        f"{options.hidden // HEAD_SIZE} heads of {HEAD_SIZE}, half as many of keys and values; greedy. Memory is "
        "what a process has for itself, before and at most, and the CPU's time is that of the prompt (in one process, "
        "of all). At once: the seconds of the prompt in which both workers computed, of those in which one did. Same "
        "tokens: up to the first that differs; log p: of these tokens, the largest difference.\n\n"
        + table(header, rows)
    )


def texts(length: int, most_tokens: int) -> list[list[int]]:
    """Tokens of what the embedded model was trained on: sections one after another, cut after so many."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path(), local_files_only=True)
    known, _ = split_sections(python_prose(), Recipe().validation_every)
    found: list[list[int]] = []
    current: list[int] = []
    for section in known:
        current += document_tokens(document_text(section), tokenizer)
        if len(current) >= length:
            found.append(current[:length])
            current = []
        if length * len(found) >= most_tokens:
            break
    return found


def error_part(options: argparse.Namespace) -> str:
    """Table of what coded caches change for the embedded model."""
    checkpoint = Checkpoint.open(embedded_model_path())
    config = build_config(checkpoint.config)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for length in (256, options.error_tokens):
            ends, stage = whole_model(checkpoint, config, dtype)
            totals = [0.0, 0.0, 0.0, 0.0]
            found = texts(length, options.error_tokens)
            num_texts = len(found)
            for its in found:
                plain, coded = (logits(ends, stage, its, coded=coded) for coded in (False, True))
                p, q = plain.log_softmax(-1), coded.log_softmax(-1)
                totals[0] += float((p.exp() * (p - q)).sum(-1).mean())
                totals[1] += float((p.argmax(-1) == q.argmax(-1)).double().mean())
                target = torch.tensor(its[1:])
                for i, each in enumerate((p, q)):
                    totals[2 + i] -= float(each[:-1].gather(1, target[:, None]).mean())
            kl, top, nats, coded_nats = (total / num_texts for total in totals)
            rows.append(
                [
                    str(dtype).removeprefix("torch."),
                    f"{num_texts} x {length}",
                    f"{kl:.1e}",
                    f"{top:.2%}",
                    f"{nats:.4f}",
                    f"{coded_nats:.4f}",
                ]
            )
    header = ["computed in", "texts", "KL, nats", "same likeliest", "nats of the text", "coded"]
    return (
        "The embedded model over sections that it was trained on, joined to that length, in chunks of 512 (it knows "
        "positions up to 1,024); against caches as they are, of the same dtype.\n\n"
        + table(header, rows)
    )


def whole_model(checkpoint: Checkpoint, config: Any, dtype: torch.dtype) -> tuple[Ends, Stage]:
    from neurogrid.model.files.blob import parse_blob

    ends = Ends(config, dtype=dtype, device="cpu")
    ends.load(checkpoint.end_tensors(dtype))
    stage = Stage(config, dtype=dtype, device="cpu")
    for layer_id in range(stage.num_layers):
        blob = b"".join(bytes(chunk) for chunk in checkpoint.layer_blob(layer_id).chunks())
        stage.load_layer(layer_id, parse_blob(memoryview(bytearray(blob))))
        stage.speed_up_layer(layer_id, fuse=True)
    return ends, stage


def logits(ends: Ends, stage: Stage, tokens: list[int], *, coded: bool) -> torch.Tensor:
    """[T, V]."""
    stage.codes_caches = coded
    cache = stage.new_cache()
    parts = []
    for start in range(0, len(tokens), CHUNK):
        hidden_BTD = ends.embed(tokens[start : start + CHUNK], position=start)
        hidden_BTD = stage.forward(
            hidden_BTD, start=0, stop=stage.num_layers, position=start, cache=cache
        )
        parts.append(ends.logits_of_all(hidden_BTD, position=start))
    return torch.cat(parts)


def decode_part(options: argparse.Namespace) -> str:
    """Table of the time that a token takes after so many, in one stage, and of the memory of the caches."""
    rows = []
    for fuse, lengths in ((True, (1_000, 8_000, 32_000)), (False, (1_000, 8_000))):
        stage = random_stage(options.hidden, 2, fuse=fuse)
        for length in lengths:
            caches = {}
            for coded in (False, True):
                stage.codes_caches = coded
                caches[coded] = filled(stage, length)
            times: dict[bool, list[float]] = {False: [], True: []}
            peaks = {}
            for _ in range(24):
                for coded, cache in caches.items():
                    hidden_BTD = torch.randn(1, 1, stage.hidden_size)
                    started = time.thread_time()
                    stage.forward(hidden_BTD, start=0, stop=2, position=cache.length, cache=cache)
                    times[coded].append(time.thread_time() - started)
            for coded, cache in caches.items():
                peaks[coded] = cache.num_bytes
            plain, coded_ms = (
                1000 * sorted(times[coded])[len(times[coded]) // 4] for coded in (False, True)
            )
            rows.append(
                [
                    "compiled" if fuse else "the family's own",
                    f"{length:,}",
                    f"{plain:.2f} ms",
                    f"{coded_ms:.2f} ms",
                    f"{coded_ms / plain:.2f}",
                    f"{peaks[False] / MIB:.1f} MiB",
                    f"{peaks[True] / MIB:.1f} MiB",
                ]
            )
    header = ["layers", "tokens before", "a token", "coded", "of it", "cache", "coded "]
    return (
        f"Two layers of {options.hidden}, float32, one thread: a token's CPU time (the first quartile of 24, in "
        "turn).\n\n" + table(header, rows)
    )


def random_stage(hidden_size: int, num_layers: int, *, fuse: bool) -> Stage:
    config = config_of(hidden_size, num_layers, vocab_size=64, max_position_embeddings=40_000)
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    stage = Stage(config, dtype=torch.float32, device="cpu")
    for layer_id in range(num_layers):
        stage.load_layer(
            layer_id,
            {n: t for n, t in model.state_dict().items() if f".layers.{layer_id}." in n},
        )
        stage.speed_up_layer(layer_id, fuse=fuse)
    return stage


def filled(stage: Stage, length: int) -> Any:
    """A cache of so many tokens of random keys and values, as one that was computed has them."""
    cache = stage.new_cache(max_length=length + 64)
    generator = torch.Generator().manual_seed(2)
    hidden_BTD = torch.randn(1, 2, stage.hidden_size, generator=generator)
    stage.forward(hidden_BTD, start=0, stop=stage.num_layers, position=0, cache=cache)
    for layer in cache.layers:
        for name in ("keys", "values"):
            states = getattr(layer, name)
            repeats = (1, 1, length // 2, 1)
            setattr(layer, name, states.repeat(repeats))
    cache._lengths = [length] * stage.num_layers
    return cache


def rows_part(options: argparse.Namespace) -> str:
    """Table of the memory that is set aside for sessions that decode together, and of what is in it."""
    rows = []
    numbers = random.Random(7)
    mixes = {
        "32 of 100 to 4,000, evenly": [numbers.randrange(100, 4_000) for _ in range(32)],
        "32: 28 of 200 to 600, 4 of 3,000 to 4,000": [
            *(numbers.randrange(200, 600) for _ in range(28)),
            *(numbers.randrange(3_000, 4_000) for _ in range(4)),
        ],
        "32 of 500 to 700": [numbers.randrange(500, 700) for _ in range(32)],
    }
    stage = random_stage(options.hidden, 2, fuse=True)
    for name, lengths in mixes.items():
        for coded in (False, True):
            stage.codes_caches = coded
            caches = [filled(stage, length // 2 * 2) for length in lengths]
            for _ in range(16):
                together = [
                    Row(torch.randn(1, 1, stage.hidden_size), cache.length, cache)
                    for cache in caches
                ]
                for group in stage.group_rows(together, start=0, stop=2, bounds=()):
                    stage.forward_rows([together[i] for i in group], start=0, stop=2)
            token_bytes = sum(caches[0].token_bytes(layer_id) for layer_id in range(2))
            used = sum(cache.length for cache in caches) * token_bytes
            taken = sum(pool.num_bytes for pool in stage.pools) + sum(
                cache.num_bytes for cache in caches if cache.home is None
            )
            agreed = 32 * max(lengths) * token_bytes
            rows.append(
                [
                    f"{name}{', coded' if coded else ''}",
                    f"{used / MIB:.0f} MiB",
                    f"{taken / MIB:.0f} MiB",
                    f"{used / taken:.0%}",
                    f"{agreed / MIB:.0f} MiB",
                ]
            )
            del caches, together
            gc.collect()
    header = [
        "sessions",
        "in them",
        "taken",
        "used",
        "set aside if all were as long as the longest",
    ]
    return (
        f"Two layers of {options.hidden}, float32, after 16 steps of all together (passes of at most {MAX_ROWS} rows, "
        "of similar length).\n\n" + table(header, rows)
    )


def disk_part(options: argparse.Namespace) -> str:
    """Table of the times that it takes to compute a prefix, to write it to disk, and to read it."""
    num_tokens, rows = 2_000, []
    stage = random_stage(options.hidden, 4, fuse=True)
    hidden_BTD = torch.randn(1, num_tokens, stage.hidden_size)
    for coded in (False, True):
        stage.codes_caches = coded
        cache = stage.new_cache(max_length=num_tokens + 64)
        started = time.perf_counter(), time.thread_time()
        for start in range(0, num_tokens, CHUNK):
            piece = hidden_BTD[:, start : start + CHUNK]
            stage.forward(piece, start=0, stop=4, position=start, cache=cache)
        computed = time.perf_counter() - started[0], time.thread_time() - started[1]
        identity = PrefixIdentity(bytes(32), "", 0, 4, (), "", b"")
        with tempfile.TemporaryDirectory() as folder:
            prefixes = WorkerPrefixes(CacheSettings(Path(folder)), 2**30)
            states = cache.states()
            started = time.perf_counter(), time.thread_time()
            assert prefixes.store(identity, states, num_tokens)
            written = time.perf_counter() - started[0], time.thread_time() - started[1]
            started = time.perf_counter(), time.thread_time()
            loaded = prefixes.load(identity)
            assert loaded is not None
            stage.new_cache().restore(loaded[0], 0, 4, num_tokens)
            read = time.perf_counter() - started[0], time.thread_time() - started[1]
        name = "coded" if coded else "float32"
        size = f"{cache.num_bytes / MIB:.1f} MiB"
        shown = [f"{wall:.2f} s, {cpu:.2f} s" for wall, cpu in (computed, written, read)]
        rows.append([name, size, *shown])
    header = ["cache", "of all", "computed", "written", "read and verified"]
    return (
        f"{num_tokens:,} tokens in one stage of 4 layers of {options.hidden}, one thread: seconds by the clock, and of "
        "the CPU. The file was written just before, so that the system has its pages still.\n\n"
        + table(header, rows)
    )


PARTS = {
    "prompt": prompt_part,
    "error": error_part,
    "decode": decode_part,
    "rows": rows_part,
    "disk": disk_part,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--prompt", type=int, default=32_000, metavar="N")
    parser.add_argument("--tokens", type=int, default=8, metavar="N")
    parser.add_argument("--hidden", type=int, default=512, metavar="D")
    parser.add_argument("--layers", type=int, default=4, metavar="N")
    parser.add_argument("--error-tokens", type=int, default=2_000, metavar="N")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bodies = [f"## {part}\n{PARTS[part](options)}" for part in options.parts.split(",")]
    write_report(
        f"long-context-{options.hidden}x{options.layers}",
        "What does a long context cost over two workers, and what do caches as codes of 8 bits?",
        "\n\n".join(bodies),
    )


if __name__ == "__main__":
    main()
