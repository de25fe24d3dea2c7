"""The process that others are forked from, with all that takes long imported: `preloaded_server DESCRIPTOR`.

At the descriptor is a socket, where each packet asks for a process and is answered by its pid; see `preloaded`.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import runpy
import signal
import socket
import sys
import termios
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000
# Not the commands themselves: each runs as `__main__`, and is imported once more.
MODULES = (
    "neurogrid.assembly.coordinator",
    "neurogrid.assembly.worker",
    "neurogrid.p2p.blocking",
    "neurogrid.server.http.http_server",
    "transformers.models.llama.modeling_llama",
)


def serve(asking: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; returns it in the new process, and None in this one when nobody asks any more."""
    while True:
        packet, descriptors, _, _ = socket.recv_fds(asking, 2**20, 3)
        if not packet:
            return None
        told, tell = os.pipe()
        # Twice: when its parent has ended, it is a child of those who asked.
        between = os.fork()
        if between == 0:
            if pid := os.fork():
                os.write(tell, str(pid).encode())
                os._exit(0)
            for descriptor in (asking.detach(), told, tell):
                os.close(descriptor)
            request: dict[str, Any] = pickle.loads(packet)
            begin(request, descriptors)
            return request
        os.waitpid(between, 0)
        asking.send(os.read(told, 64))
        for descriptor in (told, tell, *descriptors):
            os.close(descriptor)


def begin(request: dict[str, Any], descriptors: list[int]) -> None:
    """Be what a shell starts: with these files, directory, environment, session and network."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["new_session"]:
        os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    if request["new_session"] and os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        lines = 1 if name == "stderr" or os.isatty(number) else -1
        errors = "backslashreplace" if name == "stderr" else "surrogateescape"
        mode = "w" if number else "r"
        file = open(number, mode, lines, "utf-8", errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    if request["namespace"] is not None:
        with open(f"/run/netns/{request['namespace']}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")


def run(first: str, *args: str) -> None:
    """Go on as `python FIRST *ARGS`."""
    if first == "-m":
        sys.argv, sys.path[0] = list(args), os.getcwd()
        runpy.run_module(args[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv, sys.path[0] = ["-c", *args[1:]], ""
        exec(compile(args[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = [first, *args], str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the tests, which end what they started
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        run(*asked["args"])
