"""The process that others are forked from, with all that takes long imported.

Its arguments are DESCRIPTOR PROOFS PLACE. At the descriptor is a socket, where each packet asks for a process and is
answered by its pid; see `preloaded`. Proofs is the directory of what was proven (`shared_proofs`). In the place of the
last argument and those before it stands the command line of each process that was forked.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import pickle
import runpy
import signal
import socket
import sys
import tempfile
import termios
import threading
from pathlib import Path
from typing import Any, NoReturn

import neurogrid.model
from neurogrid.model.kernels.compiled import VARIABLE
from neurogrid.model.proof import proof
from tests.e2e.preloaded import fork_all_by
from tests.e2e.shared_proofs import share_proofs

CLONE_NEWNET = 0x40000000
# Not the commands themselves: each runs as `__main__`, and is imported once more.
MODULES = (
    "neurogrid.assembly.coordinator",
    "neurogrid.assembly.worker",
    "neurogrid.cli.libraries",
    "neurogrid.cli.options.discovery",
    "neurogrid.cli.options.telemetry",
    "neurogrid.cli.options.trust",
    "neurogrid.p2p.blocking",
    "neurogrid.p2p.quic.transport",
    "neurogrid.server.http.http_server",
    "neurogrid.training.leading",
    "neurogrid.training.stages.stage_learner",
    "neurogrid.training.trainer.learner",
    "transformers.models.llama.modeling_llama",
)
# Has read the environment when it was imported.
HUB_LIBRARY = "huggingface_hub"


def preload(proofs: Path) -> None:
    """Import what takes long, and prove the configs that most tests are about, which each process does once."""
    for name in MODULES:
        importlib.import_module(name)
    share_proofs(proofs)
    from neurogrid.model.embedded import embedded_model_path
    from neurogrid.model.kernels import library
    from tests.families import FAMILIES, save_checkpoint

    for dtype in (None, "bfloat16", "float32"):
        prove(embedded_model_path(), dtype)
    with tempfile.TemporaryDirectory() as directory:
        save_checkpoint(FAMILIES[0], Path(directory))
        prove(Path(directory), "float32")
    # Which kernels there are is for each process to find out, by its own environment.
    library.cache_clear()
    gc.collect()
    gc.freeze()


def prove(model: Path, dtype: str | None) -> None:
    """Know that a model can be split. None is its own dtype."""
    config = json.loads((model / "config.json").read_text())
    proving = proof.Proving(config, dtype)
    proof._kept[proving._key] = proof.prove(config, dtype)
    proving.result(seconds=0)  # which has it from there


def serve(asking: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each request.

    Returns: in the new process the request and the files that came with it, and None in this one when nobody asks
        any more.
    """
    while True:
        packet, descriptors, _, _ = socket.recv_fds(asking, 2**20, 16)
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
            return pickle.loads(packet), descriptors
        os.waitpid(between, 0)
        asking.send(os.read(told, 64))
        for descriptor in (told, tell, *descriptors):
            os.close(descriptor)


def begin(request: dict[str, Any], descriptors: list[int]) -> None:
    """Be what a shell starts: with these files, directory, environment, session and cores."""
    show(request["args"])
    os.sched_setaffinity(0, request["cores"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["new_session"]:
        os.setsid()
    for number, descriptor in zip(request["numbers"], away(descriptors), strict=True):
        os.dup2(descriptor, number)
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
    kernels, hub = os.environ.get(VARIABLE), hub_variables()
    os.environ.clear()
    os.environ.update(request["environment"])
    if os.environ.get(VARIABLE) != kernels:
        # What is known of configs, is known of other kernels.
        proof._kept.clear()
    if hub_variables() != hub:
        forget_hub()
    os.chdir(request["directory"])


def hub_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("HF_")}


def forget_hub() -> None:
    """Have the library that knows hubs imported anew by `neurogrid.hub`, which is not imported yet."""
    assert "neurogrid.hub" not in sys.modules
    for name in list(sys.modules):
        if name.partition(".")[0] == HUB_LIBRARY:
            del sys.modules[name]
    # As when it is imported: what was set before, and what is set by it.
    neurogrid.model.HUB_OFFLINE_BEFORE = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"


def enter(namespace: str) -> None:
    """Go over to another network."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def away(descriptors: list[int]) -> list[int]:
    """The same files under numbers that nobody asks for."""
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 512) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    return moved


def show(args: list[str]) -> None:
    """Have `ps` show this command line; what is too long for the place is cut."""
    start, stop = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    shown = "\0".join([sys.executable, *args]).encode(errors="replace")[: stop - start - 1]
    ctypes.memmove(start, shown.ljust(stop - start, b"\0"), stop - start)


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


def end(status: int) -> NoReturn:
    """End as Python does, without taking all that was imported to pieces, which takes 0.3 s."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for file in (sys.stdout, sys.stderr):
            file.flush()
    except OSError:
        sys.exit(status)
    os._exit(status)


def main(asking: socket.socket) -> None:
    """Serve; in a new process, be what was asked for. What starts others has a server of its own, made before it is."""
    while (asked := serve(asking)) is not None:
        request, descriptors = asked
        if request["namespace"] is not None:
            enter(request["namespace"])
        if request["starts_others"]:
            own, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if os.fork() == 0:
                own.close()
                for descriptor in descriptors:
                    os.close(descriptor)
                asking = others
                continue
            others.close()
            fork_all_by(own)
        begin(request, descriptors)
        try:
            run(*request["args"])
        except SystemExit as exc:
            if exc.code is not None and not isinstance(exc.code, int):
                raise
            end(exc.code or 0)
        end(0)
    os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the tests, which end what they started
    preload(Path(sys.argv[2]))
    main(socket.socket(fileno=int(sys.argv[1])))
