"""Functions of ours on other people's data, each in a child process whose limits the kernel keeps.

What a config or a chat template takes in memory and time is known when it has been tried, and torch and Jinja cannot
be interrupted. So it is tried where it can be killed: `ConfinedProcess` calls a function in a process of its own, which
has limits on memory, processor time and files, no core dump, and none of this process's sockets and files.

Strategy: importing torch and transformers takes seconds, so children are forked by one process that has done that, the
fork server. It is forked from this process while that is young (`start_fork_server`), which takes milliseconds, and is
otherwise started as a Python of its own when first needed. It runs nothing of others itself. A child lives as long as
the socket that its user holds: when that is closed, on purpose or because the user died, the fork server kills the
child, reaps it and removes its temporary files.

Arguments and results are JSON, in frames of a length and as many bytes. It knows neither configs nor templates.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from neurogrid.errors import (
    CheckpointError,
    ConfigurationError,
    NeuroGridError,
    UnsupportedModelError,
)

__all__ = ["ConfinedProcess", "ConfinementError", "Limits", "start_fork_server"]

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

# What a fork server that is a Python of its own imports before it is asked for anything.
PRELOADED = ("neurogrid.model.proof.proof", "neurogrid.model.files.chat_template")

_LENGTH = struct.Struct("!I")
# What the fork server is told for each child, filled up with spaces.
_ORDER_BYTES = 512
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
            own = self._socket = _fork_server().new_child(self._function, self._limits)
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


def start_fork_server(*, in_any_thread: bool = False) -> None:
    """Have the fork server, if there is none yet: at best forked from this process, before it reads its keys.

    Elsewhere than on Linux, or with other threads or a GPU in use, it is a Python of its own, which is not waited for.

    Args:
        in_any_thread: fork although there are other threads; to be used where these are known to be idle.
    """
    _fork_server(in_any_thread=in_any_thread)


# ------------------------------------------------------------------ the fork server, seen from outside


class _ForkServer:
    """A fork server that runs, the process `pid`; ends with `control`."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self._pid = pid
        self._owner = os.getpid()
        self._control = control

    def new_child(self, function: str, limits: Limits) -> socket.socket:
        """A socket to a new child, which says when it is there.

        Raises:
            OSError: the fork server has ended.
        """
        order = json.dumps({"function": function, **asdict(limits)}).encode().ljust(_ORDER_BYTES)
        own, others = socket.socketpair()
        with others:
            try:
                socket.send_fds(self._control, [order], [others.fileno()])
            except BaseException:
                own.close()
                raise
        return own

    def is_alive(self) -> bool:
        """Whether it still reads what it is told."""
        readable, _, _ = select.select([self._control], [], [], 0)
        return self._owner == os.getpid() and not readable

    def close(self) -> None:
        """End it and its children. In a process that was forked from its user's, only forget it."""
        self._control.close()
        if self._owner == os.getpid():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)


_server: _ForkServer | None = None
_server_lock = threading.Lock()


def _fork_server(*, in_any_thread: bool = False) -> _ForkServer:
    global _server
    with _server_lock:
        if _server is None or not _server.is_alive():
            if _server is not None:
                _server.close()
            own, others = socket.socketpair()
            with others:
                start = _fork_as_server if _may_fork(in_any_thread) else _start_as_server
                _server = _ForkServer(start(others), own)
        return _server


@atexit.register
def _end_fork_server() -> None:
    if _server is not None:
        _server.close()


def _may_fork(in_any_thread: bool) -> bool:
    torch = sys.modules.get("torch")
    # Without torch there is nothing to be had by it. A GPU that is in use does not survive a fork.
    return (
        sys.platform == "linux"
        and torch is not None
        and not _uses_accelerator(torch)
        and (in_any_thread or threading.active_count() == 1)
    )


def _uses_accelerator(torch: Any) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return False
    is_initialized = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    return is_initialized is None or is_initialized()


def _fork_as_server(control: socket.socket) -> int:
    # No handler of this process's is to run in the child.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _run_and_exit(lambda: _serve(control))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return pid


def _start_as_server(control: socket.socket) -> int:
    # What this process imports, that one has to find.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    number = control.fileno()
    code = f"from neurogrid.model.confined import _serve_at; _serve_at({number})"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        pass_fds=[number],
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    process.returncode = 0  # it is waited for by its number
    return process.pid


# ------------------------------------------------------------------ in the fork server


def _serve_at(descriptor: int) -> NoReturn:
    """The main function of a fork server that is a Python of its own."""
    for name in PRELOADED:
        importlib.import_module(name)
    _run_and_exit(lambda: _serve(socket.socket(fileno=descriptor)))


def _run_and_exit(run: Callable[[], None]) -> NoReturn:
    """Call `run` and end the process, whatever happens: nothing of the process that was forked goes on here."""
    status = 1
    try:
        run()
        status = 0
    finally:
        os._exit(status)


@dataclass(slots=True)
class _Child:
    """A child that runs: the socket at its end, and where its temporary files are."""

    socket: socket.socket
    folder: str


