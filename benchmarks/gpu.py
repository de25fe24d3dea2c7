"""How fast is a GPU filled and computed with, against transformers on the same one?

    python benchmarks/gpu.py

Everything on this machine. The device is the first accelerator that torch finds, or `--device`; where there is none,
that is said and the status is 77. `--device cpu --size 64x2` runs all of it on the CPU, to see that it runs: it prints
figures and files none.

Weights on their way to the device, one layer after another; a token through all layers, as a stage computes it, also
with codes, and as transformers does, also compiled, with and without CUDA graphs; products with codes; answers by
transformers, by a worker, and by two on that one device; and batches that a trainer and a plain loop learn from.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import trio
from decode import Timing, make_model, time_ours, time_transformers, workers
from report import spread, table, write_report
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from neurogrid import Coordinator, CoordinatorSettings, open_coordinator
from neurogrid.errors import ConfigurationError
from neurogrid.model.kernels import CodesLinear, quantize
from neurogrid.model.stages.device import (
    CPU,
    avoid_planned_attention,
    device_name,
    select_device,
    wait_for,
)
from neurogrid.model.stages.stage import Stage
from neurogrid.model.stages.weight_loading import place_module
from neurogrid.training.runs.run_file import InnerSection
from neurogrid.training.trainer import BatchDone, FileRange, TrainerSettings, open_trainer

NOTHING_TO_MEASURE = 77  # what test drivers take for "skipped"
MAX_POSITIONS = 2048
# Hidden size and layers; about 0.9 and 3 billion weights, and a size for a look at whether all runs.
SIZES = {"64x2": (64, 2), "2048x16": (2048, 16), "3072x28": (3072, 28)}
ROWS = (1, 8, 64, 512)
WARM_UPS = 3

Calls = Mapping[str, Callable[[], object]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    names = "transfers, products, answers, training, passes"
    parser.add_argument("parts", nargs="*", help=f"{names} (default: all)")
    parser.add_argument(
        "--device", help="as torch calls it, such as cuda:1 (default: the first GPU)"
    )
    parser.add_argument("--size", choices=SIZES, default="2048x16")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--no-compile", action="store_true", help="leave torch.compile out, which takes minutes"
    )
    options = parser.parse_args()
    try:
        device = select_device(options.device)
    except ConfigurationError as exc:
        print(exc, file=sys.stderr)
        return NOTHING_TO_MEASURE
    if device == CPU and options.device is None:
        print("there is no GPU here that torch can use: nothing was measured", file=sys.stderr)
        return NOTHING_TO_MEASURE
    hidden_size, num_layers = SIZES[options.size]
    size = {"hidden_size": hidden_size, "num_hidden_layers": num_layers}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        with device:  # on a CPU alone its random numbers would take longer than what is measured
            model = make_model(size, path, dtype=options.dtype)
        model.to(CPU)
        parts: dict[str, tuple[str, Callable[[], str]]] = {
            "transfers": (
                "Weights to the device",
                lambda: transfers(model, device, options.rounds),
            ),
            "products": ("Products", lambda: products(hidden_size, device, options)),
            "answers": ("Answers", lambda: answers(model, path, device, options)),
            "training": ("Training", lambda: training(model, path, device, options)),
            "passes": ("One token through all layers", lambda: passes(model, device, options)),
        }
        question = (
            f"{device_name(device)} ({device}): a Llama of hidden size {hidden_size} with {num_layers} layers in "
            f"{options.dtype}; median (minimum to maximum) of {options.rounds} rounds, all variants in turn in each."
        )
        sections: list[str] = []
        for title, measure_part in (parts[name] for name in options.parts or parts):
            started = time.perf_counter()
            sections.append(f"## {title}\n\n{measure_part()}")
            print(f"{title}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
            # After each: a machine that is lent for minutes may be gone before the last one.
            if device != CPU:
                write_report(f"gpu-{device.type}", question, "\n\n".join(sections))
    if device == CPU:
        print(question, *sections, sep="\n\n")
    return 0


def measure(calls: Calls, device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round, in turn; the device has done all when a call is over."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(-WARM_UPS, rounds):
        for name, call in calls.items():
            wait_for(device)
            started = time.perf_counter()
            call()
            wait_for(device)
            if number >= 0:
                taken[name].append(time.perf_counter() - started)
    return taken


def transfers(model: Any, device: torch.device, rounds: int) -> str:
    """The weights of a layer, as a worker brings them to the device and as torch does by itself."""
    source = model.model.layers[0]
    num_bytes = sum(each.nbytes for each in source.parameters())

    def plainly() -> None:
        for each in source.parameters():
            each.detach().to(device, copy=True)

    def twin() -> nn.Module:
        # The same memory under other names, since a module is moved in place.
        module = nn.Module()
        for number, each in enumerate(source.parameters()):
            module.register_parameter(f"part_{number}", nn.Parameter(each.detach()))
        return module

    seconds = measure(
        {
            "through pinned memory, in a stream of its own": lambda: place_module(twin(), device),
            "Tensor.to": plainly,
        },
        device,
        rounds,
    )
    rows = [
        [name, spread([1e3 * each for each in taken]).show(2), _rate(num_bytes, taken)]
        for name, taken in seconds.items()
    ]
    return table([f"{num_bytes / 1e6:.0f} MB of a layer", "ms", "GB/s"], rows)


def products(hidden_size: int, device: torch.device, options: argparse.Namespace) -> str:
    """Products with a matrix as it is and as codes; by its size, how fast what is held of it is read."""
    dtype = getattr(torch, options.dtype)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4 * hidden_size, hidden_size, generator=generator).to(dtype)
    plain = nn.Linear(hidden_size, 4 * hidden_size, bias=False, dtype=dtype, device=device)
    layers: dict[str, nn.Module] = {options.dtype: plain}
    for bits in (8, 4):
        codes = quantize(weight, bits).to(device)
        layers[f"int{bits}"] = CodesLinear(codes, None, dtype, by_int8=False)
    rows = []
    with torch.inference_mode():
        for num_rows in ROWS:
            given = torch.randn(1, num_rows, hidden_size, generator=generator).to(device, dtype)
            calls = {name: _call(layer, given) for name, layer in layers.items()}
            for name, taken in measure(calls, device, options.rounds).items():
                layer = layers[name]
                num_bytes = sum(each.nbytes for each in layer.parameters())
                held = type(getattr(layer, "_held", layer.weight)).__name__
                milliseconds = spread([1e3 * each for each in taken]).show(3)
                rows.append([str(num_rows), name, held, milliseconds, _rate(num_bytes, taken)])
    return table(["rows", "matrix", "held as", "ms", "GB/s"], rows)


def _call(layer: nn.Module, given: torch.Tensor) -> Callable[[], object]:
    return lambda: layer(given)


def _rate(num_bytes: int, taken: Sequence[float]) -> str:
    return spread([num_bytes / each / 1e9 for each in taken]).show(1)


def passes(model: Any, device: torch.device, options: argparse.Namespace) -> str:
    """A token that follows a prompt: for the stages each at another length of the sequence, for transformers at one."""
    avoid_planned_attention(device)  # as workers do: in the whole process, so for transformers, too
    position, dtype = options.prompt_tokens, getattr(torch, options.dtype)
    hidden_B1D = torch.zeros(1, 1, model.config.hidden_size, dtype=dtype, device=device)
    calls: dict[str, Callable[[], object]] = {}
    for name, bits in {"a stage": None, "a stage, int8": 8, "a stage, int4": 4}.items():
        calls[name] = by_a_stage(stage_of(model, device, dtype, bits), hidden_B1D, position)
    there = model.to(device)
    calls["transformers"] = by_transformers(there.model, there.model, hidden_B1D, position)
    if not options.no_compile:
        modes = {"compiled": "default"}
        if device.type == "cuda":
            modes["compiled, with CUDA graphs"] = "reduce-overhead"
        for name, mode in modes.items():
            compiled = torch.compile(there.model, mode=mode, dynamic=False)
            calls[f"transformers, {name}"] = by_transformers(
                there.model, compiled, hidden_B1D, position
            )
    with torch.inference_mode():
        seconds = measure(calls, device, options.rounds)
    model.to(CPU)
    rows = [
        [name, spread([1e3 * each for each in taken]).show(2)] for name, taken in seconds.items()
    ]
    return table([f"after {position} tokens", "ms"], rows)


def hold_as_codes(layer: nn.Module, bits: int, dtype: torch.dtype) -> None:
    """Put codes in the place of a layer's matrices, where they lie."""
    for path, each in list(layer.named_modules()):
        if isinstance(each, nn.Linear):
            parent, _, name = path.rpartition(".")
            codes = quantize(each.weight.detach(), bits)
            linear = CodesLinear(codes, None, dtype, by_int8=False)
            setattr(layer.get_submodule(parent), name, linear)


