"""State that both processes of a trainer see at once: whether the weights are being written.

In shared memory, not in frames: it is asked about a process that died.
"""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["Control"]


class Control:
    """A flag of the trainer in a directory. Made by `open`."""

    def __init__(self, flag: torch.Tensor) -> None:
        self._flag = flag

    @classmethod
    def open(cls, folder: Path) -> Control:
        """Make it, or find it."""
        # Torch makes the file where there is none.
        path = str(folder / "control")
        return cls(torch.from_file(path, shared=True, size=1, dtype=torch.int64))

    @property
    def is_writing(self) -> bool:
        """Whether some of the weights are new and some old."""
        return bool(self._flag[0])

    @is_writing.setter
    def is_writing(self, value: bool) -> None:
        self._flag[0] = int(value)
