"""Children of a process that has imported what takes seconds: forked from it, not started anew.

Importing torch and transformers takes seconds and some hundred megabytes. One process that has done both, the fork
server, forks children for whoever asks: they are there at once, and share what it has imported with it and with each
other. It is forked from this process while that is young (`start_fork_server`), which takes milliseconds, and is
otherwise started as a Python of its own when first needed. It runs nothing of others itself.

A child calls one function, and ends. It has no socket, file, terminal or signal handler of this process's, but those
that it is given. It lives as long as the socket that its user holds: when that is closed, or shut for writing, or the
user died, the fork server kills the child, reaps it and removes its temporary files.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

__all__ = [
    "EVENT",
    "ForkServer",
    "Function",
    "forget_fork_server",
    "fork_server",
    "preload",
    "running_fork_server",
    "start_fork_server",
]

EVENT: Final = struct.Struct("!i")
"""Message on the socket of a child that is told of, to its user: at first the number of its process, at its end its
exit code, negative for a signal."""

# What the fork server is told for each child, filled up with spaces.
_ORDER_BYTES: Final = 512
_MAX_DESCRIPTORS: Final = 4
# That the other end of a socket was shut for writing. That it was closed is always told.
_CLOSED: Final[int] = getattr(select, "POLLRDHUP", 0)
# What a fork server that is a Python of its own imports before it is asked for anything.
_preloaded: list[str] = []


@dataclass(frozen=True, slots=True)
class Function:
    """The function that a child calls.

    Attributes:
        main: as "module:name"; called with the child's socket, the descriptors that came with it, and the arguments.
        imports: modules that are imported before the child is forked, so that the next one has them.
        arguments: what JSON has.
        is_told_of: whether its user is told its number and its end.
    """

    main: str
    imports: tuple[str, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    is_told_of: bool = False


class ForkServer:
    """A fork server that runs, the process `pid`; ends with `control`."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self._pid = pid
        self._owner = os.getpid()
        self._control = control

    def new_child(self, function: Function, descriptors: Sequence[int] = ()) -> socket.socket:
        """A socket to a new child.

        Args:
            descriptors: at most three, of which the child gets copies.

        Raises:
            OSError: the fork server has ended.
        """
        told = [function.main, function.imports, function.arguments, function.is_told_of]
        order = json.dumps(told).encode().ljust(_ORDER_BYTES)
        if len(order) > _ORDER_BYTES or len(descriptors) >= _MAX_DESCRIPTORS:
            raise ValueError(f"an order of {len(order)} bytes with {len(descriptors)} descriptors")
        own, others = socket.socketpair()
        with others:
            try:
                socket.send_fds(self._control, [order], [others.fileno(), *descriptors])
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


def preload(*modules: str) -> None:
    """Have a fork server that is a Python of its own import these first: what most children need."""
    _preloaded.extend(name for name in modules if name not in _preloaded)


_server: ForkServer | None = None
_server_lock = threading.Lock()


def start_fork_server(*, in_any_thread: bool = False) -> None:
    """Have the fork server, if there is none yet: at best forked from this process, before it reads its keys.

    Elsewhere than on Linux, or with other threads or a GPU in use, it is a Python of its own, which is not waited for.

    Args:
        in_any_thread: fork although there are other threads; to be used where these are known to be idle.
    """
    fork_server(in_any_thread=in_any_thread)


def fork_server(*, in_any_thread: bool = False) -> ForkServer:
    """The fork server of this process; a new one where there is none, or it died."""
    global _server
    with _server_lock:
        if _server is None or not _server.is_alive():
            if _server is not None:
                _server.close()
            own, others = socket.socketpair()
            with others:
                start = _fork_as_server if _may_fork(in_any_thread) else _start_as_server
                _server = ForkServer(start(others), own)
        return _server


def running_fork_server() -> ForkServer | None:
    """The fork server of this process, if there is one."""
    with _server_lock:
        return _server if _server is not None and _server.is_alive() else None


def forget_fork_server() -> None:
    """End the fork server, if there is one; who needs one then has a new one."""
    global _server
    with _server_lock:
        if _server is not None:
            _server.close()
        _server = None


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
    code = f"from neurogrid.fork_server import _serve_at; _serve_at({number}, {_preloaded!r})"
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


