"""A model whose caches hold only below some length: a generation that goes past it begins anew in its own room."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from neurogrid.assembly.coordinator import open_coordinator
from neurogrid.assembly.coordinator_settings import CoordinatorSettings
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.model.embedded import embedded_model_path

NUM_TOKENS, BOUND, PROMPT = 64, 24, list(range(5, 15))


async def test_a_generation_has_its_room_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    model = LoadedModel.load(
        embedded_model_path(), name=None, max_seq_len=NUM_TOKENS, dtype="float32"
    )
    model = replace(model, traits=replace(model.traits, recompute_at=BOUND))
    settings = CoordinatorSettings(min_peers=0, max_seq_len=NUM_TOKENS)
    with trio.fail_after(120):
        async with open_coordinator(settings, model=model) as coordinator:
            generating = coordinator.generate_tokens(PROMPT, max_tokens=40, ignore_eos=True)
            reserved = [coordinator.cache_bytes[0] async for _ in generating]
            assert len(reserved) == 40
            assert len(set(reserved)) == 1  # also behind the bound
            assert reserved[0] > 0
    assert not [record for record in caplog.records if "refused" in record.message]
