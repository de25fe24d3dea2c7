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
    if random.random() < 0.5:
        schedule.rest()
    else:
        schedule.heal()
    schedule.folded()


@settings(max_examples=120)
@given(seed=SEEDS, num_acts=st.integers(0, 100))
def test_a_run_has_one_state_and_takes_nothing_back(seed: int, num_acts: int) -> None:
    check(Random(seed), num_acts, beside=True)


# 100,000 in ten parts, so that it can be seen how far they are.
@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
@settings(max_examples=10_000)
@given(seed=SEEDS, num_acts=st.integers(0, 100))
def test_a_run_has_one_state_and_takes_nothing_back_for_long(
    part: int, seed: int, num_acts: int
) -> None:
    check(Random(f"{part} {seed}"), num_acts, beside=seed % 8 == 0)
