"""Witnessed runs in processes of their own, by the names of Psyche's acceptance list; and what they survive besides.

One run of four workers goes through most of it: what happened in it stands in its journal, whose states the tests fold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from neurogrid.training.runs.entries import EpochEntry
from neurogrid.training.runs.run_file import parse_run_file
from neurogrid.training.runs.witnessed_machine import epoch_rules, epochs_of
from neurogrid.training.witnessed import (
    EpochPhase,
    EpochState,
    Witnessed,
    WitnessProof,
    event_of,
    seat_item,
)
from tests.e2e.training.odd_witnessed import PROGRAM
from tests.e2e.training.recomputed import recompute_witnessed
from tests.e2e.training.run_processes import (
    CONFIG,
    RUN_FILE,
    RunProcesses,
    entries_of,
    open_run,
    rounds_of,
    used_samples,
)
from tests.ports import free_port

WITNESSED = RUN_FILE + (
    '[outer]\nmethod = "distro"\ngrace = 3.0\n[distro]\ntop_k = 32\n'
    "[epochs]\nwarmup = 60\ntrain = 60\nwitness = 10\ncooldown = 60\n"
)
RETURNS = {
    ("waiting_for_members", "warmup"),
    ("warmup", "waiting_for_members"),
    ("warmup", "round_train"),
    ("round_train", "round_witness"),
    ("round_witness", "round_train"),
    ("round_witness", "cooldown"),
    ("cooldown", "waiting_for_members"),
    ("cooldown", "finished"),
}


def states(run: Path) -> list[EpochState]:
    """What a run went through, as its journal says so far."""
    rules = epoch_rules(parse_run_file((run / "run.toml").read_text()))
    return list(epochs_of(rules, entries_of(run)))


def latest(run: RunProcesses) -> EpochState:
    return (states(run.run) or [EpochState()])[-1] if run.run.exists() else EpochState()


def wait_for(run: RunProcesses, phase: EpochPhase, *, rounds: int = 0, healthy: int = 0) -> None:
    """Wait until a run is in a phase, has made so many rounds, and has so many members."""

    def is_so() -> bool:
        now = latest(run)
        return now.going is phase and now.made >= rounds and len(now.healthy) >= healthy

    run.wait(is_so, f"it did not come to {phase} with {rounds} rounds and {healthy} members")


@dataclass
class Whole:
    """A run that has ended.

    Attributes:
        states: that it went through.
        joined_at: rounds that were made when the third member was started, in the middle of an epoch.
    """

    directory: Path
    checkpoint: Path
    log: str
    states: list[EpochState]
    joined_at: int

    @property
    def run(self) -> Path:
        return self.directory / "run"

    def phases(self) -> list[str]:
        found = [str(each.going) for each in self.states]
        return [
            phase for phase, before in zip(found, ["", *found], strict=False) if phase != before
        ]


def status(run: RunProcesses) -> dict[str, Any]:
    """What the page of a run is told."""
    (address,) = re.findall(r"the page of the run: (http://\S+)", run.log)[-1:]
    with urlopen(f"{address}v1/training/status", timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def join_while_paused(run: RunProcesses, name: str) -> int:
    """Have a member come in the middle of an epoch, however long its machine takes; the rounds that were made."""
    (run.run / "pause").touch()
    run.wait(lambda: latest(run).phase is EpochPhase.PAUSED, "it was not paused")
    run.join(name)
    run.wait(lambda: bool(latest(run).pending), f"{name} does not wait")
    made = latest(run).made
    told = status(run)
    assert told["method"] == "distro"
    assert told["waits"].startswith("the run is paused")
    assert told["round"] == made
    (run.run / "pause").unlink()
    return made


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Two members begin, one joins in the middle of an epoch, one is killed in another, one takes its place."""
    directory = tmp_path_factory.mktemp("whole")
    run_file = WITNESSED + "rounds = 6\n[stop]\nrounds = 18\n[members]\nmin = 2\n"
    with open_run(directory, free_port(), run_file) as run:
        run.lead()
        run.join("a")
        run.wait(lambda: bool(latest(run).pending), "a does not wait")
        assert latest(run).phase is EpochPhase.WAITING_FOR_MEMBERS
        run.join("b", program=(*PROGRAM, "mortal"))
        wait_for(run, EpochPhase.ROUND_TRAIN, rounds=2)
        joined_at = join_while_paused(run, "c")
        run.wait(lambda: "b is out of the epoch" in run.log, "nobody missed it")
        run.kill("b")
        join_while_paused(run, "d")
        checkpoint = run.end()
        log = run.log
        folded = states(run.run)
    return Whole(directory, checkpoint, log, folded, joined_at)


