"""Functions in processes of their own, forked from this one: libraries need not be imported again.

`subprocess` stays for what is about imports, or about how a command starts.
"""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

__all__ = ["Forked", "told_by"]


class Forked(subprocess.Popen[str]):
    """A process that calls `function` with `args`, and ends with what that returns for its status, or None for 0.

    Args:
        options: of `subprocess.Popen`, for stdin, stdout and stderr.
    """

    def __init__(self, function: Callable[..., int | None], *args: Any, **options: Any) -> None:
        self._function = partial(function, *args)
        super().__init__([function.__name__], text=True, **options)

    def _execute_child(self, *args: Any) -> None:
        stdin, other_in, other_out, stdout, other_err, stderr = args[10:16]
        self.pid = os.fork()
        if self.pid == 0:
            for other in {other_in, other_out, other_err} - {-1}:
                os.close(other)
            _run(self._function, {0: stdin, 1: stdout, 2: stderr})
        self._child_created = True
        self._close_pipe_fds(stdin, other_in, other_out, stdout, other_err, stderr)


def told_by(function: Callable[..., int | None], *args: Any) -> str:
    """What `function` prints in a process of its own, where it has to succeed."""
    with Forked(function, *args, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        told, said = process.communicate()
    assert process.returncode == 0, said
    return told


def _run(function: Callable[[], int | None], ends: dict[int, int]) -> NoReturn:
    """Call `function` with these standard streams, and end before anything else of this process goes on."""
    status = 1
    try:
        gc.freeze()  # garbage of before is none of its concern
        for number, end in ends.items():
            if end != -1:
                os.dup2(end, number)
        sys.stdin, sys.stdout, sys.stderr = (open(n, "w" if n else "r") for n in ends)  # noqa: SIM115
        logging.getLogger().handlers.clear()
        warnings.simplefilter("default")
        status = function() or 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001 - as at the end of any program
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
