"""A deputy whose disk takes nothing: it says so in one sentence, and the run goes on without it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.training.data.manifest import Manifest, SliceInfo
from neurogrid.training.leading.deputies import deputy as deputies
from neurogrid.training.leading.deputies.deputy import stand_by
from neurogrid.training.leading.progress import QuietProgress
from neurogrid.training.leading.settings import DeputySettings
from neurogrid.training.runs.run_directory import RunDirectory
from neurogrid.training.wire.runs import Followed

if TYPE_CHECKING:
    from neurogrid.p2p.exchange.exchange import Exchange

TEXT = '[model]\nconfig = "embedded"\n[data]\npath = "data/"\n[stop]\nrounds = 1\n'
FOLLOWED = Followed(bytes(16), TEXT, "{}", bytes(32))
SAID = r"run: the run cannot be copied there: .*\. Make room, and begin again"
SLICE = SliceInfo(b"s" * 32, 2, 152)
MANIFEST = Manifest("text", (SLICE,), (), sequence_length=8, vocab_size=500)


def settings_of(directory: Path) -> DeputySettings:
    nobody: Any = None
    return DeputySettings(directory / "run", nobody, directory / "identity")


@asynccontextmanager
async def deputy_in(folder: Path) -> AsyncIterator[Any]:
    settings = settings_of(folder)
    settings.directory.mkdir()
    directory = RunDirectory(settings.directory)
    deputy = deputies._Deputy(settings, directory, Identity.generate(), QuietProgress())
    host = SimpleNamespace(is_connected=lambda peer: False)
    deputy._exchange = cast("Exchange", SimpleNamespace(host=host))
    try:
        yield deputy
    finally:
        deputy.copy.close()


async def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("no directory")
    with pytest.raises(ConfigurationError, match=SAID):
        await stand_by(settings_of(tmp_path), QuietProgress())


async def test_a_config_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    async with deputy_in(tmp_path) as deputy:
        (tmp_path / "run" / "model.json").mkdir()
        with pytest.raises(ConfigurationError, match=SAID):
            deputy._take_over_facts(FOLLOWED)


@pytest.mark.parametrize("taken", ["data", "data/manifest.json", "data/slices", "data/.complete"])
async def test_data_that_cannot_be_written_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    async def fetch_manifest(*told: object) -> Manifest:
        return MANIFEST

    class Gives:
        async def fetch_blob(self, peers: list[str], blob_id: bytes, **options: object) -> Any:
            return SimpleNamespace(blob=SimpleNamespace(path=None, data=b"data"), peer_id="leader")

    monkeypatch.setattr(deputies, "fetch_manifest", fetch_manifest)
    async with deputy_in(tmp_path) as deputy:
        place = tmp_path / "run" / taken
        place.parent.mkdir(exist_ok=True)
        if taken in ("data", "data/slices"):
            place.write_text("no directory")
        elif taken == "data/.complete":
            place.symlink_to(tmp_path / "nowhere" / "complete")
        else:
            place.mkdir()
        said = r"cannot be written: .*; make room there" if taken == "data/slices" else SAID
        with pytest.RaisesGroup(
            pytest.RaisesExc(ConfigurationError, match=said), allow_unwrapped=True
        ):
            await deputy._fetch_data(Gives(), FOLLOWED)
