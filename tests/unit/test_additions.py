"""What clients have added to a server: kept in a file, found again, and told apart from what lies there by then."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from neurogrid.errors import ConfigurationError
from neurogrid.server.additions import AddedAdapter, AddedModel, Additions, model_state
from neurogrid.server.app import make_app
from neurogrid.server.backend import Backend
from neurogrid.server.openai.adapter_routes import adapter_routes, restore_adapters
from tests.unit.asgi_client import Answered, ask
from tests.unit.full_disk import full_disk
from tests.unit.test_server_openai import save_embedded_adapter
from tests.unit.told_coordinator import Told, load_embedded

MODEL = AddedModel("Qwen3-4B", "00ff")
POEMS, LEGAL = AddedAdapter("middle", "poems", "01"), AddedAdapter("embedded", "legal", "02")


async def test_what_is_added_is_there_at_the_next_start(tmp_path: Path) -> None:
    file = tmp_path / "additions.json"
    additions = Additions.read(file)
    assert not additions.models
    assert not file.exists()
    await additions.keep_model("middle", MODEL)
    await additions.keep_adapter("poems", POEMS)
    await additions.keep_adapter("legal", LEGAL)
    assert file.stat().st_mode & 0o777 == 0o600
    again = Additions.read(file)
    assert again.models == {"middle": MODEL}
    assert again.adapters == {"poems": POEMS, "legal": LEGAL}
    assert again.adapters_of("middle") == {"poems": POEMS}
    # With a model go the adapters beside it.
    await again.forget_model("middle")
    assert await again.forget_adapter("legal")
    assert not await again.forget_adapter("legal")
    last = Additions.read(file)
    assert (last.models, last.adapters) == ({}, {})


async def test_what_cannot_be_written_is_not_changed(tmp_path: Path) -> None:
    additions = Additions.read(tmp_path / "additions.json")
    await additions.keep_model("middle", MODEL)
    with full_disk(), pytest.raises(ConfigurationError, match="cannot write"):
        await additions.forget_model("middle")
    assert additions.models == Additions.read(tmp_path / "additions.json").models


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"version": 2}',
        '{"version": 1, "models": {}}',
        '{"version": 1, "models": {"a": {"place": 1, "state": ""}}, "adapters": {}}',
        '{"version": 1, "models": {"a": {"path": "x"}}, "adapters": {}}',
        '{"version": 1, "models": [], "adapters": {}}',
    ],
)
def test_another_file_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "additions.json"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match=r"additions\.json does not say .* remove it"):
        Additions.read(file)


def test_a_model_is_told_by_its_files(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "README.md"):
        (tmp_path / name).write_text(name)
    state = model_state(tmp_path)
    (tmp_path / "README.md").write_text("other words")
    (tmp_path / "runs").mkdir()
    assert model_state(tmp_path) == state
    (tmp_path / "model.safetensors").write_text("other weights")
    assert model_state(tmp_path) != state
    with pytest.raises(ConfigurationError, match="cannot look at"):
        model_state(tmp_path / "gone.gguf")


async def test_adapters_come_back_unless_they_are_gone_or_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, file = tmp_path / "root", tmp_path / "additions.json"
    model = load_embedded()
    names = ("stays", "goes", "changes", "removed")
    for name in names:
        save_embedded_adapter(model, root / name)

    async def asked(app: Any, method: str, which: str = "", **body: Any) -> Answered:
        return await ask(app, method, f"/v1/adapters{which}", json_body=body or None)

    backend, additions = Backend(), Additions.read(file)
    app = make_app(adapter_routes(backend, root, additions))
    # Told has of a coordinator what a server asks of one, here and below.
    with backend.serving(Told(model)):  # type: ignore[arg-type]
        for name in names:
            assert (await asked(app, "POST", name=name, path=name)).status == 200
        assert (await asked(app, "DELETE", "/removed")).status == 200
        with full_disk():
            save = {"name": "more", "path": "stays"}
            refused = await asked(app, "POST", **save)
            assert (refused.status, refused.error["code"]) == (500, "not_kept")
            assert str(tmp_path) not in json.dumps(refused.json)
            assert (await asked(app, "DELETE", "/stays")).status == 500
        assert set(backend.coordinator.adapters.names) == {"stays", "goes", "changes"}

    (root / "goes").rename(tmp_path / "elsewhere")
    weights = root / "changes" / "adapter_model.safetensors"
    save_file({key: torch.zeros_like(value) for key, value in load_file(weights).items()}, weights)
    backend, additions, coordinator = Backend(), Additions.read(file), Told(model)
    caplog.set_level(logging.WARNING, "neurogrid")
    caplog.clear()
    await restore_adapters(coordinator, additions, root)  # type: ignore[arg-type]
    assert [*coordinator.adapters.names] == ["stays"]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "goes" in said[0]
    assert "no directory 'goes'" in said[0]
    assert "is not what was added" in said[1]
    # What is not served can be forgotten, or added anew as it is by now.
    app = make_app(adapter_routes(backend, root, additions))
    with backend.serving(coordinator):  # type: ignore[arg-type]
        assert (await asked(app, "DELETE", "/goes")).status == 200
        assert (await asked(app, "DELETE", "/goes")).status == 404
        assert (await asked(app, "POST", name="changes", path="changes")).status == 200
    caplog.clear()
    last = Told(model)
    await restore_adapters(last, Additions.read(file), root)  # type: ignore[arg-type]
    assert [*last.adapters.names] == ["stays", "changes"]
    assert not caplog.records