def test_connect_single_node(tmp_path: Path) -> None:
    run_file = WITNESSED + "rounds = 3\n[stop]\nrounds = 6\n"
    with open_run(tmp_path, free_port(), run_file) as run:
        run.lead()
        run.join("a")
        run.end()
    folded = states(run.run)
    assert {len(each.healthy) for each in folded} == {1}
    assert [entry.round for entry in rounds_of(run.run)] == [1, 2, 3, 4, 5, 6]


def test_connect_multiple_nodes(whole: Whole) -> None:
    assert max(len(each.healthy) for each in whole.states) == 3
    peers = {member.peer for each in whole.states for member in each.members}
    assert len(peers) == 4


def test_state_change_waiting_for_members_to_warmup(whole: Whole) -> None:
    assert whole.phases()[:3] == ["waiting_for_members", "warmup", "round_train"]
    first = next(each for each in whole.states if each.phase is EpochPhase.WARMUP)
    assert len(first.healthy) == 2


def test_to_round_train(whole: Whole) -> None:
    assert set(pairwise(whole.phases())) <= RETURNS
    before = next(each for each in whole.states if each.phase is EpochPhase.ROUND_TRAIN)
    assert before.ready >= set(before.healthy)
    assert (before.round, before.round_of_epoch) == (1, 1)


def test_to_round_witness(whole: Whole) -> None:
    phases = whole.phases()
    assert phases.count("round_witness") == phases.count("round_train") >= 18


def test_validate_all_clients_participate_in_witness_bloom(whole: Whole) -> None:
    num_complete = 0
    seeds = {(each.epoch, each.round): each for each in whole.states if each.has_round}
    for proof in proofs_of(whole.run):
        state = seeds[proof.epoch, proof.round]
        heard = proof.participants_filter(state.seed)
        num_complete += all(seat_item(seat) in heard for seat in state.seats)
    # All but those of the round in which one was killed.
    assert num_complete >= len(list(proofs_of(whole.run))) - 3 > 35


def proofs_of(run: Path) -> Iterator[WitnessProof]:
    for entry in entries_of(run):
        if isinstance(entry, EpochEntry):
            for event in map(event_of, entry.events):
                if isinstance(event, Witnessed):
                    yield event.proof


def test_finish_epoch(whole: Whole) -> None:
    phases, epochs = whole.phases(), {each.epoch for each in whole.states}
    assert phases[-2:] == ["cooldown", "finished"]
    assert len(epochs) == 3
    for one, other in pairwise(phases):
        assert one != "cooldown" or other in ("waiting_for_members", "finished")


def test_client_join_in_training(whole: Whole) -> None:
    """It waits for the next epoch, and the one under way goes on as if nobody had come."""
    waited = [each for each in whole.states if each.pending and each.has_round]
    assert waited
    assert all(len(each.seats) == 2 for each in waited if each.epoch == 0)
    third = next(each for each in whole.states if len(each.healthy) == 3)
    assert third.phase in (EpochPhase.WARMUP, EpochPhase.WAITING_FOR_MEMBERS)
    assert third.made >= whole.joined_at


def test_client_join_in_training_and_get_model_using_p2p(whole: Whole) -> None:
    """Each piece from another member, and none from the leader."""
    for name in ("c", "d"):
        said = (whole.directory / f"{name}.log").read_text()
        (told,) = re.findall(r"took the weights after round (\d+) in pieces: (.*)", said)
        assert int(told[0]) % 6 == 0
        sources = dict(re.findall(r"(\d+) from (seat \d+|the leader)", told[1]))
        assert len(sources.values()) >= (2 if name == "c" else 1)
        assert "the leader" not in told[1]


def test_shutdown_node_in_training_and_complete_round(whole: Whole) -> None:
    """The round goes on without it, and its samples come again."""
    lost = next(
        each
        for before, each in pairwise(whole.states)
        if len(each.healthy) < len(before.healthy) and before.has_round
    )
    (later,) = [
        each
        for each in whole.states
        if (each.epoch, each.round) == (lost.epoch, lost.round + 1) and not each.commitments
    ][:1]
    assert len(later.agreed) == 2
    assert "returned" in [entry.kind for entry in entries_of(whole.run)]


