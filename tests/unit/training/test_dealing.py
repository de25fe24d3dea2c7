"""Each sample of an epoch is used exactly once, whatever members, rounds and leaders go through."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from neurogrid.errors import ConfigurationError, LocalProtocolError, RemoteProtocolError
from neurogrid.training.data.dealing import Dealer, SampleRange, SampleState
from neurogrid.training.data.spans import Spans

MEMBERS = ("a", "b", "c", "d")
Samples = Counter[tuple[int, int]]


def samples_of(ranges: Iterable[SampleRange]) -> Samples:
    return Counter(
        (slice_, number) for slice_, start, stop in ranges for number in range(start, stop)
    )


def ranges_of(samples: Samples) -> list[SampleRange]:
    return [SampleRange(slice_, each, each + 1) for slice_, each in samples.elements()]


class Run(RuleBasedStateMachine):
    """A run, and what a bystander with a list of every sample would note of it."""

    @initialize(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5), seed=st.integers(0, 9))
    def begin(self, sizes: list[int], seed: int) -> None:
        self.sizes, self.seed = sizes, seed
        self.dealer = Dealer(sizes, seed=seed)
        self.used: Samples = Counter()
        self.held: dict[str, Samples] = {member: Counter() for member in MEMBERS}
        # What was reported of rounds that are not decided, and what members lost since had reported.
        self.reported: dict[int, dict[str, Samples]] = {}
        self.orphans: set[tuple[int, str]] = set()
        self.late: dict[tuple[int, str], Samples] = {}
        self.round = 0

    @rule(
        member=st.sampled_from(MEMBERS),
        number=st.integers(0, 12),
        holds=st.lists(st.integers(-1, 5), max_size=4),
    )
    def deal(self, member: str, number: int, holds: list[int]) -> None:
        dealt = self.dealer.deal(member, number, holds=holds)
        assert sum(each.num_samples for each in dealt) == number
        self.held[member] += samples_of(dealt)

    @rule(member=st.sampled_from(MEMBERS), ahead=st.integers(0, 2), data=st.data())
    def contribute(self, member: str, ahead: int, data: st.DataObject) -> None:
        """Some of what it has; a second report takes the place of the first."""
        number = self.round + ahead
        theirs = self.reported.setdefault(number, {})
        self.held[member] += theirs.pop(member, Counter())
        self.orphans.discard((number, member))
        chosen = self.some_of(self.held[member], data)
        assert not self.dealer.contributed(member, number, ranges_of(chosen))
        self.held[member] -= chosen
        if chosen:
            theirs[member] = chosen

    @rule(members=st.sets(st.sampled_from(MEMBERS)), late=st.sets(st.sampled_from(MEMBERS)))
    def commit(self, members: set[str], late: set[str]) -> None:
        """A round is decided; reports of some contributors come afterwards."""
        number, self.round = self.round, self.round + 1
        theirs = self.reported.pop(number, {})
        late = {member for member in late & members if member not in theirs and self.held[member]}
        for member in late:
            self.late[number, member] = self.held[member]
            self.held[member] = Counter()
        used = samples_of(self.dealer.committed(number, members))
        expected: Samples = Counter()
        for member, samples in theirs.items():
            if member in members:
                expected += samples
            elif (number, member) not in self.orphans:
                self.held[member] += samples
        assert used == expected
        self.used += used
        assert not self.dealer.committed(number, members)
        for member in set(MEMBERS) - members:
            assert not self.dealer.contributed(member, number, ranges_of(self.held[member]))
        for member in members & theirs.keys():
            assert not self.dealer.contributed(member, number, ranges_of(theirs[member]))

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def report_late(self, data: st.DataObject) -> None:
        number, member = data.draw(st.sampled_from(sorted(self.late)))
        samples = self.late.pop((number, member))
        used = samples_of(self.dealer.contributed(member, number, ranges_of(samples)))
        assert used == samples
        self.used += used
        assert not self.dealer.contributed(member, number, ranges_of(samples))

    @rule(member=st.sampled_from(MEMBERS))
    def lose(self, member: str) -> None:
        if any(late == member for _, late in self.late):
            return  # its last report is under way
        free = self.dealer.lost(member)
        assert samples_of(free) == self.held[member]
        self.held[member] = Counter()
        self.orphans |= {
            (number, member) for number, theirs in self.reported.items() if member in theirs
        }

    @rule(member=st.sampled_from(MEMBERS), other=st.sampled_from(MEMBERS), ahead=st.integers(0, 1))
    def lie(self, member: str, other: str, ahead: int) -> None:
        """It reports what others have, too; nothing comes of it."""
        has = self.has(member)
        others = Counter(each for each in self.held[other] if each not in has)
        if not others:
            return
        before = pickle.dumps(self.dealer)
        with pytest.raises(RemoteProtocolError, match="does not have"):
            self.dealer.contributed(member, self.round + ahead, ranges_of(has + others))
        assert pickle.dumps(self.dealer) == before

    @invariant()
    def nothing_is_lost_or_twice(self) -> None:
        if not hasattr(self, "dealer"):
            return
        counts = self.dealer.counts()
        assert sum(counts.values()) == sum(self.sizes)
        assert self.dealer.num_used == self.used.total()
        # An epoch that is done used each once, and none is ahead of those that are under way.
        used = [
            self.used[slice_, each]
            for slice_, size in enumerate(self.sizes)
            for each in range(size)
        ]
        assert min(used) >= self.dealer.epoch
        for member in MEMBERS:
            late = sum((each for (_, m), each in self.late.items() if m == member), Counter())
            assert samples_of(self.dealer.assigned(member)) == self.held[member] + late

    def teardown(self) -> None:
        """All that is under way ends: then each sample was used as often as there were epochs."""
        if not hasattr(self, "dealer"):
            return
        for number, member in sorted(self.late):
            self.used += samples_of(
                self.dealer.contributed(member, number, ranges_of(self.late[number, member]))
            )
        for number in range(self.round, self.round + 3):
            self.used += samples_of(self.dealer.committed(number, MEMBERS))
        for member in MEMBERS:
            self.dealer.lost(member)
        num_epochs = self.dealer._num_epochs = self.dealer._next_epoch
        ranges = self.dealer.deal("a", num_epochs * sum(self.sizes))
        self.dealer.contributed("a", self.round + 3, ranges)
        self.used += samples_of(self.dealer.committed(self.round + 3, ["a"]))
        assert self.dealer.epoch == num_epochs
        everything = [(s, each) for s, size in enumerate(self.sizes) for each in range(size)]
        assert {self.used[each] for each in everything} == {num_epochs}

    def has(self, member: str) -> Samples:
        """What the dealer takes for a member's."""
        has = self.held[member].copy()
        for theirs in self.reported.values():
            has += theirs.get(member, Counter())
        for (_, late), samples in self.late.items():
            has += samples if late == member else Counter()
        return has

    def some_of(self, samples: Samples, data: st.DataObject) -> Samples:
        if not samples:
            return Counter()
        return Counter(data.draw(st.lists(st.sampled_from(sorted(samples)), unique=True)))


