"""Checkpoints of a run: what transformers opens, and beside it what the run needs to go on. Whole, or not there.

    RUN/checkpoints/latest -> step-40
    RUN/checkpoints/step-40/config.json, model.safetensors, tokenizer.json, ...
                            training/state.json                 round, step, tokens, dealer, seats
                            training/outer.safetensors          vectors of the outer optimiser; theta0 is the model
                            training/members/SEAT.safetensors   inner optimisers

writing     a new one, and what is removed
reading     those that there are
exporting   a directory of the model alone, in a dtype of choice
"""

from neurogrid.training.checkpoints.exporting import EXPORT_DTYPES, export
from neurogrid.training.checkpoints.reading import (
    RunCheckpoint,
    checkpoints_of,
    latest_checkpoint,
    read_checkpoint,
    require_whole,
)
from neurogrid.training.checkpoints.writing import (
    CheckpointDraft,
    new_checkpoint,
    prune,
    sync,
    sync_tree,
)

__all__ = [
    "EXPORT_DTYPES",
    "CheckpointDraft",
    "RunCheckpoint",
    "checkpoints_of",
    "export",
    "latest_checkpoint",
    "new_checkpoint",
    "prune",
    "read_checkpoint",
    "require_whole",
    "sync",
    "sync_tree",
]
