"""The directory of a run: what is read of it while somebody writes, and what is said where there is nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import ConfigurationError
from neurogrid.training.runs.run_directory import Figures, RunDirectory, read_run_file
from neurogrid.training.runs.run_file import RunFileError

LEAST = '[model]\nconfig = "embedded"\n[data]\npath = "data/"\n[stop]\nsteps = 300\n'


def test_a_run_is_read_back(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with pytest.raises(ConfigurationError, match="has no run in it"):
        directory.read_run()
    file = tmp_path / "mine.toml"
    file.write_text(LEAST)
    run = read_run_file(file)
    assert run.name == "mine"
    directory.run_file.write_text(run.text())
    assert directory.read_run() == run
    assert not directory.has_run
    directory.journal.touch()
    assert (directory.has_run, directory.has_begun) == (True, False)
    directory.journal.write_text("x")
    assert directory.has_begun


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"[model]\nconfig = '\xff'\n", ":2: this is no text in UTF-8"),
        (b"#" * 20_000, " is no run file: those have at most"),
        (b"[modl]\n", ':1: a run file has no "modl"'),
    ],
)
def test_a_file_that_is_no_run_file(data: bytes, told: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(data)
    with pytest.raises(ConfigurationError) as failed:
        read_run_file(file)
    assert str(failed.value).startswith(f"{file}{told}")
    assert isinstance(failed.value, RunFileError) == ("modl" in told)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        read_run_file(tmp_path / "run.toml")
    with pytest.raises(ConfigurationError, match="Is a directory"):
        read_run_file(tmp_path)


FIGURES = st.dictionaries(
    st.text(max_size=5), st.integers(-(2**53), 2**53) | st.floats(-1e300, 1e300), max_size=4
)


@given(st.lists(FIGURES, max_size=5), st.integers(0, 200))
def test_the_lines_that_are_whole_are_read(
    tmp_path_factory: pytest.TempPathFactory, lines: list[Figures], cut: int
) -> None:
    """Whoever writes may be in the middle of a line."""
    directory = RunDirectory(tmp_path_factory.mktemp("run"))
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    data = data[: max(0, len(data) - cut)]
    directory.metrics.write_bytes(data)
    assert directory.figures() == lines[: data.count(b"\n")]


@pytest.mark.parametrize("left", [b"", b'{"step": 1}\n', b'{"step": 1}\n{"ste'])
def test_a_line_after_one_that_is_torn_is_whole(left: bytes, tmp_path: Path) -> None:
    """By a disk that was full, and is not any more."""
    directory = RunDirectory(tmp_path)
    directory.metrics.write_bytes(left)
    for step in (2, 3):
        directory.add_figures({"step": step})
    before = [{"step": 1}] if left else []
    assert directory.figures() == [*before, {"step": 2}, {"step": 3}]


def test_lines_of_rounds_that_were_taken_back_are_left_out(tmp_path: Path) -> None:
    """Tokens of a run rise: speeds are told by the difference of two lines."""
    directory = RunDirectory(tmp_path)
    # Round 3 has a line twice, since what is held out was looked at later; then it was resumed twice.
    for number, seconds in ((1, 1), (2, 2), (3, 3), (3, 4), (2, 5), (3, 6), (1, 7), (2, 8), (2, 9)):
        directory.add_figures({"round": number, "tokens": 10 * number, "seconds": seconds})
    assert [(each["round"], each["seconds"]) for each in directory.figures()] == [
        *((1, 7), (2, 8), (2, 9)),
    ]
    directory.add_figures({"step": 1})
    directory.add_figures({"round": 1})
    assert directory.figures()[-2:] == [{"step": 1}, {"round": 1}]


def test_what_is_no_figure_is_left_out(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.figures() == []
    directory.metrics.write_bytes(
        b'[1]\n"x"\nnot json\n\xff\n{"step": 1, "name": "x", "is": true}\n' + b"[" * 9999 + b"\n"
    )
    assert directory.figures() == [{"step": 1}]


def test_the_newest_lines_of_a_long_file_are_read(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with directory.metrics.open("w") as stream:
        for step in range(20_000):
            stream.write(json.dumps({"step": step, "loss": 1.0}) + "\n")
    figures = directory.figures()
    assert 5000 < len(figures) < 20_000
    assert figures[-1]["step"] == 19_999
    assert [each["step"] for each in figures] == list(range(20_000 - len(figures), 20_000))


def test_the_metrics_cannot_be_read(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.metrics.mkdir()
    with pytest.raises(ConfigurationError, match="cannot be read"):
        directory.figures()


def test_the_steps_of_checkpoints(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.steps() == []
    for name in ("step-20", "step-100", "step-3", "latest", "step-x", ".step-7.tmp"):
        (directory.checkpoints / name).mkdir(parents=True)
    assert directory.steps() == [3, 20, 100]


def test_checkpoints_may_be_in_another_directory(tmp_path: Path) -> None:
    directory, folder = RunDirectory(tmp_path / "run"), tmp_path / "disk" / "checkpoints"
    directory.path.mkdir()
    for _ in range(2):  # an attempt that failed changes nothing
        directory.place_checkpoints(folder)
    (folder / "step-4").mkdir()
    (folder / "latest").symlink_to("step-4")
    assert directory.steps() == [4]
    assert directory.latest_checkpoint() == folder / "step-4"
    moved = RunDirectory(directory.path.rename(tmp_path / "moved"))
    assert moved.latest_checkpoint() == folder / "step-4"
    folder.rename(tmp_path / "away")
    with pytest.raises(ConfigurationError, match="which is not there: is its disk mounted"):
        moved.check_checkpoints()


def test_checkpoints_have_a_directory_of_their_own(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path / "first"), RunDirectory(tmp_path / "second")
    for each in (first, second):
        each.path.mkdir()
    first.place_checkpoints(tmp_path / "here")
    with pytest.raises(ConfigurationError, match="is for one run alone, and "):
        second.place_checkpoints(tmp_path / "here")
    second.place_checkpoints(second.path / "checkpoints")
    assert not second.checkpoints.is_symlink()
    with pytest.raises(ConfigurationError, match="checkpoints is there already"):
        second.place_checkpoints(tmp_path / "there")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be used: File exists"):
        first.place_checkpoints(tmp_path / "file")
    first.place_checkpoints(tmp_path / "elsewhere")
    assert first.checkpoints.resolve() == tmp_path / "elsewhere"
