"""Lines that come by a pipe: a turn each, whatever pieces they come in."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest
import trio

from neurogrid.cli.terminal import line_reader
from neurogrid.cli.terminal.line_reader import open_lines
from neurogrid.cli.terminal.screen import Screen
from neurogrid.errors import ConfigurationError


def lines_of(monkeypatch: pytest.MonkeyPatch, write: Callable[[int], None]) -> list[str]:
    """What is read of what `write` writes into a pipe."""
    source, sink = os.pipe()

    async def main() -> list[str]:
        found = []
        with open_lines(Screen()) as lines:
            assert not lines.is_interactive
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, write, sink)
                while (line := await lines.read("> ")) is not None:
                    found.append(line)
        return found

    with os.fdopen(source) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        return trio.run(main)


def test_lines_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(sink: int) -> None:
        for part in (b"one\ntw", b"o\r\n\nth\xc3", b"\xa9 end"):
            os.write(sink, part)
        os.close(sink)

    assert lines_of(monkeypatch, write) == ["one", "two", "", "th\xe9 end"]


@pytest.mark.parametrize(
    ("data", "says"), [(b"\xff\xfe\n", "not UTF-8"), (b"x" * 100, "more than 50 B")]
)
def test_what_is_no_line_is_refused(
    monkeypatch: pytest.MonkeyPatch, data: bytes, says: str
) -> None:
    monkeypatch.setattr(line_reader, "MAX_LINE_BYTES", 50)

    def write(sink: int) -> None:
        os.write(sink, data)
        os.close(sink)

    with pytest.RaisesGroup(pytest.RaisesExc(ConfigurationError, match=says)):
        lines_of(monkeypatch, write)
