"""What the commands import late is imported without looking for garbage, and left out of that afterwards."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from neurogrid.cli.libraries import import_libraries
from neurogrid.cli.terminal.screen import Screen

MAKES_MUCH = """
import gc
was_enabled = gc.isenabled()
made = [[number] for number in range(50_000)]
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    gc.unfreeze()
    for name in ("makes_much", "fails"):
        sys.modules.pop(name, None)


def test_what_is_imported_is_left_out_of_collections(directory: Path) -> None:
    (directory / "makes_much.py").write_text(MAKES_MUCH)
    before = gc.get_freeze_count()
    import_libraries(Screen(), "makes_much")
    assert not sys.modules["makes_much"].was_enabled
    assert gc.isenabled()
    assert gc.get_freeze_count() > before + 50_000
    assert sys.modules["makes_much"].made[7] == [7]


def test_garbage_is_looked_for_again_after_an_import_that_failed(directory: Path) -> None:
    (directory / "fails.py").write_text("raise ImportError('not here')")
    with pytest.raises(ImportError, match="not here"):
        import_libraries(Screen(), "fails")
    assert gc.isenabled()


def test_who_has_turned_it_off_finds_it_off(directory: Path) -> None:
    gc.disable()
    try:
        import_libraries(Screen(), "json")
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()  # what leaks in other tests is to be found
