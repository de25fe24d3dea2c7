"""The common weights of a run: parts in turn, what is late stays on top, and the rounds at the end that only sync."""

from __future__ import annotations

import pytest
import torch

from neurogrid.errors import ConfigurationError
from neurogrid.training.averaging.groups import Outcome
from neurogrid.training.averaging.parts import Layout
from neurogrid.training.runs.outer_state import OuterState
from neurogrid.training.runs.run_file import parse_run_file
from neurogrid.training.wire.runs import SYNC_SHARE

LAYOUT = Layout(("a", "b", "c"), ((3,), (2,), (2,)))


def state(*, num_parts: int = 1, freshness: float = 1.0) -> OuterState:
    return OuterState(
        LAYOUT, torch.zeros(7), lr=0.7, momentum=0.9, num_parts=num_parts, freshness=freshness
    )


def outcome(
    number: int, values: torch.Tensor, weight: float, *, contributed: bool = True
) -> Outcome:
    return Outcome(number, values, ("a", "b"), (weight, weight), contributed)


def test_a_round_of_training_is_an_outer_step() -> None:
    member = state()
    member.weights.fill_(1.0)
    member.apply(outcome(1, member.contribution(), 8.0))
    assert torch.allclose(member.common, torch.full((7,), 0.7 * 1.9))
    assert torch.equal(member.weights, member.common)
    assert member.step_norm is not None
    assert abs(member.step_norm - float(member.common.norm())) < 1e-6


def test_a_round_that_only_syncs_takes_the_mean_and_has_no_momentum() -> None:
    member = state()
    member.weights.fill_(1.0)
    member.apply(outcome(1, member.contribution(), 8.0))
    before = member.common.clone()
    member.weights.add_(0.5)
    member.apply(outcome(2, member.contribution(), SYNC_SHARE))
    assert torch.allclose(member.common, before + 0.5)
    assert member.step_norm is None


def test_a_round_with_anything_that_was_trained_is_an_outer_step() -> None:
    member = state()
    member.weights.fill_(1.0)
    late = Outcome(1, member.contribution(), ("a", "b"), (SYNC_SHARE, 8.0 + SYNC_SHARE), True)
    member.apply(late)
    assert torch.allclose(member.common, torch.full((7,), 0.7 * 1.9))


def test_parts_have_their_turn_and_the_others_stay_as_they_are() -> None:
    member = state(num_parts=3)
    member.weights.fill_(1.0)
    for number, (start, stop) in enumerate(LAYOUT.spans, 1):
        before = member.common.clone()
        member.apply(outcome(number, member.contribution(), 4.0))
        changed = (member.common != before).nonzero().flatten().tolist()
        assert changed == list(range(start, stop))


def test_what_is_late_stays_on_top_of_the_common_weights() -> None:
    member = state()
    member.weights.fill_(1.0)
    member.apply(outcome(1, torch.full((7,), 2.0), 4.0, contributed=False))
    assert torch.allclose(member.weights, member.common + 1.0)


def overlapping() -> OuterState:
    return OuterState(LAYOUT, torch.zeros(7), lr=0.7, momentum=0.9, num_parts=3, overlaps=True)


def test_what_is_agreed_while_a_member_trains_on_is_mixed_in_afterwards() -> None:
    member = overlapping()
    member.weights.fill_(1.0)
    member.apply(outcome(1, member.contribution(), 4.0))
    assert torch.equal(member.weights, torch.ones(7)), "it trains on with what it has"
    member.weights.add_(1.0)
    member.settle()
    agreed = 0.7 * 1.9
    assert torch.allclose(member.weights[:3], torch.full((3,), (2.0 + agreed) / 2))
    assert torch.equal(member.weights[3:], torch.full((4,), 2.0))
    member.settle()
    assert torch.allclose(member.weights[:3], torch.full((3,), (2.0 + agreed) / 2)), "once"


def test_what_is_late_keeps_its_distance_to_the_common_weights() -> None:
    member = overlapping()
    member.weights.fill_(1.0)
    member.apply(outcome(1, torch.full((3,), 2.0), 4.0, contributed=False))
    member.settle()
    assert torch.allclose(member.weights[:3], member.common[:3] + 1.0)


def test_weights_that_were_kept_are_mixed_as_they_would_have_been() -> None:
    """They are kept when their part is sent: what was agreed comes to them after the next work, also then."""
    member, resumed = overlapping(), overlapping()
    member.weights.fill_(1.0)
    vector, kept = member.contribution(), member.weights.clone()
    member.apply(outcome(1, vector, 4.0))
    resumed.load(member.state())
    resumed.take_own(kept)
    for each in (member, resumed):
        each.weights.add_(0.25)
        each.settle()
    assert torch.equal(member.weights, resumed.weights)
    assert torch.equal(member.common, resumed.common)


def test_what_is_late_counts_by_its_age() -> None:
    """Each round that goes on without a member leaves a part of what it had learned before that round."""
    member = state(freshness=0.5)
    member.weights.fill_(1.0)
    for number in (1, 2):
        member.apply(outcome(number, torch.zeros(7), 4.0, contributed=False))
        member.weights.add_(1.0)  # it trains on
    assert torch.allclose(member.contribution(), torch.full((7,), (1 / 2 + 1) / 2 + 1))
    member.apply(outcome(3, member.contribution(), 4.0))
    assert torch.equal(member.weights, member.common)
    assert not member.contribution().any()


def test_who_begins_again_where_the_others_are_has_nothing_that_is_old() -> None:
    others, member = state(), state(freshness=0.5)
    others.weights.fill_(1.0)
    others.apply(outcome(1, others.contribution(), 8.0))
    member.weights.fill_(5.0)  # and was away meanwhile
    member.load(others.state())
    assert torch.equal(member.weights, others.common)
    assert not member.contribution().any()


def test_of_parts_only_the_one_that_was_late_is_older() -> None:
    member = state(num_parts=3, freshness=0.5)
    member.weights.fill_(1.0)
    member.apply(outcome(1, torch.zeros(3), 4.0, contributed=False))
    assert member.weights.tolist() == [0.5] * 3 + [1.0] * 4


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ('method = "streaming"\noverlap = true\n', "is 1 with overlap true"),
        ('method = "distro"\n', 'is 1 with method "distro"'),
    ],
)
def test_freshness_is_refused_where_nothing_goes_by_it(section: str, why: str) -> None:
    whole = '[model]\nconfig = "c"\n[data]\npath = "d"\n[stop]\nrounds = 9\n[outer]\n'
    assert parse_run_file(whole + "freshness = 0.5\n").outer.freshness == 0.5
    with pytest.raises(ConfigurationError, match=why):
        parse_run_file(whole + section + "freshness = 0.5\n")
    with pytest.raises(ConfigurationError):
        parse_run_file(whole + "freshness = 0\n")
