"""The commands, run on machines that are network namespaces."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.e2e.namespaces.netns import Machine
from tests.e2e.support import DEADLINE, ENVIRONMENT, WorkerProcess, start_worker

COORDINATOR = (sys.executable, "-m", "neurogrid.cli.commands.coordinator")
WORKER = (sys.executable, "-m", "neurogrid.cli.commands.worker")
PROMPT = ("--prompt", "A function definition", "--max-tokens", "8")


def run_in(machine: Machine, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command on a machine to its end, whatever that is."""
    return subprocess.run(
        machine.command(command),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env=ENVIRONMENT,
        check=False,
    )


def workers_on(
    stack: ExitStack, machines: Sequence[Machine], directory: Path, *args: str
) -> list[WorkerProcess]:
    """Start a worker on each machine, with these flags, until the stack is left."""
    return [
        stack.enter_context(start_worker(directory, *args, command=machine.command(WORKER)))
        for machine in machines
    ]
