"""Suspicion: who stands out is looked at sooner, and nobody is watched by the word of one."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.training.checks import audits_of, cosines_of, figures_of
from neurogrid.training.leading.witnessed.suspicion import StandingOut, Suspicion
from neurogrid.training.optimizers import Coefficients

HONEST = {0: 0.3, 1: 0.32, 2: 0.28, 3: 0.31}


def told(rounds: int, *, liar: bool = False) -> Suspicion:
    """Four members tell of rounds in which seat 9 points elsewhere; one may say that it is seat 0 that does."""
    found = Suspicion()
    for step in range(1, rounds + 1):
        for peer in "abcd":
            lies = liar and peer == "d"
            said = {**HONEST, 9: 0.3, 0: -1.0} if lies else {**HONEST, 9: -0.2}
            found.told(peer, step, said)
        found.look("abcd")
    return found


def test_who_stands_out_for_some_rounds_is_watched() -> None:
    assert told(2).watched([0, 1, 2, 3, 9]) == ()
    assert told(4).watched([0, 1, 2, 3, 9]) == (9,)
    assert told(4).watched([0, 1, 2]) == ()


def test_rounds_in_which_nobody_can_be_told_apart_are_none_over_which_a_seat_is_seen() -> None:
    found = StandingOut()
    for _ in range(5):
        found.add({8: 0.3, 9: -0.2})
    for number in range(3):
        assert found.watched([*HONEST, 9]) == ()
        found.add({**HONEST, 9: -0.2})
        assert (found.watched([*HONEST, 9]) == (9,)) == (number == 2)


def test_one_that_lies_changes_nothing() -> None:
    assert told(5, liar=True).watched([0, 1, 2, 3, 9]) == (9,)


def test_half_of_the_members_are_too_few() -> None:
    found = Suspicion()
    for step in range(1, 9):
        for peer in "ab":
            found.told(peer, step, {**HONEST, 9: -0.9})
        found.look("abcd")
    assert found.watched([9]) == ()


@given(st.binary(min_size=32, max_size=32))
def test_the_share_is_the_same_and_half_of_it_goes_to_who_is_watched(seed: bytes) -> None:
    seats = range(10)
    plain = audits_of(seed, seats, seats, seats, 0.3, 1)
    watched = audits_of(seed, seats, seats, seats, 0.3, 1, watched=(7, 99))
    assert len(watched) == len(plain) == 3
    assert len({each.seat for each in watched}) == 3
    assert all(each.seat != each.auditor for each in watched)


def test_who_is_watched_is_looked_at_more_often() -> None:
    seats, num = range(10), 0
    for number in range(400):
        seed = number.to_bytes(32, "little")
        num += 7 in [
            each.seat for each in audits_of(seed, seats, seats, seats, 0.1, 1, watched=(7,))
        ]
    assert 170 < num < 270  # 0.55 of 400; 0.1 without


def test_cosines_are_those_of_whole_vectors() -> None:
    generator = torch.Generator().manual_seed(4)
    sent, rows = [], []
    for _ in range(4):
        places = torch.randperm(60, generator=generator)[:20].sort().values
        values = torch.randn(20, generator=generator).sign()
        row = torch.zeros(60)
        row[places] = values
        sent.append(Coefficients(places, values))
        rows.append(row)
    wanted = [each.cosine for each in figures_of(rows)]
    found = cosines_of(sent, 60)
    assert all(abs(x - y) < 1e-9 for x, y in zip(wanted, found, strict=True))
    assert cosines_of([sent[0], Coefficients(sent[0].positions, torch.zeros(20))], 60) == [0.0, 0.0]
