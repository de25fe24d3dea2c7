"""A worker that computes wrong in the way that a file names, and is like others else.

The first argument is the file, which is read at each step; the options of `neurogrid-worker` follow. In the file is a
kind, and for some a number behind a colon; nothing for a worker that computes right:

    flip            the sign of all that leaves its layers
    noise           a tenth of what leaves them is noise
    skip            its first layer adds nothing
    stale           its weights are as of another time: each by 5 % of what its matrix has
    later:N         `flip`, from the step N after it was told so
    sometimes:N     `noise`, in one of N steps, by chance
    chain           `flip`, while it hands on to another worker, or one hands on to it
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

from neurogrid.cli.commands.worker import main
from neurogrid.inference.sessions import step_queue
from neurogrid.inference.sessions.activations import WorkerActivations
from neurogrid.inference.sessions.steps import Step
from neurogrid.worker import held_model

FILE = Path()
# Of the row, as its norm.
NOISE = 0.1
STALENESS = 0.05
# What adds to the residual stream, in the families that tests have.
WRITERS = ("o_proj.weight", "down_proj.weight")

_run_steps, _parse_blob = step_queue.run_steps, held_model.parse_blob  # type: ignore[attr-defined]
_serve = WorkerActivations.serve
_steps, _layers = count(1), count(1)
_told = ("", "")
_chance = random.Random(0)
_in_chain = False


def _noisy(hidden_BTD: torch.Tensor) -> torch.Tensor:
    noise_BTD = torch.randn_like(hidden_BTD.float())
    size = NOISE * hidden_BTD.float().norm(dim=-1, keepdim=True)
    noisy_BTD: torch.Tensor = hidden_BTD + noise_BTD / noise_BTD.norm(dim=-1, keepdim=True) * size
    return noisy_BTD.to(hidden_BTD.dtype)


def told() -> tuple[str, int]:
    """The kind, and the number behind it."""
    global _told, _steps
    kind, _, number = FILE.read_text().strip().partition(":")
    if (kind, number) != _told:
        _told, _steps = (kind, number), count(1)
    return kind, int(number or 1)


def wrong(hidden_BTD: torch.Tensor) -> torch.Tensor:
    """What is answered in place of it."""
    kind, every = told()
    number = next(_steps)
    is_by_chance = _chance.random() < 1 / every
    if kind == "flip" or (kind == "later" and number >= every):
        return -hidden_BTD
    if kind == "chain" and _in_chain:
        return -hidden_BTD
    if kind == "noise" or (kind == "sometimes" and is_by_chance):
        return _noisy(hidden_BTD)
    return hidden_BTD


def run_steps(steps: Sequence[Step], **how: Any) -> list[torch.Tensor | Exception | None]:
    """Steps of sessions, answered wrong."""
    return [
        wrong(result) if isinstance(result, torch.Tensor) else result
        for result in _run_steps(steps, **how)
    ]


def parse_blob(blob: memoryview) -> dict[str, torch.Tensor]:
    """A layer with other weights than came."""
    tensors = _parse_blob(blob)
    kind, _ = told()
    if kind == "skip" and next(_layers) == 1:
        return {name: _without_writers(name, tensor) for name, tensor in tensors.items()}
    if kind == "stale":
        return {name: _stale(name, tensor) for name, tensor in tensors.items()}
    return tensors


def _without_writers(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if name.endswith(WRITERS) else tensor


def _stale(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() < 2 or not tensor.is_floating_point():
        return tensor
    other = tensor.float()
    return (other + STALENESS * other.std() * torch.randn_like(other)).to(tensor.dtype)


async def serve(self: WorkerActivations, message: Any) -> None:
    """Note whether a step is one of a chain: its session has a route."""
    global _in_chain
    session = self._sessions.find(message.envelope.session_id, message.from_peer)
    _in_chain = session is not None and session.place is not None
    await _serve(self, message)


if __name__ == "__main__":
    FILE = Path(sys.argv.pop(1))
    step_queue.run_steps = run_steps  # type: ignore[attr-defined]
    held_model.parse_blob = parse_blob  # type: ignore[attr-defined, assignment]
    WorkerActivations.serve = serve  # type: ignore[method-assign]
    sys.exit(main())
