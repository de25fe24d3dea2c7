"""Whatever happens to a witnessed run, it has one state, makes no batch twice, and takes nothing back."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.training.witnessed_schedules import Schedule

SEEDS = st.integers(0, 2**64)


def check(random: Random, num_acts: int, *, beside: bool) -> None:
    schedule = Schedule(random, beside=beside)
    schedule.run(num_acts)
    schedule.folded()
    if random.random() < 0.5:
        schedule.rest()
    else:
        schedule.heal()
    schedule.folded()


@settings(max_examples=120)
@given(seed=SEEDS, num_acts=st.integers(0, 100))
def test_a_run_has_one_state_and_takes_nothing_back(seed: int, num_acts: int) -> None:
    check(Random(seed), num_acts, beside=True)


@pytest.mark.long
@settings(max_examples=100_000)
@given(seed=SEEDS, num_acts=st.integers(0, 100))
def test_a_run_has_one_state_and_takes_nothing_back_for_long(seed: int, num_acts: int) -> None:
    check(Random(seed), num_acts, beside=seed % 8 == 0)
