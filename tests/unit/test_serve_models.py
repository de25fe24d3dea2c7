"""One of several models, opened again: which adapters are beside it then."""

from __future__ import annotations

import argparse
import logging
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import neurogrid.assembly.coordinator
from neurogrid.assembly.coordinator_settings import CoordinatorSettings
from neurogrid.assembly.memory_sharing import MemorySharing
from neurogrid.cli.commands import coordinator as coordinator_command
from neurogrid.cli.commands.serve_models import ModelOptions, _Opener, _tell_adapters
from neurogrid.cli.options.common import Listening
from neurogrid.cli.options.model import adapters_of
from neurogrid.cli.options.trust import Trust
from neurogrid.inference.board.progress import Progress
from neurogrid.inference.generation.adapters import ServedAdapters
from neurogrid.server.additions import AddedAdapter, Additions
from neurogrid.server.app import make_app
from neurogrid.server.errors import APIError
from neurogrid.server.models import Models
from neurogrid.server.openai.adapter_routes import adapter_routes, restore_adapters
from tests.unit.asgi_client import Answered, ask
from tests.unit.test_server_openai import save_embedded_adapter
from tests.unit.told_coordinator import Told, load_embedded


def rewrite(directory: Path) -> None:
    """Have another adapter in the directory of one."""
    weights = directory / "adapter_model.safetensors"
    save_file({key: torch.zeros_like(value) for key, value in load_file(weights).items()}, weights)


async def test_under_the_name_of_an_adapter_that_was_added_is_that_or_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that the server was started with are taken as they are, unless a client has removed them."""
    root, given = tmp_path / "root", tmp_path / "given"
    for directory in (*(root / name for name in ("stays", "changes", "goes")), given / "removed"):
        save_embedded_adapter(load_embedded(), directory)
    save_embedded_adapter(load_embedded(), given / "own")

    @asynccontextmanager
    async def open_coordinator(
        settings: CoordinatorSettings, *, model: Any, **more: Any
    ) -> AsyncIterator[Any]:
        told = Told(model)
        told.adapters = ServedAdapters.load(model, settings.adapters)
        yield told

    monkeypatch.setattr(neurogrid.assembly.coordinator, "open_coordinator", open_coordinator)

    def settings_of(
        options: argparse.Namespace, where: Listening, trust: Trust
    ) -> CoordinatorSettings:
        return CoordinatorSettings(model=None, adapters=adapters_of(options))

    async def restore(coordinator: Any) -> None:
        await restore_adapters(coordinator, additions, root)

    additions, models = Additions(), Models()
    model = models.add("embedded", is_wanted=True)
    options = argparse.Namespace(
        model=None, adapter=[(None, given / "own"), ("unwanted", given / "removed")]
    )
    opener = _Opener(
        options,
        models,
        MemorySharing(gives_way=True),
        root=None,
        additions=additions,
        restore=restore,
        make_settings=settings_of,
        judge=lambda options: None,
        progress=Progress,
    )
    place = opener.places["embedded"] = ModelOptions(options)
    model.kept_adapters = adapters_of(options)
    app = make_app(adapter_routes(models, root, additions))

    async def asked(method: str, which: str = "", **body: Any) -> Answered:
        return await ask(app, method, f"/v1/adapters{which}", json_body=body or None)

    @asynccontextmanager
    async def serving() -> AsyncIterator[set[str]]:
        """Have it open, beside adapters of these names."""
        place.loaded = load_embedded()
        async with opener.open(model) as coordinator:
            with model.serving(coordinator):
                yield {each.name for each in coordinator.adapters}
                model.remember(coordinator, ())

    async with serving() as names:
        assert names == {"own", "unwanted"}
        for name in ("stays", "changes", "goes"):
            assert (await asked("POST", name=name, path=name)).status == 200
        assert (await asked("DELETE", "/unwanted")).status == 200
    rewrite(root / "changes")
    rewrite(given / "own")
    shutil.rmtree(root / "goes")
    shutil.rmtree(given / "removed")
    caplog.set_level(logging.WARNING, "neurogrid")
    async with serving() as names:
        assert names == {"own", "stays"}
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 2
        assert "is not what was added" in said[0]
        assert "no directory 'goes'" in said[1]
        assert (await asked("DELETE", "/goes")).status == 200
        assert (await asked("POST", name="changes", path="changes")).status == 200
    caplog.clear()
    models.begun()  # while it is not open, which it stays
    for name, status in (("own", 200), ("changes", 200), ("changes", 404)):
        assert (await asked("DELETE", f"/{name}")).status == status
    assert set(model.names) == {"embedded", "stays"}
    async with serving() as names:
        assert names == {"stays"}
    assert not caplog.records


async def test_one_that_was_never_open_is_asked_for_by_the_names_of_its_adapters(
    tmp_path: Path,
) -> None:
    """As where it found no room at the start, and stands by."""
    save_embedded_adapter(load_embedded(), tmp_path / "own")
    first = argparse.Namespace(
        model=None, model_name="first", adapter=[("named", tmp_path / "own")]
    )
    second = argparse.Namespace(model=None, model_name="second", adapter=[])
    for additions, names in (
        (Additions(), {"first", "named", "added"}),
        (None, {"first", "named"}),
    ):
        models = Models()
        for name in ("first", "second"):
            models.add(name, is_wanted=True)
        if additions is not None:
            await additions.keep_adapter("added", AddedAdapter("first", "added", "00"))
        _tell_adapters(models, [first, second], additions)
        assert set(models["first"].names) == names
        assert set(models["second"].names) == {"second"}
        assert models.choose("named") is models["first"]
        with pytest.raises(APIError, match="the name 'named' is taken"):
            models.require_free("named")


async def test_an_adapter_that_was_removed_is_not_there_with_the_next_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("stays", "goes"):
        save_embedded_adapter(load_embedded(), tmp_path / name)
    options = argparse.Namespace(
        model=None,
        follow=True,
        new_cluster=None,
        adapter=[(None, tmp_path / "stays"), ("other", tmp_path / "goes")],
    )
    served: list[set[str]] = []

    @asynccontextmanager
    async def open_coordinator(own: argparse.Namespace, *args: Any, **more: Any) -> Any:
        told = Told(load_embedded())
        told.adapters = ServedAdapters.load(told.model, adapters_of(own))
        yield told

    class End(Exception):
        """Enough was served."""

    class Server:
        board = None
        url = "http://127.0.0.1"

        async def restore(self, coordinator: Any) -> None:
            """Serve those again that clients had added: none."""

        async def finish(self) -> None:
            """Do nothing."""

        async def serve(self, coordinator: Any, until: Any) -> None:
            served.append(set(coordinator.adapters.names))
            if len(served) == 2:
                raise End
            coordinator.adapters.remove("other")

    monkeypatch.setattr(coordinator_command, "_open_coordinator", open_coordinator)
    silent: Any = SimpleNamespace(print=lambda text: None, say=lambda text: None)
    run: Any = SimpleNamespace(take=lambda: nullcontext(None), wait_newer=None)
    server: Any = Server()
    with pytest.raises(End):
        await coordinator_command._serve_all(
            options, Listening(()), silent, server, run, silent, []
        )
    assert served == [{"stays", "other"}, {"stays"}]
