"""A trainer: a model in a process of its own that learns from batches, and leaves its weights in shared memory.

    async with open_trainer(settings) as trainer:
        trained = await trainer.train(batches, step=0, seed=seed)
        difference = trainer.weights - common

handle          the process as its owner has it
program         the process
learner         model, optimiser and steps
batches         slices become batches
memory          how much a step takes, and so how many samples are computed at once
models, optimizer_files
"""

from neurogrid.training.runs.trainer_settings import FileRange, TrainerSettings
from neurogrid.training.trainer.errors import BatchError, TrainerDiedError, TrainerError
from neurogrid.training.trainer.handle import Trainer, open_trainer
from neurogrid.training.trainer.memory import free_memory
from neurogrid.training.trainer.results import BatchDone, Evaluation, Gradient, Trained

__all__ = [
    "BatchDone",
    "BatchError",
    "Evaluation",
    "FileRange",
    "Gradient",
    "Trained",
    "Trainer",
    "TrainerDiedError",
    "TrainerError",
    "TrainerSettings",
    "free_memory",
    "open_trainer",
]
