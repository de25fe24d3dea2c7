"""A server whose terminal is stopped (Ctrl-S) goes on, and ends when it is told to."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx

from tests.e2e.preloaded import COORDINATOR, DEADLINE, ENVIRONMENT, WORKER, Popen


def fill(descriptor: int) -> None:
    """Write until it takes no more, not one byte; what it has taken moves on inside of it for a moment."""
    os.set_blocking(descriptor, False)
    num_written = 1
    while num_written:
        num_written = 0
        for size in (1024, 1):
            with suppress(BlockingIOError):
                while True:
                    num_written += os.write(descriptor, b"." * size)
        time.sleep(0.2)
    os.set_blocking(descriptor, True)


@contextmanager
def ended_in_time(process: Popen) -> Iterator[None]:
    """Whoever waits for a word of it is not to wait for ever."""
    timer = threading.Timer(DEADLINE, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def complete(url: str) -> int:
    request = {"prompt": "A function", "max_tokens": 8}
    answer = httpx.post(f"{url}/v1/completions", json=request, timeout=DEADLINE)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["completion_tokens"])


def test_a_server_whose_terminal_takes_nothing_goes_on() -> None:
    master, slave = pty.openpty()
    fill(slave)
    args = ("--local-workers", "1", "--http-port", "0", "--listen", "/ip4/127.0.0.1/tcp/0")
    process = Popen(
        [*COORDINATOR, *args, "--log-level", "debug-all"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=slave,
        env={**ENVIRONMENT, "TERM": "xterm"},
    )
    os.close(slave)
    read: list[bytes] = []

    def drain() -> None:
        with suppress(OSError):  # the end of a terminal
            while data := os.read(master, 65536):
                read.append(data)

    reader = threading.Thread(target=drain)
    try:
        assert process.stdout is not None
        with ended_in_time(process):
            url = process.stdout.readline().strip()
        assert complete(url) == 8
        # Somebody presses Ctrl-Q: what was said meanwhile is there, or it is said how much of it is not.
        reader.start()
        assert complete(url) == 8
        process.terminate()
        assert process.wait(DEADLINE) == 0
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE)
        if reader.ident is None:
            reader.start()
        reader.join(DEADLINE)
        os.close(master)
    shown = b"".join(read).decode(errors="replace")
    assert re.search(r"the page is at\s+http://127\.0\.0\.1:", shown), shown[-4000:]
    assert "Traceback" not in shown


def test_a_worker_whose_terminal_takes_nothing_ends_when_it_is_told_to() -> None:
    master, slave = pty.openpty()
    fill(slave)
    process = Popen(
        [*WORKER, "--listen", "/ip4/127.0.0.1/tcp/0", "--no-cache"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=slave,
        env={**ENVIRONMENT, "TERM": "xterm"},
    )
    try:
        assert process.stdout is not None
        with ended_in_time(process):
            assert process.stdout.readline().startswith("/ip4/127.0.0.1/tcp/")
        process.terminate()
        assert process.wait(DEADLINE) == 0
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE)
        os.close(slave)
        os.close(master)