def by_a_stage(stage: Stage, hidden_B1D: torch.Tensor, position: int) -> Callable[[], object]:
    """The next token through all layers of a stage, after a prompt and those before it."""
    cache, num_layers = stage.new_cache(max_length=MAX_POSITIONS), stage.num_layers

    def run(hidden_BTD: torch.Tensor) -> None:
        stage.forward(hidden_BTD, start=0, stop=num_layers, position=cache.length, cache=cache)

    run(hidden_B1D.expand(1, position, -1).contiguous())
    return lambda: run(hidden_B1D)


def by_transformers(
    base: Any, decoder: Any, hidden_B1D: torch.Tensor, position: int
) -> Callable[[], object]:
    """The next token through `decoder`, with keys and values in memory of a fixed size, as graphs want it.

    The prompt goes through `base`: a cache that is made in a compiled pass has no fixed place, and no graph takes it.
    """
    cache = StaticCache(config=base.config, max_cache_len=MAX_POSITIONS)
    with torch.inference_mode():
        prompt_BTD = hidden_B1D.expand(1, position, -1).contiguous()
        base(inputs_embeds=prompt_BTD, past_key_values=cache, use_cache=True)
    position_ids = torch.full((1, 1), position, device=hidden_B1D.device)
    return lambda: decoder(
        inputs_embeds=hidden_B1D, past_key_values=cache, position_ids=position_ids, use_cache=True
    )


