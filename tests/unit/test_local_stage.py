"""The worker in its coordinator's own process says to the log for developers alone what others say to users."""

from __future__ import annotations

import logging

import pytest
import trio

from neurogrid.assembly.local_stage import open_local_worker
from neurogrid.fleet.remote_worker import Timeouts
from neurogrid.inference.generation.adapters import ServedAdapters
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.model.embedded import embedded_model_path
from neurogrid.model.files.config import model_config_message
from neurogrid.p2p.hosts.identity import Identity


def test_whom_it_serves_is_for_developers(caplog: pytest.LogCaptureFixture) -> None:
    model = LoadedModel.load(embedded_model_path(), name=None, max_seq_len=64, dtype=None)
    config = model_config_message(
        model.config,
        model.checkpoint.config,
        model_name=model.name,
        max_seq_len=model.max_seq_len,
        dtype=model.dtype,
    )

    async def main() -> None:
        async with open_local_worker(
            model,
            ServedAdapters(model),
            Identity.generate(),
            name="",
            max_sessions=1,
            timeouts=Timeouts(),
        ) as worker:
            await worker.configure(config)

    with caplog.at_level(logging.DEBUG, "neurogrid"):
        trio.run(main)
    levels = {
        said: {record.levelno for record in caplog.records if said in record.getMessage()}
        for said in ("serves embedded: 8 layers", "is gone; its layers are kept")
    }
    assert all(found == {logging.DEBUG} for found in levels.values()), levels
