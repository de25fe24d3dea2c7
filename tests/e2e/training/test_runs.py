"""Runs of several processes, from a file to the last checkpoint: what they leave behind, and what they survive."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from neurogrid.p2p.hosts.identity import Identity
from neurogrid.training.data.manifest import Manifest
from neurogrid.training.runs.entries import ChangedEntry, JoinedEntry, ResumedEntry, RunEntry
from neurogrid.training.runs.journal import Journal
from neurogrid.training.runs.kept_run import differing_keys
from neurogrid.training.runs.run_directory import RunDirectory
from neurogrid.training.runs.run_file import parse_run_file
from tests.e2e.preloaded import DEADLINE
from tests.e2e.training.recomputed import recompute
from tests.e2e.training.run_processes import (
    CONFIG,
    FEW_WORDS,
    RUN_FILE,
    RunProcesses,
    entries_of,
    open_run,
    program_below,
    rounds_of,
    used_samples,
)
from tests.e2e.training.test_verify import signed
from tests.ports import free_port
from tests.unit.training.test_kept_run import NEWER, without


def weights_of(checkpoint: Path) -> str:
    return hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()


def test_a_run_leaves_behind_what_it_says(tmp_path: Path) -> None:
    run_file = RUN_FILE + "[stop]\nsteps = 96\n[outer]\nevery = 16\n[checkpoints]\nevery = 6\n"
    with open_run(tmp_path, free_port(), run_file) as run:
        run.lead("--local-workers", "2")
        checkpoint = run.end()
    assert checkpoint == tmp_path / "run" / "checkpoints" / "step-96"
    assert (run.run / "checkpoints" / "latest").resolve() == checkpoint.resolve()
    kept = RunDirectory(run.run).read_run()
    assert list(differing_keys(kept, replace(parse_run_file(run_file), folder=str(tmp_path)))) == []
    assert (kept.model.config, kept.data.path) == ("../model.json", "../text.txt")
    figures = run.figures()
    assert [line["round"] for line in figures] == list(range(1, len(figures) + 1))
    for line in figures:
        assert {"step", "tokens", "round", "members", "seconds"} <= line.keys()
    losses = [line["loss"] for line in figures if "loss" in line]
    assert losses[-1] < losses[0] - 1.0
    held_out = [line["eval_loss"] for line in figures if "eval_loss" in line]
    assert held_out[-1] < held_out[0]
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer("one two three", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()
    assert len(set(used_samples(run.run).values())) == 1
    manifest = Manifest.decode((run.run / "data" / "manifest.json").read_bytes())
    begun = entries_of(run.run)[0]
    assert isinstance(begun, RunEntry)
    assert begun.slices == manifest.sizes


@pytest.mark.parametrize("overlap", ["", "overlap = true\n"], ids=["in turn", "overlap"])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(
    tmp_path: Path, overlap: str
) -> None:
    run_file = (
        RUN_FILE
        + f"[stop]\nrounds = 12\n[outer]\nevery = 8\nprojected = false\n{overlap}"
        + "[checkpoints]\nevery = 4\n[members]\nmin = 2\n"
    )
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for directory in (whole, stopped):
        directory.mkdir()
    with open_run(whole, free_port(), run_file) as run:
        run.lead("--local-workers", "2")
        wanted = weights_of(run.end())
    with open_run(stopped, free_port(), run_file) as run:
        run.lead("--local-workers", "2")
        run.wait_round(6)
        run.kill()
        run.lead("--local-workers", "2", "--resume")
        checkpoint = run.end()
    assert weights_of(checkpoint) == wanted
    assert [entry.round for entry in rounds_of(stopped / "run")] == list(range(1, 16))


def test_a_run_goes_on_from_any_folder_and_after_versions(tmp_path: Path) -> None:
    """By the file that it keeps, from elsewhere; then as if a version had begun it that had fewer keys."""
    run_file = RUN_FILE + "[stop]\nepochs = 1\n[outer]\nevery = 8\n[checkpoints]\nevery = 2\n"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with open_run(tmp_path, free_port(), run_file, num_words=9000) as run:
        run.lead("--local-workers", "1", run_file="../run.toml", cwd=elsewhere)
        run.wait_round(2)
        run.kill()
        kept = run.run / "run.toml"
        run.lead("--local-workers", "1", "--resume", run_file=str(kept), cwd=elsewhere)
        run.wait_round(run.rounds() + 2)
        run.kill()
        text = without(parse_run_file(run_file).text(), *NEWER)
        begin_as_before(run.run, text)
        (tmp_path / "run.toml").write_text(f"{run_file}[checks]\nauditors = 2\n")
        run.lead("--local-workers", "1", "--resume")
        assert run.leader is not None
        assert run.leader.wait(DEADLINE) == 2
        assert "[checks] auditors was 1 and is 2. Go on with that one" in run.log
        assert run.leader.stdout is not None
        run.leader.stdout.close()
        (tmp_path / "run.toml").write_text(run_file)
        run.lead("--local-workers", "1", "--resume")
        run.end()
    assert kept.read_text() == text
    assert set(used_samples(run.run).values()) == {1}


def begin_as_before(run: Path, text: str) -> None:
    """Have a run begin with another text of its run file, by its journal."""
    (run / "run.toml").write_text(text)
    lines: list[bytes] = []
    for line in (run / "journal").read_bytes().splitlines():
        said = json.loads(line)
        del said["signature"]
        if lines:
            said["before"] = hashlib.sha256(lines[-1]).hexdigest()
        else:
            said["entry"]["run_file"] = hashlib.sha256(text.encode()).hexdigest()
        lines.append(signed(run, said))
    (run / "journal").write_bytes(b"".join(line + b"\n" for line in lines))


def test_a_run_survives_its_members_and_its_leader(tmp_path: Path) -> None:
    run_file = (
        RUN_FILE
        + "[stop]\nepochs = 1000\n[outer]\nevery = 8\nfragments = 2\ngrace = 3.0\n[members]\nmin = 2\n"
    )
    with open_run(tmp_path, free_port(), run_file, num_words=6000) as run:
        run.lead()
        for name in ("a", "b", "c"):
            run.join(name)
        run.wait_round(3)
        run.kill("b")
        run.wait(lambda: "b is lost" in run.log, "nobody missed it")
        run.join("b")
        run.wait(lambda: run.log.count("b takes part") == 2, "it did not come back")
        run.kill()
        run.lead("--resume")
        run.wait_round(run.rounds() + 3)
        run.kill()
        run.lead("--resume")
        run.wait_round(run.rounds() + 1)
        run.kill_trainer_of_leader()
        epochs = run.end_with_epoch()
        checkpoint = run.end()
        assert "the trainer's process was ended by signal 9" in run.log
    rounds = [entry.round for entry in rounds_of(run.run)]
    assert rounds == list(range(1, len(rounds) + 1))
    manifest = Manifest.decode((run.run / "data" / "manifest.json").read_bytes())
    used = used_samples(run.run)
    assert set(used.values()) == {epochs}
    assert len(used) == manifest.num_samples
    # The leader was never without a member that went on: nothing was taken back.
    assert not [entry for entry in entries_of(run.run) if entry.kind == "resumed"]
    state = json.loads((checkpoint / "training" / "state.json").read_text())
    assert state["round"] == rounds[-1]
    # A line of each round, also of those that were decided without the leader.
    figures = run.figures()
    assert [line["round"] for line in figures] == rounds
    losses = [line["loss"] for line in figures if "loss" in line]
    assert all(later < loss + 0.5 for loss, later in pairwise(losses))
    assert sum(line.get("weights_equal", 0) for line in figures) > len(rounds)
    assert not any(line.get("weights_other", 0) for line in figures)


def test_a_run_goes_on_with_another_number_of_members(tmp_path: Path) -> None:
    run_file = (
        RUN_FILE
        + "[stop]\nepochs = 1\n[outer]\nevery = 8\nfragments = 1\n[checkpoints]\nevery = 2\n"
    )
    with open_run(tmp_path, free_port(), run_file, num_words=12_000) as run:
        run.lead("--local-workers", "2")
        run.wait_round(4)
        run.kill()
        run.lead("--local-workers", "1", "--resume", "--wait", "3")
        run.end()
    manifest = Manifest.decode((run.run / "data" / "manifest.json").read_bytes())
    used = used_samples(run.run)
    assert set(used.values()) == {1}
    assert len(used) == manifest.num_samples


@pytest.mark.parametrize(
    "outer",
    [
        'method = "streaming"\nevery = 4\n',
        'method = "streaming"\nevery = 4\noverlap = true\n',
        'method = "diloco"\nevery = 4\n',
        'method = "data_parallel"\n',
    ],
    ids=["streaming", "overlap", "diloco", "data_parallel"],
)
def test_a_run_is_what_one_process_computes(tmp_path: Path, outer: str) -> None:
    run_file = (
        RUN_FILE
        + f'[stop]\nrounds = 9\n[outer]\n{outer}codec = "f32"\ngrace = 60.0\n'
        + "[members]\nmin = 3\n"
    )
    with open_run(tmp_path, free_port(), run_file) as run:
        run.lead("--local-workers", "3")
        checkpoint = run.end()
    wanted = recompute(run.run, json.dumps(CONFIG), num_seats=3)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    got = torch.cat([each.detach().flatten() for each in model.parameters()])
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_a_member_that_begins_anew_draws_by_its_new_seat(tmp_path: Path) -> None:
    """What is dropped in its works is what one process drops."""
    run_file = (
        RUN_FILE
        + '[stop]\nrounds = 8\n[outer]\nmethod = "diloco"\nevery = 4\ncodec = "f32"\ngrace = 60.0\n'
    )
    config = json.dumps({**CONFIG, "attention_dropout": 0.5})
    with open_run(tmp_path, free_port(), run_file) as run:
        (tmp_path / "model.json").write_text(config)
        run.lead()
        run.join("a")
        run.wait_round(3)
        trainer = program_below(run.workers["a"].pid, "neurogrid.training.trainer.program")
        os.kill(trainer, signal.SIGKILL)
        checkpoint = run.end()
    entries = entries_of(run.run)
    assert [each.seat for each in entries if isinstance(each, JoinedEntry)] == [0, 1]
    assert not [each for each in entries if isinstance(each, ResumedEntry)]
    wanted = recompute(run.run, config, num_seats=1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    got = torch.cat([each.detach().flatten() for each in model.parameters()])
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_one_left", [True, False])
def test_a_run_whose_group_is_lost_goes_on(tmp_path: Path, is_one_left: bool) -> None:
    """Leader and one of two members are killed at once: the one that is left cannot decide anything, but has the
    weights of the last round. Without it there is the checkpoint."""
    run_file = (
        RUN_FILE
        + "[stop]\nepochs = 1000\n[outer]\nevery = 16\nfragments = 2\ngrace = 1.0\n"
        + "[members]\nmin = 1\n[checkpoints]\nevery = 4\n"
    )
    with open_run(tmp_path, free_port(), run_file, num_words=6000) as run:
        run.lead()
        for name in ("a", "b"):
            run.join(name)
        run.wait(lambda: "b takes part" in run.log and "a takes part" in run.log, "one is missing")
        run.wait_round(
            run.rounds() // 4 * 4 + 6
        )  # there is a checkpoint, and it is not of this round
        run.kill()
        run.kill("b")
        if not is_one_left:
            run.kill("a")
            run.join("a")
        last = rounds_of(run.run)[-1].round
        epochs = run.end_with_epoch()
        run.lead("--resume", "--wait", "5")
        run.end()
    (resumed,) = (each for each in entries_of(run.run) if isinstance(each, ResumedEntry))
    assert resumed.round == last if is_one_left else 0 < resumed.round < last
    assert ("are those that a had" in run.log) == is_one_left
    used = used_samples(run.run)
    manifest = Manifest.decode((run.run / "data" / "manifest.json").read_bytes())
    assert set(used.values()) == {epochs}
    assert len(used) == manifest.num_samples


def has_said(run: RunProcesses, name: str, text: str, *, seconds: float = 15) -> bool:
    """Whether a worker's log comes to have a text."""
    until = time.monotonic() + seconds
    while text not in run.log_of(name):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def test_members_that_are_past_the_last_round_are_taken_back(tmp_path: Path) -> None:
    """The leader was killed once it had written that the next round is the last; members had work for one more."""
    run_file = (
        RUN_FILE
        + '[stop]\nrounds = 4000\n[outer]\nmethod = "diloco"\nevery = 8\ngrace = 1.0\n'
        + "[members]\nmin = 2\n[checkpoints]\nevery = 4\n[eval]\nevery = 0\n"
    )
    with open_run(tmp_path, free_port(), run_file) as run:
        run.lead()
        for name in ("a", "b"):
            run.join(name, "--log-level", "debug")
        for _ in range(20):
            run.wait_round(run.rounds() + 3)
            run.kill()
            last = rounds_of(run.run)[-1].round + 1
            if has_said(run, "a", f"the weights are those after round {last + 1}\n"):
                break
            run.lead("--resume")  # it was killed before they had been told of another round
        identity = Identity.load(run.run / "cluster" / "identity.key")
        with Journal.open(run.run / "journal", identity) as journal:
            journal.append(ChangedEntry(last, (("stop.rounds", str(last)),)))
        run.lead("--resume")
        checkpoint = run.end()
    assert f"round {last} was the run's last, and the members have" in run.log
    assert rounds_of(run.run)[-1].round == last
    assert sorted({line["round"] for line in run.figures()}) == list(range(1, last + 1))
    assert run.figures()[-1]["members"] == 2
    assert checkpoint.name == f"step-{8 * last}"
    resumed = [each.round for each in entries_of(run.run) if isinstance(each, ResumedEntry)]
    assert resumed[-1] < last


