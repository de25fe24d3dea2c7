"""A journal that its deputy copies and goes on with: what a reader takes, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from neurogrid.errors import LocalProtocolError
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.training.runs.audit import audit
from neurogrid.training.runs.entries import (
    DeputyEntry,
    EndEntry,
    Entry,
    JoinedEntry,
    LedEntry,
    LeftEntry,
    ResumedEntry,
    RunEntry,
    entry_of,
)
from neurogrid.training.runs.journal import (
    Journal,
    JournalCopy,
    JournalError,
    Recorded,
    read_journal,
)
from neurogrid.training.runs.state import Occupant
from neurogrid.training.runs.terms import Copies, Place, Sitting, promise_bytes
from neurogrid.training.runs.verdict import verify_journal

LEADER, DEPUTY, OTHER = (Identity.generate() for _ in range(3))
MEMBERS = [Identity.generate() for _ in range(3)]
RUN = RunEntry(bytes(range(16)), LEADER.peer_id, bytes(32), bytes(32), (12,), 7)
JOINED = tuple(
    JoinedEntry(seat, each.peer_id, 100 + seat, f"m{seat}") for seat, each in enumerate(MEMBERS)
)
NAMED = DeputyEntry(5, DEPUTY.peer_id)


def promises(place: Place, *members: Identity, term: int = 1) -> tuple[tuple[str, int, bytes], ...]:
    """What members with these identities sign, by their seats."""
    found = []
    for each in members:
        number = 100 + MEMBERS.index(each) if each in MEMBERS else 1
        said = promise_bytes(RUN.run, term, DEPUTY.peer_id, number, place)
        found.append((each.peer_id, number, each.key_pair.private_key.sign(said)))
    return tuple(found)


def led_by(journal: Path, *members: Identity) -> LedEntry:
    """What the deputy writes behind its copy."""
    copy = JournalCopy(journal, lambda recorded: None)
    copy.close()
    return LedEntry(1, DEPUTY.peer_id, promises(copy.place, *members))


def written(path: Path, *entries: Entry) -> Path:
    """A journal of the leader."""
    with Journal.open(path, LEADER) as journal:
        for entry in (RUN, *JOINED, *entries):
            journal.append(entry)
    return path


def test_a_deputy_goes_on_with_its_copy(tmp_path: Path) -> None:
    path = written(tmp_path / "journal", NAMED)
    entry = led_by(path, *MEMBERS[:2])
    with Journal.take_over(path, DEPUTY, entry) as journal:
        journal.append(LeftEntry(2, "lost"))
        assert journal.place.line == 7
    with Journal.open(path, DEPUTY) as journal:
        journal.append(EndEntry("over"))
    recorded = read_journal(path)
    assert [each.entry.kind for each in recorded[-4:]] == ["deputy", "led", "left", "end"]
    assert entry_of(json.loads(json.dumps(entry.json()))) == entry
    found = audit([each.entry for each in recorded])
    assert found.problems == ()
    verdict = verify_journal(path)
    assert verdict.is_whole
    # The leader of before leads it no more.
    with pytest.raises(JournalError, match=f"a run that {DEPUTY.peer_id} leads"):
        Journal.open(path, LEADER)
    with pytest.raises(LocalProtocolError), Journal.open(path, DEPUTY) as journal:
        journal.append(replace(entry, leader=OTHER.peer_id))


@pytest.mark.parametrize(
    "wrong",
    [
        {"term": 2},
        {"leader": OTHER.peer_id},
        {"promises": ((MEMBERS[0].peer_id, 100, bytes(64)),)},
        {"promises": (("nobody", 100, bytes(64)),)},
    ],
)
def test_promises_that_no_member_signed(tmp_path: Path, wrong: dict[str, object]) -> None:
    path = written(tmp_path / "journal", NAMED)
    entry = replace(led_by(path, *MEMBERS[:2]), **wrong)  # type: ignore[arg-type]
    identity = OTHER if "leader" in wrong else DEPUTY
    Journal.take_over(path, identity, entry).close()
    with pytest.raises(JournalError, match=r"line 6 has a promise that .* did not sign") as caught:
        read_journal(path)
    assert caught.value.line == 6


def test_a_takeover_of_another_place(tmp_path: Path) -> None:
    """Promises are for the journal as it was: with another line before it they are none."""
    path = written(tmp_path / "journal", NAMED)
    entry = led_by(path, *MEMBERS)
    with Journal.open(path, LEADER) as journal:
        journal.append(LeftEntry(0, "lost"))
    Journal.take_over(path, DEPUTY, entry).close()
    with pytest.raises(JournalError, match="line 7 has a promise"):
        read_journal(path)


def test_what_the_old_leader_signs_behind_a_takeover(tmp_path: Path) -> None:
    path = written(tmp_path / "journal", NAMED)
    Journal.take_over(path, DEPUTY, led_by(path, *MEMBERS)).close()
    journal = Journal._open(path, LEADER, lambda: 0.0, may_take_over=True)
    with journal:
        journal.append(LeftEntry(0, "lost"))
    with pytest.raises(JournalError, match="line 7 is not as its leader signed it"):
        read_journal(path)


def problems(*entries: Entry) -> tuple[str, ...]:
    return audit([RUN, *JOINED, *entries]).problems


def led(*seats: int, term: int = 1, leader: Identity = DEPUTY, later: int = 0) -> LedEntry:
    told = tuple((MEMBERS[seat].peer_id, 100 + seat + later, bytes(64)) for seat in seats)
    return LedEntry(term, leader.peer_id, told)


def test_what_the_audit_says_of_takeovers() -> None:
    assert problems(NAMED, led(0, 1)) == ()
    assert "1 of 3 members, which are not most" in problems(NAMED, led(0))[0]
    # Of another incarnation than sits there, and of the same member twice.
    assert "0 of 3 members" in problems(NAMED, led(0, 1, later=50))[0]
    assert "1 of 3 members" in problems(NAMED, led(0, 0))[0]
    assert "was no deputy" in problems(NAMED, led(0, 1, leader=OTHER))[0]
    assert "was no deputy" in problems(led(0, 1))[0]
    assert "was no deputy" in problems(NAMED, DeputyEntry(6, ""), led(0, 1))[0]
    assert "deputy 5 was named after deputy 5" in problems(NAMED, NAMED)[0]
    # A deputy is that of one leader.
    assert "was no deputy" in problems(NAMED, led(0, 1), led(0, 1, term=2))[0]
    again = (NAMED, led(0, 1), NAMED, led(0, 1, term=1))
    assert "term 1 comes after term 1" in problems(*again)[0]
    # Whoever left is asked no more, and after the end nothing else comes.
    assert problems(NAMED, LeftEntry(2, ""), LeftEntry(1, ""), led(0)) == ()
    assert "0 of 0 members" in problems(NAMED, ResumedEntry(0), led(0, 1))[0]


def test_a_copy_comes_in_pieces(tmp_path: Path) -> None:
    path = written(tmp_path / "journal", NAMED)
    Journal.take_over(path, DEPUTY, led_by(path, *MEMBERS)).close()
    data = path.read_bytes()
    told: list[Recorded] = []
    copy = JournalCopy(tmp_path / "copy", told.append)
    assert (copy.leader, copy.run, copy.place) == ("", b"", Place())
    for start in range(0, len(data), 100):
        assert copy.num_received == start
        copy.take(data[start : start + 100])
        assert copy.num_bytes == data.rfind(b"\n", 0, start + 100) + 1
    assert told == list(read_journal(path))
    assert (copy.leader, copy.run) == (DEPUTY.peer_id, RUN.run)
    copy.take(b'{"line":7')
    copy.close()
    again: list[Recorded] = []
    copy = JournalCopy(tmp_path / "copy", again.append)
    assert (again, copy.num_received) == (told, len(data))
    copy.close()


def test_a_copy_that_begins_empty_is_whole_with_all_that_there_was(tmp_path: Path) -> None:
    path, of_copy = written(tmp_path / "journal", NAMED), tmp_path / "copy"
    lines = path.read_bytes().splitlines(keepends=True)
    num_bytes = len(b"".join(lines[:4]))

    def opened() -> JournalCopy:
        return JournalCopy(of_copy, lambda recorded: None)

    copy = opened()
    assert not copy.is_whole
    copy.follow(num_bytes)
    copy.take(lines[0] + lines[1] + lines[2][:9])
    assert not copy.is_whole
    copy.close()
    # Nobody leads by it, not even who has written these lines.
    with pytest.raises(JournalError, match="not whole"):
        Journal.open(of_copy, LEADER)
    # Nor after it was opened again, as long as nobody says how much there is.
    copy = opened()
    copy.take(lines[2] + lines[3])
    assert not copy.is_whole
    copy.follow(num_bytes)
    assert copy.is_whole
    # From here on it is, whatever more there is.
    copy.follow(10 * num_bytes)
    copy.close()
    copy = opened()
    assert copy.is_whole
    copy.close()
    # One that others have written is.
    copy = JournalCopy(path, lambda recorded: None)
    assert copy.is_whole
    copy.close()
    of_copy.unlink()
    copy = opened()
    assert not copy.is_whole
    copy.close()


def test_a_copy_takes_nothing_that_is_not_signed(tmp_path: Path) -> None:
    path = written(tmp_path / "journal", NAMED, LeftEntry(1, "lost"))
    lines = path.read_bytes().splitlines(keepends=True)
    for wrong in (
        lines[3],  # out of turn
        lines[1].replace(b'"m0"', b'"m9"'),
        b"{}\n",
        lines[0],
    ):
        copy = JournalCopy(tmp_path / "copy", lambda recorded: None)
        copy.take(lines[0]) if not copy.num_bytes else None
        with pytest.raises(JournalError, match="line 2"):
            copy.take(wrong)
        assert copy.place.line == 1
        copy.take(b"")
        copy.close()
    assert (tmp_path / "copy").read_bytes() == lines[0]


def test_a_leader_that_is_started_again_knows_what_its_deputy_may_have() -> None:
    def of(*entries: Entry) -> Copies:
        return Copies.of(LEADER.peer_id, [RUN, *JOINED, *entries])

    assert of().is_open
    assert of(NAMED, DeputyEntry(6, "")).is_open
    copies = of(LeftEntry(0, ""), NAMED, LeftEntry(1, ""))
    assert not copies.is_open
    # By any line from the one on that names it; not by those before.
    sitting = [Occupant(each.peer, each.incarnation) for each in JOINED]
    assert copies.known == {*sitting[1:]}
    assert of(NAMED, led(0, 1), LeftEntry(2, "")).is_open
    assert of(NAMED, led(0, 1)).term == 1


def test_who_sits_by_a_journal() -> None:
    sitting = Sitting()
    for entry in (RUN, *JOINED, NAMED):
        sitting.take(entry)
    assert (sitting.leader, sitting.term, sitting.deputy) == (LEADER.peer_id, 0, DEPUTY.peer_id)
    assert len(sitting.members) == 3
    sitting.take(LeftEntry(0, ""))
    sitting.take(LeftEntry(0, ""))
    assert len(sitting.members) == 2
    sitting.take(led(1))
    assert (sitting.leader, sitting.term, sitting.deputy) == (DEPUTY.peer_id, 1, "")
    sitting.take(EndEntry("over"))
    assert sitting.has_ended
    sitting.take(ResumedEntry(0))
    assert not sitting.members
    assert not sitting.has_ended
