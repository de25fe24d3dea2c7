"""What is proposed, and how many of it: as a pure machine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.inference.speculation.acceptance import (
    LEAST_GAIN,
    Acceptance,
    PassCosts,
    length_that_pays,
)
from neurogrid.inference.speculation.draft_pace import DraftPace, DraftRecord
from neurogrid.inference.speculation.prompt_lookup import PromptLookup
from neurogrid.inference.speculation.speculation import MAX_PROPOSED, Proposer

COSTS = PassCosts()
TOKENS = st.lists(st.integers(0, 5), max_size=60)


def proposer(prompt: Sequence[int]) -> Proposer:
    return Proposer(PromptLookup(prompt), PassCosts())


def proposed_by(machine: Proposer, room: int, num_sessions: int) -> list[int]:
    return trio.run(partial(machine.propose, (), room, num_sessions=num_sessions))


def proposed(lookup: PromptLookup, most: int = MAX_PROPOSED) -> list[int]:
    return lookup.propose(most, COSTS, least_gain=LEAST_GAIN)


@given(TOKENS, TOKENS, st.integers(-1, 40), st.integers(1, 5))
def test_there_is_never_more_than_room(
    prompt: list[int], text: list[int], room: int, num_sessions: int
) -> None:
    machine = proposer(prompt)
    for token_id in text:
        machine.add(token_id)
        tokens = proposed_by(machine, room, num_sessions)
        assert len(tokens) <= max(min(room, MAX_PROPOSED), 0)
        assert set(tokens) <= {*prompt, *text}


@given(TOKENS, st.integers(0, 60))
def test_what_is_known_does_not_depend_on_when_it_came(text: list[int], cut: int) -> None:
    """A prompt is no evidence of what is accepted, but its places are found as those of what was written since."""
    whole, grown = PromptLookup(text), PromptLookup(text[:cut])
    for token_id in text[cut:]:
        grown.add(token_id)
    assert whole._behind == grown._behind
    assert whole._tokens == grown._tokens


@given(st.permutations(range(80)))
@settings(max_examples=20)
def test_nothing_is_proposed_in_text_that_never_repeats(text: list[int]) -> None:
    machine = proposer(text[:20])
    for token_id in text[20:]:
        assert proposed_by(machine, MAX_PROPOSED, 1) == []
        machine.add(token_id)


def test_it_goes_down_to_nothing_where_nothing_is_accepted_and_comes_back_by_itself() -> None:
    """Each time that `7 8 9` comes something else follows; then all of a text comes again."""
    lookup = PromptLookup([])
    lengths = []
    for at in range(40):
        _add(lookup, [7, 8, 9])
        lengths.append(len(proposed(lookup)))
        _add(lookup, [200 + at])
    assert any(lengths[:5])
    assert not any(lengths[10:]), "rejected again and again, and still proposed"
    text = list(range(300, 340))
    _add(lookup, text)
    lengths = []
    for token_id in text:
        _add(lookup, [token_id])
        lengths.append(len(proposed(lookup)))
    assert max(lengths) >= 8
    assert proposed(lookup, 3) == [300, 301, 302][: len(proposed(lookup, 3))]


def test_text_that_repeats_is_proposed_up_to_the_bound() -> None:
    text = list(range(100, 220))
    lookup = PromptLookup(text)
    _add(lookup, text[:60])
    assert proposed(lookup) == text[60 : 60 + MAX_PROPOSED]
    assert proposed(lookup, 5) == text[60:65]
    assert proposed(lookup, 0) == []


def test_what_repeats_itself_up_to_its_end_goes_on() -> None:
    lookup = PromptLookup([])
    _add(lookup, [1, 2, 3] * 20)
    assert proposed(lookup, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_the_longest_match_is_followed() -> None:
    """`3` was followed by 9 last, but `1 2 3` by 4."""
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 7, 8, 0, 3, 9, 1, 2, 3])
    assert proposed(lookup)[0] == 4


PASSES = st.lists(st.tuples(st.integers(1, 17), st.floats(0.01, 1)), max_size=40)


@given(st.lists(st.floats(0, 1), max_size=20), PASSES, st.floats(1, 8))
def test_the_length_gives_more_than_was_asked_for_or_nothing(
    rates: list[float], passes: list[tuple[int, float]], least_gain: float
) -> None:
    costs = PassCosts()
    for num_tokens, seconds in passes:
        costs.took(num_tokens, seconds)
    assert costs.several >= 0
    assert 0 <= costs.row <= 1

    def gain(length: int) -> float:
        tokens, chance = 1.0, 1.0
        for rate in rates[:length]:
            chance *= rate
            tokens += chance
        return tokens / (1 + (costs.several if length else 0) + costs.row * length)

    length = length_that_pays(rates, costs, least_gain=least_gain)
    assert 0 <= length <= len(rates)
    assert length == 0 or gain(length) > least_gain
    assert all(
        gain(other) <= max(gain(length), least_gain) + 1e-9 for other in range(len(rates) + 1)
    )


def test_others_that_share_passes_make_it_dearer() -> None:
    text = list(range(100, 160))
    machine = proposer(text)
    for token_id in text[:30]:
        machine.add(token_id)
    assert proposed_by(machine, MAX_PROPOSED, 1)
    assert not proposed_by(machine, MAX_PROPOSED, 8)


def test_passes_are_priced_as_they_turn_out() -> None:
    costs = PassCosts()
    usual = costs.row
    for _ in range(40):
        costs.took(1, 0.120)
        costs.took(9, 0.128)
    assert costs.row < usual / 4  # far away, a row costs next to nothing
    for _ in range(40):
        costs.took(9, 0.120 * 5)
    assert costs.row > usual
    dear = costs.row
    costs.took(9, 1000.0)  # a worker was lost on the way
    assert costs.row == dear
    one = costs._one
    costs.took(1, 1000.0)
    assert costs._one == one


@pytest.mark.parametrize(
    ("several", "row"), [(0.0, 0.0), (0.0, 0.15), (1.0, 0.1), (1.0, 0.0), (0.3, 0.6)]
)
def test_what_several_cost_however_many_they_are_is_told_from_what_each_costs(
    several: float, row: float
) -> None:
    costs = PassCosts()
    for number in range(60):
        further = 1 + 5 * number % 16
        costs.took(1, 0.002)
        costs.took(1 + further, 0.002 * (1 + several + row * further))
    assert costs.several == pytest.approx(several, abs=0.05)
    assert costs.row == pytest.approx(row, abs=0.01)


def test_prices_at_which_nothing_is_proposed_are_forgotten() -> None:
    """As of a minute in which the machine did something else."""
    costs = PassCosts()
    costs.took(1, 0.01)
    for _ in range(20):
        costs.took(17, 0.01 * 40)

    def length() -> int:
        return length_that_pays([0.95] * 16, costs, least_gain=LEAST_GAIN)

    assert length() == 0
    for _ in range(2000):
        costs.took(1, 0.01)
    assert length() > 3


def test_short_proposals_are_given_up_where_passes_of_several_are_dear_and_long_ones_are_not() -> (
    None
):
    """As of a small model near by: a pass of one token is prepared, and takes half as long as one of two."""
    costs = PassCosts()
    costs.took(1, 0.002)
    for _ in range(2):
        costs.took(3, 0.0042)
    assert length_that_pays([0.5] * 3, costs, least_gain=LEAST_GAIN) == 0
    assert length_that_pays([0.95] * 16, costs, least_gain=LEAST_GAIN) > 3


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=200))
def test_rates_are_chances(seen: list[tuple[int, bool]]) -> None:
    acceptance = Acceptance()
    for num_matched, came in seen:
        acceptance.saw(num_matched, came)
    assert all(0 < acceptance.rate(n) < 1 for n in range(1, 50))


def _add(lookup: PromptLookup, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        lookup.add(token_id)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 20),
            st.lists(st.floats(0, 1), min_size=1, max_size=20),
            st.floats(0, 1),
            st.integers(0, 20),
        ),
        max_size=30,
    )
)
def test_a_draft_is_never_longer_than_its_room(
    drafts: list[tuple[int, list[float], float, int]],
) -> None:
    pace = DraftPace(PassCosts(), DraftRecord())
    for most, probabilities, seconds, num_right in drafts:
        if not pace.begins(most, least_gain=LEAST_GAIN):
            pace.came(99)
            continue
        number = 0
        while pace.goes_on(number, probabilities[min(number, len(probabilities) - 1)]):
            number += 1
        assert number < most
        tokens = pace.drafted(seconds)
        assert tokens == list(range(len(tokens)))
        for token_id in range(min(num_right, number + 1)):
            pace.came(token_id)
        pace.came(99)


def test_drafts_that_do_not_pay_are_left_alone_and_tried_again() -> None:
    costs = PassCosts()
    costs.took(1, 0.1)
    pace = DraftPace(costs, DraftRecord())

    def drafts(num_tokens: int, right: int) -> int:
        """How many are written for so many tokens, of each of which so many are right."""
        num_drafts = 0
        for _ in range(num_tokens):
            if pace.begins(4, least_gain=LEAST_GAIN):
                num_drafts += 1
                number = 0
                while pace.goes_on(number, 0.9):
                    number += 1
                pace.drafted(0.01 * (number + 1))
                for token_id in range(min(right, number + 1)):
                    pace.came(token_id)
            pace.came(99)
        return num_drafts

    assert drafts(20, 0) < 20
    assert drafts(600, 0) < 30
    assert drafts(600, 4) > 100
    assert drafts(50, 4) == 50


def test_a_draft_model_that_does_not_pay_is_not_tried_anew_in_each_generation() -> None:
    costs, record = PassCosts(), DraftRecord()
    costs.took(1, 0.002)
    num_drafts = 0
    for _ in range(20):
        pace = DraftPace(costs, record)
        for _ in range(30):
            if pace.begins(4, least_gain=LEAST_GAIN):
                num_drafts += 1
                while pace.goes_on(1, 0.5):
                    pass
                pace.drafted(0.002)
            pace.came(99)
    assert 3 < num_drafts < 20


@pytest.mark.parametrize(("price", "share"), [(1.2, 0.02), (5.0, 0.05), (40.0, 0.06)])
def test_what_a_draft_model_that_is_too_dear_costs_in_one_long_generation(
    price: float, share: float
) -> None:
    """Of each draft all is right, and it costs more than passes: so dear as it is, little is lost with it."""
    costs, record = PassCosts(), DraftRecord()
    costs.took(1, 0.1)
    pace = DraftPace(costs, record)
    cost, num_tokens = 0.0, 0
    while num_tokens < 10_000:
        if pace.begins(4, least_gain=LEAST_GAIN):
            number = 1
            while pace.goes_on(0, 0.99):
                number += 1
            pace.drafted(0.1 * price * number)
            cost += price * number
        pace.came(0)
        num_tokens += 1
    assert 0 < cost < share * num_tokens


@pytest.mark.parametrize(
    ("reading", "price", "least", "most"),
    [
        pytest.param(2.0, 0.1, 100, 100, id="pays"),
        pytest.param(30.0, 0.1, 100, 100, id="pays back a long prompt"),
        pytest.param(30.0, 0.9, 1, 6, id="pays for itself, not for the prompt"),
        pytest.param(30.0, 1.5, 1, 6, id="never pays"),
        pytest.param(90.0, 0.1, 1, 6, id="the prompt is too long for what follows"),
    ],
)
def test_a_draft_model_reads_no_prompts_whose_reading_does_not_pay(
    reading: float, price: float, least: int, most: int
) -> None:
    """In 100 generations of 96 tokens, all drafted rightly; `reading` and `price` are in passes."""
    costs, record = PassCosts(), DraftRecord()
    costs.took(1, 0.1)
    num_read = 0
    for _ in range(100):
        pace = DraftPace(costs, record)
        num_tokens, has_read = 0, False
        while num_tokens < 96:
            number = 0
            if pace.begins(4, least_gain=LEAST_GAIN):
                number = 1
                while pace.goes_on(0, 0.99):
                    number += 1
                caught_up = 0.0 if has_read else 0.1 * reading
                number = len(pace.drafted(0.1 * price * number, caught_up=caught_up))
                has_read = True
            for _ in range(number + 1):
                pace.came(0)
            num_tokens += number + 1
        pace.close()
        num_read += has_read
    assert least <= num_read <= most
