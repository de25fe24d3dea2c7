"""The layers of what a worker has trained are there for a coordinator that serves it."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from neurogrid.assembly.training import keep_layers
from neurogrid.model.embedded import embedded_model_path
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.quantization import model_fingerprint
from neurogrid.node.cache_directory import CacheSettings
from neurogrid.worker.blobs import WorkerBlobs


async def test_a_coordinator_that_asks_for_the_model_is_told_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neurogrid.worker.blobs.QUIET", 0.0)
    trained = Path(embedded_model_path())
    checkpoint = Checkpoint.open(trained)
    blobs = WorkerBlobs(CacheSettings(tmp_path))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(blobs.run)
            await keep_layers(trained, "a-run", blobs)
            await blobs.flush()
            asked = model_fingerprint(checkpoint.config, None).hex()
            assert await blobs.layers_on_disk(asked) == checkpoint.present_layers
            nursery.cancel_scope.cancel()
