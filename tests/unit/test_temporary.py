"""Temporary directories: private, gone with their block, and gone after a process that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from neurogrid.temporary import temporary_directory

PREFIX = "neurogrid-test-"
HOLDER = f"""
import sys, time
from pathlib import Path
from neurogrid.temporary import temporary_directory
with temporary_directory("{PREFIX}", parent=Path(sys.argv[1])) as directory:
    (directory / "file").write_text("something")
    print(directory, flush=True)
    time.sleep(600)
"""


def test_a_directory_is_private_and_goes_with_its_block(tmp_path: Path) -> None:
    with temporary_directory(PREFIX, parent=tmp_path) as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        (directory / "file").write_text("something")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes_with_the_next_and_nothing_that_is_in_use(
    tmp_path: Path,
) -> None:
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        left, used = (Path(holder.stdout.readline().strip()) for holder in holders if holder.stdout)
        os.kill(holders[0].pid, signal.SIGKILL)
        holders[0].wait(60)
        assert left.exists()
        with temporary_directory(PREFIX, parent=tmp_path) as directory:
            assert sorted(tmp_path.iterdir()) == sorted([used, directory])
            assert (used / "file").read_text() == "something"
    finally:
        for holder in holders:
            holder.kill()
            holder.wait(60)
            if holder.stdout is not None:
                holder.stdout.close()


def test_what_is_no_directory_of_ours_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / f"{PREFIX}other"
    other.mkdir()
    with temporary_directory(PREFIX, parent=tmp_path):
        assert other.exists()
