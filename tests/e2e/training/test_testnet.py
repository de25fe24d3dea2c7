"""`neurogrid train testnet`: its processes, its report, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.preloaded import DEADLINE, TRAIN, Popen, run
from tests.e2e.training.run_processes import RUN_FILE, make_inputs, used_samples

SHORT = "[stop]\nepochs = 2\n[outer]\nevery = 8\nfragments = 2\ngrace = 3.0\n[members]\nmin = 2\n"


def processes_in(directory: Path) -> list[int]:
    """The processes whose working directory this is."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if (each / "cwd").readlink() == directory and (each / "cmdline").read_bytes():
                found.append(int(each.name))
        except OSError:
            continue
    return found


def wait_none(directory: Path) -> None:
    until = time.monotonic() + DEADLINE
    while left := processes_in(directory):
        assert time.monotonic() < until, f"these are left: {left}"
        time.sleep(0.1)


def test_a_run_whose_worker_is_killed(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE + SHORT)
    options = ("--dir", "run", "--workers", "2", "--kill", "1", "--kill-every", "1", "--seed", "5")
    ended = run([*TRAIN, "testnet", "run.toml", *options], cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    report = json.loads((tmp_path / "run" / "testnet.json").read_text())
    assert report["is_sound"]
    assert report["audit"]["epochs"] == 2
    (kill,) = report["kills"]
    assert kill["name"] in ("worker-1", "worker-2")
    # It had a minimum of two, and so went on when it was there again.
    assert kill["rejoined_seconds"] > 0
    assert kill["next_round_seconds"] > 0
    assert set(used_samples(tmp_path / "run").values()) == {2}
    assert "each sample of 2 epochs exactly once" in ended.stdout
    assert not processes_in(tmp_path)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_one_that_is_cut_off(tmp_path: Path, signum: signal.Signals) -> None:
    make_inputs(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE + SHORT)
    with Popen(
        [*TRAIN, "testnet", "run.toml", "--dir", "run", "--workers", "2"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
    ) as process:
        try:
            until = time.monotonic() + DEADLINE
            while not (tmp_path / "run" / "testnet" / "worker-2.log").exists():
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.05)
            assert len(processes_in(tmp_path)) >= 4
        finally:
            os.kill(process.pid, signum)
            process.wait(DEADLINE)
    wait_none(tmp_path)
    assert process.returncode == (130 if signum == signal.SIGINT else -signum)


def test_what_it_refuses(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE + SHORT)
    few = run([*TRAIN, "testnet", "run.toml", "--workers", "1"], cwd=tmp_path)
    assert few.returncode == 2
    assert "the run waits for 2 members" in few.stderr
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "journal").touch()
    again = run([*TRAIN, "testnet", "run.toml", "--dir", "run"], cwd=tmp_path)
    assert again.returncode == 2
    assert "has a run already" in again.stderr
