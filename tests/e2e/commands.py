"""Run the commands as a shell does, and look at how they ended."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tests.e2e.preloaded import run

__all__ = ["Ended", "expect", "expect_at_once", "patiently", "run_preloaded"]

# An idle machine needs less than the first.
WAITS = ("2", "8", "32")
T = TypeVar("T")


@dataclass
class Ended:
    """A command that has ended."""

    command: str
    status: int | None
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The one line that says what is wrong: the last of them, after how far it got."""
        lines = self.stderr.splitlines()
        errors = [line for line in lines if line.startswith(f"neurogrid-{self.command}: ")]
        assert len(errors) == 1, self.stderr
        assert lines[-1] == errors[0], self.stderr
        assert "Traceback" not in self.stderr
        return errors[0].partition(": ")[2]

    @property
    def has_waited(self) -> bool:
        return "waiting for workers" in self.stderr


def run_preloaded(command: str, *args: str | bytes) -> Ended:
    """Run the command as a shell does, in a process that need not import torch."""
    done = run([sys.executable, "-m", f"neurogrid.cli.commands.{command}", *args])
    return Ended(command, done.returncode, done.stdout, done.stderr)


def patiently(run: Callable[[str], T], is_enough: Callable[[T], bool]) -> T:
    """The outcome of a command that looks for others as long as it is told, in seconds: the shortest that is enough."""
    for seconds in WAITS:
        outcome = run(seconds)
        if is_enough(outcome):
            break
    return outcome


def expect(ended: Ended, *, status: int, says: str) -> None:
    """The command ended with this status, one line that matches `says`, and nothing on stdout."""
    assert re.match(f".*{says}", ended.error), ended.error
    assert ended.status == status, ended
    assert ended.stdout == ""


def expect_at_once(ended: Ended, *, status: int, says: str) -> None:
    """The same, before it has waited for any worker."""
    expect(ended, status=status, says=says)
    assert not ended.has_waited
