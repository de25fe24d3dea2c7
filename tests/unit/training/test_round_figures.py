"""Figures of rounds: a line for each round, also for those of which a leader hears late."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.training.leading.opening import replay, written_round
from neurogrid.training.leading.round_figures import RoundFigures
from neurogrid.training.runs.entries import ResumedEntry, RoundEntry
from neurogrid.training.runs.run_file import parse_run_file
from neurogrid.training.runs.state import Occupant, RunState
from tests.unit.training.simulated_run import SIZES, Cluster, rules

RUN = parse_run_file('[model]\nconfig = "embedded"\n[data]\npath = "text"\n[stop]\nepochs = 1\n')
A = Occupant("a", 1)


def replayed(cluster: Cluster, last: int) -> RoundFigures:
    """As a leader begins again: with its journal, and lines up to a round."""
    figures = RoundFigures(RUN, 4)
    state = RunState(SIZES, seed=1, num_epochs=cluster.num_epochs)
    for entry in cluster.journal:
        state.apply(entry)
        if isinstance(entry, RoundEntry):
            figures.decided(state)
        elif isinstance(entry, ResumedEntry):
            figures.resumed(entry.round)
    figures.written(last)
    return figures


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["round", "apply", "killed", "resumed"]), max_size=40))
def test_each_round_has_one_line_whatever_becomes_of_the_leader(events: list[str]) -> None:
    cluster = Cluster(rules(max_samples=None))
    cluster.join()
    figures, lines = RoundFigures(RUN, 4), dict[int, dict[str, float]]()
    for event in [*events, "apply"]:
        if event == "round":
            cluster.average()
            figures.decided(cluster.state)
        elif event == "apply":
            for line in figures.take(cluster.state.round):
                assert line["round"] == len(lines) + 1
                lines[int(line["round"])] = line
        elif event == "killed":
            cluster.restarted()
            figures = replayed(cluster, len(lines))
        elif (kept := len(lines)) < cluster.state.round:
            # To what was applied: what was decided after it is taken back.
            cluster.machine.resume(kept)
            cluster.members.clear()
            cluster.round, cluster.index = kept, 0
            figures.resumed(kept)
            cluster.join()
            for seat in cluster.state.vacant():
                cluster.machine.left(seat.number, "nobody came")
            cluster.note()
    assert list(lines) == list(range(1, cluster.state.round + 1))
    assert [line["tokens"] for line in lines.values()] == sorted(
        line["tokens"] for line in lines.values()
    )
    if lines:
        assert lines[len(lines)]["tokens"] == 4 * cluster.state.num_used


def test_lines_of_rounds_that_were_taken_back_are_none_of_those_in_their_place() -> None:
    """A run that is resumed, and whose leader is killed before the next line: the members go on, and it finds them."""
    cluster = Cluster(rules(max_samples=None))
    cluster.join()
    for _ in range(4):
        cluster.average()
    lines: list[dict[str, float]] = [{"round": number} for number in range(1, 5)]
    assert written_round(lines, cluster.journal, cluster.state.round) == 4
    assert written_round([], cluster.journal, cluster.state.round) == 0
    cluster.restarted()
    cluster.machine.resume(1)
    cluster.note()
    cluster.index, cluster.round = 0, 1
    cluster.join("peer1")
    cluster.average()
    assert cluster.state.round == 2
    written = written_round(lines, cluster.journal, cluster.state.round)
    assert written == 1
    assert [line["round"] for line in replayed(cluster, written).take(2)] == [2]
    lines = [*lines[:1], {"round": 2}]
    assert written_round(lines, cluster.journal, cluster.state.round) == 2


def test_a_leader_that_reads_its_journal_knows_which_rounds_have_lines() -> None:
    """The same for each kind of leader: the state after round 2 is kept, and its line is yet to be written."""
    cluster = Cluster(rules(max_samples=None))
    cluster.join()
    for _ in range(4):
        cluster.average()
    cluster.restarted()
    cluster.machine.resume(1)
    cluster.note()
    cluster.index, cluster.round = 0, 1
    cluster.join("peer1")
    cluster.average()
    journal: Any = SimpleNamespace(entries=[SimpleNamespace(entry=e) for e in cluster.journal])
    manifest: Any = SimpleNamespace(sizes=SIZES)
    figures = RoundFigures(RUN, 4)
    lines: list[dict[str, float]] = [{"round": number} for number in range(1, 5)]
    state = replay(journal, manifest, replace(RUN, seed=1), {2}, figures, lines)
    assert state.round == 2
    figures.resumed(2)
    assert [line["round"] for line in figures.take(3)] == [2]


def test_the_loss_is_of_what_was_told_since_the_round_before() -> None:
    cluster = Cluster(rules(max_samples=None))
    cluster.join()
    figures = RoundFigures(RUN, 4)
    # It has trained for a while when this leader begins: that is no loss of the next round.
    figures.heard(A, 900.0, 100)
    figures.heard(A, 920.0, 110)
    cluster.average()
    figures.decided(cluster.state)
    cluster.average()
    figures.decided(cluster.state)
    figures.heard(A, 930.0, 120)
    figures.keep([])
    figures.heard(A, 5.0, 10)  # another process of its name
    figures.heard(A, 15.0, 20)
    cluster.average()
    figures.decided(cluster.state)
    assert [line.get("loss") for line in figures.take(3)] == [2.0, None, 1.0]


def test_the_gradient_norm_is_the_mean_of_what_members_told_last() -> None:
    cluster = Cluster(rules(max_samples=None))
    cluster.join()
    figures = RoundFigures(RUN, 4)

    def next_line() -> dict[str, float]:
        cluster.average()
        figures.decided(cluster.state)
        [line] = figures.take(cluster.state.round)
        return line

    assert "gradient_norm" not in next_line()
    other = Occupant("b", 2)
    figures.heard(A, 0.0, 0, 1.0)
    figures.heard(other, 0.0, 0, 2.0)
    figures.heard(A, 0.0, 0, 4.0)
    figures.heard(A, 0.0, 0)
    assert next_line()["gradient_norm"] == 3.0
    assert next_line()["gradient_norm"] == 3.0
    figures.keep([other])
    assert next_line()["gradient_norm"] == 2.0
