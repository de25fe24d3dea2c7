"""Who may join a run, and who counts: the pure machine, and the bans of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.p2p.hosts.identity import Identity
from neurogrid.training.joining import (
    MAX_BANS,
    Ban,
    Banned,
    BanRefusedError,
    Bans,
    Became,
    BeganTrial,
    Invitation,
    JoinMachine,
    JoinRules,
    Outcome,
    Refused,
    RefusedFor,
    Spent,
    Waits,
)

RUN = bytes(range(16))
NOW = 1_800_000_000.0
RULES = JoinRules(
    max_members=3,
    max_trials=2,
    max_waiting=2,
    wait_seconds=60,
    trial_seconds=100,
    max_starts=4,
    window_seconds=1000,
    retry_seconds=50,
)


@cache
def peer(number: int) -> str:
    """A peer id; the same for a number as long as the tests run."""
    return Identity.generate().peer_id


LEADER = peer(-1)
OPEN = Invitation(RUN, LEADER, 1, int(NOW) - 10, int(NOW) + 10**6, is_open=True)
CLOSED = replace(OPEN, serial=2, is_open=False)


def machine(rules: JoinRules = RULES, **of_before: Any) -> JoinMachine:
    return JoinMachine(rules, RUN, LEADER, **of_before)


def never(peer: str, round_number: int) -> bool | None:
    return None


def right(*peers: str) -> Callable[[str, int], bool | None]:
    return lambda peer, round_number: True if peer in peers else None


def wrong(*peers: str) -> Callable[[str, int], bool | None]:
    return lambda peer, round_number: False if peer in peers else None


def test_who_comes_by_an_open_invitation_counts_once_a_round_was_found_right() -> None:
    joins, a = machine(), peer(0)
    assert joins.applied(a, OPEN, now=NOW) == [BeganTrial(a, NOW + 100)]
    assert joins.state.takes_part(a)
    assert not joins.state.counts(a)
    assert joins.decided(1, never, now=NOW + 1) == []
    assert not joins.state.counts(a)
    assert joins.decided(2, right(a), now=NOW + 2) == [Became(a)]
    assert joins.state.counts(a)


def test_who_comes_by_one_that_is_not_open_counts_at_once_while_there_is_room() -> None:
    joins = machine()
    for number in range(3):
        assert joins.applied(peer(number), CLOSED, now=NOW) == [Became(peer(number))]
    [told] = joins.applied(peer(3), CLOSED, now=NOW)
    assert told == Refused(peer(3), RefusedFor.FULL, 50)
    joins.left(peer(0), now=NOW)
    assert joins.applied(peer(3), CLOSED, now=NOW) == [Became(peer(3))]


def test_a_round_counts_once_and_none_of_before_the_trial() -> None:
    joins, a = machine(replace(RULES, trial_rounds=2)), peer(0)
    joins.decided(5, never, now=NOW)
    joins.applied(a, OPEN, now=NOW)
    assert joins.decided(5, right(a), now=NOW) == []
    assert joins.decided(6, right(a), now=NOW) == []
    assert joins.decided(6, right(a), now=NOW) == []
    assert not joins.state.counts(a)
    assert joins.decided(7, right(a), now=NOW) == [Became(a)]


def test_a_wrong_claim_is_the_end_of_a_trial_and_of_a_member() -> None:
    joins, a, b = machine(), peer(0), peer(1)
    joins.applied(a, CLOSED, now=NOW)
    joins.applied(b, OPEN, now=NOW)
    told = joins.decided(1, wrong(a, b), now=NOW)
    assert [each.ban.peer for each in told if isinstance(each, Banned)] == [b, a]
    assert [each.ban.number for each in told if isinstance(each, Banned)] == [1, 2]
    for each in (a, b):
        assert not joins.state.takes_part(each)
        assert joins.applied(each, CLOSED, now=NOW + 10**9) == [
            Refused(each, RefusedFor.BANNED, None)
        ]


def test_a_ban_that_has_an_end_ends_and_the_next_has_another_number() -> None:
    joins, a = machine(replace(RULES, ban_seconds=500)), peer(0)
    [told] = joins.ejected(a, now=NOW, evidence=bytes(32))
    assert isinstance(told, Banned)
    assert (told.ban.at, told.ban.until, told.ban.evidence) == (NOW, NOW + 500, bytes(32))
    assert joins.ejected(a, now=NOW + 1) == []
    assert joins.applied(a, OPEN, now=NOW + 100) == [Refused(a, RefusedFor.BANNED, 400)]
    assert joins.applied(a, OPEN, now=NOW + 500) == [BeganTrial(a, NOW + 600)]
    [again] = joins.ejected(a, now=NOW + 501)
    assert isinstance(again, Banned)
    assert again.ban.number == 2


def test_a_trial_has_an_end_and_who_leaves_it_waits_like_who_was_refused() -> None:
    joins, a, b = machine(), peer(0), peer(1)
    joins.applied(a, OPEN, now=NOW)
    joins.applied(b, OPEN, now=NOW)
    assert joins.left(b, now=NOW + 1) == [Refused(b, RefusedFor.LEFT, 50)]
    assert joins.applied(b, OPEN, now=NOW + 2) == [Refused(b, RefusedFor.TOO_SOON, 49)]
    assert joins.next_at == NOW + 100
    assert joins.passed(now=NOW + 99) == []
    assert joins.passed(now=NOW + 100) == [Refused(a, RefusedFor.NOT_FOUND_RIGHT, 50)]
    assert joins.decided(9, right(a), now=NOW + 101) == []
    assert not joins.state.counts(a)


def test_those_for_whom_there_is_no_room_wait_in_turn_but_not_for_ever() -> None:
    joins = machine()
    for number in (0, 1):
        joins.applied(peer(number), OPEN, now=NOW)
    assert joins.applied(peer(2), OPEN, now=NOW + 1) == [Waits(peer(2), NOW + 61)]
    assert joins.applied(peer(3), OPEN, now=NOW + 2) == [Waits(peer(3), NOW + 62)]
    assert joins.applied(peer(2), OPEN, now=NOW + 3) == []
    assert joins.applied(peer(4), OPEN, now=NOW + 3) == [Refused(peer(4), RefusedFor.FULL, 50)]
    told = joins.left(peer(0), now=NOW + 10)
    assert told == [
        Refused(peer(0), RefusedFor.LEFT, 50),
        BeganTrial(peer(2), NOW + 110),
    ]
    assert joins.passed(now=NOW + 62) == [Refused(peer(3), RefusedFor.FULL, 50)]


def test_those_on_trial_take_places_of_members() -> None:
    joins = machine()
    for number in (0, 1):
        joins.applied(peer(number), CLOSED, now=NOW)
    assert joins.applied(peer(2), OPEN, now=NOW) == [BeganTrial(peer(2), NOW + 100)]
    assert joins.applied(peer(3), OPEN, now=NOW) == [Waits(peer(3), NOW + 60)]
    assert joins.applied(peer(4), CLOSED, now=NOW) == [Refused(peer(4), RefusedFor.FULL, 50)]
    assert joins.left(peer(0), now=NOW + 1) == [BeganTrial(peer(3), NOW + 101)]


def test_trials_begin_no_faster_than_the_rate() -> None:
    joins = machine(replace(RULES, max_waiting=9))
    for number in range(6):
        joins.applied(peer(number), OPEN, now=NOW + 10 * number)
        joins.left(peer(number), now=NOW + 10 * number)
    joins.applied(peer(7), OPEN, now=NOW + 960)
    assert peer(7) in joins.state.waiting
    assert joins.next_at == NOW + 1000
    assert joins.passed(now=NOW + 1000) == [BeganTrial(peer(7), NOW + 1100)]


@pytest.mark.parametrize(
    ("invitation", "reason"),
    [
        (replace(OPEN, run=bytes(16)), RefusedFor.WRONG_RUN),
        (replace(OPEN, leader=peer(9)), RefusedFor.WRONG_RUN),
        (replace(OPEN, not_before=int(NOW) + 5), RefusedFor.NOT_YET),
        (replace(OPEN, not_after=int(NOW)), RefusedFor.EXPIRED),
    ],
)
def test_what_an_invitation_is_not_good_for(invitation: Invitation, reason: RefusedFor) -> None:
    joins = machine()
    [told] = joins.applied(peer(0), invitation, now=NOW)
    assert isinstance(told, Refused)
    assert told.reason is reason
    assert told.retry_after == (5 if reason is RefusedFor.NOT_YET else 50)
    assert joins.state == machine().state
    # By another one it comes at once.
    assert joins.applied(peer(0), CLOSED, now=NOW) == [Became(peer(0))]


def test_as_many_come_by_an_invitation_as_it_says_also_once_some_have_left() -> None:
    joins, two = machine(), replace(OPEN, max_uses=2)
    told = [joins.applied(peer(number), two, now=NOW) for number in (0, 1)]
    assert told == [
        [Spent(peer(number), 1), BeganTrial(peer(number), NOW + 100)] for number in (0, 1)
    ]
    joins.left(peer(0), now=NOW)
    assert joins.applied(peer(2), two, now=NOW) == [Refused(peer(2), RefusedFor.USED_UP, 50)]
    # Its use is its own.
    assert joins.applied(peer(0), two, now=NOW + 50) == [BeganTrial(peer(0), NOW + 150)]
    assert joins.applied(peer(2), replace(two, serial=3), now=NOW + 50) == [
        Waits(peer(2), NOW + 110)
    ]
    # Who waits has spent nothing yet.
    assert joins.state.uses == {1: {peer(0), peer(1)}}
    # Nor does a leader that comes back forget them.
    again = machine(spent=[use for each in told for use in each if isinstance(use, Spent)])
    assert again.applied(peer(2), two, now=NOW) == [Refused(peer(2), RefusedFor.USED_UP, 50)]
    assert again.applied(peer(1), two, now=NOW) == [BeganTrial(peer(1), NOW + 100)]


def test_a_leader_that_comes_back_has_its_bans_and_its_members() -> None:
    joins, a, b, c = machine(), peer(0), peer(1), peer(2)
    for each in (a, b):
        joins.applied(each, CLOSED, now=NOW)
    [told] = joins.ejected(b, now=NOW)
    assert isinstance(told, Banned)
    again = machine(bans=[told.ban], admitted=[a, b], round_number=7)
    assert not again.state.takes_part(a)
    assert again.applied(a, OPEN, now=NOW) == [Became(a, is_back=True)]
    assert again.state.counts(a)
    assert not again.state.takes_part(b)
    assert again.applied(b, OPEN, now=NOW) == [Refused(b, RefusedFor.BANNED, None)]
    [second] = again.ejected(c, now=NOW)
    assert isinstance(second, Banned)
    assert second.ban.number == 2


def test_members_of_before_take_no_place_until_they_come() -> None:
    before = [peer(number) for number in range(RULES.max_members + 1)]
    joins, new = machine(admitted=before), peer(-2)
    assert joins.applied(new, CLOSED, now=NOW) == [Became(new)]
    for each in before[1 : RULES.max_members]:
        assert joins.applied(each, OPEN, now=NOW) == [Became(each, is_back=True)]
    late = before[0]
    assert joins.applied(late, OPEN, now=NOW) == [Refused(late, RefusedFor.FULL, 50)]
    # Once there is room; and once only.
    joins.left(new, now=NOW)
    assert joins.applied(late, OPEN, now=NOW) == [Became(late, is_back=True)]
    joins.left(late, now=NOW)
    assert isinstance(joins.applied(late, OPEN, now=NOW)[0], BeganTrial)
    # Who is ejected before it comes is none of them.
    [told] = joins.ejected(before[-1], now=NOW)
    assert isinstance(told, Banned)
    assert joins.state.admitted == frozenset()


def test_a_run_with_too_many_bans_takes_nobody_new() -> None:
    bans = [
        Ban(RUN, LEADER, f"12D3KooW{number:04d}".replace("0", "z"), number, int(NOW))
        for number in range(1, MAX_BANS + 1)
    ]
    bans = list({ban.peer: ban for ban in bans}.values())
    joins = machine(bans=bans)
    missing = MAX_BANS - len(joins.state.bans)
    for number in range(missing):
        joins.ejected(f"12D3KooWxx{number:04d}".replace("0", "y"), now=NOW)
    assert len(joins.state.bans) == MAX_BANS
    assert joins.applied(peer(0), OPEN, now=NOW) == [Refused(peer(0), RefusedFor.FULL, 50)]
    assert joins.applied(peer(0), CLOSED, now=NOW) == [Became(peer(0))]


# Whatever happens


@dataclass
class Story:
    """Events, and what must be so after each: kept apart from the machine."""

    joins: JoinMachine
    now: float = NOW
    num_right: dict[str, set[int]] = field(default_factory=dict)
    trusted: set[str] = field(default_factory=set)
    begun_at: list[float] = field(default_factory=list)
    after: dict[str, int] = field(default_factory=dict)
    banned: dict[str, int] = field(default_factory=dict)

    def told(self, outcomes: list[Outcome], invitation: Invitation | None = None) -> None:
        for each in outcomes:
            if isinstance(each, BeganTrial):
                self.num_right[each.peer] = set()
                self.after[each.peer] = self.joins.state.round
                self.begun_at.append(self.now)
            elif isinstance(each, Became) and invitation is not None and not invitation.is_open:
                self.trusted.add(each.peer)
            elif isinstance(each, Banned):
                self.banned[each.ban.peer] = each.ban.until
            if isinstance(each, Refused | Banned):
                name = each.peer if isinstance(each, Refused) else each.ban.peer
                if not self.joins.state.counts(name):
                    self.trusted.discard(name)

    def check(self) -> None:
        state, rules = self.joins.state, self.joins.rules
        inside = [*state.waiting, *state.trials, *state.members]
        assert len(inside) == len(set(inside))
        assert state.num_inside <= rules.max_members
        assert len(state.trials) <= rules.max_trials
        assert len(state.waiting) <= rules.max_waiting
        lately = [at for at in self.begun_at if at > self.now - rules.window_seconds]
        assert len(lately) <= rules.max_starts
        for each in inside:
            until = self.banned.get(each)
            assert until is None or 0 < until <= self.now, "who is banned is inside"
        for each in state.members:
            rounds = self.num_right.get(each, set())
            assert each in self.trusted or len(rounds) >= rules.trial_rounds
        assert all(each.until > self.now for each in (*state.trials.values(),))
        assert all(each.until > self.now for each in (*state.waiting.values(),))
        numbers = [ban.number for ban in state.bans.values()]
        assert len(numbers) == len(set(numbers))
        assert max(numbers, default=0) == state.num_bans
        assert LEADER not in inside
        assert all(len(peers) <= 2 for peers in state.uses.values())
        due = self.joins.next_at
        assert due is None or due > self.now


EVENTS = st.one_of(
    st.tuples(st.just("open"), st.integers(0, 6)),
    st.tuples(st.just("limited"), st.integers(0, 6)),
    st.tuples(st.just("closed"), st.integers(0, 6)),
    st.tuples(st.just("leaves"), st.integers(0, 6)),
    st.tuples(st.just("ejected"), st.integers(-1, 6)),
    st.tuples(st.just("right"), st.integers(0, 127)),
    st.tuples(st.just("wrong"), st.integers(0, 127)),
    st.tuples(st.just("nobody looks"), st.just(0)),
    st.tuples(st.just("passes"), st.sampled_from([1, 10, 49, 60, 100, 999, 1000])),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(EVENTS, max_size=60), st.sampled_from([None, 200.0]), st.integers(1, 2))
def test_nobody_counts_that_was_not_found_right_or_trusted(
    events: list[tuple[str, int]], ban_seconds: float | None, trial_rounds: int
) -> None:
    joins = machine(replace(RULES, ban_seconds=ban_seconds, trial_rounds=trial_rounds))
    story = Story(joins)
    invitations = {"open": OPEN, "limited": replace(OPEN, serial=5, max_uses=2), "closed": CLOSED}
    for what, number in events:
        chosen = {peer(each) for each in range(7) if number >> each & 1}
        if what in invitations:
            invitation = invitations[what]
            story.told(joins.applied(peer(number), invitation, now=story.now), invitation)
            before = joins.state
            if not any(
                isinstance(each, Refused)
                for each in joins.applied(peer(number), invitation, now=story.now)
            ):
                assert joins.state == before  # what is said again changes nothing
        elif what == "leaves":
            story.told(joins.left(peer(number), now=story.now))
            if not joins.state.counts(peer(number)):
                story.trusted.discard(peer(number))
        elif what == "ejected":
            story.told(joins.ejected(peer(number), now=story.now))
        elif what == "passes":
            story.now += number
            story.told(joins.passed(now=story.now))
        else:
            round_number = joins.state.round + 1
            if what == "right":
                for each in chosen & joins.state.trials.keys():
                    story.num_right[each].add(round_number)
            found = {"right": right(*chosen), "wrong": wrong(*chosen)}.get(what, never)
            story.told(joins.decided(round_number, found, now=story.now))
            if what == "wrong":
                assert not any(
                    joins.state.takes_part(each) for each in chosen & story.banned.keys()
                )
        story.check()


# The bans of a run, elsewhere


def ban(number: int, of: int = 0, **changes: Any) -> Ban:
    return replace(Ban(RUN, LEADER, peer(of), number, int(NOW)), **changes)


def test_a_ban_that_is_replayed_or_over_or_of_another_run_is_refused() -> None:
    bans = Bans(RUN, LEADER)
    short = ban(1, until=int(NOW) + 10)
    assert bans.take(short, NOW)
    assert not bans.take(short, NOW)
    assert bans.take(ban(5), NOW)
    for old, why in (
        (short, "is replayed"),
        (ban(5, until=int(NOW) + 99), "is replayed"),
        (ban(6, of=1, until=int(NOW) + 10), "has expired"),
        (ban(7, run=bytes(16)), "another run"),
        (ban(7, leader=peer(3)), "another run"),
    ):
        with pytest.raises(BanRefusedError, match=why):
            bans.take(old, NOW + 20)
    assert bans.of(peer(0), NOW + 10**9) == ban(5)
    assert bans.of(peer(1), NOW) is None


def test_a_ban_that_is_over_does_not_come_again() -> None:
    bans, short = Bans(RUN, LEADER), ban(1, until=int(NOW) + 10)
    bans.take(short, NOW)
    assert bans.of(peer(0), NOW + 9.9) == short
    assert bans.of(peer(0), NOW + 10) is None
    assert not bans.take(short, NOW + 10)
    assert bans.of(peer(0), NOW + 10) is None
    assert (len(bans), bans.last_number) == (1, 1)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), max_size=20))
def test_whatever_order_bans_come_in_the_highest_number_holds(told: list[tuple[int, int]]) -> None:
    bans = Bans(RUN, LEADER)
    for number, of in told:
        try:
            bans.take(ban(number, of), NOW)
        except BanRefusedError:
            assert any(earlier >= number and whose == of for earlier, whose in told)
    highest = {of: max(number for number, whose in told if whose == of) for _, of in told}
    assert {each.peer: each.number for each in bans} == {
        peer(of): number for of, number in highest.items()
    }
    assert [each.number for each in bans] == sorted(highest.values())
