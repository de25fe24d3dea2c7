"""What memory do a coordinator and its workers take for a large model, and when is the first token there?

    python benchmarks/footprint.py --hidden 2048 --layers 22 --forms none int8 int4 gguf

A Llama with random weights in bfloat16, in shards, is made in a temporary directory, and the same in GGUF (Q4_0),
unless `--model` names one. For each form two workers are started, then a coordinator. Memory is that of each process
while it loads (the most at any of five looks a second) and after the first tokens: anonymous, which is its own, and of
files, which the system takes back when it needs it (`Anonymous`, and the rest of `Rss`, of /proc/PID/smaps_rollup).
Seconds are counted from the start of the coordinator's process.
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
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
import trio
from report import table, write_report
from safetensors.torch import save_file

NUM_WORKERS = 2
FORMS = ("none", "int8", "int4", "gguf")
VOCAB_SIZE = 32_000
HEAD_SIZE = 128
PROMPT_TOKENS, NUM_TOKENS = 32, 16
LOOK_INTERVAL = 0.2
MIB = 2**20
Q4_0 = (32, 18)  # weights and bytes of a block


@dataclass
class Process:
    """One process that is looked at; sizes in bytes.

    Attributes:
        peak: the most anonymous memory.
        now: anonymous memory, and of files, at the last look.
    """

    name: str
    pid: int
    peak: int = 0
    now: tuple[int, int] = (0, 0)

    def look(self) -> None:
        with contextlib.suppress(OSError):
            self.now = _memory(self.pid)
            self.peak = max(self.peak, self.now[0])


@dataclass
class Outcome:
    """Memory and times that a form took."""

    form: str
    processes: list[Process]
    told: dict[str, float] = field(default_factory=dict)


def _memory(pid: int) -> tuple[int, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines}
    return sizes["Anonymous:"], sizes["Rss:"] - sizes["Anonymous:"]


# ------------------------------------------------------------------ models


def shapes_of(hidden: int) -> dict[str, tuple[int, int]]:
    """Matrices of a layer by their names in a checkpoint: half as many heads of keys, 4 times as wide within."""
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 2, hidden),
        "self_attn.v_proj": (hidden // 2, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (4 * hidden, hidden),
        "mlp.up_proj": (4 * hidden, hidden),
        "mlp.down_proj": (hidden, 4 * hidden),
    }


def num_parameters(hidden: int, layers: int) -> int:
    per_layer = sum(rows * columns for rows, columns in shapes_of(hidden).values())
    return layers * per_layer + 2 * VOCAB_SIZE * hidden


def make_checkpoint(folder: Path, hidden: int, layers: int) -> None:
    """Save it with a shard for each layer, and one for the ends."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD_SIZE,
        "num_key_value_heads": hidden // HEAD_SIZE // 2,
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def some(rows: int, columns: int) -> torch.Tensor:
        weights = torch.randn(rows, columns, generator=generator, dtype=torch.float32)
        return (weights * columns**-0.5).bfloat16()

    places: dict[str, str] = {}
    for number in range(layers + 1):
        if number == layers:
            tensors = {
                f"{name}.weight": some(VOCAB_SIZE, hidden)
                for name in ("model.embed_tokens", "lm_head")
            }
            tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        else:
            place = f"model.layers.{number}"
            tensors = {
                f"{place}.{name}.weight": some(*shape) for name, shape in shapes_of(hidden).items()
            }
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{place}.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        file = f"model-{number + 1:05}-of-{layers + 1:05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def make_gguf(path: Path, hidden: int, layers: int) -> None:
    """Save the same shapes in Q4_0, of random blocks."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(4 * hidden)
    writer.add_head_count(hidden // HEAD_SIZE)
    writer.add_head_count_kv(hidden // HEAD_SIZE // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_vocab_size(VOCAB_SIZE)
    known = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256))]
    unused = [f"[PAD{number}]" for number in range(VOCAB_SIZE - len(known))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*known, *unused])
    writer.add_token_scores([0.0] * VOCAB_SIZE)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[5] * len(unused)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    made = numpy.random.default_rng(0)

    def some(rows: int, columns: int) -> Any:
        elements, num_bytes = Q4_0
        blocks = made.integers(0, 256, (rows * columns // elements, num_bytes), dtype=numpy.uint8)
        scales = made.uniform(0.8, 1.25, len(blocks)) / 4.6 * columns**-0.5
        blocks[:, :2] = scales.astype(numpy.float16).view(numpy.uint8).reshape(-1, 2)
        return blocks.reshape(rows, -1)

    def add(name: str, shape: tuple[int, int]) -> None:
        writer.add_tensor(name, some(*shape), raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    ones = numpy.ones(hidden, numpy.float32)
    add("token_embd.weight", (VOCAB_SIZE, hidden))
    add("output.weight", (VOCAB_SIZE, hidden))
    writer.add_tensor("output_norm.weight", ones)
    for number in range(layers):
        for name, shape in shapes_of(hidden).items():
            add(f"blk.{number}.{names[name]}.weight", shape)
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{number}.{norm}.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ------------------------------------------------------------------ processes


@contextlib.contextmanager
def started(arguments: list[str], name: str) -> Iterator[tuple[subprocess.Popen[str], Process]]:
    process = subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process, Process(name, process.pid)
    finally:
        process.terminate()
        process.wait()


def measure(form: str, model: Path) -> Outcome:
    with contextlib.ExitStack() as stack:
        addresses, processes = [], []
        for number in range(NUM_WORKERS):
            arguments = ["-m", "neurogrid.cli.commands.worker", "--port", "0", "--no-cache"]
            worker, process = stack.enter_context(
                started([*arguments, "--log-level", "error"], f"worker {number + 1}")
            )
            assert worker.stdout is not None
            addresses.append(worker.stdout.readline().strip())
            processes.append(process)
        method = form if form in ("int8", "int4") else "none"
        coordinator, process = stack.enter_context(
            started(
                [__file__, "--serve", method, "--model", str(model), "--peers", *addresses],
                "coordinator",
            )
        )
        outcome = Outcome(form, [process, *processes])
        is_over = threading.Event()

        def look() -> None:
            while not is_over.wait(LOOK_INTERVAL):
                for each in outcome.processes:
                    each.look()

        looking = threading.Thread(target=look)
        looking.start()
        assert coordinator.stdout is not None
        try:
            outcome.told = json.loads(coordinator.stdout.readline())
            time.sleep(2 * LOOK_INTERVAL)  # what is to be given back is, and looked at
        finally:
            is_over.set()
            looking.join()
        return outcome


async def serve(model: Path, method: str, peers: list[str], started_at: float) -> None:
    from neurogrid import CoordinatorSettings, open_coordinator

    settings = CoordinatorSettings(
        model=model,
        quantize=None if method == "none" else method,
        dtype="bfloat16",
        peers=tuple(peers),
        stages=len(peers),
        max_seq_len=512,
    )
    async with open_coordinator(settings) as coordinator:
        ready = time.monotonic() - started_at
        prompt = list(range(3, 3 + PROMPT_TOKENS))
        times = []
        async for _ in coordinator.generate(prompt, max_tokens=NUM_TOKENS):
            times.append(time.monotonic() - started_at)
        rate = (len(times) - 1) / (times[-1] - times[0])
        told = {"ready": ready, "first": times[0], "rate": rate}
        await trio.sleep(1)
        print(json.dumps(told), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)


def row_of(outcome: Outcome) -> list[str]:
    def mib(process: Process) -> str:
        own, of_files = (f"{size / MIB:.0f}" for size in process.now)
        return f"{own} + {of_files} (most {process.peak / MIB:.0f})"

    told = outcome.told
    return [
        outcome.form,
        *map(mib, outcome.processes),
        f"{told['ready']:.1f}",
        f"{told['first']:.1f}",
        f"{told['rate']:.1f}",
    ]


def main() -> None:
    started_at = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a checkpoint, or a file in GGUF")
    parser.add_argument("--hidden", type=int, default=1536, help="a multiple of 256")
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--peers", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.serve:
        # The interpreter and torch took a while before this line; a process says itself when it began.
        began = started_at - _age()
        trio.run(serve, options.model, options.serve, options.peers, began)
        return
    with tempfile.TemporaryDirectory() as directory:
        outcomes = []
        for form in options.forms:
            model = options.model or Path(directory, "gguf" if form == "gguf" else "checkpoint")
            if not model.exists():
                model.mkdir()
                if form == "gguf":
                    make_gguf(model / "model.gguf", options.hidden, options.layers)
                else:
                    make_checkpoint(model, options.hidden, options.layers)
            outcomes.append(measure(form, model))
            print(row_of(outcomes[-1]), flush=True)
        what = (
            str(options.model)
            if options.model
            else (
                f"A Llama of {num_parameters(options.hidden, options.layers) / 1e9:.2f} billion parameters (hidden "
                f"size {options.hidden}, {options.layers} layers, random weights in bfloat16; gguf: in Q4_0)"
            )
        )
        names = [process.name for process in outcomes[0].processes]
        header = [
            "--quantize",
            *(f"{name}, MiB" for name in names),
            "ready, s",
            "first token, s",
            "tokens/s",
        ]
        write_report(
            f"footprint-{options.hidden}x{options.layers}",
            f"{what} over {NUM_WORKERS} workers, computed in bfloat16, one torch thread a process. Memory after "
            f"{NUM_TOKENS} tokens: anonymous + of files (the most anonymous while loading). Seconds from the start of "
            "the coordinator's process to every stage ready, and to the first of the tokens after a prompt of "
            f"{PROMPT_TOKENS}.",
            table(header, [row_of(outcome) for outcome in outcomes]),
        )


def _age() -> float:
    """Seconds since this process began."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
