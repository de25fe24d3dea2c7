"""A group of which too many are lost at once is given up, and no other is."""

from __future__ import annotations

import pytest

from neurogrid.training.leading.group_watch import GroupWatch
from neurogrid.training.wire import Member

MEMBERS = tuple(Member(peer, number) for number, peer in enumerate("labcd", 1))


def look(
    watch: GroupWatch, now: float, *, lost: str = "", ended: str = "", leader: str | None = "l"
) -> str:
    return watch.look(
        MEMBERS,
        leader=leader,
        lost=[member for member in MEMBERS if member.peer in lost],
        ended=[member for member in MEMBERS if member.peer in ended],
        now=now,
    )


@pytest.mark.parametrize("lost", ["", "a", "ab", "cd"])
def test_half_of_it_is_enough_under_its_leader(lost: str) -> None:
    watch = GroupWatch(3.0)
    assert not any(look(watch, float(now), lost=lost) for now in range(100))


def test_members_that_may_come_back_are_waited_for() -> None:
    watch = GroupWatch(3.0)
    assert look(watch, 0.0, lost="abc") == ""
    assert look(watch, 2.9, lost="abc") == ""
    assert look(watch, 3.0, lost="ab") == ""
    # From here on anew.
    assert look(watch, 4.0, lost="abc") == ""
    assert look(watch, 6.9, lost="abc") == ""
    assert look(watch, 7.0, lost="abc") == "2 of 5 are left, leader included, and it takes 3"


def test_members_that_have_ended_are_not() -> None:
    watch = GroupWatch(1000.0)
    assert look(watch, 0.0, ended="ab") == ""
    assert look(watch, 1.0, lost="c", ended="ab") == ""  # c may come back
    assert look(watch, 2.0, ended="abc") != ""


def test_without_its_leader_it_takes_more_than_half() -> None:
    four = MEMBERS[:4]
    for leader, lost, is_lost in (("l", "ab", False), ("a", "al", True), (None, "ab", True)):
        gone = [member for member in four if member.peer in lost]
        found = GroupWatch(9.0).look(four, leader=leader, lost=(), ended=gone, now=0.0)
        assert bool(found) == is_lost
