"""Proofs of configs (`neurogrid.model.proof`) that all processes of the tests have in common.

A proof takes a second of a core. Each process that is given a config proves it for itself, three workers and a
coordinator the same one: here, whoever comes first does, and the others read what it found. Only of a config that was
found to be right: each process that gets a wrong one refuses it by its own proof.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

from neurogrid.model.kernels.compiled import VARIABLE
from neurogrid.model.proof import proof

__all__ = ["share_proofs"]


class _SharedProofs(dict[Any, Any]):
    """What this process has proven, and what is in the directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    def _path(self, key: object) -> Path:
        # What holds with some kernels, may not with others.
        told = repr((key, os.environ.get(VARIABLE)))
        return self._directory / hashlib.sha256(told.encode()).hexdigest()

    def get(self, key: object, default: Any = None) -> Any:
        found = super().get(key)
        if found is None:
            try:
                found = pickle.loads(self._path(key).read_bytes())
            except FileNotFoundError:
                return default
            super().__setitem__(key, found)
        return found

    def __setitem__(self, key: object, found: Any) -> None:
        super().__setitem__(key, found)
        if isinstance(found, proof.Proof):
            with tempfile.NamedTemporaryFile(dir=self._directory, delete=False) as file:
                file.write(pickle.dumps(found))
            Path(file.name).replace(self._path(key))


def share_proofs(directory: Path) -> None:
    """Have this process, and those that are forked from it, share proofs by this directory."""
    proof._kept = _SharedProofs(directory)
