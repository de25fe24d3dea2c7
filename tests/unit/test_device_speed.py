"""A device measures itself: figures that are there, in any dtype, within the memory that it is given."""

from __future__ import annotations

import pytest
import torch

from neurogrid.model.stages import device_speed
from neurogrid.model.stages.device_speed import measure_speed

CPU = torch.device("cpu")
MIB = 1024**2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_figure_is_there(dtype: torch.dtype) -> None:
    speed = measure_speed(CPU, dtype, free_bytes=1024 * MIB)
    assert speed is not None
    # Between a slow card of today's and ten times the fastest.
    assert 1e7 < speed.bytes_per_second < 1e14
    assert 1e8 < speed.flops < 1e17
    assert 1e-7 < speed.layer_seconds < 1.0


def test_too_little_memory_is_not_measured() -> None:
    assert measure_speed(CPU, torch.float32, free_bytes=500 * MIB) is None


def test_it_takes_no_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    full = torch.full

    def watched(shape: tuple[int, ...], *args: object, **kwargs: object) -> torch.Tensor:
        tensor = full(shape, *args, **kwargs)  # type: ignore[call-overload]
        taken.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(device_speed.torch, "full", watched)
    measure_speed(CPU, torch.float32, free_bytes=1024 * MIB)
    assert 120 * MIB <= sum(taken) <= 130 * MIB


def test_a_dtype_that_cannot_be_computed_with_is_not_measured() -> None:
    assert measure_speed(CPU, torch.bool, free_bytes=1024 * MIB) is None
