"""`make demo-train`, with fewer tokens than it takes to write well."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from statistics import fmean

from neurogrid.training.runs.entries import JoinedEntry, LeftEntry
from tests.e2e.preloaded import run
from tests.e2e.training.run_processes import entries_of, used_samples
from tools.demo_train import NUM_LAST

ROOT = Path(__file__).parents[3]
TARGET = 7.0


def test_the_demo_of_training_learns_although_a_worker_is_killed(tmp_path: Path) -> None:
    # From the folder that it is started in, as its own.
    directory = os.path.relpath(tmp_path / "demo", ROOT)
    options = ["--dir", directory, "--tokens", "60000", "--target", str(TARGET)]
    done = run([sys.executable, "-m", "tools.demo_train", *options], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert said[0].startswith(f"== The loss is to fall below {TARGET:g};")
    assert any("is killed" in line for line in said)
    made = tmp_path / "demo" / "run"
    figures = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in figures if "loss" in line]
    assert fmean(losses[-NUM_LAST:]) < TARGET < losses[0]
    entries = entries_of(made)
    names = [entry.name for entry in entries if isinstance(entry, JoinedEntry)]
    assert {"quick", "slow", "slower"} == set(names)
    assert any(isinstance(entry, LeftEntry) for entry in entries)
    times = set(used_samples(made).values())
    assert max(times) - min(times) <= 1
    # It has hardly learned anything yet, and may write what it will.
    assert re.search(r"\(\d+ prompt \+ [1-9]\d* new\)", said[-1]), said[-1]
    assert done.stdout
