"""Offers, and leases over a network that delays, doubles and loses messages, by a clock of the test's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from neurogrid.errors import RequestRefusedError
from neurogrid.p2p.wire import ErrorCode
from neurogrid.training.runs.resources import (
    LEASE_SECONDS,
    OFFER_SECONDS,
    Bid,
    LeaseBook,
    LeaseTable,
    Need,
    Resources,
    choose_offers,
    lacking,
)

ALL = Resources(memory=100, storage=50, cores=8, gpu="one")
RUN, OTHER = bytes(16), bytes(range(16))


def code_of(call: Callable[[], object]) -> ErrorCode:
    with pytest.raises(RequestRefusedError) as caught:
        call()
    return ErrorCode(caught.value.code)


def table(resources: Resources = ALL, price: float = 0.0) -> LeaseTable:
    return LeaseTable(resources, price=price, draw=count(1).__next__)


@pytest.mark.parametrize(
    ("need", "word"),
    [
        (Need(memory=101), "memory"),
        (Need(storage=51), "storage"),
        (Need(cores=9), "cores"),
        (Need(price=1.5), "paid"),
    ],
)
def test_what_is_lacking_is_named(need: Need, word: str) -> None:
    assert word in lacking(Bid(ALL, price=2.0), need)
    assert code_of(lambda: table(price=2.0).offer("a", RUN, need, 0.0)) is ErrorCode.NOT_SUPPORTED


def test_memory_that_is_lacking_is_told_in_bytes() -> None:
    told = lacking(Bid(Resources(memory=1024**3)), Need(memory=5 * 10**9))
    assert told == (
        "5,000,000,000 bytes of memory (4.66 GiB) are needed, and 1,073,741,824 (1.00 GiB) are lent (--memory-limit)"
    )


def test_a_gpu_is_lacking() -> None:
    assert "GPU" in lacking(Bid(Resources()), Need(gpu=True))
    assert lacking(Bid(ALL), Need(100, 50, 8, gpu=True, price=0.0)) == ""


def test_the_cheapest_for_what_it_is_worth_is_chosen() -> None:
    need = Need(memory=10, cores=2, price=5.0)
    bids = {
        "dear": Bid(Resources(memory=10, cores=2), 6.0),
        "small": Bid(Resources(memory=9, cores=2), 0.0),
        "just": Bid(Resources(memory=10, cores=2), 3.0),
        "twice": Bid(Resources(memory=20, cores=4), 4.0),
        "free": Bid(Resources(memory=10, cores=2), 0.0),
        "free and more": Bid(Resources(memory=10, cores=8), 0.0),
        "free with a GPU": Bid(Resources(memory=10, cores=8, gpu="one"), 0.0),
    }
    best = ("free with a GPU", "free and more", "free", "twice", "just")
    assert choose_offers(bids, need) == best
    assert choose_offers(bids, need, 2) == best[:2]
    assert choose_offers({"b": Bid(ALL), "a": Bid(ALL)}, Need()) == ("a", "b")


def test_what_is_offered_is_kept_for_a_moment() -> None:
    leases = table()
    leases.offer("a", RUN, Need(memory=60), 0.0)
    assert leases.free(0.4) == Resources(40, 50, 8, "one")
    assert code_of(lambda: leases.offer("b", OTHER, Need(memory=60), 0.4)) is ErrorCode.BUSY
    assert leases.offer("b", OTHER, Need(memory=40, gpu=True), 0.4).until == 0.4 + OFFER_SECONDS
    assert leases.free(0.4).gpu == ""
    assert leases.free(0.9) == ALL
    assert {lease.leader for lease in leases.expire(0.9)} == {"a", "b"}


def test_one_run_trains_at_a_time() -> None:
    leases = table()
    one = leases.offer("a", RUN, Need(memory=1), 0.0)
    two = leases.offer("b", OTHER, Need(memory=1), 0.0)
    assert leases.take("b", OTHER, two.number, 0.1).until == 0.1 + LEASE_SECONDS
    assert code_of(lambda: leases.take("a", RUN, one.number, 0.2)) is ErrorCode.BUSY
    assert code_of(lambda: leases.offer("a", RUN, Need(), 0.2)) is ErrorCode.BUSY
    assert leases.running(10.0) is not None
    assert leases.running(10.2) is None
    assert leases.offer("a", RUN, Need(memory=100), 10.2)


def test_a_lease_is_its_leaders_and_its_runs() -> None:
    leases = table()
    number = leases.offer("a", RUN, Need(), 0.0).number
    for call in (
        lambda: leases.take("b", RUN, number, 0.1),
        lambda: leases.take("a", OTHER, number, 0.1),
        lambda: leases.take("a", RUN, number + 1, 0.1),
        lambda: leases.take("a", RUN, number, OFFER_SECONDS),
        lambda: leases.renew("a", RUN, number, 0.1),
    ):
        assert code_of(call) is ErrorCode.UNAUTHORIZED
    leases.take("a", RUN, number, 0.1)
    assert code_of(lambda: leases.renew("b", RUN, number, 0.2)) is ErrorCode.UNAUTHORIZED
    assert leases.release("b", RUN) is None
    assert leases.renew("a", RUN, number, 5.0).until == 5.0 + LEASE_SECONDS
    assert leases.take("a", RUN, number, 6.0).until == 6.0 + LEASE_SECONDS
    assert leases.release("a", RUN) is not None
    assert leases.free(6.0) == ALL


def test_a_leader_that_was_started_again_takes_its_own_over() -> None:
    leases = table()
    old = leases.offer("a", RUN, Need(memory=100), 0.0).number
    leases.take("a", RUN, old, 0.1)
    new = leases.offer("a", RUN, Need(memory=100), 1.0).number
    assert leases.running(1.0) is not None
    leases.take("a", RUN, new, 1.1)
    assert code_of(lambda: leases.renew("a", RUN, old, 1.2)) is ErrorCode.UNAUTHORIZED
    assert leases.renew("a", RUN, new, 1.2)


def test_leases_are_renewed_at_two_thirds_and_asked_again() -> None:
    book = LeaseBook()
    book.granted("m", 7, 9.0, asked_at=1.0)
    assert book.due(6.9) == ()
    assert book.due(7.0) == (("m", 7),)
    assert book.due(7.1) == ()
    assert book.due(8.0) == (("m", 7),)
    book.renewed("m", 8, 9.0, asked_at=8.0)
    assert book.number("m", 9.9) == 7
    assert book.number("m", 10.0) is None
    book.renewed("m", 7, 9.0, asked_at=8.0)
    assert book.number("m", 16.9) == 7
    book.renewed("m", 7, 9.0, asked_at=7.0)
    assert (book.expire(16.9), book.expire(17.0)) == ((), ("m",))


class Leasing(RuleBasedStateMachine):
    """Two leaders, one of which may be started again, and a worker."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = table()
        self.books = {"a": LeaseBook(), "b": LeaseBook()}
        self.runs = {"a": RUN, "b": OTHER}
        # Under way to the worker, and back.
        self.asked: list[Callable[[], None]] = []

    def at_the_worker(self, leader: str, what: str, number: int, need: Need, sent: float) -> None:
        run = self.runs[leader]
        try:
            if what == "ask":
                lease = self.table.offer(leader, run, need, self.now)
                self.send(leader, "start", lease.number, need)
            elif what == "start":
                lease = self.table.take(leader, run, number, self.now)
                seconds = lease.until - self.now
                self.asked.append(
                    lambda: self.books[leader].granted("m", number, seconds, asked_at=sent)
                )
            else:
                self.table.renew(leader, run, number, self.now)
                self.asked.append(
                    lambda: self.books[leader].renewed("m", number, LEASE_SECONDS, asked_at=sent)
                )
        except RequestRefusedError:
            return

    def send(self, leader: str, what: str, number: int, need: Need) -> None:
        sent = self.now
        self.asked.append(lambda: self.at_the_worker(leader, what, number, need, sent))

    @rule(leader=st.sampled_from("ab"), memory=st.integers(0, 110), gpu=st.booleans())
    def ask(self, leader: str, memory: int, gpu: bool) -> None:
        self.send(leader, "ask", 0, Need(memory=memory, gpu=gpu))

    @rule(seconds=st.sampled_from([0.1, 0.4, 0.5, 1.0, 3.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for leader, book in self.books.items():
            for _, number in book.due(self.now):
                self.send(leader, "renew", number, Need())

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), keep=st.booleans())
    def arrive(self, data: st.DataObject, keep: bool) -> None:
        place = data.draw(st.integers(0, len(self.asked) - 1))
        call = self.asked[place] if keep else self.asked.pop(place)
        call()

    @rule(leader=st.sampled_from("ab"))
    def restart(self, leader: str) -> None:
        self.books[leader] = LeaseBook()

    @rule()
    def expire(self) -> None:
        self.table.expire(self.now)

    @invariant()
    def what_is_kept_and_what_is_free_is_what_there_is(self) -> None:
        live = [x for x in self.table._leases.values() if self.now < x.until]
        running = [lease for lease in live if lease.is_taken]
        assert len(running) <= 1
        others = [lease for lease in live if not lease.is_taken]
        assert sum(lease.need.memory for lease in others) <= ALL.memory
        assert sum(lease.need.gpu for lease in others) <= 1
        if not live:
            assert self.table.free(self.now) == ALL

    @invariant()
    def a_leader_has_no_more_than_the_worker_gave(self) -> None:
        for leader, book in self.books.items():
            number = book.number("m", self.now)
            if number is not None:
                running = self.table.running(self.now)
                assert running is not None
                assert running.leader == leader


TestLeasing = Leasing.TestCase
TestLeasing.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_book_says_how_long_a_lease_lasts() -> None:
    book = LeaseBook()
    book.granted("a", 7, 10.0, asked_at=100.0)
    assert (book.left("a", 104.0), book.left("a", 110.0), book.left("b", 104.0)) == (
        6.0,
        None,
        None,
    )
    book.drop("a")
    assert book.left("a", 104.0) is None


def test_a_lease_that_is_handed_over() -> None:
    """A deputy that takes over has what its leader had, and may ask again as that could."""
    table = LeaseTable(Resources(memory=8))
    lease = table.offer("leader", RUN, Need(memory=8), 0.0)
    table.take("leader", RUN, lease.number, 0.1)
    table.hand_over("other", "deputy", RUN)
    assert table.running(0.2) == table.take("leader", RUN, lease.number, 0.1)
    table.hand_over("leader", "deputy", RUN)
    with pytest.raises(RequestRefusedError):
        table.renew("leader", RUN, lease.number, 0.2)
    assert table.renew("deputy", RUN, lease.number, 0.2).leader == "deputy"
    again = table.offer("deputy", RUN, Need(memory=8), 0.3)
    assert table.take("deputy", RUN, again.number, 0.4).leader == "deputy"
