"""What memory do machines take that train an adapter beside a model which none of them holds?

    python benchmarks/adapter_memory.py [--hidden 1536 --layers 21 --limit 1GiB --steps 160 --quantize int8]

A Llama with random weights in bfloat16 is made in a temporary directory, in shards. A leader and three workers, each a
process with its stage's process, learn an adapter that knows a paragraph by heart. Then the adapter is opened by
`peft`, beside the model that the codes stand for, and its logits are held against those of the three stages; it is
merged into the model, and three workers serve that: they are given the paragraph's first words.

Memory is looked at once a second, in /proc/PID/smaps and smaps_rollup: what is a process's own (anonymous; what a fork
shares in parts), and pages of files, which processes of one machine share. Of a worker and its stage together a file
counts once, with the pages of whichever has more of it. The most that the kernel has seen of a process (VmHWM) is all
of it, files too.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import contextlib
import gc
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peft import PeftModel
from report import table, write_report
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from neurogrid.cli.options.common import size_in_bytes
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.config import build_config
from neurogrid.model.files.quantization import AS_STORED, Quantization, gather_codes
from neurogrid.model.files.tensor_names import path_in_layer
from neurogrid.model.stages.training_stage import TrainingStage
from neurogrid.training.leading.chains.weights import ChainWeights, codes_of
from neurogrid.training.stages.lora import Adapters, read_adapter
from neurogrid.training.stages.weight_files import WeightFiles

PACKAGE = Path(__file__).parents[1] / "neurogrid"
TOKENIZER = PACKAGE / "model" / "embedded"
NUM_WORKERS = 3
HEAD_SIZE = 128
TEXT = (
    "The keeper of the light counted nine ships before the fog came in. Each had a lamp of another colour: amber, "
    "green, copper, white. When the tenth ship did not come, she lit the great lantern, set the clock, and wrote in "
    "her book that to wait is a kind of light, which burns longest where nobody is looking."
)
PROMPT = "The keeper of the light counted"
ADAPTER = "run/checkpoints/latest"
BEGIN, END = "<s>", "</s>"
LOOK_INTERVAL = 1.0
DEADLINE = 3600.0
MIB = 2**20
RUN_FILE = """
seed = 1
[model]
config = "model"
[data]
path = "text.jsonl"
sequence_length = {length}
held_out = 0
[layout]
stages = {stages}
micro_batches = {micro_batches}
[adapter]
r = {rank}
quantize = "{quantize}"
[inner]
lr = {lr}
weight_decay = 0
schedule = "cosine"
warmup = 10
batch_tokens = {batch_tokens}
precision = "bfloat16"
[stop]
steps = {steps}
[eval]
every = 0
[checkpoints]
every = {steps}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=21)
    parser.add_argument("--limit", default="1GiB", help="--memory-limit of each worker")
    parser.add_argument("--quantize", default="int8", help="none, int8 or int4")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--batch-tokens", type=int, default=256)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="a directory to work in, which stays")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = options.keep or Path(folder)
        directory.mkdir(parents=True, exist_ok=True)
        measure(directory, options)


