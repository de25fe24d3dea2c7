"""A stage that becomes slow for good is noticed; one that is slow now and then, or always was, is not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from neurogrid.training.stages.pace import PaceWatch

QUICK = st.floats(0.9, 1.1)


@given(
    st.lists(QUICK, min_size=8, max_size=100),
    st.lists(st.floats(4.0, 50.0), min_size=4, max_size=4),
)
def test_one_that_has_become_slow_is_named_with_both_paces(
    before: list[float], after: list[float]
) -> None:
    watch = PaceWatch()
    assert [watch.told(seconds) for seconds in before] == [None] * len(before)
    *first, last = [watch.told(seconds) for seconds in after]
    assert first == [None] * 3
    assert last is not None
    now, usual = last
    assert 0.9 <= usual <= 1.1
    assert min(after) <= now <= max(after)


@given(st.lists(st.tuples(st.lists(QUICK, min_size=1), st.lists(st.floats(4, 50), max_size=3))))
def test_what_passes_is_no_reason(turns: list[tuple[list[float], list[float]]]) -> None:
    watch = PaceWatch()
    for quick, slow in turns:
        for seconds in (*quick, *slow):
            assert watch.told(seconds) is None


@given(st.lists(st.floats(0.0, 0.04)))
def test_a_moment_is_no_reason(steps: list[float]) -> None:
    watch = PaceWatch()
    for _ in range(20):
        watch.told(0.001)
    assert all(watch.told(seconds) is None for seconds in steps)


def test_one_that_always_was_slow_is_as_it_was() -> None:
    watch = PaceWatch()
    assert all(watch.told(30.0) is None for _ in range(50))
