"""AdamW in pieces that stay in a processor's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.adamw import adamw

__all__ = ["PiecewiseAdamW"]

# Elements: with what is kept of each and what comes in between, 5 MiB in float32.
_PIECE: Final = 256 * 1024


class PiecewiseAdamW(torch.optim.AdamW):
    """torch's AdamW, with the same bits; on a CPU its step goes through a parameter in pieces.

    Torch makes several tensors as large as a parameter on the way, and goes through memory for each: for an embedding
    of 128,256 x 4,096 that is 4 GB for a moment. Its `fused` kernel has neither, but other bits at the end of a row of
    memory than within it, and on another kind of processor: members would drift.

    Args:
        parameters: dense; of any dtype, on any device.
        lr, betas, eps, weight_decay: torch's.
    """

    def __init__(
        self,
        parameters: Any,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(parameters, lr, betas=betas, eps=eps, weight_decay=weight_decay)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change all parameters that have a gradient.

        Args:
            closure: computes the loss and the gradients anew.

        Returns:
            What it returns; None where there is none.
        """
        groups = self.param_groups
        if any(each.device.type != "cpu" for group in groups for each in group["params"]):
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._change(group, parameter, parameter.grad)
        return loss

    def _change(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        if not (state := self.state[parameter]):
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        before = state["step"].clone()
        tensors = [parameter, gradient, state["exp_avg"], state["exp_avg_sq"]]
        for value, its_gradient, average, average_of_squares in _pieces(tensors):
            adamw(
                [value],
                [its_gradient],
                [average],
                [average_of_squares],
                max_exp_avg_sqs=[],
                # Each call counts it up.
                state_steps=[state["step"].copy_(before)],
                foreach=False,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def _pieces(tensors: list[Tensor]) -> Iterable[tuple[Tensor, ...]]:
    """Cut tensors of the same shape into the same pieces; in one where the elements of one are in another order."""
    if not all(each.is_contiguous() for each in tensors):
        return [tuple(tensors)]
    return zip(*(each.view(-1).split(_PIECE) for each in tensors), strict=True)
