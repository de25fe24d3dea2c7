"""The audit of a run, by entries of its journal."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.training.runs.audit import Audit, audit
from neurogrid.training.runs.entries import (
    CheckpointEntry,
    Contributor,
    EndEntry,
    Entry,
    MemberEntry,
    ResumedEntry,
    RoundEntry,
    RunEntry,
    UsedEntry,
    UsedRange,
)

SLICES = (10, 5, 7)
RUN = RunEntry(bytes(16), "leader", bytes(32), bytes(32), SLICES)
JOINED = [MemberEntry(name, seat, joined=True) for seat, name in enumerate("abc")]


def round_of(number: int, **ranges: list[tuple[int, int, int, int]]) -> RoundEntry:
    return RoundEntry(
        number,
        bytes(32),
        tuple(
            Contributor(
                member,
                sum(stop - start for *_, start, stop in given_),
                tuple(UsedRange(*each) for each in given_),
            )
            for member, given_ in ranges.items()
        ),
    )


SOUND: list[Entry] = [
    RUN,
    *JOINED,
    round_of(1, a=[(0, 0, 0, 10)], b=[(0, 1, 0, 3)]),
    round_of(2, c=[(0, 2, 0, 7)], b=[(0, 1, 3, 5), (1, 1, 0, 2)]),
    CheckpointEntry(40, 2),
    MemberEntry("c", 2, joined=False),
    round_of(3, a=[(1, 0, 0, 1)]),
    EndEntry("tokens"),
]


def test_a_sound_run() -> None:
    assert audit(SOUND) == Audit(3, 22, 25, 1, {1: 19}, 3, 1, has_ended=True, problems=())
    assert audit(SOUND).is_sound
    assert audit([RUN]) == Audit(0, 22, 0, 0, {}, 0, 0, has_ended=False, problems=())


def test_rounds_that_are_taken_back_are_used_again() -> None:
    again = [*SOUND, ResumedEntry(1), *SOUND[5:]]
    assert audit(again) == replace(audit(SOUND), left=2)
    assert not audit([*SOUND, ResumedEntry(4)]).is_sound
    assert not audit([*SOUND, *SOUND[5:6]]).is_sound


def test_a_report_that_comes_late() -> None:
    late = replace(round_of(3, a=[(1, 0, 0, 1)]), contributors=(Contributor("a", 1, ()),))
    entries = [*SOUND[:-2], late]
    assert "0 are accounted for" in audit(entries).problems[0]
    entries.append(UsedEntry(3, "a", (UsedRange(1, 0, 0, 1),)))
    assert audit(entries) == replace(audit(SOUND), has_ended=False)
    assert not audit([*entries, UsedEntry(3, "b", (UsedRange(1, 0, 1, 2),))]).is_sound


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (round_of(4, a=[(0, 0, 9, 10)]), "samples 9 to 10 of slice 0 were used twice in epoch 0"),
        (round_of(4, a=[(1, 0, 0, 10)]), "in round 3 by a, in round 4 by a"),
        (round_of(3, a=[(1, 0, 1, 2)]), "round 3 comes after round 3"),
        (round_of(5, a=[(1, 0, 1, 2)]), "round 5 comes after round 3"),
        (round_of(4, x=[(1, 0, 1, 2)]), "x never joined"),
        (round_of(4, a=[(1, 0, 1, 11)]), "there are no samples 1 to 11 of slice 0"),
        (round_of(4, a=[(1, 3, 0, 1)]), "of slice 3"),
        (CheckpointEntry(80, 4), "checkpoint"),
        (RUN, "second run"),
    ],
)
def test_what_is_wrong_is_named(wrong: Entry, said: str) -> None:
    problems = audit([*SOUND, wrong]).problems
    assert any(said in problem for problem in problems), problems


def test_a_journal_without_a_run_and_one_in_which_all_is_wrong() -> None:
    assert "begins with its run" in audit(SOUND[1:]).problems[0]
    assert len(audit([RUN, *[round_of(9)] * 500]).problems) == 100


@given(st.data())
def test_any_deal_is_sound_and_any_second_use_is_found(data: st.DataObject) -> None:
    """Two epochs, cut anywhere, used by anybody in any order."""
    pieces: list[tuple[int, int, int, int]] = []
    for epoch in range(2):
        for number, size in enumerate(SLICES):
            inner = data.draw(st.sets(st.integers(1, size - 1)))
            cuts = [0, *sorted(inner), size]
            pieces += [(epoch, number, a, b) for a, b in pairwise(cuts)]
    pieces = data.draw(st.permutations(pieces))
    entries: list[Entry] = [RUN, *JOINED]
    for number, piece in enumerate(pieces, 1):
        entries.append(round_of(number, **{data.draw(st.sampled_from("abc")): [piece]}))
    found = audit(entries)
    assert found.is_sound
    assert (found.epochs, found.missing, found.num_used) == (2, {}, 44)
    epoch, slice_, start, stop = data.draw(st.sampled_from(pieces))
    doubled = round_of(len(pieces) + 1, a=[(epoch, slice_, start, stop)])
    assert not audit([*entries, doubled]).is_sound
    number = data.draw(st.integers(len(entries) - len(pieces), len(entries) - 1))
    removed = audit(
        [*entries[:number], replace(entries[number], contributors=()), *entries[number + 1 :]]
    )
    assert removed.is_sound
    assert removed.epochs < 2
