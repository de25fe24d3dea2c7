"""`make demo-train`: a run from nothing to a sentence, on this machine, with what a run has to bear on the way.

A small Llama of random weights learns the language reference that comes with Python. Three workers of uneven speed join
with the ticket of the run; one is killed in the middle, and comes back. It succeeds if the loss falls below a number
that is printed beforehand; what the last checkpoint writes is printed at the end.

The commands are those that anybody types, and are shown. All that it makes stays in a directory, to be looked at.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from neurogrid.model.embedded import embedded_model_path
from neurogrid.training.runs.run_directory import RunDirectory
from tools.embedded.corpus import python_prose

__all__ = ["main"]

DIRECTORY: Final = Path("runs/demo-train")
PROMPT: Final = "A function definition"
NUM_TOKENS: Final = 510_000
TARGET: Final = 5.0  # nats a token, of what is trained on
NUM_LAST: Final = 5  # rounds whose mean that is
# Part of the run after which a worker is killed; seconds until it is started again.
KILL_AT: Final = 0.4
AWAY: Final = 3.0
# For the whole, on a machine that others use; seconds.
TIMEOUT: Final = 900.0
NEUROGRID: Final = (sys.executable, "-m", "neurogrid.cli.commands.main")

# Which core each worker has, where the system allows one to say so: one has a core to itself, two share the other.
CORES: Final = {"quick": 0, "slow": 1, "slower": 1}
KILLED: Final = "slow"

CONFIG: Final[dict[str, Any]] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}

RUN_FILE: Final = """\
[model]
config = "config.json"
[data]
path = "reference.jsonl"
tokenizer = "{tokenizer}"
sequence_length = 128
[stop]
tokens = {tokens}
[inner]
lr = 3e-3
schedule = "wsd"
decay = 0.2
batch_tokens = 256
[outer]
every = 40
[members]
min = 2
[checkpoints]
every = 50
[eval]
every = 25
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns 0 if the loss fell below the number, and 1 if not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dir", type=Path, default=DIRECTORY)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    parser.add_argument("--target", type=float, default=TARGET)
    options = parser.parse_args(arguments)
    directory: Path = options.dir
    shutil.rmtree(directory, ignore_errors=True)  # of the demo before
    directory.mkdir(parents=True)
    say(f"The loss is to fall below {options.target:g}; random weights have about 8.3.")
    write_inputs(directory, options.tokens)
    checkpoint = train(directory, options.tokens)
    losses = [line["loss"] for line in RunDirectory(directory / "run").figures() if "loss" in line]
    last = fmean(losses[-NUM_LAST:])
    say(f"The loss fell from {losses[0]:.2f} to {last:.2f}. The model continues {PROMPT!r}:")
    write_sentence(checkpoint)
    if not last < options.target:
        say(f"That is not below {options.target:g}.")
        return 1
    return 0


def write_inputs(directory: Path, num_tokens: int) -> None:
    """Write text, config and run file, and show the run file."""
    with (directory / "reference.jsonl").open("w", encoding="utf-8") as file:
        for section in python_prose():
            file.write(json.dumps({"text": "\n\n".join(section.paragraphs)}) + "\n")
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    run_file = RUN_FILE.format(tokenizer=embedded_model_path(), tokens=num_tokens)
    (directory / "run.toml").write_text(run_file, encoding="utf-8")
    say(f"{directory / 'run.toml'}:")
    print(run_file, file=sys.stderr, flush=True)


def train(directory: Path, num_tokens: int) -> Path:
    """Lead the run, have workers join, kill one on the way; returns the last checkpoint."""
    run, ticket = RunDirectory(directory / "run"), directory / "ticket"
    deadline = time.monotonic() + TIMEOUT
    with ExitStack() as stack:
        leader = stack.enter_context(
            started(
                *(*NEUROGRID, "train", str(directory / "run.toml"), "--dir", str(run.path)),
                *("--ticket-file", str(ticket), "--threads", "1"),
                *("--listen", "/ip4/127.0.0.1/tcp/0"),
            )
        )
        while not ticket.exists():
            wait(leader, deadline, "the leader prints no ticket")
        workers = {
            name: stack.enter_context(joined(name, core, directory, ticket))
            for name, core in CORES.items()
        }
        while not (lines := run.figures()) or lines[-1]["tokens"] < KILL_AT * num_tokens:
            wait(leader, deadline, "the run does not come to its middle")
        say(f"Worker {KILLED!r} is killed, as a machine that loses its power is.")
        workers[KILLED].kill()
        workers[KILLED].wait()
        time.sleep(AWAY)
        say(f"Worker {KILLED!r} is started again, with the same ticket.")
        stack.enter_context(joined(KILLED, CORES[KILLED], directory, ticket))
        while leader.poll() is None:
            wait(leader, deadline, "the run does not come to its end")
        assert leader.stdout is not None
        last = leader.stdout.read().decode().strip()
    if leader.returncode != 0:
        raise SystemExit(f"demo-train: neurogrid train ended with status {leader.returncode}")
    return Path(last)


def write_sentence(checkpoint: Path) -> None:
    """Print what the trained model writes."""
    command = (*NEUROGRID, "run", str(checkpoint), PROMPT, "--max-tokens", "40")
    show(command)
    subprocess.run([*command, "--log-level", "error"], check=True)


def wait(leader: subprocess.Popen[bytes], deadline: float, complaint: str) -> None:
    """Wait a moment for something that the leader does.

    Raises:
        SystemExit: it has failed, or the time is up.
    """
    if leader.poll():
        raise SystemExit(f"demo-train: neurogrid train ended with status {leader.returncode}")
    if time.monotonic() > deadline:
        raise SystemExit(f"demo-train: {complaint} within {TIMEOUT:g} s")
    time.sleep(0.2)


@contextmanager
def joined(
    name: str, core: int, directory: Path, ticket: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that takes part, on one core; what it says goes to a file."""
    with (directory / f"{name}.log").open("ab") as log, on_core(core), ExitStack() as stack:
        worker = stack.enter_context(
            started(
                *(*NEUROGRID, "join", f"@{ticket}", "--cluster", str(directory / name), "--train"),
                *("--name", name, "--threads", "1", "--listen", "/ip4/127.0.0.1/tcp/0"),
                log=log.fileno(),
            )
        )
        held = stack.pop_all()
    with held:
        yield worker


@contextmanager
def on_core(number: int) -> Iterator[None]:
    """Let processes that are started meanwhile have one of the cores alone, where the system has a call for it."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    cores = sorted(before)
    os.sched_setaffinity(0, {cores[number % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def started(*command: str, log: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block at the latest.

    Args:
        log: a file for all that it says; None to show it, but for stdout, which can be read.
    """
    show(command)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE if log is None else log,
        stderr=log,
        stdin=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def show(command: Sequence[str]) -> None:
    """Show a command as it is typed."""
    typed = ["neurogrid", *command[len(NEUROGRID) :]]
    say(f"$ {shlex.join(typed)}")


def say(text: str) -> None:
    """Say what happens, apart from the commands' own words."""
    print(f"== {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