Run.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRun = Run.TestCase


def sizes(*numbers: int, seed: int = 0, num_epochs: int | None = None) -> Dealer:
    return Dealer(numbers, seed=seed, num_epochs=num_epochs)


def test_a_member_goes_on_with_its_slice_and_others_begin_new_ones() -> None:
    dealer = sizes(10, 10, 10, 10)
    (first,) = dealer.deal("a", 4)
    (second,) = dealer.deal("b", 4)
    assert first.slice != second.slice
    assert dealer.deal("a", 4) == (SampleRange(first.slice, 4, 8),)


def test_what_a_member_holds_is_dealt_to_it() -> None:
    for held in range(6):
        dealer = sizes(*[5] * 6)
        assert {each.slice for each in dealer.deal("a", 5, holds=[held, 99, -3])} == {held}


def test_who_has_no_slice_left_helps_with_what_others_have_begun() -> None:
    dealer = sizes(10, 10)
    mine, other = dealer.deal("a", 1)[0].slice, dealer.deal("b", 3)[0].slice
    dealer.deal("a", 9)
    assert dealer.deal("a", 2) == (SampleRange(other, 3, 5),)
    assert dealer.deal("b", 5) == (SampleRange(other, 5, 10),)
    assert mine != other


def test_what_a_lost_member_had_is_dealt_first() -> None:
    dealer = sizes(10, 10, 10)
    had = dealer.deal("a", 5)
    assert dealer.lost("a") == had
    assert dealer.deal("b", 5) == had
    # And then the rest of the slice, which nobody goes on with.
    assert dealer.deal("c", 2) == (SampleRange(had[0].slice, 5, 7),)


@given(st.data())
def test_what_is_dealt_in_few_ranges_is_what_is_dealt_first(data: st.DataObject) -> None:
    """Dealt again by its number of samples it is the same, and so is all that comes after it."""
    numbers = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=12))
    one, other = sizes(*numbers, num_epochs=2), sizes(*numbers, num_epochs=2)
    for _ in range(20):
        member = data.draw(st.sampled_from("abc"))
        if data.draw(st.booleans()):
            assert one.lost(member) == other.lost(member)
            continue
        wanted, most = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 6))
        holds = data.draw(st.lists(st.integers(0, 12), max_size=4))
        dealt = one.deal(member, wanted, holds=holds, max_ranges=most)
        num_samples = sum(each.num_samples for each in dealt)
        assert len(dealt) <= most
        assert num_samples or not one.counts()[SampleState.AVAILABLE]
        assert other.deal(member, num_samples, holds=holds) == dealt


