"""A run for transformers' Trainer, and its end."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from neurogrid.training.averaging.groups import RoundTimeout
from neurogrid.training.loops.trainer_callback import NeuroGridCallback


def test_a_last_sync_that_fails_leaves_the_run_all_the_same() -> None:
    callback = NeuroGridCallback()
    is_left: list[bool] = []

    def sync() -> None:
        raise RoundTimeout(3, 600.0, ())

    callback._open.callback(is_left.append, True)
    run: Any = SimpleNamespace(num_steps=7, rules=SimpleNamespace(every=5), sync=sync)
    callback.run = callback._open.enter_context(nullcontext(run))
    nothing: Any = None
    with pytest.raises(RoundTimeout):
        callback.on_train_end(nothing, nothing, nothing)
    assert is_left == [True]
    assert callback.run is None
