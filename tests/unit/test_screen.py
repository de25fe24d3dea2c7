"""A completion and what is said meanwhile, on one terminal: neither tears the other."""

from __future__ import annotations

import fcntl
import io
import os
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress

import pytest

from neurogrid.cli.terminal.screen import Screen
from neurogrid.cli.terminal.text_rows import fold, in_encoding, last_row, num_cells, printable

WIDTH = 20


class Terminal:
    """A pseudo-terminal, and what stands on it: enough of one for text, newlines and carriage returns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 10, WIDTH, 0, 0))
        self.stdout = os.fdopen(slave, "w", encoding="utf-8")
        self.stderr = os.fdopen(os.dup(slave), "w", encoding="utf-8")

    def screen(self) -> Screen:
        # In the test itself: pytest puts its own streams there before each phase.
        self._monkeypatch.setattr(sys, "stdout", self.stdout)
        self._monkeypatch.setattr(sys, "stderr", self.stderr)
        return Screen()

    def close(self) -> None:
        for stream in (self.stdout, self.stderr):
            stream.close()

    def rows(self) -> list[str]:
        self.close()
        data = b""
        with suppress(OSError):  # which is the end of it
            while part := os.read(self.master, 65536):
                data += part
        written = data.decode()
        assert "\x1b" not in written
        rows: list[list[str]] = [[]]
        column = 0
        for character in written:
            if character == "\r":
                column = 0
            elif character == "\n":
                rows.append([])
                column = 0
            else:
                if column == WIDTH:
                    rows.append([])
                    column = 0
                row = rows[-1]
                row[column : column + 1] = [character]
                column += 1
        return ["".join(row).rstrip() for row in rows]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    terminal = Terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("COLUMNS", raising=False)
    yield terminal
    terminal.close()
    os.close(terminal.master)


def test_what_is_said_takes_a_row_of_its_own(terminal: Terminal) -> None:
    screen = terminal.screen()
    assert screen.is_shared
    screen.write("The quick bro")
    screen.say("lost worker")
    screen.write("wn fox\n")
    screen.say("4 tokens/s")
    assert terminal.rows() == ["lost worker", "The quick brown fox", "4 tokens/s", ""]


def test_rows_end_between_words(terminal: Terminal) -> None:
    screen = terminal.screen()
    for piece in ("A function object is", " a wrap", "per of code\n"):
        screen.write(piece)
    assert terminal.rows() == ["A function object", "is a wrapper of", "code", ""]


def test_a_line_of_several_rows_goes_on_where_it_was(terminal: Terminal) -> None:
    screen = terminal.screen()
    for word in ("0123456789" * 3, " ", "abc"):
        screen.write(word)
    screen.say("a line that is itself longer than a row")
    screen.write("def\n")
    rows = terminal.rows()
    assert rows[0] == "01234567890123456789"
    assert rows[1:4] == ["a line that is", "    itself longer", "    than a row"]
    assert rows[4] == "0123456789 abcdef"


def test_a_full_row_stays(terminal: Terminal) -> None:
    screen = terminal.screen()
    screen.write("x" * 2 * WIDTH)
    screen.say("said")
    screen.write("y")
    assert terminal.rows() == ["x" * WIDTH, "x" * WIDTH, "said", "y"]


def test_what_is_typed_is_kept(terminal: Terminal) -> None:
    screen = terminal.screen()
    terminal.stdout.write("> hel")
    with screen.reading(lambda: "> hel"):
        screen.say("lost worker")
    assert terminal.rows() == ["lost worker", "> hel"]


def test_an_unfinished_line_is_ended(terminal: Terminal) -> None:
    screen = terminal.screen()

    def fail() -> None:
        with screen.ending_line():
            screen.write("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    screen.say("failed")
    assert terminal.rows() == ["half", "failed", ""]


def test_a_model_does_not_steer_the_terminal(terminal: Terminal) -> None:
    screen = terminal.screen()
    screen.write("a\x1b[2Jb\r ")
    screen.say("c\x9b2Jd")
    assert terminal.rows() == ["c\\x9b2Jd", "a\\x1b[2Jb\\x0d"]


def test_a_pipe_gets_the_text_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    screen = Screen()
    screen.write("a\x1b[2Jb ")
    screen.say("lost worker …abc")
    with screen.ending_line():
        screen.write("c")
    assert stdout.getvalue() == "a\x1b[2Jb c"
    assert stderr.getvalue() == "lost worker …abc\n"


def test_an_error_is_told_without_rich(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    terminal.screen().say("this needs the extra neurogrid[inference]")
    assert terminal.rows() == ["this needs the extra", "    neurogrid[infere", "nce]", ""]


def test_what_is_said_is_broken_between_words() -> None:
    line = "  stage 1  layers 0-3        3.9 MB  on vm (127.0.0.1)  CPU (AMD EPYC), 9.7 GB free"
    assert fold(line, len(line)) == line
    assert fold(f"plan:\n{line}", 70) == (
        "plan:\n  stage 1  layers 0-3        3.9 MB  on vm (127.0.0.1)  CPU (AMD\n"
        "      EPYC), 9.7 GB free"
    )
    address = "/ip4/127.0.0.1/tcp/9000/p2p/12D3KooWxAAAAAA4"
    assert fold(f"listening at {address} alone", 20) == f"listening at\n    {address}\n    alone"
    assert fold("word word word", 1).split() == ["word"] * 3


def test_what_is_to_be_copied_is_not_broken(terminal: Terminal) -> None:
    screen = terminal.screen()
    screen.say("neurogrid join ngt1aeayli3lmv44", whole=True)
    screen.say("listening on loopback only")
    assert terminal.rows() == [
        *("neurogrid join ngt1a", "eayli3lmv44"),
        *("listening on", "    loopback only", ""),
    ]


def test_rows() -> None:
    assert last_row("", 4) == ""
    assert last_row("abcd", 4) == "abcd"
    assert last_row("abcde", 4) == "e"
    assert last_row("abc漢", 4) == "漢"  # two columns wide
    assert num_cells("漢a", 10) == 3
    assert num_cells("a\tb", 20) == 9
    assert num_cells("\t", 6) == 5


def test_letters() -> None:
    assert printable("a\tb\nc\x7f\x00") == "a\tb\nc\\x7f\\x00"
    assert in_encoding("…ab · c", "latin-1") == "...ab - c"
    assert in_encoding("…ab · c", "UTF-8") == "…ab · c"


def test_what_a_command_prints_to_a_terminal_does_nothing_there(terminal: Terminal) -> None:
    """A journal of another's run says what its leader likes."""
    terminal.screen().print("gone\x1b[2J")
    assert terminal.rows()[0] == "gone\\x1b[2J"


def test_what_a_command_prints_for_programs_is_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().print("a\x1bb")
    assert capsys.readouterr().out == "a\x1bb\n"
