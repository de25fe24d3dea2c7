"""Models and adapters that clients have added to a server, kept in a file so that they are there at the next start.

FILE    JSON, 0600, written anew at each change: of each its place, and what it was like

The weights stay where they are. So each is looked at again before it is served: under a name stands what a client has
added under it, or nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import trio

from neurogrid.errors import ConfigurationError

__all__ = ["AddedAdapter", "AddedModel", "Additions", "model_state"]

_VERSION: Final = 1
# 1,024 adapters and 16 models, each with a name and a path.
_MAX_BYTES: Final = 16 * 1024 * 1024
# The files that a model is read from: who writes into a README changes none.
_MODEL_FILES: Final = frozenset({".safetensors", ".gguf", ".json", ".jinja", ".model", ".txt"})


@dataclass(frozen=True)
class AddedModel:
    """A model that a client added.

    Attributes:
        place: as the client named it: below the directory of models, or at the hub.
        state: of its files, by `model_state`.
    """

    place: str
    state: str


@dataclass(frozen=True)
class AddedAdapter:
    """An adapter that a client added.

    Attributes:
        model: the one that it stands beside.
        path: of its directory, below the directory of adapters.
        key: of its content, in hexadecimal (`AdapterSource.key`).
    """

    model: str
    path: str
    key: str


@dataclass(frozen=True)
class _Kept:
    models: Mapping[str, AddedModel] = field(default_factory=dict)
    adapters: Mapping[str, AddedAdapter] = field(default_factory=dict)


class Additions:
    """Models and adapters that clients have added, by name.

    Args:
        file: where it is kept; None where it is forgotten at the end.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._kept = _Kept()
        self._changing = trio.Lock()

    @classmethod
    def read(cls, file: Path | None) -> Additions:
        """Read what is kept in a file; nothing, where there is none.

        Raises:
            ConfigurationError: it cannot be read, or is not what was written.
        """
        additions = cls(file)
        if file is None:
            return additions
        # Here, since a command line is judged before libp2p is imported.
        from neurogrid.p2p.trust.private_files import read_private

        data = read_private(file, _MAX_BYTES)
        if data is not None:
            try:
                additions._kept = _decode(data)
            except (ValueError, TypeError, LookupError, RecursionError) as exc:
                raise ConfigurationError(
                    f"{file} does not say which models and adapters clients have added ({exc}): remove it, and add "
                    "them again"
                ) from exc
        return additions

    @property
    def models(self) -> Mapping[str, AddedModel]:
        """All models, in the order in which they were added."""
        return self._kept.models

    @property
    def adapters(self) -> Mapping[str, AddedAdapter]:
        """All adapters, in the order in which they were added."""
        return self._kept.adapters

    def adapters_of(self, model: str) -> Mapping[str, AddedAdapter]:
        """The adapters beside one model."""
        return {name: each for name, each in self._kept.adapters.items() if each.model == model}

    async def keep_model(self, name: str, model: AddedModel) -> None:
        """Keep a model, in the place of another of its name.

        Raises:
            ConfigurationError: the file cannot be written; nothing is changed then. So do all that change something.
        """
        async with self._changing:
            await self._write(_Kept({**self.models, name: model}, self.adapters))

    async def keep_adapter(self, name: str, adapter: AddedAdapter) -> None:
        """Keep an adapter, in the place of another of its name."""
        async with self._changing:
            await self._write(_Kept(self.models, {**self.adapters, name: adapter}))

    async def forget_model(self, name: str) -> None:
        """Keep a model no longer, nor the adapters beside it."""
        async with self._changing:
            models = {other: each for other, each in self.models.items() if other != name}
            adapters = {other: each for other, each in self.adapters.items() if each.model != name}
            if len(models) < len(self.models) or len(adapters) < len(self.adapters):
                await self._write(_Kept(models, adapters))

    async def forget_adapter(self, name: str) -> bool:
        """Keep an adapter no longer; False where there was none of that name."""
        async with self._changing:
            if name not in self.adapters:
                return False
            adapters = {other: each for other, each in self.adapters.items() if other != name}
            await self._write(_Kept(self.models, adapters))
            return True

    async def _write(self, kept: _Kept) -> None:
        if self._file is not None:
            from neurogrid.p2p.trust.private_files import write_private  # here, as above

            data = json.dumps({"version": _VERSION, **asdict(kept)}, indent=1).encode()
            await trio.to_thread.run_sync(write_private, self._file, data)
        self._kept = kept


def model_state(path: Path) -> str:
    """Digest of the names, sizes and times of a model's files: another text where one of them is another file.

    Args:
        path: of its directory, or of its file.

    Raises:
        ConfigurationError: they cannot be looked at.
    """
    hasher = hashlib.sha256()
    try:
        files = [path]
        if path.is_dir():
            files = [f for f in sorted(path.iterdir()) if f.suffix in _MODEL_FILES and f.is_file()]
        for file in files:
            found = file.stat()
            told = [file.name, found.st_size, found.st_mtime_ns]
            hasher.update(json.dumps(told).encode() + b"\n")
    except OSError as exc:
        raise ConfigurationError(f"cannot look at {path}: {exc.strerror}") from exc
    return hasher.hexdigest()


def _decode(data: bytes) -> _Kept:
    """Decode what was written; anything else raises ValueError, TypeError, LookupError or RecursionError."""
    told = _table(json.loads(data))
    if told["version"] != _VERSION:
        raise ValueError(f"version {told['version']!r}, and {_VERSION} is known here")
    models, adapters = _table(told["models"]), _table(told["adapters"])
    return _Kept(
        {name: AddedModel(**_texts(each)) for name, each in models.items()},
        {name: AddedAdapter(**_texts(each)) for name, each in adapters.items()},
    )


def _table(told: object) -> dict[str, object]:
    if not isinstance(told, dict):
        raise TypeError(f"a table was expected, not {type(told).__name__}")
    return told


def _texts(told: object) -> dict[str, str]:
    table = _table(told)
    if not all(isinstance(value, str) for value in table.values()):
        raise TypeError("texts were expected")
    return {key: str(value) for key, value in table.items()}
