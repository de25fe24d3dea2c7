"""What the end-to-end tests share: worker processes, coordinators in this process, reference tokens."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import trio

from neurogrid import CoordinatorSettings, open_coordinator
from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.planner import PlannedStage
from tests.e2e.preloaded import DEADLINE, ENVIRONMENT, WORKER, Popen

__all__ = [
    "DEADLINE",
    "ENVIRONMENT",
    "Outcome",
    "WorkerProcess",
    "generate",
    "reference_tokens",
    "run_coordinator",
    "start_worker",
]


@dataclass
class WorkerProcess:
    """A `neurogrid-worker` that is ready."""

    process: Popen
    addresses: list[str]
    log_file: Path

    @property
    def address(self) -> str:
        return self.addresses[0]

    @property
    def peer_id(self) -> str:
        return self.address.rpartition("/")[2]

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE)

    def is_alive(self) -> bool:
        return self.process.poll() is None


@contextmanager
def start_worker(
    directory: Path,
    *args: str,
    command: Sequence[str] = WORKER,
    variables: Mapping[str, str] | None = None,
) -> Iterator[WorkerProcess]:
    """Run a worker with these arguments until the block is left; on a free port unless told otherwise.

    Args:
        variables: of its environment, beside those of all.
    """
    log_file = directory / f"worker-{len(list(directory.glob('worker-*.log')))}.log"
    where = () if {"--port", "--listen"} & set(args) else ("--port", "0")
    # What one test sends must not be there in the next.
    cache = () if "--cache-dir" in args else ("--no-cache",)
    with log_file.open("w") as log:
        process = Popen(
            [*command, *where, *cache, *args],
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=directory,
            env={**ENVIRONMENT, **(variables or {})},
        )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, f"the worker did not start: {log_file.read_text()}"
        yield WorkerProcess(process, [address], log_file)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)
        process.stdout.close()


@dataclass
class Outcome:
    """What a coordinator in this process did."""

    tokens: list[list[int]]
    stages: list[PlannedStage]
    sent: dict[str, dict[str, int]] = field(default_factory=dict)
    """Bytes sent, by peer id and message type."""


async def generate(
    coordinator: Coordinator, prompts: Sequence[Sequence[int]], max_tokens: int
) -> Outcome:
    tokens = [
        [token async for token in coordinator.generate(prompt, max_tokens=max_tokens)]
        for prompt in prompts
    ]
    snapshot = coordinator.counters.snapshot()
    return Outcome(
        tokens=tokens,
        stages=list(coordinator.stages),
        sent={
            peer: {name: traffic.num_bytes for name, traffic in by_way.get("sent", {}).items()}
            for peer, by_way in snapshot.items()
        },
    )


def run_coordinator(
    settings: CoordinatorSettings, prompts: Sequence[Sequence[int]] = (), max_tokens: int = 12
) -> Outcome:
    """Open a coordinator in this process and generate greedily from each prompt."""

    async def main() -> Outcome:
        with trio.fail_after(DEADLINE):
            async with open_coordinator(settings) as coordinator:
                return await generate(coordinator, prompts, max_tokens)

    return trio.run(main)


def reference_tokens(model: Any, prompt: Sequence[int], max_tokens: int, **more: Any) -> list[int]:
    """What transformers' own `generate()` writes, greedily; `more` are options of its own."""
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            **more,
        )
    return output[0, len(prompt) :].tolist()
