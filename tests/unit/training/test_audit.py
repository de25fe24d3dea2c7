"""The audit of a run, by entries of its journal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.training.data.dealing import SampleRange
from neurogrid.training.runs.audit import Audit, audit
from neurogrid.training.runs.entries import (
    Assignment,
    BannedEntry,
    BeganEntry,
    ChangedEntry,
    CheckpointEntry,
    DealtEntry,
    EndEntry,
    Entry,
    JoinedEntry,
    LeftEntry,
    ResumedEntry,
    RoundEntry,
    StoppingEntry,
)
from neurogrid.training.runs.state import Phase
from tests.unit.training.simulated_run import RUN, SIZES, Cluster, drive, rules

NUM = sum(SIZES)


def run_of(num_epochs: int = 1, **changes: object) -> Cluster:
    changes = {"max_samples": num_epochs * NUM, **changes}
    return Cluster(rules(**changes), num_epochs=num_epochs)


def to_its_end(cluster: Cluster) -> list[Entry]:
    while cluster.state.phase is not Phase.ENDED:
        cluster.average()
    return [RUN, *cluster.journal]


def sound() -> list[Entry]:
    """Two members, then three, of whom one is late and one is lost; two epochs."""
    cluster = run_of(2, min_members=2, projected=False)
    first, second = cluster.join(), cluster.join()
    cluster.average()
    third = cluster.join()
    cluster.average(without=first)
    cluster.train(first, 2)
    cluster.average()
    cluster.journal.append(CheckpointEntry(9, 3))
    cluster.lose(third)
    assert second in cluster.members
    return to_its_end(cluster)


SOUND = sound()
ROUNDS = [number for number, entry in enumerate(SOUND) if isinstance(entry, RoundEntry)]
DEALT = [number for number, entry in enumerate(SOUND) if isinstance(entry, DealtEntry)]


def test_a_sound_run() -> None:
    found = audit(SOUND)
    assert found == Audit(len(ROUNDS), NUM, 2 * NUM, 2, {}, 3, 1, has_ended=True, problems=())
    assert found.is_sound
    assert audit([RUN]) == Audit(0, NUM, 0, 0, {}, 0, 0, has_ended=False, problems=())


def test_a_run_that_goes_on() -> None:
    """Whatever the leader has written so far is sound; what is missing of an epoch is counted."""
    used = 0
    for number in range(1, len(SOUND)):
        found = audit(SOUND[:number])
        assert found.is_sound, found.problems
        assert found.num_used >= used
        used = found.num_used
        left = sum(found.missing.values())
        assert used + left == NUM * (found.epochs + len(found.missing))
    assert audit(SOUND[: ROUNDS[0] + 1]).missing == {0: NUM - 12}


def test_rounds_that_are_taken_back_are_used_again() -> None:
    cluster = run_of()
    cluster.join("a")
    cluster.average()
    cluster.average()
    used = audit([RUN, *cluster.journal]).num_used
    cluster.restarted()
    cluster.machine.resume(1)
    cluster.note()
    cluster.index = 0
    cluster.round = 1
    before = audit([RUN, *cluster.journal])
    assert (before.rounds, before.num_used, before.is_sound) == (1, used // 2, True)
    cluster.join("a")
    assert audit(to_its_end(cluster)) == Audit(
        *(4, NUM, NUM, 1, {}, 2, 0), has_ended=True, problems=()
    )


def test_a_run_that_ended_is_resumed() -> None:
    cluster = run_of(max_samples=12)
    cluster.join("a")
    ended = to_its_end(cluster)
    assert audit(ended).has_ended
    found = audit([*ended, ResumedEntry(1), JoinedEntry(0, "a", 9)])
    assert (found.has_ended, found.rounds, found.is_sound) == (False, 1, True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"round": 9}, "round 9 comes after round 0"),
        ({"index": 0}, "round 1 is decision 0, after decision 0"),
        ({"contributions": ()}, "made of nobody's works"),
        ({"contributions": ((0, 1), (7, 1))}, "nobody sits on seat 7"),
        ({"contributions": ((0, 1), (0, 1))}, "seat 0 contributed twice"),
        ({"contributions": ((0, 3), (1, 1))}, "seat 0 contributed 3 of 2 works"),
        ({"contributions": ((0, 0), (1, 1))}, "seat 0 contributed 0 of 2 works"),
        ({"contributions": ((0, 2), (1, 1))}, "its samples are not those of the works"),
        ({"contributions": ((1, 1), (0, 1))}, "its samples are not those of the works"),
        ({"ranges": ()}, "its samples are not those of the works"),
        ({"ranges": (SampleRange(0, 0, 8),)}, "no samples 0 to 8 of slice 0"),
        ({"ranges": (SampleRange(4, 0, 1),)}, "no samples 0 to 1 of slice 4"),
        (
            {"ranges": 3 * (SampleRange(0, 0, 1),)},
            "used 3 times, where epochs that were begun are 1",
        ),
    ],
)
def test_a_round_that_is_wrong_is_named(change: dict[str, object], said: str) -> None:
    wrong = replace(SOUND[ROUNDS[0]], **change)  # type: ignore[arg-type]
    problems = audit([*SOUND[: ROUNDS[0]], wrong]).problems
    assert any(said in each for each in problems), problems


def with_work(change: dict[str, object]) -> list[Entry]:
    """The journal, with something else in its first work."""
    dealt = SOUND[DEALT[0]]
    assert isinstance(dealt, DealtEntry)
    (seat, work), *others = dealt.works
    wrong = DealtEntry(((seat, replace(work, **change)), *others))  # type: ignore[arg-type]
    return [*SOUND[: DEALT[0]], wrong, *SOUND[DEALT[0] + 1 :]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"number": 2}, "work 2 of seat 0 comes after work 0"),
        ({"weight": 7}, "work 1 of seat 0 counts 7, and has 6 samples"),
        ({"ranges": (SampleRange(0, 2, 8),)}, "there are no samples 2 to 8 of slice 0"),
        ({"ranges": (SampleRange(0, 0, 3),) * 2}, "some were dealt again before others"),
    ],
)
def test_a_work_that_is_wrong_is_named(change: dict[str, object], said: str) -> None:
    problems = audit(with_work(change)).problems
    assert any(said in each for each in problems), problems


def test_works_that_do_not_follow_from_the_seed() -> None:
    """All in order, but of other samples: what is wrong is found by dealing again."""
    cluster = run_of()
    cluster.join()
    entries = [RUN, *cluster.journal]
    assert audit(entries).is_sound
    other = audit([replace(RUN, seed=2), *cluster.journal])
    assert other.problems == (
        "work 1 of seat 0 is about other samples than the data and the seed give",
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([SOUND[ROUNDS[0]]], "round comes after the end of the run"),
        ([SOUND[DEALT[0]]], "was dealt after the run stopped"),
        ([BeganEntry(2, 0)], "training begins twice"),
        ([StoppingEntry("again")], "the run stops twice"),
        ([CheckpointEntry(80, 400)], "a checkpoint has round 400 after round"),
        ([ResumedEntry(400)], "resumed after round 400, with"),
        ([LeftEntry(7, "")], "seat 7 was left, and was not there"),
        ([JoinedEntry(0, "peer9", 9)], "peer9 joined on seat 0, where peer1 sat"),
        ([JoinedEntry(2, "peer9", 9)], "seat 2 was empty for good"),
        ([JoinedEntry(5, "peer1", 1)], "peer1 joined on seat 5, and sat on 0"),
        ([ResumedEntry(2), SOUND[DEALT[0]]], "work 1 of seat 0 was dealt, and nobody sits there"),
        ([ResumedEntry(2), SOUND[ROUNDS[2]]], "round 3: nobody sits on seat 0"),
        ([ResumedEntry(2), EndEntry("")], "the run ended while seat 0 had work"),
        ([RUN], "a second run begins"),
        ([BannedEntry("peer9", 2, 0, 0, b"", "")], "ban 2 comes after ban 0"),
    ],
)
def test_what_must_not_come_is_named(wrong: list[Entry], said: str) -> None:
    problems = audit([*SOUND, *wrong]).problems
    assert any(said in each for each in problems), problems


def test_works_before_training_began() -> None:
    began = next(number for number, entry in enumerate(SOUND) if isinstance(entry, BeganEntry))
    problems = audit([*SOUND[:began], *SOUND[began + 1 :]]).problems
    assert "work 1 of seat 0 was dealt before training began" in problems


def test_an_epoch_of_some_samples_only() -> None:
    """Told by the counts: as many samples as were planned, and not each as often."""
    twice = 2 * (SampleRange(2, 0, 9), SampleRange(3, 0, 3))
    work = Assignment(1, 0.0, 1.0, NUM, twice)
    problems = audit(
        [
            *(RUN, JoinedEntry(0, "a", 1), BeganEntry(1, NUM), DealtEntry(((0, work),))),
            *(RoundEntry(1, 1, bytes(32), ((0, 1),), twice), StoppingEntry(""), EndEntry("")),
        ]
    ).problems
    assert "12 samples were used less often than others" in problems


def test_no_journal_and_one_in_which_all_is_wrong() -> None:
    assert audit([]).problems == ("a journal begins with its run, not with nothing",)
    assert audit(SOUND[1:]).problems == ("a journal begins with its run, not with joined",)
    assert len(audit([RUN, *[LeftEntry(9, "")] * 500]).problems) == 100


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_happens_a_run_is_sound(data: st.DataObject) -> None:
    num_epochs = data.draw(st.integers(1, 3))
    cluster = run_of(
        num_epochs,
        num_parts=data.draw(st.integers(1, 2)),
        projected=data.draw(st.booleans()),
        steps=data.draw(st.integers(1, 12)),
    )
    drive(cluster, data)
    found = audit([RUN, *cluster.journal])
    assert found.problems == ()
    assert (found.epochs, found.missing, found.num_used) == (num_epochs, {}, num_epochs * NUM)
    assert found.rounds == cluster.state.round


def doubled(entries: Sequence[Entry], at: int) -> list[Entry]:
    return [*entries[: at + 1], *entries[at:]]


def left_out(entries: Sequence[Entry], at: int) -> list[Entry]:
    return [*entries[:at], *entries[at + 1 :]]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_is_altered_is_found(data: st.DataObject) -> None:
    """In a run that nobody left: where somebody does, a journal without what was lost may be as good."""
    cluster = run_of(data.draw(st.integers(1, 2)), steps=data.draw(st.integers(1, 4)))
    for _ in range(data.draw(st.integers(1, 3))):
        cluster.join()
        cluster.average()
    entries = to_its_end(cluster)
    at = data.draw(
        st.sampled_from(
            [n for n, each in enumerate(entries) if isinstance(each, RoundEntry | DealtEntry)]
        )
    )
    change: Callable[[Sequence[Entry], int], list[Entry]] = data.draw(
        st.sampled_from([doubled, left_out])
    )
    assert not audit(change(entries, at)).is_sound


def changed() -> tuple[list[Entry], Cluster]:
    """A run that was changed with round 3, and resumed after round 1."""
    cluster = run_of()
    cluster.join("a")
    cluster.average()
    cluster.average()
    cluster.machine.change([("eval.every", "7")])
    cluster.note()
    cluster.average()
    cluster.restarted()
    cluster.machine.resume(1)
    cluster.note()
    cluster.index, cluster.round = 0, 1
    cluster.join("a")
    return [RUN, *cluster.journal], cluster


def test_what_was_changed_comes_again_at_its_round() -> None:
    _, cluster = changed()
    entries = to_its_end(cluster)
    assert audit(entries).is_sound
    assert [e.round for e in entries if isinstance(e, ChangedEntry)] == [3, 3]
    again = [n for n, entry in enumerate(entries) if isinstance(entry, ChangedEntry)][1]
    without = [*entries[:again], *entries[again + 1 :]]
    assert audit(without).problems[0] == "round 3 was made without what changed with round 3"


@pytest.mark.parametrize("number", [1, 3, 9])
def test_a_change_of_another_round_is_found(number: int) -> None:
    entries, _ = changed()
    found = audit([*entries, ChangedEntry(number, (("eval.every", "2"),))]).problems
    assert found == (f"what changed with round {number} was changed after round 1",)


def test_nothing_is_changed_after_the_end() -> None:
    late = ChangedEntry(len(ROUNDS) + 1, (("eval.every", "2"),))
    assert audit([*SOUND, late]).problems == ("changed comes after the end of the run",)
