"""The journal of a run on a disk: what a crash leaves, what was altered, and who may write to it."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neurogrid.errors import ConfigurationError, LocalProtocolError
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.trust import DirectoryInUseError
from neurogrid.training.data.dealing import SampleRange
from neurogrid.training.runs.entries import (
    Assignment,
    BannedEntry,
    BeganEntry,
    ChangedEntry,
    CheckpointEntry,
    DealtEntry,
    EndEntry,
    Entry,
    JoinedEntry,
    LeftEntry,
    ResumedEntry,
    RoundEntry,
    RunEntry,
    StoppingEntry,
    entry_of,
)
from neurogrid.training.runs.journal import Journal, JournalError, read_journal

LEADER, OTHER = Identity.generate(), Identity.generate()
RUN = RunEntry(bytes(16), LEADER.peer_id, bytes(32), bytes(range(32)), (10, 5), 2**64 - 1)
ENTRIES: tuple[Entry, ...] = (
    RUN,
    JoinedEntry(0, "one", 2**64 - 1, "attic"),
    JoinedEntry(1, "zwei … \"'\n", 7),
    JoinedEntry(2, "drei", 8, "", ((0, 1), (4, 2**64 - 1))),
    BeganEntry(2, 15),
    DealtEntry(
        (
            (0, Assignment(1, 0.0, 1.5, 3, (SampleRange(0, 0, 2), SampleRange(1, 4, 5)))),
            (1, Assignment(1, 0.1, 1.5, 8)),
        )
    ),
    RoundEntry(
        *(4, 1, bytes(32)),
        contributions=((0, 1), (1, 1)),
        ranges=(SampleRange(0, 0, 2), SampleRange(1, 4, 5)),
    ),
    CheckpointEntry(20, 1),
    ResumedEntry(0),
    LeftEntry(0, "it was killed"),
    BannedEntry("one", 1, 1_800_000_000, 1_800_003_600, b"", "it took what was not its own"),
    BannedEntry("two", 2, 1_800_000_000, 0, bytes(32), "a claim of its was false"),
    ChangedEntry(1, (("inner.lr", "0.0001"), ("stop.steps", "500"))),
    StoppingEntry("2 hours are over"),
    EndEntry("2,000 tokens"),
)


def written(path: Path) -> Path:
    with Journal.open(path, LEADER, clock=lambda: 1700.5) as journal:
        for entry in ENTRIES:
            journal.append(entry)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path / "journal")


def test_what_is_written_is_read(path: Path) -> None:
    recorded = read_journal(path)
    assert tuple(each.entry for each in recorded) == ENTRIES
    assert [each.line for each in recorded] == list(range(1, len(ENTRIES) + 1))
    assert {each.time for each in recorded} == {1700.5}


def test_it_goes_on_where_it_ended(path: Path) -> None:
    with Journal.open(path, LEADER) as journal:
        assert tuple(each.entry for each in journal.entries) == ENTRIES
        journal.append(ResumedEntry(1))
        assert [each.entry for each in read_journal(path)] == [*ENTRIES, ResumedEntry(1)]
    assert len(read_journal(path)) == len(ENTRIES) + 1


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.kind)
def test_entries_are_json(entry: Entry) -> None:
    assert entry_of(json.loads(json.dumps(entry.json()))) == entry
    keys = entry.json().keys() - {"held"}  # which may be left out
    broken = [{k: v for k, v in entry.json().items() if k != key} for key in keys]
    broken += [{**entry.json(), key: None} for key in entry.json()]
    broken.append({**entry.json(), "later": 1})
    for each in broken:
        with pytest.raises(ValueError, match=r"it |is "):
            entry_of(each)


@pytest.mark.parametrize(
    "change",
    [
        {"round": 0},
        {"round": True},
        {"round": 1.0},
        {"round": 2**64},
        {"digest": "00"},
        {"digest": "x" * 64},
        {"index": -1},
        {"contributions": [1]},
        {"contributions": [[0]]},
        {"contributions": [[0, -1]]},
        {"contributions": [[0, 1, 2]]},
        {"ranges": [0, 0]},
        {"ranges": [0, 1, 1]},
        {"ranges": [0, 0, -1]},
    ],
)
def test_a_wrong_round_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"is |has |are |hexadecimal"):
        entry_of({**ENTRIES[5].json(), **change})


@pytest.mark.parametrize(
    "works",
    [
        [1],
        [[0]],
        [[-1, [1, 0.0, 1.0, 3, []]]],
        [[0, [1, 0.0, 1.0, 3]]],
        [[0, [0, 0.0, 1.0, 3, []]]],
        [[0, [1, -1.0, 1.0, 3, []]]],
        [[0, [1, 0.0, float("inf"), 3, []]]],
        [[0, [1, 0.0, float("nan"), 3, []]]],
        [[0, [1, 0.0, True, 3, []]]],
        [[0, [1, 0.0, 1.0, 0, []]]],
        [[0, [1, 0.0, 1.0, 3, {}]]],
        [[0, [1, 0.0, 1.0, 3, [0, 1, 1]]]],
        [[0, [1, 0.0, 1.0, 3, [0, 1]]]],
        [[0, [1, 0.0, 1.0, 3, [0, "1", 2]]]],
    ],
)
def test_wrong_works_are_refused(works: list[object]) -> None:
    with pytest.raises(ValueError, match=r"is |has |are "):
        entry_of({"kind": "dealt", "works": works})


def test_texts_are_bounded() -> None:
    for entry in (JoinedEntry(0, "m" * 1025, 1), LeftEntry(0, "r" * 1025)):
        with pytest.raises(ValueError, match="at most 1024 characters"):
            entry_of(entry.json())


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_a_torn_last_line_is_cut_and_the_rest_goes_on(tmp_path: Path, data: st.DataObject) -> None:
    path = written_once(tmp_path)
    whole = path.read_bytes()
    torn = tmp_path / "torn"
    length = data.draw(st.integers(0, len(whole)))
    junk = data.draw(st.binary(max_size=20)).replace(b"\n", b"")
    torn.write_bytes(whole[:length] + (junk if length < len(whole) else b""))
    lines = whole[:length].count(b"\n")
    with Journal.open(torn, LEADER) as journal:
        assert tuple(each.entry for each in journal.entries) == ENTRIES[:lines]
        assert torn.read_bytes() == b"".join(whole.splitlines(keepends=True)[:lines])
        journal.append(ResumedEntry(0) if lines else RUN)
    assert len(read_journal(torn)) == lines + 1


def written_once(directory: Path) -> Path:
    path = directory / "journal"
    return path if path.exists() else written(path)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_an_altered_byte_is_found_and_its_line_is_named(
    tmp_path: Path, data: st.DataObject
) -> None:
    whole = written_once(tmp_path).read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1).filter(lambda n: whole[n] != 10))
    byte = data.draw(st.integers(0, 255).filter(lambda b: b not in (whole[at], 10)))
    altered = tmp_path / "altered"
    altered.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
    line = whole[:at].count(b"\n") + 1
    with pytest.raises(JournalError, match=f"line {line} "):
        read_journal(altered)
    with pytest.raises(JournalError, match=f"line {line} "):
        Journal.open(altered, LEADER)
    assert len(altered.read_bytes()) == len(whole)


def test_a_signature_in_capitals_is_altered(tmp_path: Path) -> None:
    whole = written_once(tmp_path).read_bytes()
    head, mark, signature = whole.rpartition(b'"signature":"')
    altered = tmp_path / "altered"
    altered.write_bytes(head + mark + signature.upper())
    with pytest.raises(JournalError, match="not as its leader signed it"):
        read_journal(altered)


def test_lines_taken_out_doubled_or_in_another_order(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    for wrong in ([*lines[:3], *lines[4:]], [*lines[:3], lines[2], *lines[3:]]):
        path.write_bytes(b"".join(wrong))
        with pytest.raises(JournalError, match="line 4 does not follow"):
            read_journal(path)
    path.write_bytes(b"".join(lines[1:]))
    with pytest.raises(JournalError, match="line 1 "):
        read_journal(path)


def test_another_leader_cannot_go_on_with_it_nor_sign_for_it(path: Path, tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=f"{LEADER.peer_id} leads; this is {OTHER.peer_id}"):
        Journal.open(path, OTHER)
    forged = tmp_path / "forged"
    with Journal.open(forged, OTHER) as journal:
        journal.append(RunEntry(bytes(16), OTHER.peer_id, bytes(32), bytes(32), (1,), 0))
    text = forged.read_text().replace(OTHER.peer_id, LEADER.peer_id)
    forged.write_text(text)
    with pytest.raises(JournalError, match="line 1 is not as its leader signed it"):
        Journal.open(forged, LEADER)


def test_one_leader_at_a_time(path: Path) -> None:
    with Journal.open(path, LEADER):
        with pytest.raises(DirectoryInUseError, match=f"process {os.getpid()} on"):
            Journal.open(path, LEADER)
        assert len(read_journal(path)) == len(ENTRIES)
    Journal.open(path, LEADER).close()


def test_what_may_not_be_appended(path: Path, tmp_path: Path) -> None:
    with Journal.open(tmp_path / "new", LEADER) as journal:
        for entry in (
            EndEntry(""),
            RunEntry(bytes(16), OTHER.peer_id, bytes(32), bytes(32), (), 0),
        ):
            with pytest.raises(LocalProtocolError):
                journal.append(entry)
        assert (tmp_path / "new").read_bytes() == b""
    with Journal.open(path, LEADER) as journal, pytest.raises(LocalProtocolError):
        journal.append(RUN)
    with pytest.raises(LocalProtocolError, match="closed"):
        journal.append(EndEntry(""))


def test_a_full_disk_leaves_what_was_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()
    write = os.pwrite

    def full(descriptor: int, data: bytes, at: int) -> int:
        if at >= len(before) + 7:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:7], at)

    journal = Journal.open(path, LEADER)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ConfigurationError, match="No space left"):
        journal.append(EndEntry("again"))
    monkeypatch.undo()
    # Whoever writes next is told why, too: which task it is that ends the run is chance.
    with pytest.raises(ConfigurationError, match="No space left"):
        journal.append(EndEntry("again"))
    assert path.read_bytes() == before
    with Journal.open(path, LEADER) as journal:
        assert len(journal.entries) == len(ENTRIES)


def test_a_disk_that_takes_nothing_any_more_leaves_what_was_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of a line cannot be cut off either: that is done when the journal is opened again."""
    before, write = path.read_bytes(), os.pwrite

    def full(descriptor: int, data: bytes, at: int) -> int:
        if at > len(before):
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:7], at)

    def broken(descriptor: int, length: int) -> None:
        raise OSError(5, "Input/output error")

    journal = Journal.open(path, LEADER)
    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(os, "ftruncate", broken)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"No space left on device.* make room"):
            journal.append(EndEntry("again"))
    monkeypatch.undo()
    assert path.read_bytes() == before + path.read_bytes()[len(before) :][:7]
    assert len(read_journal(path)) == len(ENTRIES)
    with Journal.open(path, LEADER) as journal:
        assert len(journal.entries) == len(ENTRIES)
    assert path.read_bytes() == before


