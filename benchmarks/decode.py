"""How fast does a model decode over 1, 2 and 3 workers, against transformers in one process?

Everything on this machine, loopback, one torch thread in every process, greedy; float32, or `--dtype`. Each figure is
taken several times, the variants in turn within each round, so that a machine that drifts drifts for all. In float32
also llama.cpp's RPC, where its programs are, and Petals, where `--petals-python` names a Python that has it.

`--saved-as bfloat16` computes a checkpoint in bfloat16 in float32, and `--quantize` its layers as codes; both against
transformers in float32.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import trio
from clock import Clock
from decode_peers import Generate, Timing, has_llama_cpp, llama_cpp, peer_versions, petals
from report import spread, table, write_report
from transformers import AutoModelForCausalLM, LlamaConfig

from neurogrid import Coordinator, CoordinatorSettings, open_coordinator

MAX_POSITIONS = 2048
SIZES = {
    "512x8": {"hidden_size": 512, "num_hidden_layers": 8},
    "1024x16": {"hidden_size": 1024, "num_hidden_layers": 16},
}
WORKER_COUNTS = (1, 2, 3)
DTYPES = ("float32", "bfloat16")


def make_model(size: dict[str, int], directory: Path, *, dtype: str = "float32") -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        **size,
        intermediate_size=4 * size["hidden_size"],
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=32_000,
        max_position_embeddings=MAX_POSITIONS,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    return model


def time_transformers(model: Any, prompt: list[int], num_tokens: int) -> tuple[Timing, list[int]]:
    clock = Clock()
    started = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt], device=model.device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=model.device),
            max_new_tokens=num_tokens,
            do_sample=False,
            streamer=clock,
        )
    times = clock.times[1:]
    timing = Timing(times[0] - started, (len(times) - 1) / (times[-1] - times[0]))
    return timing, output[0, len(prompt) :].tolist()


async def time_ours(
    coordinator: Coordinator, prompt: list[int], num_tokens: int
) -> tuple[Timing, list[int]]:
    times: list[float] = []
    tokens: list[int] = []
    started = time.perf_counter()
    async for token in coordinator.generate(prompt, max_tokens=num_tokens):
        times.append(time.perf_counter())
        tokens.append(token)
    timing = Timing(times[0] - started, (len(times) - 1) / (times[-1] - times[0]))
    return timing, tokens


@contextlib.contextmanager
def workers(count: int, *args: str) -> Iterator[list[str]]:
    command = [
        sys.executable,
        "-m",
        "neurogrid.cli.commands.worker",
        "--port",
        "0",
        "--log-level",
        "warning",
        *args,
    ]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        addresses = []
        for process in processes:
            assert process.stdout is not None
            addresses.append(process.stdout.readline().strip())
        yield addresses
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


@contextlib.contextmanager
def peers(
    model: Any, path: Path, prompt: list[int], options: argparse.Namespace
) -> Iterator[dict[str, Generate]]:
    """Other programs that do the same and are installed, by name."""
    with contextlib.ExitStack() as stack:
        found: dict[str, Generate] = {}
        if options.dtype == "float32" and has_llama_cpp():
            found["llama.cpp, 2 RPC servers"] = stack.enter_context(
                llama_cpp(model, path, len(prompt), options.tokens, options.quantize)
            )
        if options.dtype == "float32" and options.petals_python is not None:
            num_layers = model.config.num_hidden_layers
            found["Petals, 2 servers"] = stack.enter_context(
                petals(options.petals_python, path, num_layers, prompt, options.tokens)
            )
        yield found


async def compare(
    model: Any,
    path: Path,
    addresses: list[list[str]],
    others: Mapping[str, Generate],
    prompt: list[int],
    options: argparse.Namespace,
) -> dict[str, list[Timing]]:
    """One model: all variants in turn, so many rounds, after one that warms up."""
    rounds, num_tokens = options.rounds, options.tokens
    timings: dict[str, list[Timing]] = {"transformers": []}
    async with contextlib.AsyncExitStack() as stack:
        coordinators: dict[str, Coordinator] = {}
        for peers in addresses:
            settings = CoordinatorSettings(
                model=path,
                peers=tuple(peers),
                stages=len(peers),
                max_seq_len=MAX_POSITIONS,
                prefix_reuse=False,
                dtype=options.dtype,
                quantize=options.quantize,
                # Random weights repeat themselves, and how much is by chance.
                speculate="off",
            )
            name = f"{len(peers)} worker{'s' if len(peers) > 1 else ''}"
            coordinators[name] = await stack.enter_async_context(open_coordinator(settings))
            timings[name] = []
        for number in range(rounds + 1):
            reference, expected = await trio.to_thread.run_sync(
                time_transformers, model, prompt, num_tokens
            )
            if number:
                timings["transformers"].append(reference)
            for name, coordinator in coordinators.items():
                timing, tokens = await time_ours(coordinator, prompt, num_tokens)
                if tokens != expected and options.is_equal:
                    raise SystemExit(f"{name}: other tokens than transformers'")
                if number:
                    timings[name].append(timing)
            for name, generate in others.items():
                timing, others_tokens = await trio.to_thread.run_sync(generate)
                if others_tokens not in (None, expected):
                    raise SystemExit(f"{name}: other tokens than transformers'")
                if number:
                    timings.setdefault(name, []).append(timing)
    return timings


def rows_of(size: str, timings: dict[str, list[Timing]]) -> list[list[str]]:
    baseline = timings["transformers"]
    rows = []
    for name, taken in timings.items():
        rate = spread([timing.rate for timing in taken])
        first = spread([timing.first * 1000 for timing in taken])
        rate_ratio = spread([t.rate / b.rate for t, b in zip(taken, baseline, strict=True)])
        first_ratio = spread([t.first / b.first for t, b in zip(taken, baseline, strict=True)])
        rows.append(
            [size, name, rate.show(), rate_ratio.show(2), first.show(0), first_ratio.show(2)]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    parser.add_argument("--saved-as", choices=DTYPES, help="the dtype of the checkpoint")
    parser.add_argument("--quantize", choices=("int8", "int4"))
    parser.add_argument(
        "--petals-python", type=Path, help="Python of an environment that has Petals"
    )
    options = parser.parse_args()
    # Rounding is another where weights are, and in bfloat16 where products are ours.
    options.is_equal = options.quantize is None and options.dtype == "float32"
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(2, 32_000, (options.prompt_tokens,), generator=generator).tolist()
    rows: list[list[str]] = []
    # A worker serves one coordinator at a time, so each variant has workers of its own.
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(workers(count)) for count in WORKER_COUNTS]
        for size in options.sizes:
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory)
                model = make_model(SIZES[size], path, dtype=options.saved_as or options.dtype)
                model = model.to(getattr(torch, options.dtype))
                with peers(model, path, prompt, options) as others:
                    timings = trio.run(
                        compare,
                        model,
                        path,
                        addresses,
                        others,
                        prompt,
                        options,
                    )
                rows += rows_of(size, timings)
    header = ["model", "variant", "tokens/s", "x transformers", "first token, ms", "x transformers"]
    # Another prompt or dtype does not take the place of the one that has targets.
    prompt = "" if options.prompt_tokens == 128 else f"-after-{options.prompt_tokens}"
    dtype = "" if options.dtype == DTYPES[0] else f"-{options.dtype}"
    saved = f"-of-{options.saved_as}" if options.saved_as else ""
    form = f"-{options.quantize}" if options.quantize else ""
    what = f"{options.dtype}{f' of a checkpoint in {options.saved_as}' if options.saved_as else ''}"
    what += f", layers as {options.quantize}" if options.quantize else ""
    tokens = (
        "equal in all variants but llama.cpp, which draws its own"
        if options.is_equal
        else "not compared"
    )
    write_report(
        f"decode{dtype}{saved}{form}{prompt}",
        f"Decoding over workers on one machine against transformers' `generate()` in one process: one "
        f"torch thread in each process, {what}, greedy, a prompt of {options.prompt_tokens} tokens, "
        f"{options.tokens} new ones; median (minimum to maximum) of {options.rounds} rounds; the tokens "
        f"are {tokens}. Installed beside ours are "
        f"{peer_versions(options.petals_python)}.",
        table(header, rows),
    )


if __name__ == "__main__":
    main()
