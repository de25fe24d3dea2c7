"""Trainers whose owner is killed, and whose checkpoints find no room: both in processes of their own."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.preloaded import ENVIRONMENT, Popen
from tests.e2e.training.trainer_models import write_slice

NOT_FOREVER = 120.0  # seconds


def test_it_ends_with_its_owner(tmp_path: Path) -> None:
    owner = Path(__file__).with_name("trainer_owner.py")
    path = write_slice(tmp_path / "slice")
    with Popen(
        [sys.executable, str(owner), str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert process.stdout.readline() == "training\n"
        process.kill()
        process.wait()
    deadline = time.monotonic() + NOT_FOREVER
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it has not ended: nobody may have asked how."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except FileNotFoundError:
        return False
    return fields[0] != "Z"


def test_a_disk_that_is_full_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """On a file system of 800 KB, in a mount namespace: a checkpoint has 560 KB."""
    mount = f"mount -t tmpfs -o size=800k tmpfs {shlex.quote(str(tmp_path))}"
    if os.geteuid() or subprocess.run(["unshare", "-m", "sh", "-c", mount]).returncode:
        pytest.skip("no mounts for this user here")
    program = shlex.join(
        [sys.executable, str(Path(__file__).with_name("small_disk.py")), str(tmp_path)]
    )
    root = Path(__file__).parents[3]
    run = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount} && {program}"],
        capture_output=True,
        text=True,
        timeout=NOT_FOREVER,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert "step-2: cannot be written: " in told["of the trainer"]
    assert "step-2: cannot be written: " in told["of the checkpoint"]
    assert "make room there" in told["of the checkpoint"]
    assert told["names"] == ["latest", "step-1"]
    assert told["step"] == 1
    assert told["is whole"]
