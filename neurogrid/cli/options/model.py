"""Options that name a model: a directory, which for a run is that of its newest checkpoint; or a name at a hub, which
is a directory once it is in the cache."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Final

from neurogrid.cli.signals import ending_at_once
from neurogrid.cli.terminal.screen import Screen
from neurogrid.errors import ConfigurationError
from neurogrid.hub.names import ModelName, model_place

if TYPE_CHECKING:
    from neurogrid.training.runs.run_directory import RunDirectory

__all__ = [
    "HUB_NAMES",
    "adapter_place",
    "adapters_of",
    "add_offline_option",
    "find_model",
    "model_place",
    "named_model_place",
    "run_of",
    "with_adapters",
]

HUB_NAMES: Final = (
    "a directory with config.json, safetensors and tokenizer, that of a training run, a file in GGUF, or "
    "OWNER/NAME[:QUANT][@REVISION] at a hub, which is fetched unless the cache has it"
)


def add_offline_option(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """`--offline`, where a model can be named."""
    group.add_argument(
        "--offline",
        action="store_true",
        help="take a model that is named from the cache alone, and ask no hub",
    )


def adapter_place(text: str) -> tuple[str | None, Path]:
    """An argparse type: a directory, with a name before it or without."""
    name, separator, directory = text.partition("=")
    if not separator or "/" in name or Path(text).exists():
        return None, Path(text).expanduser()
    if not name or not directory:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=DIR")
    return name, Path(directory).expanduser()


def named_model_place(text: str) -> tuple[str | None, Path | ModelName]:
    """An argparse type: a model, with a name before it or without."""
    name, separator, place = text.partition("=")
    if not separator or "/" in name or Path(text).exists():
        return None, model_place(text)
    if not name or not place:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=MODEL")
    return name, model_place(place)


def adapters_of(options: argparse.Namespace) -> dict[str, Path]:
    """The directories of the adapters that the options name, by what they are called.

    Raises:
        ConfigurationError: one is not there, or two have one name.
    """
    from neurogrid.assembly.adapter_places import adapter_directory, adapter_name

    found: dict[str, Path] = {}
    for given, path in options.adapter:
        directory = adapter_directory(path)
        name = given or adapter_name(path)
        if name in found:
            raise ConfigurationError(
                f"two adapters are called {name!r}: --adapter NAME=DIR gives one of them another name"
            )
        found[name] = directory
    return found


def with_adapters(options: argparse.Namespace, names: Collection[str]) -> argparse.Namespace:
    """The options with these of their adapters, and no others."""
    from neurogrid.assembly.adapter_places import adapter_name

    kept = copy.copy(options)
    kept.adapter = [
        (name, path) for name, path in options.adapter if (name or adapter_name(path)) in names
    ]
    return kept


async def find_model(
    options: argparse.Namespace, screen: Screen, judge: Callable[[], object] = lambda: None
) -> None:
    """Put the directory of a model that is named where the options have its name, fetched if need be; and that of the
    newest checkpoint where they have a training run.

    Args:
        judge: raises what else is wrong with the options: called before anything is fetched.

    Raises:
        ConfigurationError: it cannot be had.
    """
    if isinstance(options.model, ModelName):
        options.model = await named_model(
            options.model, screen, is_offline=options.offline, judge=judge
        )
    elif options.model is not None:
        found = _checkpoint_of(options.model)
        if found != options.model and getattr(options, "model_name", None) is None:
            # Checkpoints come and go; what clients ask for stays.
            options.model_name = options.model.resolve().name
        options.model = found


def run_of(path: Path) -> RunDirectory | None:
    """The training run that is kept in a directory; None where there is none, or a model."""
    from neurogrid.training.runs.run_directory import RunDirectory

    run = RunDirectory(path)
    return run if run.has_run and not (path / "config.json").exists() else None


def _checkpoint_of(path: Path) -> Path:
    """The newest checkpoint of the run that is kept in a directory; any other path as it is.

    Raises:
        ConfigurationError: the run has no checkpoint yet, or those that it has are not there.
    """
    run = run_of(path)
    if run is None:
        return path
    run.check_checkpoints()
    checkpoint = run.latest_checkpoint()
    if checkpoint is None:
        raise ConfigurationError(f"the training run in {path} has written no checkpoint yet")
    return checkpoint


async def named_model(
    name: ModelName,
    screen: Screen,
    *,
    is_offline: bool,
    is_renewed: bool = False,
    judge: Callable[[], object] = lambda: None,
) -> Path:
    """The directory of a model in the cache, or its file in GGUF.

    Args:
        is_offline: look there alone.
        is_renewed: ask the hub what the revision is today, though the cache has one.
        judge: called before anything is fetched.

    Raises:
        ConfigurationError: it cannot be had.
    """
    # Here, not above: the library takes a third of a second, and --help does without.
    from neurogrid.hub.cache import cache_directory, cached_snapshot
    from neurogrid.hub.download import download, is_switched_off

    with ending_at_once():
        why_not = "--offline" if is_offline else "HF_HUB_OFFLINE" if is_switched_off() else ""
        found = cached_snapshot(name) if why_not or not is_renewed else None
        if found is not None:
            return found
        if why_not:
            raise ConfigurationError(
                f"{name} is neither a directory here nor whole in {cache_directory()}, and {why_not} forbids to ask a "
                "hub for it"
            )
        judge()
        from neurogrid.cli.terminal.download_view import DownloadView
    with DownloadView(screen, str(name)) as view:
        return await download(name, view)
