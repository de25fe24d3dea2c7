"""One of the words behind `neurogrid`, and what carries it out."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from neurogrid.cli.commands import coordinator, download, identity, train, worker

__all__ = ["Command"]


@dataclass(frozen=True)
class Command:
    """One of the words behind `neurogrid`.

    Attributes:
        name: a word, or two: `train check`.
        argument: what may stand behind it; empty for nothing.
        summary: in a line of the list of all.
        first: the flags that `--help` shows.
        examples: what stands behind `neurogrid`, and what that does.
        add_options: to its parser.
        mode: options that it stands for.
    """

    name: str
    argument: str
    summary: str
    description: str
    first: tuple[str, ...]
    examples: tuple[tuple[str, str], ...]
    add_options: Callable[[argparse.ArgumentParser], None]
    mode: dict[str, object]

    @property
    def takes_model(self) -> bool:
        """Whether a checkpoint is named."""
        return "MODEL" in self.argument

    @property
    def carrier(self) -> ModuleType:
        """The module that carries it out: a coordinator, a worker, or neither of them."""
        word = self.name.partition(" ")[0]
        others = {"join": worker, "download": download, "identity": identity, "train": train}
        return others.get(word, coordinator)
