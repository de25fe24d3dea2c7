"""Weights on their way, as somebody sees them: rate and time left for each worker, on a pipe and on a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from neurogrid.cli.terminal.transfer_view import TransferView, format_bytes

MB = 1_000_000


class Seen:
    def __init__(self, *, is_terminal: bool) -> None:
        self.now = 100.0
        self.file = io.StringIO()
        console = Console(file=self.file, force_terminal=True, width=120) if is_terminal else None
        self.view = TransferView(
            lambda line: print(line, file=self.file), console, clock=lambda: self.now
        )

    @property
    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()


def test_lines_on_a_pipe_say_how_fast_and_how_long_yet() -> None:
    seen = Seen(is_terminal=False)
    seen.view.plan("a", "…one", 1000 * MB)
    seen.view.plan("b", "…two", 500 * MB)
    for _ in range(40):  # ten seconds
        seen.now += 0.25
        seen.view.came("a", 2_500_000)
    assert seen.lines == [
        "  weights to …one: 50.0 MB of 1.0 GB, 10.0 MB/s, 1:35 left",
        "  weights to …one: 100.0 MB of 1.0 GB, 10.0 MB/s, 1:30 left",
    ]
    seen.view.came("a", 900 * MB)
    assert seen.lines[2] == "  weights to …one: all of 1.0 GB in 10.0 s, 100.0 MB/s"
    seen.view.came("b", 500 * MB)
    assert seen.lines[3] == "  weights to …two: all of 500.0 MB in 10.0 s, 50.0 MB/s"
    seen.view.stop()
    assert len(seen.lines) == 4


def test_the_rate_is_that_of_the_bytes_and_not_of_what_came_before_them() -> None:
    seen = Seen(is_terminal=False)
    seen.view.plan("a", "…one", 6 * MB)
    seen.now += 9.3  # the worker checks the model's config
    seen.view.begin("a")
    seen.now += 0.2
    seen.view.came("a", 3 * MB)
    seen.view.begin("a")  # the next layer
    seen.now += 0.1
    seen.view.came("a", 3 * MB)
    assert seen.lines == ["  weights to …one: all of 6.0 MB in 0.3 s, 20.0 MB/s"]


def test_what_was_there_is_neither_waited_for_nor_counted() -> None:
    seen = Seen(is_terminal=False)
    seen.view.plan("a", "…one", 1000 * MB)
    seen.view.was_there("a", 900 * MB)
    seen.now += 10
    seen.view.came("a", 50 * MB)
    seen.view.came("a", 50 * MB)
    assert seen.lines == [
        "  weights to …one: 50.0 MB of 100.0 MB, 5.0 MB/s, 0:10 left",
        "  weights to …one: all of 100.0 MB in 10.0 s, 10.0 MB/s",
    ]
    seen.view.plan("b", "…two", MB)
    seen.view.was_there("b", MB)
    assert len(seen.lines) == 2  # nothing came, nothing is to be said


def test_bars_on_a_terminal() -> None:
    seen = Seen(is_terminal=True)
    seen.view.plan("a", "…one", 100 * MB)
    seen.view.came("a", 40 * MB)
    seen.view.was_there("a", 20 * MB)
    seen.view.stop()
    assert "weights to …one" in seen.file.getvalue()
    assert "40.0/80.0 MB" in seen.file.getvalue()


def test_bytes_for_people() -> None:
    sizes = (999, 1000, 12_345_678, 2.5e9, 3e12, 4e15)
    assert [format_bytes(size) for size in sizes] == [
        "999 B",
        "1.0 kB",
        "12.3 MB",
        "2.5 GB",
        "3.0 TB",
        "4000.0 TB",
    ]
