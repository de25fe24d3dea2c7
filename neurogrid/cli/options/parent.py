"""A command that another program starts as a child ends with it, also when that is killed: by its standard input."""

from __future__ import annotations

import argparse
import sys

import trio

__all__ = ["add_parent_option", "wait_stdin_eof"]


def add_parent_option(parser: argparse.ArgumentParser) -> None:
    """The flag of a command that is such a child; people have no use for it."""
    parser.add_argument("--stop-on-stdin-eof", action="store_true", help=argparse.SUPPRESS)


async def wait_stdin_eof() -> None:
    """Wait until standard input has ended."""
    async with trio.lowlevel.FdStream(sys.stdin.fileno()) as stdin:
        while await stdin.receive_some(4096):
            pass  # what is written there means nothing, only its end does
