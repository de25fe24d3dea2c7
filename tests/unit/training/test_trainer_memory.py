"""How much memory there is for a step on an accelerator, by what its makers tell."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from neurogrid.errors import ConfigurationError
from neurogrid.model.stages.device import DeviceMemory
from neurogrid.training.trainer import memory
from neurogrid.training.trainer.memory import memory_of


def test_a_driver_that_does_not_say_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of some Intel GPUs: then it is all but what others take as far as anybody knows."""

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        raise RuntimeError("the device does not support querying the available free memory")

    module = SimpleNamespace(
        mem_get_info=mem_get_info,
        max_memory_allocated=lambda device: 0,
        memory_reserved=lambda device: 300,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(memory, "device_memory", lambda device: DeviceMemory(1000, 400))
    assert memory_of(torch.device("xpu", 0), 0).limit == 900
    assert memory_of(torch.device("xpu", 0), 500).limit == 500


def test_a_device_of_which_nobody_says_what_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(recommended_max_memory=lambda: 1000)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    with pytest.raises(ConfigurationError, match="how much memory a step takes on mps:0"):
        memory_of(torch.device("mps", 0), 0)
