"""What the commands import late is imported without looking for garbage, and left out of that afterwards."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from neurogrid.cli.libraries import import_libraries
from neurogrid.cli.terminal.screen import Screen
from tests.unit.forked import told_by

MAKES_MUCH = """
import gc
was_enabled = gc.isenabled()
made = [[number] for number in range(50_000)]
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


# Each in a process of its own: in this one, what leaks in other tests is to be found.


def import_what_makes_much() -> None:
    before = gc.get_freeze_count()
    import_libraries(Screen(), "makes_much")
    assert not sys.modules["makes_much"].was_enabled
    assert gc.isenabled()
    assert gc.get_freeze_count() > before + 50_000
    assert sys.modules["makes_much"].made[7] == [7]


def test_what_is_imported_is_left_out_of_collections(directory: Path) -> None:
    (directory / "makes_much.py").write_text(MAKES_MUCH)
    told_by(import_what_makes_much)


def import_what_fails() -> None:
    with pytest.raises(ImportError, match="not here"):
        import_libraries(Screen(), "fails")
    assert gc.isenabled()


def test_garbage_is_looked_for_again_after_an_import_that_failed(directory: Path) -> None:
    (directory / "fails.py").write_text("raise ImportError('not here')")
    told_by(import_what_fails)


def import_without_looking_for_garbage() -> None:
    gc.disable()
    import_libraries(Screen(), "json")
    assert not gc.isenabled()


def test_who_has_turned_it_off_finds_it_off() -> None:
    told_by(import_without_looking_for_garbage)