def test_what_was_contributed_is_nobodys_until_the_round_is_decided() -> None:
    dealer = sizes(4)
    had = dealer.deal("a", 4)
    dealer.contributed("a", 7, had)
    assert dealer.lost("a") == ()
    assert dealer.counts()[SampleState.ASSIGNED] == 4
    dealer.deal("b", 4)
    assert dealer.epoch == 0
    assert dealer.committed(7, ["a", "b"]) == had
    assert dealer.epoch == 1


def test_a_round_without_a_member_leaves_it_what_it_has() -> None:
    dealer = sizes(8)
    had = dealer.deal("a", 3)
    dealer.contributed("a", 1, had)
    assert dealer.committed(1, ["b"]) == ()
    dealer.contributed("a", 2, had)
    assert dealer.committed(2, ["a"]) == had


def test_epochs_differ_in_order_and_are_the_same_for_one_seed() -> None:
    def order(seed: int) -> list[int]:
        dealer = sizes(*[1] * 20, seed=seed)
        return [dealer.deal("a", 1)[0].slice for _ in range(40)]

    one = order(1)
    assert one == order(1) != order(2)
    assert sorted(one[:20]) == sorted(one[20:]) == list(range(20))
    assert one[:20] != one[20:]


def test_after_the_last_epoch_nothing_is_dealt() -> None:
    dealer = sizes(3, 2, num_epochs=2)
    assert sum(each.num_samples for each in dealer.deal("a", 8)) == 8
    assert sum(each.num_samples for each in dealer.deal("b", 8)) == 2
    assert dealer.deal("c", 8) == ()
    freed = dealer.lost("b")
    assert sorted(dealer.deal("c", 8)) == sorted(freed)


def test_a_large_epoch_takes_little_room() -> None:
    dealer = sizes(*[1000] * 500)
    for number in range(500):
        ranges = dealer.deal("a", 777)
        dealer.contributed("a", number, ranges)
        dealer.committed(number, ["a"])
    assert dealer.num_used == 500 * 777
    assert len(pickle.dumps(dealer)) < 40_000


@pytest.mark.parametrize("numbers", [(), (3, 0), (-1,)])
def test_data_without_samples_are_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="at least one"):
        Dealer(numbers, seed=0)


@pytest.mark.parametrize(
    "given_", [SampleRange(2, 0, 1), SampleRange(-1, 0, 1), SampleRange(0, 0, 11), (0, 3, 3)]
)
def test_ranges_that_are_none_are_refused(given_: tuple[int, int, int]) -> None:
    dealer = sizes(10, 10)
    dealer.deal("a", 20)
    with pytest.raises(RemoteProtocolError, match="a names s"):
        dealer.contributed("a", 0, [SampleRange(*given_)])


def test_a_range_counts_once_in_a_report() -> None:
    dealer = sizes(10)
    had = dealer.deal("a", 5)
    with pytest.raises(RemoteProtocolError, match="does not have"):
        dealer.contributed("a", 0, [*had, SampleRange(0, 2, 3)])


def test_a_round_is_decided_once() -> None:
    dealer = sizes(10)
    dealer.committed(3, ["a", "b"])
    with pytest.raises(LocalProtocolError, match="with \\['a', 'b'\\], and now with \\['a'\\]"):
        dealer.committed(3, ["a"])


@given(st.data())
def test_spans_are_a_set(data: st.DataObject) -> None:
    spans, numbers = Spans(), set[int]()
    for _ in range(data.draw(st.integers(0, 12))):
        start = data.draw(st.integers(0, 20))
        stop = data.draw(st.integers(start, 21))
        wanted = set(range(start, stop))
        if data.draw(st.booleans()):
            if wanted and not wanted & numbers:
                spans.add(start, stop)
                numbers |= wanted
            else:
                with pytest.raises(ValueError, match="empty"):
                    spans.add(start, stop)
        else:
            limit = data.draw(st.none() | st.integers(0, 6))
            taken = [n for a, b in spans.take(start, stop, limit) for n in range(a, b)]
            assert taken == sorted(wanted & numbers)[:limit]
            numbers -= set(taken)
        listed = list(spans)
        assert [n for a, b in listed for n in range(a, b)] == sorted(numbers)
        assert all(b < c for (_, b), (c, _) in pairwise(listed))
        assert len(spans) == len(numbers)
        assert spans.count(start, stop) == len(wanted & numbers)
        assert list(spans.copy()) == listed
