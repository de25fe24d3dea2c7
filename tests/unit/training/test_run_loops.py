"""Runs in a loop of one's own: the model of which a member syncs the weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from neurogrid.errors import ConfigurationError
from neurogrid.training.loops import open_run

LISTEN = ("/ip4/127.0.0.1/tcp/0",)


def unfreeze(model: nn.Module) -> None:
    model.get_parameter("bias").requires_grad_(True)


def replace(model: nn.Module) -> None:
    model.weight = nn.Parameter(model.get_parameter("weight").detach().clone())


@pytest.mark.parametrize(("change", "name"), [(unfreeze, "bias"), (replace, "weight")])
def test_a_parameter_that_would_not_be_synced_is_an_error_by_name(
    change: Callable[[nn.Module], None], name: str
) -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    with open_run(model, listen=LISTEN, timeout=5.0) as run:
        change(model)
        with pytest.raises(ConfigurationError, match=f"^{name} is trained, and was not"):
            run.sync()


def test_parameters_that_are_frozen_meanwhile_are_none() -> None:
    model = nn.Linear(3, 2)
    with open_run(model, listen=LISTEN, timeout=5.0) as run:
        model.bias.requires_grad_(False)
        run._member.loop.check({"weight": model.weight})
