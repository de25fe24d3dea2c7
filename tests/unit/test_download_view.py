"""A download as somebody sees it: lines on a pipe, and what is said when it stops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from neurogrid.cli.terminal.download_view import DownloadView
from neurogrid.cli.terminal.logs import JsonFormatter
from neurogrid.cli.terminal.screen import Screen

MB = 1_000_000
HOME = Path("/home/me/.cache/huggingface/hub")


class Seen:
    def __init__(self, *, as_json: bool = False) -> None:
        self.now = 100.0
        screen = Screen(JsonFormatter() if as_json else None)
        self.view = DownloadView(screen, "org/model", clock=lambda: self.now)

    def fetch(self, seconds: int) -> None:
        """10 MB a second, of which is told each quarter."""
        for _ in range(4 * seconds):
            self.now += 0.25
            self.view.came(self.view._there + 2_500_000)


def test_lines_on_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    seen = Seen()
    with seen.view as view:
        view.found(50_000 * MB, 1_000 * MB, 3, HOME)
        seen.fetch(25)
        view.silent("timed out", 15.0)
        view.came(50_000 * MB)
    assert capsys.readouterr().err.splitlines() == [
        "fetching org/model: 49.0 GB in 3 files (1.0 GB are there), to /home/me/.cache/huggingface/hub",
        "  org/model: 1.1/50.0 GB, 10.0 MB/s, 1:21:30 left",
        "  org/model: 1.2/50.0 GB, 10.0 MB/s, 1:21:20 left",
        "nothing comes (timed out): asking again in 15 s",
        "org/model: 49.0 GB came in 25.0 s (2.0 GB/s)",
    ]


def test_what_was_there_needs_no_word(capsys: pytest.CaptureFixture[str]) -> None:
    with Seen().view as view:
        view.found(50 * MB, 50 * MB, 0, HOME)
    assert capsys.readouterr().err == ""


async def test_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    seen = Seen()
    with trio.CancelScope() as scope, seen.view as view:
        view.waiting()
        view.found(50 * MB, 0, 1, HOME)
        seen.fetch(1)
        scope.cancel()
        await trio.lowlevel.checkpoint()
    assert capsys.readouterr().err.splitlines() == [
        "another process fetches org/model: waiting for it",
        "fetching org/model: 50.0 MB in 1 file, to /home/me/.cache/huggingface/hub",
        "stopped with 10.0/50.0 MB of org/model here; the next time it goes on from there",
    ]


def test_an_error_is_the_only_word_about_itself(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with Seen().view as view:
            view.found(50 * MB, 0, 1, HOME)
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_objects_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    seen = Seen(as_json=True)
    with seen.view as view:
        view.found(1000 * MB, 0, 1, HOME)
        seen.fetch(10)
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in told] == ["download_found", "downloading", "downloaded"]
    assert (told[1]["there"], told[1]["total"]) == (100 * MB, 1000 * MB)