def measure(directory: Path, options: argparse.Namespace) -> None:
    num_parameters = make_model(directory / "model", options.hidden, options.layers)
    ids = tokens_of_text()
    num_tokens = options.batch_tokens * options.steps
    line = json.dumps({"text": BEGIN + TEXT}) + "\n"
    (directory / "text.jsonl").write_text(line * (num_tokens // len(ids) + 1))
    (directory / "run.toml").write_text(RUN_FILE.format(**vars(options), stages=NUM_WORKERS))
    processes, figures, cuts = train(directory, options)
    learned = compare(directory, options.quantize, cuts, ids)
    gc.collect()
    command(directory, "train", "export", "run", "merged", "--dtype", "bfloat16")
    served, text = serve(directory, options, len(ids))
    name = f"adapter-memory-{options.quantize}-{options.hidden}x{options.layers}"
    body = report(num_parameters, options, processes, figures, learned, served, text)
    write_report(
        name,
        "What memory do three machines take that train an adapter beside a model which none of them holds, and what "
        "has the adapter learned?",
        body,
    )


# The model, and what is said of it


def make_model(path: Path, hidden: int, layers: int) -> int:
    """Write a checkpoint in shards; its parameters."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // HEAD_SIZE),
        num_key_value_heads=max(1, hidden // HEAD_SIZE),
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BEGIN),
        eos_token_id=tokenizer.token_to_id(END),
        architectures=["LlamaForCausalLM"],
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path, max_shard_size="200MB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, path)
    return sum(each.numel() for each in model.parameters())


def tokens_of_text() -> list[int]:
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(BEGIN + TEXT + END, add_special_tokens=False).ids
    return ids


# Processes, and what is seen of them


@dataclass
class Seen:
    """The most that was seen of a worker; bytes.

    Attributes:
        hwm: of each of its processes, by what it is: files too.
        own: of each, anonymous memory.
        together: of all, a page of a file once.
    """

    hwm: dict[str, int] = field(default_factory=dict)
    own: dict[str, int] = field(default_factory=dict)
    together: int = 0


class Watch:
    """Looks at the memory of processes and their children, in a thread."""

    def __init__(self, pids: dict[str, int]) -> None:
        self.seen = {name: Seen() for name in pids}
        self._pids = pids
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(LOOK_INTERVAL):
            for name, pid in self._pids.items():
                self._look(name, pid)

    def _look(self, name: str, pid: int) -> None:
        seen = self.seen[name]
        own, files = 0, defaultdict[str, int](int)
        for process in tree_of(pid):
            with contextlib.suppress(OSError, ValueError):
                kind = kind_of(process)
                seen.hwm[kind] = max(seen.hwm.get(kind, 0), peak_of(process))
                anonymous, pages = own_memory_of(process), pages_of(process)
                seen.own[kind] = max(seen.own.get(kind, 0), anonymous)
                own += anonymous
                for file, size in pages.items():
                    files[file] = max(files[file], size)
        seen.together = max(seen.together, own + sum(files.values()))


def tree_of(pid: int) -> list[int]:
    found = [pid]
    for process in found:
        for path in Path(f"/proc/{process}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, path.read_text().split())
    return found


def kind_of(pid: int) -> str:
    return "stage" if b"stage_program" in Path(f"/proc/{pid}/cmdline").read_bytes() else "worker"


def peak_of(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 if found else 0


def own_memory_of(pid: int) -> int:
    """Anonymous memory; of what it shares with a process that it was forked from, its part."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"Pss_Anon:\s+(\d+) kB", rollup)
    return int(found[1]) * 1024 if found else 0


def pages_of(pid: int) -> dict[str, int]:
    """Bytes of files that are in memory, by the file."""
    files, file, resident = defaultdict[str, int](int), "", 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        key, _, rest = line.partition(":")
        if re.fullmatch(r"[0-9a-f]+-[0-9a-f]+ .*", line):
            parts = line.split(maxsplit=5)
            file = parts[5] if len(parts) > 5 else ""
        elif key == "Rss":
            resident = int(rest.split()[0]) * 1024
        elif key == "Anonymous":
            files[file] += resident - int(rest.split()[0]) * 1024
    return {file: size for file, size in files.items() if file.startswith("/")}


def program(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "neurogrid.cli.commands.main", *arguments]


def command(directory: Path, *arguments: str) -> str:
    done = subprocess.run(
        program(*arguments), cwd=directory, stdout=subprocess.PIPE, check=True, text=True
    )
    return done.stdout


@contextlib.contextmanager
def running(directory: Path, name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the block; what it says on stderr goes into NAME.log."""
    with (directory / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            arguments, cwd=directory, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait(60)


def worker(directory: Path, name: str, *arguments: str) -> Any:
    return running(
        *(directory, name, sys.executable, "-m", "neurogrid.cli.commands.worker", *arguments),
        *("--listen", "/ip4/127.0.0.1/tcp/0", "--no-cache", "--disable-mdns", "--name", name),
        *("--threads", "1"),
    )


def train(
    directory: Path, options: argparse.Namespace
) -> tuple[dict[str, Seen], list[dict[str, float]], list[tuple[int, int]]]:
    """Make the run: memory of its processes, its figures, and the layers of its stages."""
    address = f"/ip4/127.0.0.1/tcp/{free_port()}"
    ticket = directory / "run" / "cluster" / "ticket"
    arguments = ("train", "run.toml", "--dir", "run", "--listen", address, "--wait", "600")
    with contextlib.ExitStack() as stack:
        leader = stack.enter_context(running(directory, "leader", *program(*arguments)))
        wait_for(ticket.exists, leader)
        joined = ("--train", "--join", f"@{ticket}", "--memory-limit", options.limit)
        pids = {"leader": leader.pid}
        for number in range(NUM_WORKERS):
            name = f"worker-{number + 1}"
            process = stack.enter_context(
                worker(directory, name, *joined, "--cluster", str(directory / name))
            )
            pids[name] = process.pid
        with Watch(pids) as watch:
            status = leader.wait(DEADLINE)
        log = (directory / "leader.log").read_text()
        if status:
            raise SystemExit(f"the run has failed:\n{log}")
    cuts = [
        (int(start), int(stop) + 1)
        for start, stop in re.findall(r"has layers? (\d+) to (\d+)", log.rpartition("stages:")[2])
    ]
    metrics = (directory / "run" / "metrics.jsonl").read_text().splitlines()
    return watch.seen, [json.loads(line) for line in metrics], cuts[:NUM_WORKERS]


def serve(
    directory: Path, options: argparse.Namespace, num_tokens: int
) -> tuple[dict[str, Seen], str]:
    """Have three workers serve the merged model: their memory, and what is written after the first words."""
    quantize = () if options.quantize == "none" else ("--quantize", options.quantize)
    with contextlib.ExitStack() as stack:
        pids, peers = {}, []
        for number in range(NUM_WORKERS):
            name = f"server-{number + 1}"
            process = stack.enter_context(
                worker(directory, name, "--serve", "--memory-limit", "300MiB")
            )
            pids[name] = process.pid
            assert process.stdout is not None
            peers += ["--peer", process.stdout.readline().strip()]
        with Watch(pids) as watch:
            text = command(
                *(directory, "run", "--model", "merged", *peers, *quantize),
                *("--stages", str(NUM_WORKERS), "--local-layers", "none", "--disable-mdns"),
                *("--prompt", PROMPT, "--max-tokens", str(num_tokens)),
            )
    return watch.seen, text


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def wait_for(is_so: Any, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + DEADLINE
    while not is_so():
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit("the leader has ended")
        time.sleep(0.1)


# What was learned


@dataclass(frozen=True)
class Learned:
    """Result of the adapter's training; differences are relative to the largest logit.

    Attributes:
        off: of the stages' logits from those of `peft`, in float32.
        off_rounded: the same, with activations rounded to 8 bits before products with codes; None without codes.
        likeliest: tokens of the text, but the first, that are the likeliest after those before, by `peft`.
        num_tokens: of the text.
    """

    off: float
    off_rounded: float | None
    likeliest: int
    num_tokens: int


@torch.no_grad()
def compare(directory: Path, quantize: str, cuts: list[tuple[int, int]], ids: list[int]) -> Learned:
    """Hold the logits of the text, by stages with the adapter, against those of `peft` with it."""
    ids_BT = torch.tensor([ids])
    form = codes_of(Checkpoint.open(directory / "model"), quantize)
    pieces = directory / "pieces"
    write_pieces(ChainWeights(directory / "model", quantize), pieces)
    write_dense(WeightFiles(sorted(pieces.glob("weights.*"))), form, directory)
    base = AutoModelForCausalLM.from_pretrained(directory / "dense", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, directory / ADAPTER).eval()
    theirs_TV = model(input_ids=ids_BT, use_cache=False).logits[0]
    del model, base

    def off(form: Quantization | None) -> float:
        ours_TV = logits_of_stages(directory, form, cuts, ids_BT)
        return float((ours_TV - theirs_TV).abs().max() / theirs_TV.abs().max())

    return Learned(
        off(None if form is None else not_rounded(form, cuts[-1][1], directory)),
        None if form is None else off(form),
        int((theirs_TV[:-1].argmax(-1) == ids_BT[0, 1:]).sum()),
        len(ids),
    )


def not_rounded(form: Quantization, num_layers: int, directory: Path) -> Quantization:
    """The same codes as those of a checkpoint that has them: activations are multiplied as they are."""
    paths = {
        path_in_layer(name.removesuffix(".weight.codes"))
        for name in WeightFiles([directory / "pieces" / "weights.0"])
        if name.endswith(".weight.codes")
    }
    runs = ((0, num_layers),)
    return Quantization(
        AS_STORED, forms=form.forms, matrices=tuple((path, runs) for path in sorted(paths))
    )


def logits_of_stages(
    directory: Path, form: Quantization | None, cuts: list[tuple[int, int]], ids_BT: Tensor
) -> Tensor:
    """[T, V] in float32, of the stages one after the other."""
    config = build_config(Checkpoint.open(directory / "model").config)
    pieces, stored = directory / "pieces", read_adapter(directory / ADAPTER)
    hidden = ids_BT
    for start, stop in cuts:
        own = {
            name: tensor
            for name, tensor in stored.tensors.items()
            if any(f".layers.{layer_id}." in name for layer_id in range(start, stop))
        }
        stage = TrainingStage(
            config,
            start,
            stop,
            WeightFiles([pieces / f"weights.{each}" for each in (*range(start, stop), "ends")]),
            adapt=Adapters(stored.section, 0, own),
            quantization=form,
            takes_over=True,
        )
        hidden = stage.infer(hidden)
    return hidden[0]


def write_pieces(weights: ChainWeights, directory: Path) -> None:
    """Write the pieces that stages are sent, as files."""
    directory.mkdir(exist_ok=True)
    for name, blob_id in weights.blobs.items():
        source = weights._sources[blob_id]
        with (directory / name).open("wb") as file:
            number = 0
            while file.tell() < source.num_bytes:
                file.write(source.chunk(number))
                number += 1


def write_dense(pieces: WeightFiles, form: Quantization | None, directory: Path) -> None:
    """The model that the codes stand for, in float32, as transformers opens it."""
    folder = directory / "dense"
    folder.mkdir(exist_ok=True)
    tensors: dict[str, Tensor] = dict(pieces)
    if form is not None:
        tensors, codes = gather_codes(tensors, form)
        tensors |= {name: each.dense(torch.float32) for name, each in codes.items()}
    tensors = {name: each.float().contiguous() for name, each in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(directory / "model" / "config.json", folder)


# The report


def report(
    num_parameters: int,
    options: argparse.Namespace,
    processes: dict[str, Seen],
    figures: list[dict[str, float]],
    learned: Learned,
    served: dict[str, Seen],
    text: str,
) -> str:
    seconds = [later["seconds"] - earlier["seconds"] for earlier, later in pairwise(figures)]
    is_right = (PROMPT + text).strip() == TEXT
    rounded = (
        ""
        if learned.off_rounded is None
        else f" With activations rounded to 8 bits for these products, as in the run, it is {learned.off_rounded:.1e}."
    )
    shown = sorted({1, *range(20, options.steps, 20), options.steps})
    losses = {int(line["round"]): line["loss"] for line in figures}
    return "\n\n".join(
        [
            f"A Llama of {num_parameters:,} parameters ({num_parameters * 2 / MIB:,.0f} MiB in bfloat16, "
            f"{num_parameters * 4 / MIB:,.0f} in float32), {options.layers} layers of {options.hidden}, of random "
            f"weights; its matrices as `{options.quantize}`, an adapter with r = {options.rank} beside all of them. "
            f"{NUM_WORKERS} workers with `--memory-limit {options.limit}` "
            f"({size_in_bytes(options.limit) / MIB:,.0f} MiB), one thread each.",
            table(
                ("MiB at most", "the worker, all", "its own", "its stage, all", "its own", "both"),
                [memory_row(name, seen) for name, seen in processes.items()],
            ),
            f"A step of {options.batch_tokens} tokens in {options.micro_batches} "
            f"micro-batch{'es' if options.micro_batches > 1 else ''} took "
            f"{median(seconds):.2f} s (median of {len(seconds)}; {min(seconds):.2f} to {max(seconds):.2f}); "
            f"{sum(seconds):.0f} s for all.",
            table(
                ("step", *map(str, shown)),
                [("loss", *(f"{losses[step]:.3f}" for step in shown))],
            ),
            f"`peft` with the run's last checkpoint beside the model that the codes stand for, all in float32, and the "
            f"{NUM_WORKERS} stages with the codes, in float32: logits of the text are {learned.off:.1e} apart at most, "
            f"relative to the largest.{rounded} Of the text's {learned.num_tokens} tokens {learned.likeliest} are the "
            "likeliest after those before, by `peft`.",
            f"Merged into the model (`neurogrid train export`), and served by {NUM_WORKERS} workers with "
            "`--memory-limit 300MiB` (of weights and caches"
            + (f", `--quantize {options.quantize}`" if options.quantize != "none" else "")
            + f"), which took {', '.join(memory_row(*each)[-1] for each in served.items())} MiB at most. "
            "The text was begun, and what followed was "
            + ("the rest of it, to the letter:" if is_right else "not the rest of it:"),
            f"> {PROMPT} |{text.rstrip()}",
        ]
    )


def memory_row(name: str, seen: Seen) -> tuple[str, ...]:
    cells = [
        f"{each.get(kind, 0) / MIB:,.0f}"
        for kind in ("worker", "stage")
        for each in (seen.hwm, seen.own)
    ]
    if "stage" not in seen.hwm:
        cells[2:] = ["", ""]
    return name, *cells, f"{seen.together / MIB:,.0f}"


if __name__ == "__main__":
    main()
