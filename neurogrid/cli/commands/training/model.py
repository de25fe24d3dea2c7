"""First steps of every command about a run file: the file, the directory of the run, and the place of its model."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from neurogrid.cli.options.model import model_place, named_model
from neurogrid.errors import ConfigurationError
from neurogrid.hub.names import ModelName

if TYPE_CHECKING:
    from neurogrid.cli.terminal.screen import Screen
    from neurogrid.training.runs.run_file import RunFile

__all__ = ["EMBEDDED", "add_run_file", "check_paths", "model_of", "run_directory"]

EMBEDDED: Final = "embedded"
# Where runs are kept that are told no place of their own.
RUNS: Final = Path("runs")


def add_run_file(parser: argparse.ArgumentParser) -> None:
    """The argument that names the run file."""
    parser.add_argument(
        "run_file",
        type=Path,
        metavar="RUN.toml",
        help="the run file: model, data, when to stop, and what else is not as by default",
    )


def run_directory(options: argparse.Namespace, run: RunFile) -> Path:
    """Directory in which the run is kept."""
    directory: Path | None = options.dir
    return RUNS / run.name if directory is None else directory


async def model_of(run: RunFile, options: argparse.Namespace, screen: Screen) -> Path:
    """The directory of the model that a run file names, fetched from the hub if need be; or its config.json.

    Raises:
        ConfigurationError: it cannot be had.
    """
    place = place_of(run.model.config, run.folder)
    if isinstance(place, ModelName):
        return await named_model(place, screen, is_offline=options.offline)
    if not place.exists():
        raise ConfigurationError(
            f'[model] config = "{run.model.config}": there is no such directory or file, {place}, and it is neither '
            f'"{EMBEDDED}" nor OWNER/NAME at a hub'
        )
    return place


def check_paths(run: RunFile, model: Path) -> None:
    """See that what a run file names is there, before anything is imported or made that takes a while.

    Args:
        model: where its model is.

    Raises:
        ConfigurationError: it is not.
    """
    if model.is_dir() and not (model / "config.json").is_file():
        raise ConfigurationError(
            f'[model] config = "{run.model.config}": this directory has no config.json, as that of a model has'
        )
    data = run.data
    for place in data.places:
        if "://" not in place and not run.place(place).exists():
            key = "path" if data.path else "mixture: path"
            raise ConfigurationError(
                f'[data] {key} = "{place}": there is no such file or directory: {run.place(place)}'
            )
    if data.tokenizer:
        file = run.place(data.tokenizer) / "tokenizer.json"
        if not file.is_file():
            raise ConfigurationError(
                f'[data] tokenizer = "{data.tokenizer}": there is no such file: {file}'
            )


def place_of(config: str, folder: str = "") -> Path | ModelName:
    """Place of the model that `config` of [model] names: a path, or a name at the hub.

    Args:
        folder: that relative paths begin at; a `~` at the beginning is a home.
    """
    if config == EMBEDDED:
        from neurogrid.model.embedded import embedded_model_path

        return embedded_model_path()
    return model_place(os.path.expanduser(config), folder)
