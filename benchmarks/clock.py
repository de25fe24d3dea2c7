"""Clock of the tokens of transformers' `generate()`. Imports torch and no more: a Python without ours needs it."""

from __future__ import annotations

import time

import torch

__all__ = ["Clock"]


class Clock:
    """A streamer for `generate()` that notes when each token came; the prompt comes first.

    Attributes:
        times: of `time.perf_counter`, seconds.
    """

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass
