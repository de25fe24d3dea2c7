"""The data of a run that is about to begin, and whether its model can learn from them."""

from __future__ import annotations

import hashlib
import shutil
from functools import partial
from pathlib import Path

import trio

from neurogrid.errors import ConfigurationError
from neurogrid.training.data.manifest import Manifest
from neurogrid.training.leading.data import RunData, check_left_over, data_of
from neurogrid.training.leading.model_numbers import ModelNumbers, model_numbers
from neurogrid.training.leading.settings import LeaderProgress
from neurogrid.training.runs.estimate import leader_bytes
from neurogrid.training.runs.kept_run import check_kept
from neurogrid.training.runs.run_directory import RunDirectory
from neurogrid.training.runs.run_file import RunFile
from neurogrid.training.runs.run_file.sections import CAUSAL_LM
from neurogrid.training.trainer import free_memory

__all__ = ["check_length", "check_model", "first_data"]


async def first_data(
    run: RunFile, directory: RunDirectory, model: Path, progress: LeaderProgress
) -> RunData:
    """The data of a run that is about to begin. What is wrong with the run is told before they are prepared, where it
    can be; and where it cannot, nothing is left of them: with other settings they would be others.

    Raises:
        ConfigurationError: the run cannot begin as it is.
    """
    check_kept(run, directory)
    if run.checkpoints.dir:
        directory.place_checkpoints(run.place(run.checkpoints.dir))
    numbers = await trio.to_thread.run_sync(model_numbers, model, run.model.kind)
    needed, free = leader_bytes(run, numbers.num_parameters), free_memory()
    if needed > free:
        raise ConfigurationError(
            f"the leader of a model with {numbers.num_parameters:,} parameters needs {needed:,} bytes of memory, and "
            f"{free:,} are free on this machine: lead the run on another, or take a smaller model"
        )
    check_left_over(run, directory, model)
    were_there = directory.data.exists()
    data = await data_of(run, directory, model, progress)
    try:
        check_model(run, model, numbers, data.manifest)
    except ConfigurationError:
        if not were_there:
            await trio.to_thread.run_sync(partial(shutil.rmtree, directory.data, True))
        raise
    return data


def check_length(numbers: ModelNumbers, length: int) -> None:
    """Refuse samples that are longer than the model's sequences.

    Args:
        length: in tokens; 0 for images.

    Raises:
        ConfigurationError: they are.
    """
    if 0 < numbers.max_tokens < length:
        raise ConfigurationError(
            f"[data] sequence_length is {length}, and the model's sequences have at most {numbers.max_tokens} tokens"
        )


def check_model(run: RunFile, model: Path, numbers: ModelNumbers, manifest: Manifest) -> None:
    """Refuse data that the model cannot learn from.

    Args:
        model: its directory, or its config alone.
        numbers: of it.
        manifest: of the data.

    Raises:
        ConfigurationError: they are of another kind, have other tokens or classes, or samples that are too long.
    """
    is_text = run.model.kind == CAUSAL_LM
    if (manifest.kind == "text") != is_text:
        wanted = "text" if is_text else "images"
        raise ConfigurationError(
            f"the data are {manifest.kind}, and [model] kind {run.model.kind!r} learns from {wanted}"
        )
    if not is_text:
        if numbers.num_labels < manifest.num_classes:
            raise ConfigurationError(
                f"the data have {manifest.num_classes} classes, and the model in {model} knows {numbers.num_labels}: "
                f"give its config num_labels = {manifest.num_classes}"
            )
        return
    check_length(numbers, manifest.sequence_length)
    if 0 < numbers.vocab_size < manifest.vocab_size:
        raise ConfigurationError(
            f"the data have token ids up to {manifest.vocab_size - 1}, and the model in {model} knows "
            f"{numbers.vocab_size} tokens: prepare the data with its tokenizer, or take a larger vocab_size"
        )
    tokenizer = model / "tokenizer.json"
    if manifest.tokenizer.startswith("sha256:") and model.is_dir() and tokenizer.is_file():
        found = f"sha256:{hashlib.sha256(tokenizer.read_bytes()).hexdigest()}"
        if found != manifest.tokenizer:
            raise ConfigurationError(
                f"the data were prepared with another tokenizer than the one in {model}: prepare them with that one "
                "(neurogrid train prepare --tokenizer)"
            )
