"""Coordinators take turns at a worker, whatever each of them has waiting: counted in passes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.inference.sessions.steps import Step, Turns

NOTHING: Any = None  # neither a model nor a cache is looked at


def step(owner: str, number: int, *, num_tokens: int = 1, batch: tuple[int, ...] = ()) -> Step:
    return Step(
        number,
        NOTHING,
        0,
        2,
        0 if num_tokens > 1 else 5,
        torch.zeros(1, num_tokens, 1),
        NOTHING,
        0.0,
        batch,
        owner=owner,
    )


def test_thirty_two_sessions_and_a_long_prompt_do_not_keep_one_session_waiting() -> None:
    turns, served = Turns(), []
    chunks, many = 40, 32
    for _ in range(30):
        waiting = [step("many", 100 + i) for i in range(many)]
        waiting += [step("many", 7, num_tokens=chunks), step("one", 1)]
        # Until the one session has had its step, which then comes again.
        for number in range(10):
            assert number < 2
            chosen = turns.next(waiting, now=0.0)
            served.append(chosen[0].owner)
            assert {each.owner for each in chosen} == {chosen[0].owner}
            waiting = [each for each in waiting if each not in chosen]
            if chosen[0].owner == "one":
                break
    counts = Counter(served)
    assert counts["one"] == 30
    assert counts["many"] <= 30


def test_batches_of_two_coordinators_may_have_the_same_number() -> None:
    turns = Turns()
    first, second = step("ann", 1, batch=(9, 2)), step("bob", 2, batch=(9, 2))
    assert turns.next([first, second], now=0.0) == []
    assert turns.seconds_until_next([first, second], now=0.0) > 0
    third = step("bob", 3, batch=(9, 2))
    assert turns.next([first, second, third], now=0.0) == [second, third]
    assert turns.next([first], now=0.06) == [first]


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from("abcd"),
        st.tuples(st.integers(0, 5), st.integers(0, 3)).filter(any),
        min_size=1,
    )
)
def test_each_that_has_something_waiting_gets_as_many_passes(
    owners: dict[str, tuple[int, int]],
) -> None:
    """Decoding sessions and prompts of each, which never end: none is ever more than one pass behind."""
    turns, counts = Turns(), Counter(dict.fromkeys(owners, 0))
    waiting = [
        step(owner, 10 * number + kind, num_tokens=9 if kind else 1)
        for owner, (num_decoded, num_prompts) in owners.items()
        for kind, num in ((0, num_decoded), (1, num_prompts))
        for number in range(num)
    ]
    for _ in range(60):
        chosen = turns.next(waiting, now=0.0)
        counts[chosen[0].owner] += 1
        waiting = [each for each in waiting if each not in chosen] + chosen
        assert max(counts.values()) - min(counts.values()) <= 1