def test_a_run_without_data_is_none(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal.open(path, LEADER) as journal:
        journal.append(replace(RUN, slices=()))
    with pytest.raises(JournalError, match="line 1: no entry of a journal: slices are none"):
        read_journal(path)


@pytest.mark.parametrize("time", [math.inf, math.nan, 1e300, -1.0])
def test_a_time_that_is_none_is_refused(tmp_path: Path, time: float) -> None:
    """Its leader has signed it: whoever judges the journal is told so, and does not fail by it."""
    path = tmp_path / "journal"
    with Journal.open(path, LEADER, clock=lambda: time) as journal:
        journal.append(RUN)
    with pytest.raises(JournalError, match="line 1: no entry of a journal: time is no number"):
        read_journal(path)


def test_what_is_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for content in (
        b"text\n",
        b"[]\n",
        b"{}\n",
        b'{"entry":{"leader":5}}\n',
        b"[" * 100_000 + b"\n",
        b"\xff\n",
    ):
        path.write_bytes(content)
        with pytest.raises(JournalError, match="line 1 does not say whose"):
            Journal.open(path, LEADER)
    with pytest.raises(ConfigurationError, match="cannot read"):
        read_journal(tmp_path / "missing")
    with pytest.raises(ConfigurationError):
        Journal.open(tmp_path / "missing" / "journal", LEADER)


def test_what_is_appended_is_told_when_it_is_on_the_disk(tmp_path: Path) -> None:
    path, told = tmp_path / "journal", []
    with Journal.open(path, LEADER) as journal:
        journal.append(RUN)
        journal.on_append = lambda recorded: told.append((recorded, len(read_journal(path))))
        for entry in ENTRIES[1:3]:
            journal.append(entry)
    assert [(each.entry, count) for each, count in told] == [(ENTRIES[1], 2), (ENTRIES[2], 3)]
