"""A training run as processes: leader, data nodes and workers, by their commands; and a small model."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from neurogrid.training.data.preparing import prepare
from tests.e2e.preloaded import DEADLINE, WORKER, Popen

__all__ = [
    "CONFIG",
    "LOOPBACK",
    "RunProcess",
    "TRAIN",
    "prepared_text",
    "start",
    "start_data_node",
    "start_leader",
    "start_run_worker",
    "write_run_file",
]

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
}
_WORDS = (
    "one",
    "ring",
    "to",
    "rule",
    "them",
    "all",
    "find",
    "bring",
    "and",
    "bind",
    "in",
    "the",
    "dark",
)
TRAIN = (sys.executable, "-m", "neurogrid.cli.commands.main", "train")
LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0")


@dataclass
class RunProcess:
    """A process of a run; `log` is its stderr."""

    process: Popen
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def wait_line(self, text: str) -> None:
        """Wait until it has said this."""
        deadline = time.monotonic() + DEADLINE
        while text not in self.log:
            assert self.process.poll() is None or text in self.log, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def kill(self) -> None:
        """End it as a power cut would."""
        self.process.kill()
        self.process.wait(DEADLINE)

    def finish(self) -> str:
        """Wait until it ends well; the last line of its stdout."""
        out, _ = self.process.communicate(timeout=DEADLINE)
        assert self.process.returncode == 0, self.log
        return out.strip()


@contextmanager
def start(directory: Path, name: str, *args: str) -> Iterator[RunProcess]:
    """Run a command until the block is left."""
    log_file = directory / f"{name}.log"
    with log_file.open("w") as log:
        process = Popen(args, stdout=subprocess.PIPE, stderr=log, cwd=directory, text=True)
    try:
        yield RunProcess(process, log_file)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(DEADLINE)
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def start_leader(directory: Path, *options: str) -> Iterator[RunProcess]:
    """Lead directory/run.toml, kept in directory/run; there is a ticket when the block is entered."""
    where = () if "--listen" in options else LOOPBACK
    args = (*TRAIN, "run.toml", "--dir", "run", *where, *options)
    with start(directory, "leader", *args) as leader:
        leader.wait_line("the ticket by which workers join")
        yield leader


def start_data_node(directory: Path, data: Path, name: str) -> AbstractContextManager[RunProcess]:
    """Serve a data directory to the run in directory/run."""
    cluster = ("--cluster", f"{name}.cluster", "--join", "@run/cluster/ticket")
    return start(directory, name, *TRAIN, "data", str(data), *cluster, *LOOPBACK)


def start_run_worker(
    directory: Path, name: str, *options: str
) -> AbstractContextManager[RunProcess]:
    """A worker that joins the run in directory/run by its ticket."""
    cluster = ("--cluster", f"{name}.cluster", "--join", "@run/cluster/ticket")
    cache = ("--cache-dir", f"{name}.cache")
    return start(directory, name, *WORKER, *cluster, *cache, *LOOPBACK, *options)


def prepared_text(out: Path, *, slice_samples: int = 32) -> Path:
    """A data directory of text, samples of 32 tokens, with a tokenizer of 512."""
    source = out.with_suffix(".txt")
    words = [f"{a} {b} {c}" for a in _WORDS for b in _WORDS for c in _WORDS]
    source.write_text(". ".join(words))
    prepare(source, out, vocab_size=512, sequence_length=32, slice_samples=slice_samples, seed=3)
    return out


def write_run_file(directory: Path, data: str, *, rounds: int, every: int = 4) -> None:
    """A run file, and the config that it names."""
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "run.toml").write_text(
        f"""
[model]
config = "config.json"
[data]
path = "{data}"
[stop]
rounds = {rounds}
[inner]
batch_tokens = 256
[outer]
every = {every}
projected = false
codec = "f32"
fragments = 1
[members]
min = 2
[checkpoints]
every = 2
[eval]
every = 2
"""
    )
