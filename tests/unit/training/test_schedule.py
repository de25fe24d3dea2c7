"""One forward, one backward: driven as a chain whose messages arrive whenever they like, and by the clock."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.training.stages.schedule import (
    Operation,
    Progress,
    bubble,
    bubble_of_members,
    forward_only,
    most_under_way,
    one_forward_one_backward,
    progress_of,
    window_of,
)

chains = st.integers(1, 8)
batches = st.integers(1, 24)


class Member:
    """A member of a stage that holds what came, and does the next of its operations once it can."""

    def __init__(self, stage: int, operations: tuple[Operation, ...]) -> None:
        self.stage = stage
        self.left = list(operations)
        self.done: list[Operation] = []
        self.here: set[Operation] = set()
        self.most_held = 0
        self.most_early = {False: 0, True: 0}

    def arrive(self, operation: Operation) -> None:
        """What the operation needs is here."""
        assert operation in self.left
        assert operation not in self.here
        self.here.add(operation)
        early = sum(each.is_backward == operation.is_backward for each in self.here)
        self.most_early[operation.is_backward] = max(self.most_early[operation.is_backward], early)

    @property
    def can_run(self) -> bool:
        return bool(self.left) and self.left[0] in self.here

    def run(self) -> Operation:
        operation = self.left.pop(0)
        self.here.remove(operation)
        self.done.append(operation)
        forwards = sum(not each.is_backward for each in self.done)
        self.most_held = max(self.most_held, 2 * forwards - len(self.done))
        return operation


Routes = list[list[int]]


def next_of(operation: Operation, stage: int, num_stages: int) -> tuple[int, Operation]:
    """The stage and its operation that the outcome of this one is for; below 0: nobody's."""
    if operation.is_backward:
        return stage - 1, operation
    if stage == num_stages - 1:
        return stage, operation._replace(is_backward=True)
    return stage + 1, operation


def drive(stages: list[list[Member]], routes: Routes, random: Random) -> None:
    """Let tensors arrive and members compute in any order, until nothing more can happen.

    Args:
        routes: of each micro-batch, the member of each stage.
    """
    on_the_way = [(0, Operation(False, number)) for number in range(len(routes))]
    while True:
        ready = [member for stage in stages for member in stage if member.can_run]
        if not ready and not on_the_way:
            return
        if on_the_way and (not ready or random.random() < 0.5):
            to, operation = on_the_way.pop(random.randrange(len(on_the_way)))
            stages[to][routes[operation.number][to]].arrive(operation)
            continue
        member = random.choice(ready)
        operation = member.run()
        to, wanted = next_of(operation, member.stage, len(stages))
        if to >= 0 and wanted in stages[to][routes[wanted.number][to]].left:
            on_the_way.append((to, wanted))


@st.composite
def wide_chains(draw: st.DrawFn) -> tuple[list[int], Routes]:
    """The number of members of each stage, and any routes through them."""
    widths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    route = st.tuples(*(st.integers(0, width - 1) for width in widths)).map(list)
    return widths, draw(st.lists(route, min_size=1, max_size=24))


@given(wide_chains(), st.randoms(use_true_random=False))
def test_all_is_done_once_in_order_and_within_memory_whatever_comes_first(
    chain: tuple[list[int], Routes], random: Random
) -> None:
    """Whatever the routes are: nobody waits for ever."""
    widths, routes = chain

    def own(stage: int, lane: int) -> list[int]:
        return [number for number, route in enumerate(routes) if route[stage] == lane]

    stages = [
        [
            Member(stage, one_forward_one_backward(own(stage, lane), window_of(stage, widths)))
            for lane in range(width)
        ]
        for stage, width in enumerate(widths)
    ]
    drive(stages, routes, random)
    for stage, members in enumerate(stages):
        for lane, member in enumerate(members):
            assert not member.left
            for is_backward in (False, True):
                done = [op.number for op in member.done if op.is_backward == is_backward]
                assert done == own(stage, lane)
            assert member.most_held == most_under_way(own(stage, lane), window_of(stage, widths))
            # What waits at a member is bounded by what its senders, or it itself, have under way.
            if stage:
                assert member.most_early[False] <= sum(each.most_held for each in stages[stage - 1])
            assert member.most_early[True] <= member.most_held


@given(chains, batches)
def test_where_each_stage_is_one_member_it_holds_as_many_as_there_are_stages_to_the_last(
    num_stages: int, num_micro_batches: int
) -> None:
    widths = [1] * num_stages
    for stage in range(num_stages):
        held = most_under_way(range(num_micro_batches), window_of(stage, widths))
        assert held == min(num_stages - stage, num_micro_batches)


