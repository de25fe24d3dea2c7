"""The messages of `/neurogrid/training/1.0.0`, and what is in them. Imports no torch."""

from neurogrid.training.wire.types import (
    DEFAULT_TRAINING_LIMITS,
    MAX_CHUNK_BYTES,
    PROTOCOL_TRAINING,
    TrainingLimits,
    TrainingMessage,
    training_table,
)

__all__ = [
    "DEFAULT_TRAINING_LIMITS",
    "MAX_CHUNK_BYTES",
    "PROTOCOL_TRAINING",
    "TrainingLimits",
    "TrainingMessage",
    "training_table",
]
