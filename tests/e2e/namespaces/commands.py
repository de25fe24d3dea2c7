"""The commands, run on machines that are network namespaces."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.e2e.commands import patiently
from tests.e2e.namespaces.netns import Machine
from tests.e2e.preloaded import COORDINATOR, WORKER, run
from tests.e2e.support import WorkerProcess, start_worker

__all__ = ["COORDINATOR", "PROMPT", "WORKER", "diagnose", "run_in", "workers_on"]

PROMPT = ("--prompt", "A function definition", "--max-tokens", "8")


def run_in(machine: Machine, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command on a machine to its end, whatever that is."""
    return run(machine.command(command))


def diagnose(machine: Machine, *args: str) -> subprocess.CompletedProcess[str]:
    """Have a coordinator say which workers it finds, and how; it looks on until there are enough."""
    return patiently(
        lambda wait: run_in(machine, *COORDINATOR, "--diagnose", "--wait", wait, *args),
        lambda ended: ended.returncode == 0,
    )


def workers_on(
    stack: ExitStack, machines: Sequence[Machine], directory: Path, *args: str
) -> list[WorkerProcess]:
    """Start a worker on each machine, with these flags, until the stack is left."""
    return [
        stack.enter_context(start_worker(directory, *args, command=machine.command(WORKER)))
        for machine in machines
    ]