def stage_of(
    model: Any, device: torch.device, dtype: torch.dtype, bits: int | None = None
) -> Stage:
    """All layers of a model on the device, as a worker holds them; their matrices as codes, if `bits` are given."""
    stage = Stage(model.config, dtype=dtype, device=device)
    for layer_id, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{layer_id}."
        tensors = {f"{prefix}{name}": each for name, each in layer.state_dict().items()}
        stage.load_layer(layer_id, tensors)
        stage.speed_up_layer(layer_id)
        if bits is not None:
            hold_as_codes(stage.layer(layer_id), bits, dtype)
    return stage


def answers(model: Any, path: Path, device: torch.device, options: argparse.Namespace) -> str:
    """Prompt and tokens by transformers, by one worker, and by two that share the device."""
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(2, 32_000, (options.prompt_tokens,), generator=generator).tolist()
    with contextlib.ExitStack() as stack:
        addresses = [
            stack.enter_context(workers(count, "--device", str(device))) for count in (1, 2)
        ]
        timings = trio.run(compare, model.to(device), path, addresses, prompt, options)
    rows = [
        [
            name,
            spread([1e3 * timing.first for timing in taken]).show(0),
            spread([len(prompt) / timing.first for timing in taken]).show(0),
            spread([timing.rate for timing in taken]).show(),
        ]
        for name, taken in timings.items()
    ]
    text = table(
        [f"{len(prompt)} + {options.tokens}", "first token, ms", "prompt tokens/s", "tokens/s"],
        rows,
    )
    return f"{text}\n\nEmbedding and head are the coordinator's, on the CPU, but for transformers."


