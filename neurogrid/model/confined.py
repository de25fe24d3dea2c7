"""Functions of ours on other people's data, each in a child process whose limits the kernel keeps.

What a config or a chat template takes in memory and time is known when it has been tried, and torch and Jinja cannot
be interrupted. So it is tried where it can be killed: `ConfinedProcess` calls a function in a process of its own, which
has limits on memory, processor time and files, no core dump, and none of this process's sockets and files.

The process is forked by the fork server, which sees to its end (`neurogrid.fork_server`).

Arguments and results are JSON, in frames of a length and as many bytes. It knows neither configs nor templates.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from neurogrid.errors import (
    CheckpointError,
    ConfigurationError,
    NeuroGridError,
    UnsupportedModelError,
)
from neurogrid.fork_server import Function, fork_server, preload

__all__ = ["ConfinedProcess", "ConfinementError", "Limits"]

# For a process to be there: a Python that is started anew imports torch and transformers first. Seconds.
START_TIMEOUT = 120.0
# Arguments and results; a long conversation is a few MB. Bytes.
MAX_FRAME_BYTES = 32 * 1024**2
# A file that a child writes: the checkpoint of the largest miniature has 200 MB. Bytes.
MAX_FILE_BYTES = 512 * 1024**2
# Address space is set aside more freely than memory is used.
ADDRESS_SPACE_FACTOR = 2
# The part of the memory that a process has reached when allocations fail, unless one alone is for more than all of it.
NEARLY_ALL = 0.9

_LENGTH = struct.Struct("!I")
# What torch says, and what others make of it: "RuntimeError: ... DefaultCPUAllocator: can't allocate memory: you ..."
_NO_MEMORY = (
    "can't allocate memory",
    "Cannot allocate memory",
    "MemoryError",
)
# Errors that are raised on the other side as what they are.
_ERRORS: dict[str, Callable[[str], NeuroGridError]] = {
    cls.__name__: cls for cls in (CheckpointError, ConfigurationError, UnsupportedModelError)
}


preload("neurogrid.model.proof.proof", "neurogrid.model.files.chat_template")


class ConfinementError(NeuroGridError):
    """A child process came to one of its limits, or to its end; the text says which, after `it`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one child process.

    Attributes:
        memory_bytes: private memory, above what it has when it begins.
        cpu_seconds: of processor time, for each call.
    """

    memory_bytes: int
    cpu_seconds: int


class ConfinedProcess:
    """A child process that calls `function`, one call at a time; started by the first call.

    After a call that failed with ConfinementError the next one starts a new process.

    Args:
        function: of a module, not of a class; takes and returns what JSON has. What it raises of `_ERRORS` is raised
            here.
        limits: for the process.
    """

    def __init__(self, function: Callable[[Any], Any], limits: Limits) -> None:
        self._function = f"{function.__module__}:{function.__qualname__}"
        self._limits = limits
        self._memory = f"{limits.memory_bytes // 1024**2} MiB of memory"
        self._lock = threading.Lock()  # of the two below
        self._socket: socket.socket | None = None
        self._is_closed = False

    def __del__(self) -> None:
        own = self._socket
        # At the end of the interpreter there is nothing left to call but its own methods.
        if own is not None:
            own.close()

    def call(self, argument: object, *, seconds: float) -> Any:
        """`function(argument)`, within `seconds` once the process is there. Blocks.

        Raises:
            ConfinementError: not in time or memory, or the process ended; also when `close` is called meanwhile.
            CheckpointError, ConfigurationError, UnsupportedModelError: raised by the function.
        """
        data = json.dumps(argument).encode()
        if len(data) > MAX_FRAME_BYTES:
            raise ConfinementError(f"it would be given more than {MAX_FRAME_BYTES} bytes")
        try:
            own = self._started()
            deadline = time.monotonic() + seconds
            _send(own, data, deadline)
            answer = json.loads(_receive(own, deadline))
        except TimeoutError as exc:
            self._end()
            raise ConfinementError(f"it takes longer than {seconds:g} s") from exc
        except (EOFError, OSError, ValueError) as exc:
            self._end()
            raise ConfinementError(
                "it ended the process that tried it: more than "
                f"{self._limits.cpu_seconds} s of processor time or {self._memory}, or a crash"
            ) from exc
        except BaseException:  # a thread that is interrupted leaves half an answer behind
            self._end()
            raise
        if "result" in answer:
            return answer["result"]
        if answer["error"] == MemoryError.__name__:
            self._end()
            raise ConfinementError(f"it takes more than {self._memory}")
        raise _ERRORS.get(answer["error"], ConfinementError)(answer["text"])

    def close(self) -> None:
        """Kill the process, if there is one, and start none any more. From any thread."""
        with self._lock:
            self._is_closed = True
        self._end()

    def _started(self) -> socket.socket:
        with self._lock:
            if self._is_closed:
                raise EOFError
            own = self._socket
            if own is not None:
                return own
            module, _, _ = self._function.partition(":")
            called = Function(
                f"{__name__}:{_answer_calls.__name__}",
                imports=(module,),
                arguments={"function": self._function, **asdict(self._limits)},
            )
            own = self._socket = fork_server().new_child(called)
        try:
            _receive(own, time.monotonic() + START_TIMEOUT)  # that it is there
        except (TimeoutError, EOFError, OSError) as exc:
            self._end()
            raise ConfinementError("it had no process to be tried in: none could start") from exc
        return own

    def _end(self) -> None:
        with self._lock:
            own, self._socket = self._socket, None
        if own is not None:
            with contextlib.suppress(OSError):
                own.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads
            own.close()


# ------------------------------------------------------------------ in the child


def _answer_calls(
    own: socket.socket,
    descriptors: Sequence[int],
    *,
    function: str,
    memory_bytes: int,
    cpu_seconds: int,
) -> None:
    """Answer calls until the socket is closed: what the child of a `ConfinedProcess` does."""
    module, _, name = function.partition(":")
    called = getattr(importlib.import_module(module), name)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # its others are not in a process that was forked
    nearly_all = _set_limits(memory_bytes)
    _send(own, b"")
    while True:
        try:
            data = _receive(own)
        except EOFError:
            return
        _allow_seconds(cpu_seconds)
        answer = _answer(called, data, nearly_all)
        if len(answer) > MAX_FRAME_BYTES:
            answer = _told(ConfinementError(f"it gives more than {MAX_FRAME_BYTES} bytes"))
        _send(own, answer)


def _answer(function: Callable[[Any], Any], data: bytes, nearly_all: float) -> bytes:
    try:
        return json.dumps({"result": function(json.loads(data))}).encode()
    except Exception as exc:  # noqa: BLE001 - told to whoever asked
        # What begins with an allocation that fails may end as any error: SystemError and std::bad_alloc were seen.
        is_full = _memory_bytes().get("VmPeak", 0) > nearly_all
        return _told(MemoryError() if is_full or _is_out_of_memory(exc) else exc)


def _told(exc: Exception) -> bytes:
    name, text = type(exc).__name__, " ".join(str(exc).split())[:2000]
    is_known = isinstance(exc, NeuroGridError | MemoryError)
    return json.dumps({"error": name, "text": text if is_known else f"{name}: {text}"}).encode()


def _is_out_of_memory(exc: BaseException | None) -> bool:
    """Whether that is what it began with: code of families turns MemoryError into errors of its own."""
    while exc is not None:
        if isinstance(exc, MemoryError) or any(words in str(exc) for words in _NO_MEMORY):
            return True
        exc = exc.__cause__ or exc.__context__
    return False


def _set_limits(memory_bytes: int) -> float:
    """Set all but that of processor time; the address space above which hardly any memory is left."""
    # Here, not above: it exists on Unix alone.
    from resource import RLIMIT_AS, RLIMIT_CORE, RLIMIT_DATA, RLIMIT_FSIZE

    _lower(RLIMIT_CORE, 0)
    _lower(RLIMIT_FSIZE, MAX_FILE_BYTES)
    with contextlib.suppress(OSError):  # the first to go when the machine has no memory left
        Path("/proc/self/oom_score_adj").write_text("1000")
    used = _memory_bytes()
    if "VmData" in used:
        _lower(RLIMIT_DATA, used["VmData"] + memory_bytes)
        _lower(RLIMIT_AS, used["VmSize"] + ADDRESS_SPACE_FACTOR * memory_bytes)
    return used.get("VmSize", 0) + NEARLY_ALL * memory_bytes


def _allow_seconds(seconds: int) -> None:
    """Let this process use so much more processor time; it is killed for more, watched or not."""
    from resource import RLIM_INFINITY, RLIMIT_CPU, getrlimit, setrlimit

    _, hard = getrlimit(RLIMIT_CPU)
    bound = int(time.process_time()) + 1 + seconds
    setrlimit(RLIMIT_CPU, (bound if hard == RLIM_INFINITY else min(bound, hard), hard))


def _lower(resource: int, bound: int) -> None:
    from resource import RLIM_INFINITY, getrlimit, setrlimit

    _, hard = getrlimit(resource)
    bound = bound if hard == RLIM_INFINITY else min(bound, hard)
    setrlimit(resource, (bound, bound))


def _memory_bytes() -> dict[str, int]:
    """This process's memory as the limits count it: VmData, VmSize, VmPeak; nothing where nobody says (not Linux)."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.partition(":") for line in lines)
    return {
        key: int(value.split()[0]) * 1024
        for key, _, value in fields
        if key in ("VmData", "VmSize", "VmPeak")
    }


