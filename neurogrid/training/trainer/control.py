"""Two numbers that both processes of a trainer see at once: when to stop, and whether the weights are being written.

In shared memory, not in frames: the one is for a process that computes and reads no frames, the other of one that died.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

__all__ = ["Control"]

NEVER: Final = 2**62


class Control:
    """The numbers of the trainer in a directory. Made by `open`."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers

    @classmethod
    def open(cls, folder: Path) -> Control:
        """Make them, or find them."""
        # Torch makes the file where there is none: [finish_after, is_writing].
        path = str(folder / "control")
        return cls(torch.from_file(path, shared=True, size=2, dtype=torch.int64))

    @property
    def finish_after(self) -> int:
        """Batches of the call that is under way."""
        return int(self._numbers[0])

    @finish_after.setter
    def finish_after(self, number: int) -> None:
        self._numbers[0] = number

    @property
    def is_writing(self) -> bool:
        """Whether some of the weights are new and some old."""
        return bool(self._numbers[1])

    @is_writing.setter
    def is_writing(self, value: bool) -> None:
        self._numbers[1] = int(value)
