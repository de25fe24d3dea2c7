"""A trainer: a model in a process of its own that learns from batches, and leaves its weights in shared memory.

    async with open_trainer(settings) as trainer:
        trained = await trainer.train(batches, step=0, seed=seed)
        difference = trainer.weights - common

settings        what it is told
handle          the process as its owner has it
program         the process
learner         model, optimiser and steps
inner_optimizer torch's own, by a run file's [inner]
batches         slices become batches
memory          how much a step takes, and so how many samples are computed at once
models, optimizer_files
"""

from neurogrid.training.trainer.errors import BatchError, TrainerDiedError, TrainerError
from neurogrid.training.trainer.handle import Trainer, open_trainer
from neurogrid.training.trainer.results import BatchDone, Evaluation, Gradient, Trained
from neurogrid.training.trainer.settings import FileRange, TrainerSettings

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
    "open_trainer",
]
