"""Facts of a run that its leader tells all members alike, and the drawing of its id."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from neurogrid.training.runs.run_file import RunFile

__all__ = ["RunFacts", "draw_run_id"]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts of a run that its leader tells all members alike.

    Attributes:
        run_id: 16 bytes.
        run_file: of the run.
        text: of the run file, as members get it.
        config: of the model, as JSON.
        manifest: the blob id of the data's manifest.
        num_parameters: that are trained.
        member_memory: bytes that each has to offer.
    """

    run_id: bytes
    run_file: RunFile
    text: str
    config: str
    manifest: bytes
    num_parameters: int
    member_memory: int


def draw_run_id() -> bytes:
    """The id of a new run."""
    return secrets.token_bytes(16)
