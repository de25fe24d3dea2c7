"""Programs for processes that the fork server makes: they answer with what they read."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    for line in sys.stdin:
        word = line.strip()
        if word == "fail":
            raise ValueError("as it was told")
        if word == "number":
            word = str(os.getpid())
        elif word == "signals":
            word = str([signal.getsignal(each) == signal.SIG_DFL for each in (2, 15)])
        elif word == "files":
            word = str(sorted(map(int, os.listdir("/proc/self/fd")))[:-1])
        print(word, flush=True)
    sys.exit(3)
