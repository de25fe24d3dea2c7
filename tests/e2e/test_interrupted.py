"""SIGINT and SIGTERM from the first moment of a command to the last: it ends, without a word more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e import preloaded
from tests.e2e.support import DEADLINE, ENVIRONMENT

ROOT = Path(__file__).parents[2]
INT, TERM = signal.SIGINT, signal.SIGTERM
RUN = ("run", "hello", "--max-tokens", "100000", "--max-seq-len", "100000")
SERVE = ("serve", "--http-port", "0")


def start(
    *args: str, popen: type[subprocess.Popen[str]] = subprocess.Popen
) -> subprocess.Popen[str]:
    """Start `neurogrid` as its script does, in a session of its own, so that nobody else gets its signals."""
    return popen(
        [sys.executable, ROOT / "cmd" / "neurogrid.py", *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )


def wait_until_it_is_ours(process: subprocess.Popen[str]) -> None:
    """Wait out what Python itself needs to start: from then on SIGTERM is handled."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline and process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        (caught,) = (line.split()[1] for line in status.splitlines() if line[:7] == "SigCgt:")
        if int(caught, 16) >> (TERM - 1) & 1:
            return
        time.sleep(0.002)
    raise AssertionError("it never began")


def ended(process: subprocess.Popen[str], signum: signal.Signals) -> tuple[str, str]:
    """Send the signal and wait; returns what it wrote after that."""
    process.send_signal(signum)
    try:
        return process.communicate(timeout=DEADLINE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("signum", [INT, TERM])
@pytest.mark.parametrize("after", [0.0, 0.05, 0.2, 0.5, 1.0])
def test_while_it_starts(signum: signal.Signals, after: float) -> None:
    process = start(*(RUN if signum is INT else SERVE))
    wait_until_it_is_ours(process)
    time.sleep(after)  # anywhere in what is imported: whichever module that is
    stdout, stderr = ended(process, signum)
    assert process.returncode == 128 + signum
    assert (stdout, "Traceback" in stderr) == ("", False)
    assert len(stderr.splitlines()) <= 1


@pytest.mark.parametrize(
    ("args", "line", "signum"),
    [
        (RUN, "reading the model", INT),
        ((*SERVE, "--local-workers", "2"), "starting 2 workers here", TERM),
        ((*RUN, "--min-peers", "1"), "waiting for workers: 0 of 1 found", INT),
        (RUN, "embedded, ", TERM),
    ],
)
def test_once_it_has_begun(args: tuple[str, ...], line: str, signum: signal.Signals) -> None:
    with start(*args, popen=preloaded.Popen) as process:
        assert process.stderr is not None
        seen: list[str] = []
        for said in process.stderr:
            seen.append(said)
            if said.startswith(line):
                break
        else:
            pytest.fail("".join(seen))
        _, stderr = ended(process, signum)
    assert process.returncode == 128 + signum, seen
    assert "Traceback" not in stderr


def test_what_serves_until_it_is_ended_has_done_its_work_then() -> None:
    process = start(*SERVE)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("http://")
    _, stderr = ended(process, INT)
    assert process.returncode == 0, stderr
    assert "Traceback" not in stderr