@given(wide_chains(), st.randoms(use_true_random=False))
def test_an_evaluation_goes_through(chain: tuple[list[int], Routes], random: Random) -> None:
    widths, routes = chain
    stages = [
        [
            Member(stage, forward_only([n for n, r in enumerate(routes) if r[stage] == lane]))
            for lane in range(width)
        ]
        for stage, width in enumerate(widths)
    ]
    drive(stages, routes, random)
    assert not any(member.left for members in stages for member in members)


def makespan(num_stages: int, num_micro_batches: int, forward: int, backward: int) -> int:
    """When the last operation ends, if tensors take no time."""
    ended: dict[tuple[int, Operation], int] = {}
    left = [
        list(one_forward_one_backward(range(num_micro_batches), num_stages - number))
        for number in range(num_stages)
    ]
    free = [0] * num_stages
    while any(left):
        for stage, operations in enumerate(left):
            if not operations:
                continue
            operation = operations[0]
            if operation.is_backward and stage == num_stages - 1:
                needs = (stage, operation._replace(is_backward=False))
            else:
                needs = (stage + 1 if operation.is_backward else stage - 1, operation)
            if needs[0] >= 0 and needs not in ended:
                continue
            begins = max(free[stage], ended.get(needs, 0))
            free[stage] = begins + (backward if operation.is_backward else forward)
            ended[stage, operation] = free[stage]
            operations.pop(0)
    return max(free)


@given(chains, batches, st.integers(1, 50), st.integers(1, 50))
def test_a_step_takes_no_longer_than_the_stages_and_the_micro_batches(
    num_stages: int, num_micro_batches: int, forward: int, backward: int
) -> None:
    time = makespan(num_stages, num_micro_batches, forward, backward)
    assert time == (num_micro_batches + num_stages - 1) * (forward + backward)
    busy = num_micro_batches * (forward + backward)
    assert bubble(num_stages, num_micro_batches) == pytest.approx(1 - busy / time)


@given(chains, batches)
def test_the_bubble_of_stages_of_one_member_each(num_stages: int, num_micro_batches: int) -> None:
    told = bubble_of_members([[range(num_micro_batches)]] * num_stages)
    assert told == pytest.approx(bubble(num_stages, num_micro_batches))


@pytest.mark.parametrize("widths", [(2, 2), (4, 4, 4), (3, 1), (1, 3), (2, 1, 2)])
def test_the_bubble_of_stages_of_several_members(widths: tuple[int, ...]) -> None:
    """It is that of as many micro-batches as the members of the widest stage have each."""
    each = 6
    num = each * max(widths)
    stages = [[range(lane, num, width) for lane in range(width)] for width in widths]
    assert bubble_of_members(stages) == pytest.approx(bubble(len(widths), each))


def test_a_member_that_has_nothing_does_not_count() -> None:
    assert bubble_of_members([[range(8), ()], [range(8)]]) == pytest.approx(bubble(2, 8))


def test_how_far_a_member_is() -> None:
    operations = one_forward_one_backward(range(4), window_of(0, (1, 1, 1)))
    told = [progress_of(operations, num_done) for num_done in range(9)]
    assert told == [
        *(Progress(4, 0, 0), Progress(4, 0, 1), Progress(4, 0, 2), Progress(4, 0, 3)),
        *(Progress(4, 1, 2), Progress(4, 1, 3), Progress(4, 2, 2), Progress(4, 3, 1)),
        Progress(4, 4, 0),
    ]
    assert progress_of(forward_only(range(4)), 3) == Progress(4, 3, 0)
    assert progress_of((), 0) == Progress()


def test_the_order_of_a_chain_of_three() -> None:
    def order(stage: int) -> str:
        operations = one_forward_one_backward(range(4), window_of(stage, (1, 1, 1)))
        return " ".join(f"{'B' if op.is_backward else 'F'}{op.number}" for op in operations)

    assert order(0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert order(1) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert order(2) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_the_orders_of_a_wide_stage_behind_a_narrow_one() -> None:
    """One member of the first stage, two of the second, one of the last: in turn."""
    widths = (1, 2, 1)

    def order(stage: int, numbers: range) -> str:
        operations = one_forward_one_backward(numbers, window_of(stage, widths))
        return " ".join(f"{'B' if op.is_backward else 'F'}{op.number}" for op in operations)

    assert order(0, range(6)) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5"
    assert order(1, range(0, 6, 2)) == "F0 F2 B0 F4 B2 B4"
    assert order(1, range(1, 6, 2)) == "F1 F3 B1 F5 B3 B5"


@pytest.mark.parametrize("stage", [-1, 2])
def test_what_is_no_stage_has_no_window(stage: int) -> None:
    with pytest.raises(ValueError, match="no order"):
        window_of(stage, (1, 1))
