"""AdamW in pieces: torch's own bits and state, and nothing as large as a parameter beside it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from neurogrid.training.optimizers import PiecewiseAdamW, adamw

OPTIONS: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}
SHAPES = [(), (0,), (7,), (3, 1001), (64, 16), (65, 16), (2, 5, 300)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "_PIECE", 1024)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    return [nn.Parameter(each) for each in (*made, torch.randn(40, 50, generator=generator).t())]


def set_gradients(values: list[nn.Parameter], step: int) -> None:
    """Give each a gradient, but one that has none in the first steps, and one whose gradient lies across."""
    generator = torch.Generator().manual_seed(step)
    for place, value in enumerate(values):
        gradient = torch.randn(value.shape, generator=generator).to(value.dtype)
        if place == 4:
            gradient = gradient.t().contiguous().t()
        value.grad = None if place == 3 and step < 2 else gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_its_bits_and_its_state_are_torchs(dtype: torch.dtype) -> None:
    ours, torchs = parameters(dtype), parameters(dtype)
    own = PiecewiseAdamW([{"params": ours[:4]}, {"params": ours[4:], "lr": 3e-3}], 1e-3, **OPTIONS)
    groups: list[dict[str, Any]] = [{"params": torchs[:4]}, {"params": torchs[4:], "lr": 3e-3}]
    other = torch.optim.AdamW(groups, 1e-3, **OPTIONS)
    for step in range(5):
        for optimizer, values in ((own, ours), (other, torchs)):
            set_gradients(values, step)
            optimizer.param_groups[0]["lr"] = 1e-3 / (step + 1)
            optimizer.step()
        for value, expected in zip(ours, torchs, strict=True):
            assert torch.equal(value, expected)
            its, due = own.state[value], other.state[expected]
            assert list(its) == list(due)
            for key, tensor in its.items():
                assert torch.equal(tensor, due[key])
                assert (tensor.dtype, tensor.stride()) == (due[key].dtype, due[key].stride())
    # Either goes on with what the other has kept.
    kept = deepcopy(own.state_dict())
    own.load_state_dict(deepcopy(other.state_dict()))
    other.load_state_dict(kept)
    for optimizer, values in ((own, ours), (other, torchs)):
        set_gradients(values, 9)
        optimizer.step()
    assert all(map(torch.equal, ours, torchs))


def test_a_closure_is_asked_for_gradients() -> None:
    value = nn.Parameter(torch.ones(3))
    optimizer = PiecewiseAdamW([value], 0.1, weight_decay=0.0)

    def closure() -> torch.Tensor:
        loss = value.square().sum()
        loss.backward()
        return loss.detach()

    assert float(optimizer.step(closure)) == 3
    assert torch.allclose(value, torch.full((3,), 0.9))


class _Sizes(TorchDispatchMode):
    """Keeps the most elements that anything newly made has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (list, tuple)) else (result,):
            given = [own for own in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(own)]
            if torch.is_tensor(each) and all(
                each.untyped_storage().data_ptr() != own.untyped_storage().data_ptr()
                for own in given
            ):
                self.most = max(self.most, each.numel())
        return result


def test_nothing_larger_than_a_piece_is_made_on_the_way() -> None:
    value = nn.Parameter(torch.randn(100, 100))
    made = {}
    for kind in (PiecewiseAdamW, torch.optim.AdamW):
        optimizer = kind([value], 1e-3)
        for _ in range(2):  # the first makes the state
            value.grad = torch.randn(100, 100)
            with _Sizes() as sizes:
                optimizer.step()
        made[kind] = sizes.most
    assert made == {PiecewiseAdamW: 1024, torch.optim.AdamW: 10_000}