# ------------------------------------------------------------------ frames


def _send(own: socket.socket, data: bytes, deadline: float | None = None) -> None:
    """Send a frame; raises TimeoutError at `deadline` (of time.monotonic)."""
    view = memoryview(_LENGTH.pack(len(data)) + data)
    while view:
        _wait_no_longer(own, deadline)
        view = view[own.send(view) :]


def _receive(own: socket.socket, deadline: float | None = None) -> bytes:
    """The next frame.

    Raises:
        EOFError: there is none any more.
        TimeoutError: it is not there at `deadline`.
        ValueError: it is longer than a frame may be.
    """
    (length,) = _LENGTH.unpack(_receive_bytes(own, _LENGTH.size, deadline))
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return _receive_bytes(own, length, deadline)


def _receive_bytes(own: socket.socket, length: int, deadline: float | None) -> bytes:
    received = bytearray()
    while len(received) < length:
        _wait_no_longer(own, deadline)
        piece = own.recv(min(length - len(received), 1024**2))
        if not piece:
            raise EOFError
        received += piece
    return bytes(received)


def _wait_no_longer(own: socket.socket, deadline: float | None) -> None:
    seconds = None if deadline is None else deadline - time.monotonic()
    if seconds is not None and seconds <= 0:
        raise TimeoutError
    own.settimeout(seconds)
