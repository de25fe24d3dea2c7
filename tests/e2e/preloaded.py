"""Python programs that need not import torch: forked from a process that has, which takes a tenth of a second.

`Popen` is `subprocess.Popen`. What begins with `sys.executable` and then `-m`, `-c` or a file, be it in a network
namespace, is forked from `preloaded_server`, and goes on there as Python does with such a command line: a process of
its own, child of this one. So is what such a process starts in its turn, local workers above all. Everything else is
started as ever, and so is what has something to do before it begins.
`subprocess.Popen` stays for what is about starting itself, or about what is read when a library is imported.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

__all__ = [
    "COORDINATOR",
    "DEADLINE",
    "ENVIRONMENT",
    "TRAIN",
    "WORKER",
    "Popen",
    "command_after",
    "fork_all_by",
    "fork_child",
    "proofs_directory",
    "run",
]

# For anything that takes seconds on an idle machine: the machines are shared, and slow at times.
DEADLINE = 240.0
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
COORDINATOR = (sys.executable, "-m", "neurogrid.cli.commands.coordinator")
WORKER = (sys.executable, "-m", "neurogrid.cli.commands.worker")
TRAIN = (sys.executable, "-m", "neurogrid.cli.commands.main", "train")

# Modules whose processes start others in their turn, as a member of a run does, too.
STARTERS = (COORDINATOR[2], TRAIN[2], "tools.demo_train")
# Imports little besides the library that reads the environment when it is imported: started as ever.
FETCHING = ["-m", "neurogrid.hub.fetching"]
IN_NAMESPACE = ["ip", "netns", "exec"]
PR_SET_CHILD_SUBREAPER = 36

_starting = threading.Lock()
# That of a process that was forked itself; see `preloaded_server`.
_own_server: socket.socket | None = None
_start_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def fork_child(
    process: Any, args: Sequence[Any], executable: Any, preexec: Any, *rest: Any
) -> None:
    """What `Popen` does to start a process; to be put in the place of `subprocess.Popen._execute_child`."""
    program, namespace = [args] if isinstance(args, str) else list(args), None
    if program[:3] == IN_NAMESPACE:
        namespace, program = program[3], program[4:]
    _, passed, cwd, env, _, _, _, *ends, _, _, _, _, _, new_session, _ = rest
    if program[0] != sys.executable or preexec is not None or program[1:3] == FETCHING:
        _start_child(process, args, executable, preexec, *rest)
        return
    stdin, _, _, stdout, _, stderr = ends
    request = {
        "args": [os.fsencode(part).decode(errors="surrogateescape") for part in program[1:]],
        "environment": dict(os.environ) if env is None else env,
        "directory": os.getcwd() if cwd is None else os.fspath(cwd),
        "namespace": namespace,
        "new_session": new_session,
        "numbers": [0, 1, 2, *passed],
        "cores": os.sched_getaffinity(0),
        # For each that might, there is a process more.
        "starts_others": program[1] != "-m" or program[2] in STARTERS or "--train" in program,
    }
    given = [own if end == -1 else end for own, end in enumerate((stdin, stdout, stderr))]
    given += passed
    process.pid = _ask_server(pickle.dumps(request), given)
    process._child_created = True
    process._close_pipe_fds(*ends)


class Popen(subprocess.Popen[str]):
    """A process with text pipes."""

    _execute_child = fork_child

    def __init__(self, args: Sequence[Any], **options: Any) -> None:
        super().__init__(args, **{"text": True, "env": ENVIRONMENT, **options})


def command_after(code: str, command: str = "worker") -> tuple[str, ...]:
    """A command line that runs some Python and then, in the same process, a command of ours."""
    then = f"from neurogrid.cli.commands.{command} import main; raise SystemExit(main())"
    return (sys.executable, "-c", f"{code}\n{then}")


def fork_all_by(server: socket.socket) -> None:
    """Have all that this process starts forked at the other end of this socket, whoever starts it."""
    global _own_server
    _own_server = server
    subprocess.Popen._execute_child = fork_child  # type: ignore[attr-defined]


def run(
    args: Sequence[Any], *, input: str | None = None, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; what it wrote is captured unless told otherwise."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        pipes["stdin"] = subprocess.PIPE
    with Popen(args, **{**pipes, **options}) as process:
        try:
            stdout, stderr = process.communicate(input, DEADLINE)
        finally:
            process.kill()
    done = subprocess.CompletedProcess(list(args), process.returncode, stdout, stderr)
    if check:
        done.check_returncode()
    return done


def _ask_server(request: bytes, descriptors: Sequence[int]) -> int:
    """The pid of the process, which is this one's child: whoever it came from has ended, and left it to us."""
    with _starting:
        server = _own_server or _server()
        _take_orphans(True)
        try:
            socket.send_fds(server, [request], descriptors)
            pid = int(server.recv(64))
        finally:
            # Nobody else's: whoever looks for the end of a process looks whether it is there.
            _take_orphans(False)
    return pid


def _take_orphans(takes: bool) -> None:
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(takes), 0, 0, 0) == 0


@cache
def proofs_directory() -> Path:
    """Where the processes of this one share what they have proven; gone with it."""
    directory = tempfile.mkdtemp(prefix="neurogrid-proofs-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


class _Server(subprocess.Popen[bytes]):
    _execute_child = _start_child


@cache
def _server() -> socket.socket:
    """The connection to the server, which ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arguments = [str(theirs.fileno()), str(proofs_directory()), "-" * 4000]
    process = _Server(
        [sys.executable, "-m", "tests.e2e.preloaded_server", *arguments],
        pass_fds=[theirs.fileno()],
        cwd=Path(__file__).parents[2],
        env=ENVIRONMENT,
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait(DEADLINE)

    atexit.register(end)
    return ours