async def compare(
    model: Any,
    path: Path,
    addresses: list[list[str]],
    prompt: list[int],
    options: argparse.Namespace,
) -> dict[str, list[Timing]]:
    """All variants in turn, so many rounds after one that warms up."""
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
            )
            name = f"{len(peers)} worker{'s' if len(peers) > 1 else ''}"
            coordinators[name] = await stack.enter_async_context(open_coordinator(settings))
            timings[name] = []
        for number in range(options.rounds + 1):
            reference, _ = await trio.to_thread.run_sync(
                time_transformers, model, prompt, options.tokens
            )
            if number:
                timings["transformers"].append(reference)
            for name, coordinator in coordinators.items():
                timing, _ = await time_ours(coordinator, prompt, options.tokens)
                if number:
                    timings[name].append(timing)
    return timings


def training(model: Any, path: Path, device: torch.device, options: argparse.Namespace) -> str:
    """Batches through a trainer, in a process of its own, and through the loop that everybody writes, in turn.

    Masters are float32, products bfloat16.
    """
    model.to(CPU)
    sequences, length, num_batches = (4, 64, 2) if device == CPU else (16, 1024, 4)
    shape = (sequences * num_batches, length)
    ids = torch.randint(0, 32_000, shape, generator=torch.Generator().manual_seed(2))
    save_file({"input_ids": ids.to(torch.int32)}, path / "slice")
    starts = range(0, len(ids), sequences)
    batches = [[FileRange(path / "slice", start, start + sequences)] for start in starts]
    inner = InnerSection(
        lr=1e-4, schedule="constant", warmup=0, precision="bfloat16", micro_batch=4
    )
    config = json.dumps(model.config.to_dict())
    settings = TrainerSettings("causal-lm", config, inner=inner, device=str(device))
    whole, steps, plainly = "a trainer, a call", "a trainer, its steps alone", "a plain loop"
    rates: dict[str, list[float]] = {whole: [], steps: [], plainly: []}

    async def in_turn() -> int:
        async with open_trainer(settings) as trainer:
            plain = PlainLoop(config, inner, device)
            for number in range(options.rounds + 1):
                done: list[BatchDone] = []
                started = time.perf_counter()
                trained = await trainer.train(
                    batches, step=number * num_batches, seed=0, on_batch=done.append
                )
                between = time.perf_counter()
                plain.train(ids, sequences, trained.micro_batch)
                ended = time.perf_counter()
                if number:
                    rates[whole].append(ids.numel() / (between - started))
                    rates[steps].append(ids.numel() / sum(each.seconds for each in done))
                    rates[plainly].append(ids.numel() / (ended - between))
        return trained.micro_batch

    micro_batch = trio.run(in_turn)
    rows = [[name, spread(taken).show(0)] for name, taken in rates.items()]
    text = table([f"batches of {sequences} x {length}", "tokens/s"], rows)
    return (
        f"{text}\n\n{micro_batch} sequences at once in both. A call, of {num_batches} batches, takes the weights over "
        "from the process of their owner and gives them back."
    )


class PlainLoop:
    """AdamW on a model, in plain torch."""

    def __init__(self, config: str, inner: InnerSection, device: torch.device) -> None:
        torch.manual_seed(0)
        raw = json.loads(config)
        built = AutoConfig.for_model(raw.pop("model_type"), **raw)
        with device:
            self._model = AutoModelForCausalLM.from_config(built, dtype=torch.float32)
        self._model.train()
        self._inner, self._device = inner, device
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=inner.lr,
            betas=inner.betas,
            weight_decay=inner.weight_decay,
        )

    def train(self, ids: torch.Tensor, batch: int, at_once: int) -> None:
        """A step for each batch, and the device has done it."""
        for start in range(0, len(ids), batch):
            pieces = ids[start : start + batch].split(at_once)
            for piece in pieces:
                given = piece.to(self._device)
                with torch.autocast(self._device.type, torch.bfloat16):
                    loss = self._model(input_ids=given, labels=given, use_cache=False).loss
                (loss * len(piece) / batch).backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._inner.clip)
            self._optimizer.step()
            self._optimizer.zero_grad()
        wait_for(self._device)


if __name__ == "__main__":
    raise SystemExit(main())
