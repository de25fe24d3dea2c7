"""Runs that cannot be, at the command: each is told in one sentence, and what there was stays whole."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.e2e.preloaded import DEADLINE, TRAIN, WORKER
from tests.e2e.preloaded import run as run_program
from tests.e2e.training.run_processes import RUN_FILE, open_run
from tests.ports import free_port

FILE = RUN_FILE + "[stop]\nrounds = 2\n"


def told_by(command: list[str], cwd: Path) -> tuple[int, str]:
    """The status of a command that ends by itself, and what it says."""
    done = run_program(command, cwd=cwd, stdin=subprocess.DEVNULL)
    return done.returncode, done.stderr


def test_runs_that_cannot_be(tmp_path: Path) -> None:
    """A second leader, a ticket of another run, and a model that fits nobody."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir(), other.mkdir()
    with open_run(one, free_port(), FILE) as run, open_run(other, free_port(), FILE) as another:
        run.lead("--wait", "20")
        run.join("small", "--memory-limit", "512KiB")
        another.lead()
        status, told = told_by([*TRAIN, "run.toml", "--dir", "run", "--resume"], one)
        assert status == 2
        assert "another leader writes to run/journal: process" in told
        assert "Two with one journal would each undo what the other decides" in told
        run.wait(lambda: "small takes no part yet" in run.log, "nobody said that it is too small")
        another.wait(lambda: (another.run / "cluster" / "ticket").exists(), "there was no ticket")
        ticket = other / "run" / "cluster" / "ticket"
        status, told = told_by(
            [*WORKER, "--train", "--join", f"@{ticket}", "--cluster", "small", "--no-cache"], one
        )
        assert status == 2
        assert "small has a membership in cluster" in told
        assert "name another directory" in told
        assert run.leader is not None
        stdout, _ = run.leader.communicate(timeout=DEADLINE)
        assert (run.leader.returncode, stdout) == (1, "")
        assert "the run has 0 of 1 members after 20 s" in run.log
        assert (
            "bytes of memory (0.00 GiB) are needed, and 524,288 (0.00 GiB) are lent"
            in (run.log.splitlines()[-1])
        )
        assert another.leader is not None
        assert another.leader.poll() is None, "the other run goes on"
