"""Which fragment is sent when, what is under way, and what a newcomer is told of it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import NotFiniteError
from neurogrid.training.averaging.parts import gather
from neurogrid.training.optimizers import (
    Flight,
    OuterOptimizer,
    StreamingOuter,
    StreamingSchedule,
)

FRAGMENTS = [[(0, 3), (7, 12), (18, 20)], [(3, 7), (12, 18)]]


def make(overlap: int = 2, last_step: int | None = None) -> StreamingOuter:
    return StreamingOuter(
        OuterOptimizer(torch.arange(20.0)),
        FRAGMENTS,
        StreamingSchedule(2, 6, overlap, last_step),
    )


@given(
    every=st.integers(1, 40),
    data=st.data(),
    num_steps=st.integers(1, 120),
)
def test_every_fragment_has_its_turn_and_its_mean_in_time(
    every: int, data: st.DataObject, num_steps: int
) -> None:
    num_fragments = data.draw(st.integers(1, every))
    overlap = data.draw(st.integers(0, every - 1))
    schedule = StreamingSchedule(num_fragments, every, overlap, num_steps)
    sent: dict[int, list[int]] = {f: [] for f in range(num_fragments)}
    applied: dict[int, list[int]] = {f: [] for f in range(num_fragments)}
    for step in range(1, num_steps + 1):
        due = schedule.due(step)
        assert len(due) <= 1 or step == num_steps
        for fragment in due:
            sent[fragment].append(step)
        for fragment in schedule.apply(step):
            applied[fragment].append(step)
    for fragment in range(num_fragments):
        steps = sent[fragment]
        assert steps[-1] == applied[fragment][-1] == num_steps
        between = [b - a for a, b in pairwise(steps[:-1])]
        assert all(gap == every for gap in between)
        assert steps[0] <= every
        in_time = [step + overlap for step in steps[:-1] if step + overlap < num_steps]
        assert applied[fragment] == [*in_time, num_steps]


def test_the_schedule_of_four_fragments() -> None:
    schedule = StreamingSchedule(4, 20, 5)
    sent = {step: schedule.due(step) for step in range(1, 41) if schedule.due(step)}
    assert sent == {5: (1,), 10: (2,), 15: (3,), 20: (0,), 25: (1,), 30: (2,), 35: (3,), 40: (0,)}
    assert [schedule.apply(step) for step in (5, 10, 15, 20, 25)] == [(), (1,), (2,), (3,), (0,)]


@pytest.mark.parametrize("numbers", [(0, 5, 0), (6, 5, 0), (1, 5, 5), (1, 5, -1)])
def test_numbers_that_do_not_fit(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"must be in|do not fit"):
        StreamingSchedule(*numbers)


def test_a_mean_that_is_awaited_is_named_and_can_be_given_up() -> None:
    stream, theta = make(), torch.arange(20.0) + 1
    ((fragment, difference),) = stream.send(3, theta)
    assert fragment == 1
    assert torch.equal(difference, torch.ones(10))
    assert stream.awaited(4) == ()
    assert stream.awaited(5) == (1,)
    with pytest.raises(ValueError, match=r"fragments \[1\] are wanted after step 5"):
        stream.apply(5, theta)
    with pytest.raises(NotFiniteError):
        stream.receive(1, torch.full((10,), torch.nan))
    with pytest.raises(ValueError, match="mean difference"):
        stream.receive(1, torch.ones(9))
    with pytest.raises(ValueError, match="fragment 0 is not under way"):
        stream.receive(0, torch.ones(10))
    stream.give_up(1)
    assert stream.apply(5, theta) == ()
    assert torch.equal(stream.outer.theta0, torch.arange(20.0))
    # Nothing is lost: the next difference has it.
    stream.send(6, theta)
    ((fragment, difference),) = stream.send(9, theta + 1)
    assert fragment == 1
    assert torch.equal(difference, torch.full((10,), 2.0))


def test_the_agreed_weights_are_mixed_in_after_an_overlap() -> None:
    stream, theta = make(), torch.arange(20.0) + 1
    ((_, difference),) = stream.send(3, theta)
    stream.receive(1, difference)
    theta += 1
    assert stream.apply(4, theta) == ()
    assert stream.apply(5, theta) == (1,)
    agreed, other = FRAGMENTS[1], FRAGMENTS[0]
    before = gather(torch.arange(20.0), agreed)
    moved = gather(stream.outer.theta0, agreed) - before
    torch.testing.assert_close(moved, torch.full((10,), 1.33))
    torch.testing.assert_close(gather(theta, agreed), before + 0.5 * 1.33 + 0.5 * 2)
    assert torch.equal(gather(theta, other), gather(torch.arange(20.0), other) + 2)


def test_after_the_last_step_all_are_synced_once() -> None:
    stream, theta = make(last_step=4), torch.arange(20.0) + 1
    stream.receive(1, stream.send(3, theta)[0][1])
    for fragment, difference in stream.send(4, theta):
        assert torch.equal(difference, torch.ones(10))
        stream.receive(fragment, difference)
    assert stream.apply(4, theta) == (0, 1)
    torch.testing.assert_close(stream.outer.theta0, torch.arange(20.0) + 1.33)


def test_a_newcomer_takes_over_what_is_under_way() -> None:
    stream, newcomer = make(overlap=5), make(overlap=5)
    theta = torch.arange(20.0) + 1
    stream.receive(1, stream.send(3, theta)[0][1])
    stream.send(6, theta)
    vectors = [vector.clone() for vector in stream.state_vectors()]
    assert [vector.numel() for vector in vectors] == [20, 20, 10]
    newcomer.load(vectors, stream.flights())
    assert [(f.fragment, f.apply_step) for f in newcomer.flights()] == [(1, 8), (0, 11)]
    for one in (stream, newcomer):
        one.receive(0, torch.full((10,), 3.0))
        own = theta.clone()
        assert one.apply(8, own) == (1,)
        assert one.apply(11, own) == (0,)
    for mine, others in zip(newcomer.state_vectors(), stream.state_vectors(), strict=True):
        assert torch.equal(mine, others)
    with pytest.raises(ValueError, match="3 vectors"):
        newcomer.load(vectors[:2], [Flight(1, 8, torch.ones(10))])
    with pytest.raises(ValueError, match="none of the 2"):
        newcomer.load(vectors, [Flight(2, 8, torch.ones(10))])


@pytest.mark.parametrize(
    "fragments",
    [
        [[(0, 20)]],
        [[(0, 10)], [(10, 19)]],
        [[(0, 10)], [(9, 20)]],
        [[(0, 10)], [(10, 21)]],
    ],
)
def test_fragments_are_all_of_the_vector(fragments: list[list[tuple[int, int]]]) -> None:
    with pytest.raises(ValueError, match=r"fragments|ascend"):
        StreamingOuter(OuterOptimizer(torch.zeros(20)), fragments, StreamingSchedule(2, 6))
