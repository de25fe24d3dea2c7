"""Deadlines of steps: no step stands still for ever, whatever members tell, and none is too long to be made."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from neurogrid.training.leading.chains.step_deadline import StepDeadline, StepDeadlines

PEERS = ("a", "b")
looks = st.lists(
    st.tuples(st.floats(0.0, 30.0), st.dictionaries(st.sampled_from(PEERS), st.integers(0, 9))),
    max_size=40,
)


@given(looks, st.floats(1.0, 50.0), st.integers(0, 12))
def test_a_step_ends_whatever_members_tell_and_never_while_they_come_further(
    looks: list[tuple[float, dict[str, int]]], seconds: float, num_operations: int
) -> None:
    deadline = StepDeadline(0.0, seconds, num_operations)
    now, moved, num_moves, before = 0.0, 0.0, 0, dict[str, int]()
    for waited, done in looks:
        now += waited
        has_more = any(num > before.get(peer, 0) for peer, num in done.items())
        if has_more and num_moves < num_operations:
            moved, num_moves = now, num_moves + 1
        deadline.look(now, done)
        before = done
        assert deadline.at == moved + seconds


def test_what_is_told_again_moves_nothing() -> None:
    deadline = StepDeadline(0.0, 10.0, 4)
    deadline.look(3.0, {"a": 1})
    deadline.look(6.0, {"a": 1})
    assert deadline.at == 13.0
    deadline.look(7.0, {"a": 1, "b": 1})
    assert deadline.at == 17.0


def test_a_step_has_ten_times_what_the_longest_took() -> None:
    deadlines = StepDeadlines()
    assert deadlines.begin(5.0, PEERS, 4).at == 125.0
    deadlines.made(PEERS, 60.0)
    deadlines.made(PEERS, 20.0)
    assert deadlines.begin(0.0, PEERS, 4).seconds == 600.0


def test_members_whose_step_was_given_up_have_twice_as_long_until_one_is_made() -> None:
    deadlines = StepDeadlines()
    for seconds in (120.0, 240.0, 480.0):
        deadline = deadlines.begin(0.0, PEERS, 4)
        assert deadline.seconds == seconds
        deadlines.ran_out(PEERS, deadline)
    # One of them is enough, and those of another chain have nothing to do with it.
    assert deadlines.begin(0.0, ("b", "c"), 4).seconds == 960.0
    assert deadlines.begin(0.0, ("c",), 4).seconds == 120.0
    deadlines.made(("c",), 1.0)
    assert deadlines.begin(0.0, PEERS, 4).seconds == 960.0
    deadlines.made(PEERS, 1.0)
    assert deadlines.begin(0.0, PEERS, 4).seconds == 120.0
