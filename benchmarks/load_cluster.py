"""The processes of `load.py`: a server and its workers, which join by a ticket, and the models that are served."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file, save_file

from neurogrid.model.embedded import embedded_model_path

__all__ = [
    "HEADERS",
    "MAX_SEQ_LEN",
    "NUM_WORKERS",
    "Cluster",
    "Served",
    "alone",
    "cluster",
    "serve_one",
    "serve_two",
]

NUM_WORKERS = 3
MAX_SEQ_LEN = 512
KEY = "a-key-of-sixteen-characters"
HEADERS = {"Authorization": f"Bearer {KEY}"}
COORDINATOR = (sys.executable, "-m", "neurogrid.cli.commands.coordinator")
WORKER = (sys.executable, "-m", "neurogrid.cli.commands.worker")
LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0", "--disable-mdns", "--log-level", "warning")
# Far above anything that is measured; what hangs must not hang this. Seconds.
READY_TIMEOUT = 180.0


class Program:
    """A process that says on its first line of stdout that it is ready. Ended when the stack is left."""

    def __init__(self, stack: contextlib.ExitStack, command: Sequence[str], **more: str) -> None:
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, **more}
        )
        stack.callback(self.end)

    def first_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise SystemExit("a process did not start; its own words stand above")
        return line

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def own_mib(self) -> float:
        """Memory that is this process's alone; 0 where it has ended."""
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) / 1024
        return 0.0


class Worker(Program):
    """A worker that joins by the ticket in a file."""

    def __init__(self, stack: contextlib.ExitStack, ticket: Path, directory: Path) -> None:
        join = ("--join", f"@{ticket}", "--cluster", str(directory), "--no-cache")
        super().__init__(stack, [*WORKER, *join, *LOOPBACK])
        self.peer_id = ""

    def wait(self) -> None:
        self.peer_id = self.first_line().rpartition("/")[2]


@dataclass
class Cluster:
    """A server and its workers, all ready.

    Attributes:
        join: starts one more worker, which has still to be waited for.
    """

    url: str
    server: Program
    workers: list[Worker]
    join: Callable[[], Worker]


@dataclass(frozen=True)
class Served:
    """Models that are served, by options of the first and of the others, and adapters that clients add.

    Attributes:
        options: for the coordinator.
        added: bodies of `POST /v1/adapters`.
        names: of models and adapters.
    """

    options: tuple[str, ...]
    added: tuple[dict[str, str], ...]
    names: tuple[str, ...]


@contextlib.contextmanager
def cluster(served: Served, directory: Path, *options: str) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        directory.mkdir()
        ticket = directory / "ticket"
        command = [
            *(*COORDINATOR, *served.options, *options, *LOOPBACK, "--http-port", "0"),
            *("--new-cluster", str(directory / "cluster"), "--ticket-file", str(ticket)),
            *("--min-peers", str(NUM_WORKERS), "--local-layers", "none"),
        ]
        server = Program(stack, command)
        deadline = time.monotonic() + READY_TIMEOUT
        while not (ticket.exists() and ticket.read_text()):
            if time.monotonic() > deadline or server.process.poll() is not None:
                raise SystemExit("the coordinator wrote no ticket")
            time.sleep(0.1)
        workers: list[Worker] = []

        def join() -> Worker:
            worker = Worker(stack, ticket, directory / f"member-{len(workers)}")
            workers.append(worker)
            return worker

        for _ in range(NUM_WORKERS):
            join()
        for worker in workers:
            worker.wait()
        url = server.first_line()
        add_adapters(url, served)
        yield Cluster(url, server, workers, join)


@contextlib.contextmanager
def alone(served: Served) -> Iterator[str]:
    """A server that computes all layers itself, one request at a time."""
    with contextlib.ExitStack() as stack:
        options = ("--min-peers", "0", "--speculate", "off", "--no-prefix-reuse")
        command = [*COORDINATOR, *served.options, *options, *LOOPBACK, "--http-port", "0"]
        url = Program(stack, command).first_line()
        add_adapters(url, served)
        yield url


def add_adapters(url: str, served: Served) -> None:
    for body in served.added:
        answer = httpx.post(f"{url}/v1/adapters", json=body, headers=HEADERS, timeout=120)
        if answer.status_code != 200:
            raise SystemExit(f"an adapter was not added: {answer.text}")


def serve_one() -> Served:
    options = ("--dtype", "float32", "--max-seq-len", str(MAX_SEQ_LEN))
    return Served(options, (), ("embedded",))


def serve_two(directory: Path, num_adapters: int) -> Served:
    """Two models that say different things, each with half of the adapters: the first one's named, the others added."""
    places = [directory / name for name in ("one", "other")]
    for seed, place in enumerate(places):
        shutil.copytree(embedded_model_path(), place, ignore=shutil.ignore_patterns("*.py", "*.md"))
        if seed:
            torch.manual_seed(seed)
            weights = load_file(place / "model.safetensors")
            for name, tensor in weights.items():
                if "mlp" in name:
                    noise = torch.randn(tensor.shape) * 0.8 * tensor.float().std()
                    weights[name] = tensor + noise.to(tensor.dtype)
            save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    root = directory / "adapters"
    names = [f"adapter{number}" for number in range(num_adapters)]
    for seed, name in enumerate(names):
        save_adapter(places[0], root / name, seed)
    keys = directory / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"{KEY}\n")
    half = num_adapters // 2
    options = (
        *("--model", str(places[0]), "--with-model", str(places[1])),
        *(f"--adapter={root / name}" for name in names[:half]),
        *("--api-key-file", str(keys), "--adapter-root", str(root)),
        *("--dtype", "float32", "--max-seq-len", str(MAX_SEQ_LEN)),
    )
    added = tuple({"name": name, "path": name, "model": "other"} for name in names[half:])
    return Served(options, added, ("one", "other", *names))


def save_adapter(model: Path, directory: Path, seed: int) -> None:
    """LoRA of rank 8 in PEFT's files, with random matrices that matter."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "v_proj.weight", "up_proj.weight")):
            path = f"base_model.model.{name.removesuffix('.weight')}"
            outputs, inputs = weight.shape
            for part, shape in (("A", (8, inputs)), ("B", (outputs, 8))):
                value = 0.5 * torch.randn(shape, generator=generator) / shape[1] ** 0.5
                tensors[f"{path}.lora_{part}.weight"] = value
    save_file(tensors, directory / "adapter_model.safetensors")
    targets = ["q_proj", "v_proj", "up_proj"]
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": targets}
    (directory / "adapter_config.json").write_text(json.dumps(config))
