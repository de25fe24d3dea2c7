"""A command whose reader has gone says nothing of it, and ends as if SIGPIPE had ended it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from neurogrid.cli.terminal.closed_pipe import PIPE_STATUS, ends_with_its_reader

COMMAND = """
import sys
from collections.abc import Sequence
from neurogrid.cli.terminal.closed_pipe import ends_with_its_reader

@ends_with_its_reader
def main(argv=None):
    {body}
    return 7

sys.exit(main())
"""


def run(body: str, *, stdout: int) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND.format(body=body)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "body",
    [
        "print('one line, which waits in the buffer')",
        "print('x' * 100_000)",
        "print('help'); sys.exit(0)",  # as argparse does
    ],
)
def test_nobody_reads_it(body: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert run(body, stdout=writer) == (PIPE_STATUS, "")
    finally:
        os.close(writer)


def test_somebody_reads_it() -> None:
    assert run("print('a line')", stdout=subprocess.DEVNULL) == (7, "")


def test_it_passes_its_arguments_and_its_status_on() -> None:
    @ends_with_its_reader
    def main(argv: Sequence[str] | None = None) -> int:
        return len(argv or [])

    assert main(["a", "b"]) == 2
    assert main() == 0