def test_replace_node_and_complete_round(whole: Whole) -> None:
    last = whole.states[-1]
    assert len(last.healthy) == 3
    assert last.made == 18
    seats = [each.seat for each in last.members]
    assert max(seats) == 3


def test_every_sample_is_used_once_and_the_weights_are_one(whole: Whole) -> None:
    used, figures = used_samples(whole.run), lines_of(whole.run)
    assert set(used.values()) <= {1, 2}
    assert max(used.values()) - min(used.values()) <= 1
    assert [line["round"] for line in figures] == list(range(1, 19))
    assert not any(line.get("weights_other") for line in figures)
    assert sum(line.get("weights_equal", 0) for line in figures) > 2 * 18 - 4
    losses = [line["loss"] for line in figures if "loss" in line]
    assert losses[-1] < losses[0] - 1.0


def lines_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_weights_are_what_one_process_computes(whole: Whole) -> None:
    """From the journal and the data alone, through a kill and two joins."""
    wanted = recompute_witnessed(whole.run, json.dumps(CONFIG))
    model = AutoModelForCausalLM.from_pretrained(whole.checkpoint, dtype=torch.float32)
    got = torch.cat([each.detach().flatten() for each in model.parameters()])
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_the_checkpoint_is_a_model(whole: Whole) -> None:
    model = AutoModelForCausalLM.from_pretrained(whole.checkpoint)
    ids = AutoTokenizer.from_pretrained(whole.checkpoint)("one two three", return_tensors="pt")
    with torch.no_grad():
        assert torch.isfinite(model(ids.input_ids).logits).all()


def test_shutdown_node_in_warmup(tmp_path: Path) -> None:
    """Too few are left: the run waits again, and begins with whoever comes. It is paused, and its leader is killed."""
    run_file = WITNESSED + "rounds = 5\n[stop]\nrounds = 15\n[members]\nmin = 2\n"
    with open_run(tmp_path, free_port(), run_file) as run:
        run.lead()
        run.join("cold", program=(*PROGRAM, "cold"))
        run.join("a")
        wait_for(run, EpochPhase.WARMUP, healthy=2)
        run.kill("cold")
        wait_for(run, EpochPhase.WAITING_FOR_MEMBERS)
        run.join("b")
        wait_for(run, EpochPhase.ROUND_TRAIN, rounds=3)
        (run.run / "pause").touch()
        run.wait(lambda: latest(run).phase is EpochPhase.PAUSED, "it was not paused")
        paused = latest(run)
        (run.run / "pause").unlink()
        wait_for(run, EpochPhase.ROUND_TRAIN, rounds=7)
        assert paused.made < 7
        run.kill()
        run.lead("--resume")
        run.end()
    rounds = [entry.round for entry in rounds_of(run.run)]
    assert rounds == list(range(1, 16))
    assert "resumed" in [entry.kind for entry in entries_of(run.run)]
    figures = lines_of(run.run)
    assert [line["round"] for line in figures][-10:] == list(range(6, 16))
    assert not any(line.get("weights_other") for line in figures)
    used = used_samples(run.run)
    assert max(used.values()) - min(used.values()) <= 1


def test_odd_members_change_nothing(tmp_path: Path) -> None:
    """One whose results are none is out after a round; what is said in another's name is refused; one that says two
    things of a round is taken no more."""
    run_file = (
        WITNESSED.replace("train = 60", "train = 6").replace("witness = 10", "witness = 3")
        + "rounds = 4\n[stop]\nrounds = 8\n[members]\nmin = 2\n"
    )
    with open_run(tmp_path, free_port(), run_file) as run:
        run.lead()
        for name in ("a", "b"):
            run.join(name)
        for kind in ("garbage", "forger", "liar"):
            run.join(kind, program=(*PROGRAM, kind))
        run.wait(lambda: "garbage is out of the epoch" in run.log, "garbage stays")
        run.wait(lambda: "liar is out of the epoch" in run.log, "liar stays")
        run.wait(lambda: "forger sends" in run.log, "nobody heard the forger")
        run.end()
        honest = (tmp_path / "a.log").read_text()
    assert re.search(r"what seat \d+ has committed itself to is no result", honest)
    folded = states(run.run)
    health = {str(each.health) for state in folded for each in state.members}
    assert {"healthy", "dropped", "ejected"} <= health
    assert not any(line.get("weights_other") for line in lines_of(run.run))
    assert [entry.round for entry in rounds_of(run.run)] == list(range(1, 9))
