"""Places for connections: never more than there are, a share for each address, and who gives way for whom."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from neurogrid.server.http.places import NoPlaceError, Places, client_address, share_of

TOTAL, SHARE = 4, 3
ADDRESSES = st.sampled_from("abc")


class EveryCourse(RuleBasedStateMachine):
    """Against a list of all holders, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Places[int] = Places(TOTAL, SHARE)
        self.model: list[tuple[int, str]] = []
        self.kept: set[int] = set()
        self.num_come = 0

    @rule(address=ADDRESSES)
    def take(self, address: str) -> None:
        self.num_come += 1
        held = [holder for holder, of in self.model if of == address]
        leaver: int | None = None
        if len(held) >= SHARE or len(self.model) >= TOTAL:
            among = held if len(held) >= SHARE else [holder for holder, _ in self.model]
            leaver = next((holder for holder in among if holder not in self.kept), None)
            assert self.places.has_room(address) is (leaver is not None)
            if leaver is None:
                with pytest.raises(NoPlaceError):
                    self.places.take(self.num_come, address)
                return
        assert self.places.take(self.num_come, address) == leaver
        self.model = [(holder, of) for holder, of in self.model if holder != leaver]
        self.model.append((self.num_come, address))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        holder, _ = data.draw(st.sampled_from(self.model))
        self.places.keep(holder)
        self.kept.add(holder)

    @precondition(lambda self: self.num_come)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        gone = data.draw(st.integers(1, self.num_come))  # also who has no place any more
        self.places.leave(gone)
        self.model = [(holder, of) for holder, of in self.model if holder != gone]

    @invariant()
    def are_the_same(self) -> None:
        assert list(self.places) == [holder for holder, _ in self.model]
        assert len(self.places) == len(self.model)


TestEveryCourse = EveryCourse.TestCase


def test_keeping_a_place_that_was_lost_keeps_nothing() -> None:
    places: Places[int] = Places(1, 1)
    places.take(1, "a")
    assert places.take(2, "a") == 1
    places.keep(1)
    assert places.take(3, "a") == 2


def test_a_share_is_three_quarters_and_never_nothing() -> None:
    assert [share_of(total) for total in (1, 2, 32, 512)] == [1, 1, 24, 384]


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.2"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:0:1", "2001:db8::/64"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("testclient", "testclient"),
    ],
)
def test_a_machine_is_one_address(host: str, address: str) -> None:
    assert client_address(host) == address
