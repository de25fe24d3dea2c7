"""What SIGINT and SIGTERM do to a command before and beside its loop."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from neurogrid.cli.signals import SIGNALS, Watchdog, end_process, on_signals, status_of
from neurogrid.fleet.local_trust import credentials_of_local_workers
from tests.unit.forked import Forked

ROOT = Path(__file__).parents[2]
LOCAL_MODES = 3
WAITS_AT_ONCE = """
import signal
from neurogrid.cli.signals import ending_at_once
with ending_at_once():
    print("waiting", flush=True)
    while True:
        signal.pause()
"""
WATCHED = """
import sys, threading
from neurogrid.cli.signals import Watchdog
with Watchdog() as watchdog:
    watchdog.arm(1, 3600)
    watchdog.arm({status}, 0)
    watchdog.arm(1, 3600)
    threading.Event().wait()
"""
RAW = """
import sys, termios
from neurogrid.cli.signals import ending_at_once, end_process
with ending_at_once():
    modes = termios.tcgetattr(0)
    modes[3] &= ~(termios.ICANON | termios.ECHO)
    termios.tcsetattr(0, termios.TCSANOW, modes)
    end_process(130)
"""


def end_beside_local_workers() -> None:
    with credentials_of_local_workers(2, None, "") as credentials:
        print(credentials[1][1], flush=True)
        end_process(130)


def test_the_keys_of_local_workers_do_not_outlive_a_process_that_ends_on_the_spot() -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Forked(end_beside_local_workers, **pipes) as process:
        told, said = process.communicate()
    assert (process.returncode, said) == (130, "")
    key_file = Path(told.strip())
    assert key_file.name == "identity.key"
    assert not key_file.parents[1].exists()


@pytest.mark.parametrize("signum", SIGNALS)
def test_before_there_is_a_loop_a_signal_ends_it_without_a_word(signum: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITS_AT_ONCE],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signum)
        _, said = process.communicate()
    assert (process.returncode, said) == (128 + signum, "")


def test_the_watchdog_ends_a_process_that_does_nothing_about_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WATCHED.format(status=143)], cwd=ROOT, capture_output=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (143, b"", b"")


def test_a_watchdog_that_was_not_needed_leaves_nothing_behind() -> None:
    before, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with Watchdog() as watchdog:
        watchdog.arm(1, 3600)
    assert threading.active_count() == before
    assert len(os.listdir("/proc/self/fd")) == files


def test_the_terminal_is_left_as_it_was() -> None:
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)[LOCAL_MODES]
    done = subprocess.run([sys.executable, "-c", RAW], cwd=ROOT, stdin=slave, stderr=slave)
    assert done.returncode == 130
    assert termios.tcgetattr(slave)[LOCAL_MODES] == before
    assert os.read(master, 100) == b"\x1b[?25h"
    os.close(master)
    os.close(slave)


def test_handlers_of_before_come_back() -> None:
    before = [signal.getsignal(signum) for signum in SIGNALS]
    came: list[int] = []
    with on_signals(lambda signum, frame: came.append(signum)):
        for signum in SIGNALS:
            signal.raise_signal(signum)
    assert came == list(SIGNALS)
    assert [signal.getsignal(signum) for signum in SIGNALS] == before
    assert [status_of(signum) for signum in SIGNALS] == [130, 143]
