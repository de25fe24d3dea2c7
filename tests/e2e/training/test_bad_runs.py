"""Runs that cannot be, at the command: each is told in one sentence, and what there was stays whole."""

from __future__ import annotations

import json
import resource
import subprocess
from pathlib import Path

from safetensors.torch import load_file

from neurogrid.training.checkpoints import latest_checkpoint, read_checkpoint
from neurogrid.training.data.slices import read_manifest, slice_path
from neurogrid.training.runs.entries import StoppingEntry
from tests.e2e.preloaded import DEADLINE, TRAIN, WORKER
from tests.e2e.preloaded import run as run_program
from tests.e2e.training.data_processes import LOOPBACK, prepared_text, write_run_file
from tests.e2e.training.run_processes import (
    RUN_FILE,
    RunProcesses,
    entries_of,
    open_run,
    program_below,
)
from tests.e2e.training.test_changes import change
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


LIES: list[tuple[int, object, str]] = [
    (1, -3, "number of samples is -3"),
    (2, 2**63, "number of bytes is"),
    (0, "00", "id has 1 bytes"),
]


def test_a_manifest_that_lies_ends_a_run(tmp_path: Path) -> None:
    """In one line, before anything is made; one that names another content leaves nothing to train on."""
    data = prepared_text(tmp_path / "data")
    path = data / "manifest.json"
    truth = json.loads(path.read_bytes())
    write_run_file(tmp_path, "data", rounds=2)
    command = [*TRAIN, "run.toml", "--dir", "run", "--wait", "1", *LOOPBACK]
    for field, value, reason in LIES:
        told = json.loads(json.dumps(truth))
        told["slices"][0][field] = value
        path.write_text(json.dumps(told, sort_keys=True, separators=(",", ":")))
        status, said = told_by(command, tmp_path)
        assert (status, reason in said.splitlines()[-1]) == (2, True), said
        assert "Traceback" not in said
    truth["slices"][0][0] = "ab" * 32
    path.write_text(json.dumps(truth, sort_keys=True, separators=(",", ":")))
    status, said = told_by(command, tmp_path)
    # There are no members either, and both are waited for as long: which of them it ends by is chance.
    assert status in (1, 2), said
    assert "1 of 10 slices are not in data, and no node here has them" in said
    assert "Traceback" not in said


def test_a_run_stops_after_its_tokens_or_its_hours(tmp_path: Path) -> None:
    stop = "[stop]\ntokens = 4096\n[outer]\nevery = 4\n"
    tokens, hours, none = tmp_path / "tokens", tmp_path / "hours", tmp_path / "none"
    tokens.mkdir(), hours.mkdir(), none.mkdir()
    with open_run(tokens, free_port(), RUN_FILE + stop) as run:
        run.lead("--local-workers", "1")
        run.end()
        assert run.figures()[-1]["tokens"] == 4096
    with open_run(hours, free_port(), RUN_FILE + stop.replace("4096", "40_000_000")) as run:
        run.lead("--local-workers", "1")
        run.wait_round(2)
        change(run, "stop.hours=0.0001")
        run.end()
        reasons = [each.reason for each in entries_of(run.run) if isinstance(each, StoppingEntry)]
        assert reasons == ["0.0001 hours are over"]
    constant = RUN_FILE.replace("lr = 3e-3", 'lr = 3e-3\nschedule = "constant"')
    with open_run(none, free_port(), constant + "[stop]\nhours = 0.0001\n"):
        status, said = told_by([*TRAIN, "run.toml", "--dir", "run", *LOOPBACK], none)
        assert (status, "the run has ended before its first round" in said) == (1, True), said


def test_the_leaders_disk_is_damaged_and_then_full(tmp_path: Path) -> None:
    """Nobody trains on a slice that is damaged, and the run goes on when it is mended; a checkpoint that cannot be
    written leaves the one before whole, and the next one is written when there is room."""
    data = prepared_text(tmp_path / "data", slice_samples=8)
    paths = [slice_path(data, info) for info in read_manifest(data).slices]
    whole = [path.read_bytes() for path in paths]
    for path, content in zip(paths, whole, strict=True):
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with open_run(tmp_path, free_port(), "") as run:
        write_run_file(tmp_path, "data", rounds=4000)
        file = tmp_path / "run.toml"
        file.write_text(file.read_text().replace("min = 2", "min = 1"))
        run.lead()
        run.join("one")
        run.wait(lambda: "is not what its name says: it is not served" in run.log, "it was served")
        assert run.rounds() == 0
        for path, content in zip(paths, whole, strict=True):
            path.write_bytes(content)
        run.wait_round(2)
        before = wait_checkpoint(run, 0)
        assert run.leader is not None
        trainer = program_below(run.leader.pid, "neurogrid.training.trainer.program")
        _, hard = resource.prlimit(trainer, resource.RLIMIT_FSIZE)
        resource.prlimit(trainer, resource.RLIMIT_FSIZE, (1000, hard))
        run.wait(lambda: "no checkpoint after round" in run.log, "no checkpoint failed")
        latest = latest_checkpoint(run.run / "checkpoints")
        assert latest is not None
        assert load_file(latest / "model.safetensors")
        assert read_checkpoint(latest).state["round"] >= before
        assert "The one before is whole" in run.log
        resource.prlimit(trainer, resource.RLIMIT_FSIZE, (hard, hard))
        wait_checkpoint(run, int(read_checkpoint(latest).state["round"]))


def wait_checkpoint(run: RunProcesses, after: int) -> int:
    """Wait for a checkpoint after a round; the round that it has."""

    def newest() -> int:
        latest = latest_checkpoint(run.run / "checkpoints")
        return 0 if latest is None else int(read_checkpoint(latest).state["round"])

    run.wait(lambda: newest() > after, "there was no checkpoint")
    return newest()
