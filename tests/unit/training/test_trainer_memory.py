"""How much memory there is for a step on an accelerator, by what its makers tell; and what a process keeps."""

from __future__ import annotations

import subprocess
import sys
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


FREES = """
import resource
import sys
import torch
from neurogrid.training.trainer.memory import keep_freed

if int(sys.argv[1]):
    keep_freed()

def step():
    made = [torch.zeros(1_000_000) for _ in range(32)]

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
def test_what_a_step_frees_the_next_one_has() -> None:
    """In pages that the system had to give: of 128 MB a step."""

    def num_pages(*, are_kept: bool) -> int:
        command = [sys.executable, "-c", FREES, str(int(are_kept))]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert num_pages(are_kept=True) * 10 < num_pages(are_kept=False)
