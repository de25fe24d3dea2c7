"""One forward, one backward: driven as a chain whose messages arrive whenever they like, and by the clock."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.training.stages.schedule import (
    Operation,
    bubble,
    forward_only,
    most_under_way,
    one_forward_one_backward,
)

chains = st.integers(1, 8)
batches = st.integers(1, 24)


class Stage:
    """A stage that holds what came, and does the next of its operations once it can."""

    def __init__(self, number: int, operations: tuple[Operation, ...]) -> None:
        self.number = number
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


def next_of(operation: Operation, stage: int, num_stages: int) -> tuple[int, Operation]:
    """The stage and its operation that the outcome of this one is for; below 0: nobody's."""
    if operation.is_backward:
        return stage - 1, operation
    if stage == num_stages - 1:
        return stage, operation._replace(is_backward=True)
    return stage + 1, operation


def drive(stages: list[Stage], num_micro_batches: int, random: Random) -> None:
    """Let tensors arrive and stages compute in any order, until nothing more can happen."""
    numbers = list(range(num_micro_batches))
    on_the_way = [(0, Operation(False, number)) for number in numbers]
    while True:
        ready = [stage for stage in stages if stage.can_run]
        if not ready and not on_the_way:
            return
        if on_the_way and (not ready or random.random() < 0.5):
            to, operation = on_the_way.pop(random.randrange(len(on_the_way)))
            stages[to].arrive(operation)
            continue
        stage = random.choice(ready)
        operation = stage.run()
        to, wanted = next_of(operation, stage.number, len(stages))
        if to >= 0 and wanted in stages[to].left:
            on_the_way.append((to, wanted))


@given(chains, batches, st.randoms(use_true_random=False))
def test_all_is_done_once_in_order_and_within_memory_whatever_comes_first(
    num_stages: int, num_micro_batches: int, random: Random
) -> None:
    stages = [
        Stage(number, one_forward_one_backward(number, num_stages, num_micro_batches))
        for number in range(num_stages)
    ]
    drive(stages, num_micro_batches, random)
    for stage in stages:
        assert not stage.left
        for is_backward in (False, True):
            done = [op.number for op in stage.done if op.is_backward == is_backward]
            assert done == list(range(num_micro_batches))
        assert stage.most_held == most_under_way(stage.number, num_stages, num_micro_batches)
        # What waits at a stage is bounded by what its sender, or it itself, has under way.
        if stage.number:
            assert stage.most_early[False] <= most_under_way(
                stage.number - 1, num_stages, num_micro_batches
            )
        assert stage.most_early[True] <= stage.most_held


@given(chains, batches, st.randoms(use_true_random=False))
def test_an_evaluation_goes_through(
    num_stages: int, num_micro_batches: int, random: Random
) -> None:
    stages = [Stage(number, forward_only(num_micro_batches)) for number in range(num_stages)]
    drive(stages, num_micro_batches, random)
    for stage in stages:
        assert not stage.left
        assert [op.number for op in stage.done] == list(range(num_micro_batches))


def makespan(num_stages: int, num_micro_batches: int, forward: int, backward: int) -> int:
    """When the last operation ends, if tensors take no time."""
    ended: dict[tuple[int, Operation], int] = {}
    left = [
        list(one_forward_one_backward(number, num_stages, num_micro_batches))
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


def test_the_order_of_a_chain_of_three() -> None:
    def order(stage: int) -> str:
        operations = one_forward_one_backward(stage, 3, 4)
        return " ".join(f"{'B' if op.is_backward else 'F'}{op.number}" for op in operations)

    assert order(0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert order(1) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert order(2) == "F0 B0 F1 B1 F2 B2 F3 B3"


@pytest.mark.parametrize(
    ("stage", "num_stages", "num_micro_batches"), [(-1, 2, 1), (2, 2, 1), (0, 1, 0)]
)
def test_what_is_no_chain_has_no_order(stage: int, num_stages: int, num_micro_batches: int) -> None:
    with pytest.raises(ValueError, match="no order"):
        one_forward_one_backward(stage, num_stages, num_micro_batches)
