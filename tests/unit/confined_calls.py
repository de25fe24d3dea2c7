"""Functions for a confined process to call: in a module that needs nothing that takes long to import."""

from __future__ import annotations

import os
import signal
import tempfile
from typing import Any

from neurogrid.errors import ConfigurationError

__all__ = ["one_of"]


def describe(argument: Any) -> dict[str, Any]:
    return {
        "argument": argument,
        "pid": os.getpid(),
        "server": os.getppid(),
        "folder": tempfile.mkdtemp(),
        "files": [os.readlink(f"/proc/self/fd/{n}") for n in own_descriptors()],
        "session": os.getsid(0),
    }


def own_descriptors() -> list[int]:
    held = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))
        except OSError:
            continue  # that of the listing itself
        held.append(int(name))
    return held


def take_memory(num_bytes: int) -> int:
    return len(bytearray(num_bytes))


def loop_for_ever(argument: None) -> None:
    while True:
        pass


def sleep_for_ever(argument: None) -> None:
    signal.pause()


def crash(argument: None) -> None:
    os.abort()


def refuse(text: str) -> None:
    raise ConfigurationError(text)


def fail(text: str) -> None:
    raise KeyError(text)


def write_file(num_bytes: int) -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(num_bytes)


def one_of(argument: list[Any]) -> Any:
    """A function by its name, so that one process can be asked for different things."""
    name, value = argument
    return globals()[name](value)
