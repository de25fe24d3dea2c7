"""A stream whose reader is stopped: nobody waits for it, little is kept, and what was lost is told."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from neurogrid.cli.terminal.queued_stream import MAX_WAITING_BYTES, QueuedStream

DEADLINE = 60.0


@contextmanager
def unread_pipe() -> Iterator[tuple[int, TextIO]]:
    """Both ends of a pipe that takes nothing as long as nobody reads it."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with open(reader, "rb", closefd=True), open(writer, "w", encoding="utf-8") as stream:
        try:
            while True:
                os.write(writer, b"." * 4096)
        except BlockingIOError:
            os.set_blocking(writer, True)
        yield reader, stream


def read_all(reader: int, stream: TextIO, queued: QueuedStream) -> str:
    """What comes out of the pipe until everything was written."""
    read: list[bytes] = []

    def drain() -> None:
        while data := os.read(reader, 65536):
            read.append(data)

    draining = threading.Thread(target=drain)
    draining.start()
    assert queued.finish(DEADLINE)
    stream.close()
    draining.join(DEADLINE)
    return b"".join(read).decode().lstrip(".")


def lost(number: int) -> str:
    return f"lost {number}\n"


def test_what_waits_comes_in_its_order_and_what_is_too_much_is_counted() -> None:
    with unread_pipe() as (reader, stream):
        queued = QueuedStream(stream, lost)
        queued.start()
        lines = [f"{number:99}\n" for number in range(2 * MAX_WAITING_BYTES // 100)]
        for line in lines:
            queued.write(line)
        assert queued.is_behind
        text = read_all(reader, stream, queued)
    shown = text.splitlines(keepends=True)
    num_kept = MAX_WAITING_BYTES // 100
    assert shown == [*lines[:num_kept], lost(len(lines) - num_kept)]


def test_after_the_loss_it_goes_on() -> None:
    with unread_pipe() as (reader, stream):
        queued = QueuedStream(stream, lost)
        queued.start()
        queued.write("x" * (MAX_WAITING_BYTES + 1) + "\n")  # too much by itself
        while not os.read(reader, 65536).endswith(b"lost 1\n"):
            pass
        queued.write("after\n")
        assert read_all(reader, stream, queued) == "after\n"


def test_a_reader_that_has_gone_keeps_nobody() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as stream:
        queued = QueuedStream(stream, lost)
        queued.start()
        queued.write("to nobody\n")
        assert queued.finish(DEADLINE)


def test_one_that_never_reads_keeps_nobody_longer_than_is_said() -> None:
    with unread_pipe() as (reader, stream):
        queued = QueuedStream(stream, lost)
        queued.start()
        queued.write("a line\n")
        assert not queued.finish(0.0)
        queued.write("another\n")
        assert read_all(reader, stream, queued) == "a line\nanother\n"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_it_is_like_the_file_that_it_writes(encoding: str) -> None:
    reader, writer = os.pipe()
    with open(reader, "rb") as source:
        with open(writer, "w", encoding=encoding) as stream:
            queued = QueuedStream(stream, lost)
            assert (queued.encoding, queued.fileno(), queued.isatty()) == (encoding, writer, False)
            queued.start()
            print("é", file=queued, flush=True)
            assert queued.finish(DEADLINE)
        assert source.read() == "é\n".encode(encoding, "backslashreplace")
