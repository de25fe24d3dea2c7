"""`neurogrid train verify` on the journal of a real run, as it is, and as others would have it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neurogrid.p2p.hosts.identity import Identity
from neurogrid.training.runs.entries import RoundEntry
from tests.e2e import preloaded
from tests.e2e.preloaded import TRAIN
from tests.e2e.training.run_processes import RUN_FILE, entries_of, open_run
from tests.ports import free_port

DOMAIN = b"neurogrid run journal 1\0"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("verify")
    text = RUN_FILE + "[stop]\nepochs = 1\n[outer]\nevery = 8\n[checkpoints]\nevery = 4\n"
    with open_run(directory, free_port(), text, num_words=6000) as processes:
        processes.lead("--local-workers", "2")
        processes.end()
        yield processes.run


def verified(path: Path) -> tuple[int, dict[str, Any], str]:
    """The status, what the command says in JSON, and what it says to people."""
    told = [preloaded.run([*TRAIN, "verify", str(path), *options]) for options in ((), ("--json",))]
    assert told[0].returncode == told[1].returncode
    return told[0].returncode, json.loads(told[1].stdout), told[0].stdout


def altered(to: Path, lines: list[bytes]) -> Path:
    """The journal with other lines, alone."""
    to.write_bytes(b"".join(line + b"\n" for line in lines))
    return to


def lines_of(run: Path) -> list[bytes]:
    return (run / "journal").read_bytes().splitlines()


def round_line(run: Path) -> int:
    """The number of the line of the second round."""
    rounds = [n for n, entry in enumerate(entries_of(run), 1) if isinstance(entry, RoundEntry)]
    return rounds[1]


def test_a_journal_that_is_whole(run: Path, tmp_path: Path) -> None:
    status, found, told = verified(run)
    assert status == 0
    assert (found["is_whole"], found["problem"], found["line"]) == (True, "", None)
    assert found["num_lines"] == len(lines_of(run))
    assert found["peers"] == 2
    assert (found["audit"]["epochs"], found["audit"]["missing"]) == (1, {})
    assert found["audit"]["has_ended"]
    assert "each sample of 1 epoch used exactly once" in told
    assert "the run has ended: " in told
    copied = shutil.copy(run / "journal", tmp_path / "copy")
    again = verified(Path(copied))
    assert again[0] == 0
    assert again[1]["audit"] == found["audit"]


def test_a_line_that_was_altered(run: Path, tmp_path: Path) -> None:
    lines, number = lines_of(run), round_line(run)
    digest = json.loads(lines[number - 1])["entry"]["digest"].encode()
    lines[number - 1] = lines[number - 1].replace(digest, digest[::-1])
    status, found, told = verified(altered(tmp_path / "journal", lines))
    assert (status, found["is_whole"], found["line"]) == (1, False, number)
    assert f"line {number} is not as its leader signed it" in told


def test_a_line_that_was_taken_out(run: Path, tmp_path: Path) -> None:
    lines, number = lines_of(run), round_line(run)
    del lines[number - 1]
    status, found, told = verified(altered(tmp_path / "journal", lines))
    assert (status, found["line"]) == (1, number)
    assert f"line {number} does not follow on the line before it" in told


def signed(run: Path, said: dict[str, Any]) -> bytes:
    """A line that the leader has signed."""
    identity = Identity.load(run / "cluster" / "identity.key")
    body = json.dumps(said, separators=(",", ":")).encode()
    signature = identity.key_pair.private_key.sign(DOMAIN + body).hex().encode()
    return body[:-1] + b',"signature":"' + signature + b'"}'


def test_a_false_digest_that_the_leader_has_signed(run: Path, tmp_path: Path) -> None:
    """Of the line before; the leader itself cannot change what it wrote without being seen."""
    lines, number = lines_of(run), round_line(run)
    said = json.loads(lines[number - 1])
    del said["signature"]
    said["before"] = said["before"][::-1]
    lines[number - 1] = signed(run, said)
    status, found, told = verified(altered(tmp_path / "journal", lines))
    assert (status, found["line"]) == (1, number)
    assert "does not follow" in told


def test_a_round_that_its_leader_has_made_up(run: Path, tmp_path: Path) -> None:
    """Whole by its signatures, and not by what it says: the round's samples are used twice."""
    lines, number = lines_of(run)[: round_line(run)], round_line(run)
    said = json.loads(lines[-1])
    del said["signature"]
    said["line"], said["before"] = number + 1, hashlib.sha256(lines[-1]).hexdigest()
    said["entry"]["index"] += 1
    said["entry"]["round"] += 1
    lines.append(signed(run, said))
    status, found, told = verified(altered(tmp_path / "journal", lines))
    assert (status, found["line"]) == (1, number + 1)
    assert f"line {number + 1}: " in told


def test_a_run_file_that_was_altered(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "journal", tmp_path / "journal")
    (tmp_path / "run.toml").write_text((run / "run.toml").read_text() + "# more\n")
    status, found, _ = verified(tmp_path)
    assert (status, found["line"]) == (1, 1)
    assert "another run file" in found["problem"]


def test_what_is_no_journal(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(b"")
    assert verified(tmp_path)[1]["problem"].endswith("no run has begun in it")
    (tmp_path / "journal").write_bytes(b"hello\n")
    assert verified(tmp_path)[1]["line"] == 1
