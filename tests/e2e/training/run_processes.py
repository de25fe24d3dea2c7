"""A run in processes of its own: a leader, and workers that join it by ticket. Also a small model, and data for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

from neurogrid.cli.commands.training.change import change
from neurogrid.cli.terminal.screen import Screen
from neurogrid.training.data.manifest import Manifest
from neurogrid.training.runs.audit import audit
from neurogrid.training.runs.entries import Entry, ResumedEntry, RoundEntry
from neurogrid.training.runs.journal import read_journal
from tests.e2e.preloaded import DEADLINE, TRAIN, WORKER, Popen

__all__ = [
    "FEW_WORDS",
    "RUN_FILE",
    "STAGE_PROGRAM",
    "RunProcesses",
    "check_used",
    "make_inputs",
    "program_below",
    "rounds_of",
    "used_samples",
]

STAGE_PROGRAM = "neurogrid.training.stages.stage_program"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}

RUN_FILE = """
[model]
config = "model.json"
[data]
path = "text.txt"
sequence_length = 32
vocab_size = 512
slice_samples = 64
[inner]
lr = 3e-3
batch_tokens = 256
"""

# Some 3,400 samples, and an eighth of that.
NUM_WORDS, FEW_WORDS = 24_000, 3_500


def make_inputs(directory: Path, *, num_words: int = NUM_WORDS) -> None:
    """A config and a text, which is anything but random: numbers in words, one after the other."""
    (directory / "model.json").write_text(json.dumps(CONFIG))
    digits = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    words = (digits[int(digit)] for number in range(num_words) for digit in str(number))
    (directory / "text.txt").write_text(" ".join(words))


def program_below(pid: int, module: str) -> int:
    """The one process that runs a module, of those that a process has started, or these have in their turn."""
    found, below = [], [pid]
    while below:
        for path in Path(f"/proc/{below.pop()}/task").glob("*/children"):
            for child in path.read_text().split():
                below.append(int(child))
                if module.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    (process,) = found
    return process


class RunProcesses:
    """A run in a directory, which has `run.toml` and what that names."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory, self.port = directory, port
        self.leader: Popen | None = None
        self.workers: dict[str, Popen] = {}
        self._logs: list[Any] = []

    @property
    def run(self) -> Path:
        """The directory of the run."""
        return self.directory / "run"

    @property
    def log(self) -> str:
        """What the leader said."""
        return (self.directory / "leader.log").read_text()

    def log_of(self, name: str) -> str:
        """What a worker said."""
        return (self.directory / f"{name}.log").read_text()

    def lead(self, *options: str, run_file: str = "run.toml", cwd: Path | None = None) -> None:
        """Start the leader, in the directory where nothing else is said."""
        log = (self.directory / "leader.log").open("a")
        self._logs.append(log)
        listen = f"/ip4/127.0.0.1/tcp/{self.port}"
        # Others use the port that it would have, at the same time.
        page = () if "--http-port" in options else ("--http-port", "0")
        self.leader = Popen(
            [
                *TRAIN,
                *(run_file, "--dir", "run" if cwd is None else str(self.run)),
                *("--listen", listen, "--wait", "60", *page, *options),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=cwd or self.directory,
        )

    def join(self, name: str, *options: str, program: Sequence[str] = WORKER) -> None:
        """Start a worker, the same as before if it was there."""
        self.wait(lambda: (self.run / "cluster" / "ticket").exists(), "there was no ticket")
        log = (self.directory / f"{name}.log").open("a")
        self._logs.append(log)
        self.workers[name] = Popen(
            [
                *(*program, "--train", "--join", "@run/cluster/ticket", "--cluster", name),
                *("--listen", "/ip4/127.0.0.1/tcp/0", "--no-cache", "--disable-mdns"),
                *("--threads", "1", "--name", name, *options),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            cwd=self.directory,
        )

    def kill(self, name: str = "") -> None:
        """kill -9 a worker, or the leader."""
        process = self.workers.pop(name) if name else self.leader
        assert process is not None
        process.kill()
        process.wait(DEADLINE)
        if process.stdout is not None:
            process.stdout.close()

    def kill_trainer_of_leader(self) -> None:
        """kill -9 the process in which the leader evaluates and writes checkpoints."""
        assert self.leader is not None
        os.kill(
            program_below(self.leader.pid, "neurogrid.training.trainer.program"), signal.SIGKILL
        )

    def rounds(self) -> int:
        """The last round in the figures."""
        figures = self.figures()
        return int(figures[-1]["round"]) if figures else 0

    def figures(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        path = self.run / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, is_so: Callable[[], bool], otherwise: str) -> None:
        """Wait until something is so."""
        until = time.monotonic() + DEADLINE
        while not is_so():
            assert time.monotonic() < until, f"{otherwise}: {self.log}"
            assert self.leader is None or self.leader.poll() is None, (
                f"the leader ended: {self.log}"
            )
            time.sleep(0.05)

    def wait_round(self, number: int) -> None:
        """Wait until a round is in the figures."""
        self.wait(lambda: self.rounds() >= number, f"round {number} did not come")

    def end_with_epoch(self, copy: Path | None = None) -> int:
        """Have it end three epochs after the one that goes on; how many there are then.

        What is to happen before a run ends takes as long as it takes: the run is begun for more epochs than that. Of
        the next ones samples may be dealt already when the change is read: rounds go on meanwhile.

        Args:
            copy: the directory of who leads it, if that is not the one that began it.
        """
        run = copy or self.run
        manifest = Manifest.decode((run / "data" / "manifest.json").read_bytes())
        num_used = sum(each.num_samples for entry in rounds_of(run) for each in entry.ranges)
        epochs = num_used // manifest.num_samples + 4
        self.change(f"stop.epochs={epochs}", run=run)
        return epochs

    def change(self, *words: str, run: Path | None = None) -> None:
        """`neurogrid train change`, in this process: a command of its own takes as long as some rounds."""
        trio.run(change, Namespace(directory=run or self.run, words=[*words]), Screen())

    def end(self) -> Path:
        """Wait for the end of the run; the checkpoint that it names."""
        assert self.leader is not None
        stdout, _ = self.leader.communicate(timeout=DEADLINE)
        assert self.leader.returncode == 0, self.log
        path = self.directory / stdout.removesuffix("\n")
        assert path.is_dir(), stdout
        return path

    def close(self) -> None:
        """End what still runs."""
        processes = [*self.workers.values(), *([self.leader] if self.leader is not None else [])]
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)
            if process.stdout is not None:
                process.stdout.close()
        for log in self._logs:
            log.close()


@contextmanager
def open_run(
    directory: Path, port: int, run_file: str, *, num_words: int = NUM_WORDS
) -> Iterator[RunProcesses]:
    """A run with this file, none of whose processes has begun."""
    make_inputs(directory, num_words=num_words)
    (directory / "run.toml").write_text(run_file)
    processes = RunProcesses(directory, port)
    try:
        yield processes
    finally:
        processes.close()


def rounds_of(run: Path) -> list[RoundEntry]:
    """The rounds that the journal says, without those that were taken back; the journal is sound."""
    rounds: list[RoundEntry] = []
    entries = entries_of(run)
    problems = audit(entries).problems
    assert problems == (), problems
    for entry in entries:
        if isinstance(entry, ResumedEntry):
            rounds = [each for each in rounds if each.round <= entry.round]
        elif isinstance(entry, RoundEntry):
            rounds.append(entry)
    return rounds


def entries_of(run: Path) -> Sequence[Entry]:
    """The journal."""
    return [recorded.entry for recorded in read_journal(run / "journal")]


def check_used(run: Path) -> None:
    """Each sample was used as often as any other, or once more where a later epoch goes on."""
    times = used_samples(run).values()
    assert max(times) - min(times) <= 1


def used_samples(run: Path) -> Counter[tuple[int, int]]:
    """How often each sample was used, by the journal."""
    return Counter(
        (each.slice, number)
        for entry in rounds_of(run)
        for each in entry.ranges
        for number in range(each.start, each.stop)
    )