def _serve(control: socket.socket) -> None:
    """Fork children as `control` orders, and see to their ends, until it is closed."""
    # What is here belongs to the parent: to free one of its sockets would close a number that is another's by now.
    gc.freeze()
    _leave_the_parent(control)
    own_end, woken = socket.socketpair()
    for each in (own_end, woken):
        each.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    children: dict[int, _Child] = {}
    try:
        while True:
            poll = select.poll()
            poll.register(control, select.POLLIN)
            poll.register(own_end, select.POLLIN)
            for child in children.values():
                poll.register(child.socket, 0)  # that its user closed it is always told
            ready = {number for number, _ in poll.poll()}
            if own_end.fileno() in ready:
                own_end.recv(4096)
            for pid, child in children.items():
                if child.socket.fileno() in ready:
                    os.kill(pid, signal.SIGKILL)
            _reap(children)
            if control.fileno() in ready and not _take_order(control, children):
                return
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid, child in children.items():
            os.waitpid(pid, 0)
            shutil.rmtree(child.folder, ignore_errors=True)


def _leave_the_parent(control: socket.socket) -> None:
    """Give up what was inherited: terminal, signals, files and sockets."""
    signal.set_wakeup_fd(-1)
    for each in signal.valid_signals():
        if callable(signal.getsignal(each)):
            signal.signal(each, signal.SIG_DFL)
    # They are for the process that uses this one, whatever other got them: its end ends this one, in order.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # a Python of its own leads its session already
        os.setsid()
    logging.disable(logging.CRITICAL)
    with open(os.devnull, "r+b", buffering=0) as nothing:
        for number in (0, 1, 2):
            os.dup2(nothing.fileno(), number)
    _close_all_but(control)


def _close_all_but(kept: socket.socket) -> None:
    os.closerange(3, kept.fileno())
    os.closerange(kept.fileno() + 1, os.sysconf("SC_OPEN_MAX"))


def _take_order(control: socket.socket, children: dict[int, _Child]) -> bool:
    """Fork the child that is ordered; False where nobody orders any more."""
    data, descriptors, _, _ = socket.recv_fds(control, _ORDER_BYTES, 1)
    while data and len(data) < _ORDER_BYTES:
        more = control.recv(_ORDER_BYTES - len(data))
        data = data + more if more else b""
    if not data or len(descriptors) != 1:
        return False
    order = json.loads(data)
    # Here, not there: what is imported now, the next child has.
    module, _, name = order["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    limits = Limits(order["memory_bytes"], order["cpu_seconds"])
    child = _Child(
        socket.socket(fileno=descriptors[0]), tempfile.mkdtemp(prefix="neurogrid-confined-")
    )
    pid = os.fork()
    if pid == 0:
        _run_and_exit(lambda: _answer_calls(child, function, limits))
    children[pid] = child
    return True


def _reap(children: dict[int, _Child]) -> None:
    """Forget the children that have ended, so that the callers that wait for them know."""
    for pid in list(children):
        ended, _ = os.waitpid(pid, os.WNOHANG)
        if ended:
            child = children.pop(pid)
            child.socket.close()
            shutil.rmtree(child.folder, ignore_errors=True)


# ------------------------------------------------------------------ in the child


def _answer_calls(child: _Child, function: Callable[[Any], Any], limits: Limits) -> None:
    gc.freeze()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _close_all_but(child.socket)
    tempfile.tempdir = child.folder
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # its others are not in a process that was forked
    nearly_all = _set_limits(limits)
    _send(child.socket, b"")
    while True:
        try:
            data = _receive(child.socket)
        except EOFError:
            # The process that should see to this end may have ended before.
            shutil.rmtree(child.folder, ignore_errors=True)
            return
        _allow_seconds(limits.cpu_seconds)
        answer = _answer(function, data, nearly_all)
        if len(answer) > MAX_FRAME_BYTES:
            answer = _told(ConfinementError(f"it gives more than {MAX_FRAME_BYTES} bytes"))
        _send(child.socket, answer)


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


def _set_limits(limits: Limits) -> float:
    """Set all but that of processor time; the address space above which hardly any memory is left."""
    # Here, not above: it exists on Unix alone.
    from resource import RLIMIT_AS, RLIMIT_CORE, RLIMIT_DATA, RLIMIT_FSIZE

    _lower(RLIMIT_CORE, 0)
    _lower(RLIMIT_FSIZE, MAX_FILE_BYTES)
    with contextlib.suppress(OSError):  # the first to go when the machine has no memory left
        Path("/proc/self/oom_score_adj").write_text("1000")
    used = _memory_bytes()
    if "VmData" in used:
        _lower(RLIMIT_DATA, used["VmData"] + limits.memory_bytes)
        _lower(RLIMIT_AS, used["VmSize"] + ADDRESS_SPACE_FACTOR * limits.memory_bytes)
    return used.get("VmSize", 0) + NEARLY_ALL * limits.memory_bytes


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
