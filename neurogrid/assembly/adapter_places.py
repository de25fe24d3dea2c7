"""Places of adapters, by what somebody names: the adapter's directory, or that of the training run that made it."""

from __future__ import annotations

from pathlib import Path

from neurogrid.errors import ConfigurationError
from neurogrid.training.runs.run_directory import RunDirectory

__all__ = ["adapter_directory", "adapter_name"]

_CONFIG = "adapter_config.json"


def adapter_directory(path: Path) -> Path:
    """The directory of an adapter's files; of a training run that of its newest checkpoint.

    Raises:
        ConfigurationError: there is no directory, or the run has no checkpoint.
    """
    if not path.is_dir():
        raise ConfigurationError(f"--adapter {path}: there is no such directory")
    run = RunDirectory(path)
    if (path / _CONFIG).exists() or not run.has_run:
        return path
    run.check_checkpoints()
    checkpoint = run.latest_checkpoint()
    if checkpoint is None:
        raise ConfigurationError(f"the training run in {path} has written no checkpoint yet")
    if not (checkpoint / _CONFIG).exists():
        raise ConfigurationError(
            f"the training run in {path} trains a whole model, and no adapter: name it in the place of the model"
        )
    return checkpoint


def adapter_name(path: Path) -> str:
    """Return the name of an adapter that was given none: that of its directory, or of its run's."""
    return path.resolve().name
