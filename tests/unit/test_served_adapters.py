"""The adapters beside a model, by name, and their parts for workers that ask."""

from __future__ import annotations

import gc
from pathlib import Path

from neurogrid.inference.generation.adapters import ServedAdapters
from tests.unit.test_server_openai import save_embedded_adapter
from tests.unit.told_coordinator import load_embedded


async def test_one_that_has_two_names_is_there_until_both_are_gone(tmp_path: Path) -> None:
    model = load_embedded()
    save_embedded_adapter(model, tmp_path / "adapter")
    adapters = ServedAdapters(model)
    for name in ("a", "b"):
        adapters.add(adapters.read(name, tmp_path / "adapter"))
    ids = [blob.blob_id() for adapter in adapters for blob in adapter.source.blobs.values()]
    assert adapters.remove("b")
    gc.collect()
    assert all([await adapters.provide("a worker", blob_id) for blob_id in ids])
    # A session has it.
    served = adapters.get("a")
    assert served is not None
    source = served.source
    assert adapters.remove("a")
    adapters.add(adapters.read("c", tmp_path / "adapter"))
    assert adapters.remove("c")
    del served
    gc.collect()
    for blob in source.blobs.values():
        assert await adapters.provide("a worker", blob.blob_id()) is blob
