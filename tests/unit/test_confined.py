"""Child processes with limits: what comes of a call, what ends a process, and what it does not have."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401 - with it here, the fork server is a fork, and there at once
from confined_calls import one_of

from neurogrid import fork_server
from neurogrid.errors import ConfigurationError
from neurogrid.model.confined import ConfinedProcess, ConfinementError, Limits

MIB = 1024**2
SECONDS = 60.0  # for what is to succeed


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def confined() -> Iterator[ConfinedProcess]:
    with closing(ConfinedProcess(one_of, Limits(64 * MIB, cpu_seconds=30))) as process:
        yield process


def test_a_process_is_kept_for_more_calls(confined: ConfinedProcess) -> None:
    value = {"text": "ä" * 100_000, "numbers": [1, 2.5, None, True]}
    first = confined.call(["describe", value], seconds=SECONDS)
    again = confined.call(["describe", 2], seconds=SECONDS)
    assert (first["argument"], again["argument"]) == (value, 2)
    assert first["pid"] == again["pid"] != os.getpid()


def test_it_has_none_of_our_sockets_and_not_our_terminal(confined: ConfinedProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)), tempfile.TemporaryFile():
        told = confined.call(["describe", None], seconds=SECONDS)
    assert sorted(told["files"])[:-1] == ["/dev/null"] * 3
    assert sorted(told["files"])[-1].startswith("socket:")  # the one that it answers through
    assert told["session"] != os.getsid(0)


@pytest.mark.parametrize(
    ("name", "argument", "says"),
    [
        ("take_memory", 300 * MIB, "more than 64 MiB of memory"),
        ("crash", None, "it ended the process"),
        ("fail", "x", "KeyError: 'x'"),
        ("write_file", 2**40, "OSError"),
        ("describe", "x" * (33 * MIB), "would be given more than"),
    ],
)
def test_what_goes_wrong_there_is_an_error_here(
    confined: ConfinedProcess, name: str, argument: object, says: str
) -> None:
    with pytest.raises(ConfinementError, match=says):
        confined.call([name, argument], seconds=SECONDS)
    assert confined.call(["describe", 1], seconds=SECONDS)["argument"] == 1


def test_an_error_of_ours_is_raised_as_such(confined: ConfinedProcess) -> None:
    with pytest.raises(ConfigurationError, match="not so"):
        confined.call(["refuse", "not so"], seconds=SECONDS)


@pytest.mark.parametrize("name", ["loop_for_ever", "sleep_for_ever"])
def test_what_is_late_is_killed(confined: ConfinedProcess, name: str) -> None:
    told = confined.call(["describe", None], seconds=SECONDS)
    with pytest.raises(ConfinementError, match=r"longer than 0\.2 s"):
        confined.call([name, None], seconds=0.2)
    wait_until(lambda: is_gone(told["pid"]) and not Path(told["folder"]).exists())
    assert confined.call(["describe", None], seconds=SECONDS)["pid"] != told["pid"]


def test_processor_time_is_bounded_whoever_watches() -> None:
    with (
        closing(ConfinedProcess(one_of, Limits(64 * MIB, cpu_seconds=1))) as confined,
        pytest.raises(ConfinementError, match="processor time"),
    ):
        confined.call(["loop_for_ever", None], seconds=SECONDS)


def test_another_thread_may_end_it(confined: ConfinedProcess) -> None:
    told = confined.call(["describe", None], seconds=SECONDS)
    errors: list[Exception] = []

    def call() -> None:
        try:
            confined.call(["sleep_for_ever", None], seconds=SECONDS)
        except ConfinementError as exc:
            errors.append(exc)

    thread = threading.Thread(target=call)
    thread.start()
    confined.close()
    thread.join(SECONDS)
    assert len(errors) == 1
    wait_until(lambda: is_gone(told["pid"]) and not Path(told["folder"]).exists())
    with pytest.raises(ConfinementError):
        confined.call(["describe", None], seconds=SECONDS)


def test_it_ends_with_whoever_uses_it() -> None:
    reading, writing = os.pipe()
    user = os.fork()
    if user == 0:
        try:
            confined = ConfinedProcess(one_of, Limits(64 * MIB, cpu_seconds=30))
            told = confined.call(["describe", None], seconds=SECONDS)
            os.write(writing, f"{told['pid']} {told['server']} {told['folder']}\n".encode())
            confined.call(["loop_for_ever", None], seconds=SECONDS)
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading) as told_here:
        pid, server, folder = told_here.readline().split()
    os.kill(user, signal.SIGKILL)
    os.waitpid(user, 0)
    wait_until(lambda: is_gone(int(pid)) and is_gone(int(server)) and not Path(folder).exists())


def test_another_fork_server_takes_the_place_of_one_that_died(
    confined: ConfinedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in fork_server._preloaded:
        importlib.import_module(name)
    # What the other one begins with takes it seconds, and is not asked for here.
    monkeypatch.setattr(fork_server, "_preloaded", [])
    told = confined.call(["describe", None], seconds=SECONDS)
    os.kill(told["server"], signal.SIGKILL)
    with closing(ConfinedProcess(one_of, Limits(64 * MIB, cpu_seconds=30))) as another:
        wait_until(lambda: _has_ended(told["server"]))
        # Beside another thread it is a Python of its own.
        answers: list[Any] = []
        thread = threading.Thread(
            target=lambda: answers.append(another.call(["describe", None], seconds=SECONDS))
        )
        thread.start()
        thread.join()
    assert answers[0]["server"] != told["server"]
    # The one for the tests to come is a fork again, which has all that takes long to import.
    fork_server.forget_fork_server()
    # Nobody is left to see to the child of the one that died.
    confined.close()
    wait_until(lambda: is_gone(told["pid"]) and not Path(told["folder"]).exists())


def test_a_signal_to_all_processes_of_a_service_leaves_its_end_to_the_service(
    confined: ConfinedProcess,
) -> None:
    told = confined.call(["describe", None], seconds=SECONDS)
    for each in (signal.SIGTERM, signal.SIGINT):
        os.kill(told["server"], each)
    assert confined.call(["describe", None], seconds=SECONDS)["pid"] == told["pid"]
    confined.close()
    wait_until(lambda: is_gone(told["pid"]) and not Path(told["folder"]).exists())


def _has_ended(pid: int) -> bool:
    """Also while nobody has asked how."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return status.rpartition(")")[2].split()[0] == "Z"
