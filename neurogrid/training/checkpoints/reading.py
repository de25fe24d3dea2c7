"""The checkpoints that there are. What they say is checked: the files may be of another program, or damaged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from neurogrid.errors import CheckpointError
from neurogrid.training.checkpoints.places import (
    CONFIGS,
    LATEST,
    MEMBERS,
    OUTER,
    STATE,
    TRAINING,
    step_of,
)

__all__ = [
    "RunCheckpoint",
    "checkpoints_of",
    "latest_checkpoint",
    "read_checkpoint",
    "require_whole",
]

# Bytes: a dealer's state has a line for each slice that is not used up.
_MAX_STATE_BYTES: Final = 256 * 1024**2


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """One of them.

    Attributes:
        path: its directory, which transformers opens; theta0 of the outer optimiser is the model in it.
        step: by its name.
        state: as `CheckpointDraft.add_training` was given it; empty where there is the model alone.
        members: files of inner optimisers, by seat.
    """

    path: Path
    step: int
    state: Mapping[str, Any]
    members: Mapping[int, Path]

    def outer(self) -> dict[str, torch.Tensor]:
        """The vectors of the outer optimiser, by name.

        Raises:
            CheckpointError: they are damaged.
        """
        file = self.path / TRAINING / OUTER
        if not file.exists():
            return {}
        try:
            return load_file(file)
        except (OSError, SafetensorError) as exc:
            raise CheckpointError(f"{file}: cannot be read: {exc}") from exc


def checkpoints_of(folder: Path) -> list[Path]:
    """The checkpoints in a directory, the oldest first; none where there is no such directory."""
    found = [(step_of(each), each) for each in folder.glob("step-*") if each.is_dir()]
    return [path for _, path in sorted((step, path) for step, path in found if step is not None)]


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `latest` names, or where it names none the newest; None where there is none."""
    link = folder / LATEST
    named = folder / link.readlink().name if link.is_symlink() else None
    if named is not None and step_of(named) is not None and named.is_dir():
        return named
    # A process may have died between the checkpoint and the link.
    return next(reversed(checkpoints_of(folder)), None)


def read_checkpoint(path: Path) -> RunCheckpoint:
    """Read what a run needs to go on; no weights yet.

    Args:
        path: of the checkpoint, or `latest`.

    Raises:
        CheckpointError: it is none, or damaged.
    """
    path = path.resolve()
    step = step_of(path)
    if step is None or not any((path / name).is_file() for name in CONFIGS):
        raise CheckpointError(f"{path}: is no checkpoint of a run; one is called step-N")
    members = {}
    for file in (path / TRAINING / MEMBERS).glob("*.safetensors"):
        if not (file.stem.isascii() and file.stem.isdecimal()):
            raise CheckpointError(f"{file}: is not called by a seat")
        members[int(file.stem)] = file
    return RunCheckpoint(path, step, _read_state(path / TRAINING / STATE), members)


def require_whole(path: Path) -> None:
    """See that a file of tensors is as long as it says.

    Raises:
        CheckpointError: it is not, or none of safetensors.
    """
    try:
        with safe_open(path, framework="pt"):
            pass
    except (OSError, SafetensorError) as exc:
        raise CheckpointError(f"{path}: is damaged: {exc}") from exc


def _read_state(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        if file.stat().st_size > _MAX_STATE_BYTES:
            raise CheckpointError(f"{file}: longer than {_MAX_STATE_BYTES} bytes")
        state = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as exc:
        raise CheckpointError(f"{file}: cannot be read: {exc}; take the one before") from exc
    if not isinstance(state, dict):
        raise CheckpointError(f"{file}: not a JSON object; take the one before")
    return state