def test_the_averaging_server_is_lost_and_then_all_members(tmp_path: Path) -> None:
    """The leader is the server while it lives. It alone has what a group of which nobody is left had
    come to: no round is taken back."""
    run_file = (
        RUN_FILE
        + '[stop]\nepochs = 1000\n[outer]\nmethod = "diloco"\nway = "server"\nevery = 4\ngrace = 2.0\n'
        + "[members]\nmin = 2\n[checkpoints]\nevery = 10_000\n"
    )
    names, said = ("a", "b", "c"), "averaging is led by this member"
    with open_run(tmp_path, free_port(), run_file, num_words=FEW_WORDS) as run:

        def servers() -> list[str]:
            return [name for name in names if said in (tmp_path / f"{name}.log").read_text()]

        run.lead()
        for name in names:
            run.join(name)
        run.wait(lambda: all(f"{name} takes part" in run.log for name in names), "one is missing")
        run.wait_round(run.rounds() + 2)
        assert not servers()
        run.kill()
        run.lead("--resume")
        run.wait_round(run.rounds() + 3)
        (server,) = servers()
        num_before = 1 + run.log.count(said)
        run.kill(server)
        run.wait_round(run.rounds() + 3)
        # Another worker is it now, or the leader that came back.
        assert len(servers()) + run.log.count(said) > num_before
        for name in run.workers:
            run.workers[name].kill()
        lost_at = run.rounds()
        for name in names:
            if name != server:
                run.kill(name)
            run.join(name)
        run.wait_round(lost_at + 3)
        epochs = run.end_with_epoch()
        run.end()
    resumed = [entry for entry in entries_of(run.run) if isinstance(entry, ResumedEntry)]
    assert len(resumed) == 1
    assert resumed[0].round >= lost_at
    rounds = [line["round"] for line in run.figures()]
    assert rounds == list(range(1, len(rounds) + 1))
    assert rounds == [entry.round for entry in rounds_of(run.run)]
    assert set(used_samples(run.run).values()) == {epochs}
