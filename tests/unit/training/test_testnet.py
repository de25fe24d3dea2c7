"""A testnet without its processes: what is planned by a seed, and what is reported of what happened."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import ConfigurationError
from neurogrid.training.runs.audit import audit
from neurogrid.training.runs.entries import (
    EndEntry,
    Entry,
    JoinedEntry,
    LeftEntry,
    ResumedEntry,
    RoundEntry,
)
from neurogrid.training.runs.journal import Recorded
from neurogrid.training.runs.run_directory import RunDirectory
from neurogrid.training.runs.state import Phase
from neurogrid.training.testnet import Chaos, ChaosReport, Lines, ProcessSettings, planned_kills
from neurogrid.training.testnet.plan import LEADER, worker_name
from neurogrid.training.testnet.report import Ended, Killed, report_of
from neurogrid.training.testnet.seats import Seats
from neurogrid.training.testnet.testnet import _Testnet
from tests.unit.training.simulated_run import RUN, SIZES, Cluster, rules

CHAOS = st.builds(
    Chaos,
    seed=st.integers(0, 2**31 - 1),
    num_workers=st.integers(1, 64),
    worker_kills=st.integers(0, 50),
    leader_kills=st.integers(0, 20),
    joins=st.just(0),
    mean_seconds=st.floats(0.01, 1000),
)


@given(CHAOS)
def test_a_plan_follows_from_the_seed(chaos: Chaos) -> None:
    plan = planned_kills(chaos)
    assert plan == planned_kills(chaos)
    names = Counter(kill.name for kill in plan)
    assert names.pop(LEADER, 0) == chaos.leader_kills
    assert names.total() == chaos.worker_kills
    assert names.keys() <= {worker_name(number) for number in range(1, chaos.num_workers + 1)}
    for kill in plan:
        assert chaos.mean_seconds * 0.49 < kill.after < chaos.mean_seconds * 1.51
        assert 0 <= kill.down <= 3


def test_new_workers_come_in_the_place_of_some_that_are_killed() -> None:
    plan = planned_kills(Chaos(7, 4, 20, 5, 8))
    assert sum(kill.is_new for kill in plan) == 8
    assert not any(kill.is_new for kill in plan if kill.name == LEADER)
    without = planned_kills(Chaos(7, 4, 20, 5))
    assert [replace(kill, is_new=False) for kill in plan] == list(without)
    with pytest.raises(ConfigurationError, match="with 2 kills of workers 3 cannot join"):
        Chaos(7, 4, 2, joins=3)


def test_who_takes_part_by_the_journal(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    seats = Seats(journal)
    seats.look()
    entries: list[Entry] = [
        JoinedEntry(0, "p", 1, "worker-1"),
        JoinedEntry(1, "q", 2, "worker-2"),
        LeftEntry(0, "lost"),
        JoinedEntry(2, "p", 3, "worker-1"),
        ResumedEntry(0),
    ]
    seen = []
    for time, entry in enumerate(entries, 1):
        with journal.open("ab") as stream:
            stream.write(json.dumps({"time": time, "entry": entry.json()}).encode())
            stream.flush()
            seats.look()  # it is not whole yet
            stream.write(b"\n")
        seats.look()
        seen.append((seats.joined_at("worker-1"), seats.joined_at("worker-2")))
    assert seen == [(1, None), (1, 2), (None, 2), (4, 2), (None, None)]


def test_seeds_differ() -> None:
    plans = {planned_kills(Chaos(seed, 6, 4, 2)) for seed in range(50)}
    assert len(plans) == 50
    orders = {tuple(kill.name == LEADER for kill in plan) for plan in plans}
    assert len(orders) > 5
    assert {kill.name for plan in plans for kill in plan} == {
        LEADER,
        *map(worker_name, range(1, 7)),
    }


@pytest.mark.parametrize(("workers", "kills"), [(0, 0), (65, 0), (1, 10_001)])
def test_what_no_testnet_is(workers: int, kills: int) -> None:
    with pytest.raises(ConfigurationError, match=r"a testnet has"):
        Chaos(0, workers, kills)


def run_of_two() -> list[Entry]:
    """A run of one epoch, to its end."""
    cluster = Cluster(rules(max_samples=sum(SIZES)), num_epochs=1)
    cluster.join(), cluster.join()
    while cluster.state.phase is not Phase.ENDED:
        cluster.average()
    return [RUN, *cluster.journal]


def recorded_of(entries: list[Entry]) -> list[Recorded]:
    """An entry each second, from 1,001 s on."""
    return [Recorded(number, 1000.0 + number, entry) for number, entry in enumerate(entries, 1)]


def report(
    recorded: list[Recorded],
    killed: list[Killed],
    *,
    other: float = 0.0,
    **changes: object,
) -> ChaosReport:
    what: dict[str, object] = {
        "audit": audit([each.entry for each in recorded]),
        "began": 1000.0,
        "over": 1100.0,
        "killed": killed,
        "failed": [],
        "has_ended": True,
        "problem": "",
        **changes,
    }
    figures = [
        {"round": 1.0, "loss": 3.0, "eval_loss": 3.5, "weights_equal": 2.0, "weights_other": other},
        {"round": 2.0, "loss": 2.0, "weights_equal": 1.0, "weights_other": 0.0},
    ]
    return report_of(Chaos(7, 2, 2, 1), Lines(0.05, 20e6), recorded, figures, **what)  # type: ignore[arg-type]


def test_a_report_of_a_sound_run() -> None:
    recorded = recorded_of(run_of_two())
    rounds = [each for each in recorded if isinstance(each.entry, RoundEntry)]
    first, second = rounds[0], rounds[1]
    at = (first.time + second.time) / 2
    found = report(recorded, [Killed(LEADER, at), Killed(worker_name(1), 1090.0)])
    assert found.is_sound
    assert (found.loss, found.held_out_loss, found.seconds) == (2.0, 3.5, 100.0)
    kill, last = found.kills
    assert (kill.name, kill.seconds, kill.round) == (LEADER, at - 1000, 1)
    assert kill.next_round_seconds == second.time - at
    assert (last.round, last.next_round_seconds, last.rejoined_seconds) == (
        len(rounds),
        None,
        None,
    )
    text = "\n".join(found.rows())
    assert "each sample of 1 epoch exactly once" in text
    assert "2 of 3 that were planned" in text
    assert "50 ms one way, 20 Mbit/s for each worker" in text
    assert "3 digests told by members, all those of the leader" in text
    assert json.loads(json.dumps(found.json()))["is_sound"] is True


def test_a_run_whose_members_had_other_weights_is_not_sound() -> None:
    found = report(recorded_of(run_of_two()), [], other=1.0)
    assert not found.is_sound
    assert "4 digests told by members, 1 other than those of the leader" in "\n".join(found.rows())


def test_digests_of_all_rounds_are_in_a_report(tmp_path: Path) -> None:
    """Of a long run, too, whose first rounds nobody looks at any more."""
    directory, none = RunDirectory(tmp_path), cast(Any, None)
    lines = [{"round": 1, "weights_equal": 1, "weights_other": 1}]
    lines += [{"round": number, "weights_equal": 2} for number in range(2, 20_001)]
    directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = ProcessSettings(tmp_path / "run.toml", tmp_path)
    testnet = _Testnet(settings, Chaos(7, 2), none, None, directory, print, None)
    found = testnet.report("")
    assert (found.weights_equal, found.weights_other) == (39_999, 1)


def test_a_worker_that_is_killed_again_did_not_come_back_from_the_first_kill() -> None:
    joined = JoinedEntry(0, "peer", 2, name=worker_name(1))
    recorded = [*recorded_of(run_of_two()), Recorded(99, 1060.0, joined)]
    killed = [
        Killed(worker_name(1), 1040.0),
        Killed(worker_name(1), 1050.0, is_new=True),
        Killed(worker_name(2), 1055.0),
    ]
    found = report(recorded, killed)
    assert [kill.rejoined_seconds for kill in found.kills] == [None, 10.0, None]
    assert found.num_joins == found.json()["num_joins"] == 1
    text = "\n".join(found.rows())
    assert "joins        1 after a kill, 1 of them by workers that were never there" in text
    assert "10.0 s, as new" in text


def test_a_report_beside_the_undisturbed_run() -> None:
    found = report(recorded_of(run_of_two()), [])
    told = found.beside(replace(found, held_out_loss=3.25))
    assert told == "undisturbed  held out 3.2500, here 3.5000: 0.2500 apart"
    assert found.beside(replace(found, held_out_loss=None)).endswith("not known, here 3.5000")


def test_a_report_of_what_went_wrong() -> None:
    whole = run_of_two()
    cut = recorded_of([entry for entry in whole if not isinstance(entry, EndEntry)])
    found = report(cut, [], has_ended=False, problem="no round within 9 s")
    assert not found.is_sound
    assert "did not end: no round within 9 s" in "\n".join(found.rows())
    twice = next(entry for entry in whole if isinstance(entry, RoundEntry))
    where = whole.index(twice)
    unsound = report(recorded_of([*whole[:where], twice, *whole[where:]]), [])
    assert not unsound.is_sound
    assert "not sound" in "\n".join(unsound.rows())
    nothing = report([], [], audit=None, has_ended=False, problem="there is no journal")
    assert not nothing.is_sound
    assert "there is no journal" in "\n".join(nothing.rows())
    failed = report(recorded_of(whole), [], failed=[Ended(worker_name(2), 1010.0, -11)])
    assert failed.is_sound
    assert "worker-2 ended by itself at 10.0 s with status -11" in "\n".join(failed.rows())