def _serve_at(descriptor: int, modules: Sequence[str]) -> NoReturn:
    """The main function of a fork server that is a Python of its own."""
    for name in modules:
        importlib.import_module(name)
    _run_and_exit(lambda: _serve(socket.socket(fileno=descriptor)))


def _run_and_exit(run: Callable[[], None]) -> NoReturn:
    """Call `run` and end the process, whatever happens: nothing of the process that was forked goes on here."""
    status = 1
    try:
        run()
        status = 0
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    finally:
        os._exit(status)


@dataclass(slots=True)
class _Child:
    """A child that runs: the socket at its end, where its temporary files are, and whether its user is told of it."""

    socket: socket.socket
    folder: str
    is_told_of: bool


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
                # That its user closed it is always told.
                poll.register(child.socket, _CLOSED)
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
    _close_all_but(control.fileno())


def _close_all_but(*kept: int) -> None:
    """Close all files and sockets but these, standard input, output and errors."""
    last = 2
    for number in sorted(kept):
        os.closerange(last + 1, number)
        last = number
    os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))


def _take_order(control: socket.socket, children: dict[int, _Child]) -> bool:
    """Fork the child that is ordered; False where nobody orders any more."""
    data, descriptors, _, _ = socket.recv_fds(control, _ORDER_BYTES, _MAX_DESCRIPTORS)
    while data and len(data) < _ORDER_BYTES:
        more = control.recv(_ORDER_BYTES - len(data))
        data = data + more if more else b""
    if not data or not descriptors:
        return False
    main, imports, arguments, is_told_of = json.loads(data)
    # Here, not there: what is imported now, the next child has. Of what cannot be imported the child says why.
    with contextlib.suppress(Exception):
        _import(*imports)
    own, folder = socket.socket(fileno=descriptors[0]), ""
    try:
        folder = tempfile.mkdtemp(prefix="neurogrid-child-")
        child = _Child(own, folder, is_told_of)
        pid = os.fork()
    except OSError:
        # A full disk, or as many processes as there may be: whoever asked sees its socket closed, and others live on.
        own.close()
        for number in descriptors[1:]:
            os.close(number)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        return True
    if pid == 0:
        _run_and_exit(lambda: _call(child, main, imports, descriptors[1:], arguments))
    for number in descriptors[1:]:
        os.close(number)
    children[pid] = child
    _tell(child, pid)
    return True


def _import(*modules: str) -> None:
    num_before = len(sys.modules)
    for each in modules:
        importlib.import_module(each)
    if len(sys.modules) > num_before:
        # It is to stay, and to be shared: nobody looks for garbage in it.
        gc.freeze()


def _tell(child: _Child, number: int) -> None:
    if child.is_told_of:
        with contextlib.suppress(OSError):  # its user may have died
            child.socket.send(EVENT.pack(number))


def _reap(children: dict[int, _Child]) -> None:
    """Forget the children that have ended, so that the callers that wait for them know."""
    for pid in list(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            child = children.pop(pid)
            _tell(child, os.waitstatus_to_exitcode(status))
            child.socket.close()
            shutil.rmtree(child.folder, ignore_errors=True)


# ------------------------------------------------------------------ in the child


def _call(
    child: _Child,
    main: str,
    imports: Sequence[str],
    descriptors: Sequence[int],
    arguments: dict[str, Any],
) -> None:
    gc.freeze()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _close_all_but(child.socket.fileno(), *descriptors)
    tempfile.tempdir = child.folder
    _call_the_process(imports[0] if imports else main)
    try:
        module, _, name = main.partition(":")
        getattr(importlib.import_module(module), name)(child.socket, descriptors, **arguments)
    finally:
        # The process that should see to this end may have ended before.
        shutil.rmtree(child.folder, ignore_errors=True)


def _call_the_process(name: str) -> None:
    """Have tools that list processes show this instead of what the process was forked from."""
    with contextlib.suppress(OSError, ValueError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, stop = map(int, fields[45:47])  # where the command line is
        ctypes.memmove(
            start, name.encode()[: stop - start - 1].ljust(stop - start, b"\0"), stop - start
        )
