"""A run for transformers' Trainer, and its end."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from neurogrid.errors import ConfigurationError, LocalProtocolError
from neurogrid.training.averaging.groups import RoundTimeout
from neurogrid.training.loops.trainer_callback import NeuroGridCallback
from neurogrid.training.wire import GroupSettings

ALONE: Any = SimpleNamespace(world_size=1, load_best_model_at_end=False)


def test_the_first_sync_waits_for_as_many_members_as_its_founder_says() -> None:
    settings = GroupSettings(grace=5.0)
    callback = NeuroGridCallback(
        min_members=3, every=4, settings=settings, listen=["/ip4/127.0.0.1/tcp/0"]
    )
    nothing: Any = None
    callback.on_train_begin(ALONE, nothing, nothing, model=nn.Linear(2, 1))
    with callback._open:
        assert callback.run is not None
        assert callback.run.rules.every == 4
        group = callback.run._member.group
        assert (group.settings.min_members, group.settings.grace) == (3, 5.0)
    with pytest.raises(ConfigurationError, match="every, min_members of a run are its founder's"):
        NeuroGridCallback("ngt1", min_members=3, every=4)


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


def test_a_program_that_goes_on_after_an_error_leaves_the_run() -> None:
    """A Trainer that is ended by one tells its callbacks nothing, and the others would wait for this member."""
    nothing: Any = None
    training = NeuroGridCallback(listen=["/ip4/127.0.0.1/tcp/0"])
    with training:
        training.on_train_begin(ALONE, nothing, nothing, model=nn.Linear(2, 1))
        run = training.run
    assert run is not None
    assert training.run is None
    with pytest.raises(LocalProtocolError, match="the run was closed"):
        run.sync()
    training.close()


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"world_size": 2}, "one of 2 processes"), ({"load_best_model_at_end": True}, "leave it out")],
)
def test_a_trainer_whose_members_would_end_with_other_weights_is_refused(
    changed: dict[str, Any], said: str
) -> None:
    nothing: Any = None
    args: Any = SimpleNamespace(**{**vars(ALONE), **changed})
    callback = NeuroGridCallback(listen=["/ip4/127.0.0.1/tcp/0"])
    with pytest.raises(ConfigurationError, match=said):
        callback.on_train_begin(args, nothing, nothing, model=nn.Linear(2, 1))
    assert callback.run is None
