"""The adapters that a coordinator serves beside its model, by name; their parts, for workers that ask.

An adapter can be added and removed at any time. Sessions that have one go on with it, also after it was removed, and
after its name was given to another.

Source: protocol_spec/sessions.md, "Adapters".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

from neurogrid.errors import ConfigurationError, RequestRefusedError
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.model.adapters import AdapterSource, cut_adapter, read_peft
from neurogrid.model.files.blob import LayerBlob
from neurogrid.p2p.transfer import BlobSource, TransferPolicy
from neurogrid.p2p.wire import ErrorCode

__all__ = ["MAX_ADAPTERS", "AdapterName", "ServedAdapter", "ServedAdapters"]

# Each is in memory here. Workers have as many open at once as there may be of a layer, and let others go.
MAX_ADAPTERS: Final = 1024
AdapterName: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")


@dataclass(frozen=True, eq=False)
class ServedAdapter:
    """An adapter under a name.

    Attributes:
        directory: where it was read.
        source: its parts.
    """

    name: str
    directory: Path
    source: AdapterSource


class ServedAdapters(TransferPolicy):
    """The adapters of one coordinator: a policy for transfers, which gives their parts and takes nothing.

    Args:
        model: whose linear layers they stand beside.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._adapters: dict[str, ServedAdapter] = {}
        # As long as a session has them, too. Adapters with equal parts share these.
        self._blobs: WeakValueDictionary[bytes, LayerBlob] = WeakValueDictionary()

    @classmethod
    def load(cls, model: LoadedModel, places: Mapping[str, Path]) -> ServedAdapters:
        """Adapters of these names and directories. Blocks: run it in a thread.

        Raises:
            ConfigurationError, ModelError: as `read` and `add`.
        """
        adapters = cls(model)
        for name, directory in places.items():
            adapters.add(adapters.read(name, directory))
        return adapters

    def __iter__(self) -> Iterator[ServedAdapter]:
        return iter(tuple(self._adapters.values()))

    def __len__(self) -> int:
        return len(self._adapters)

    @property
    def names(self) -> Collection[str]:
        """The names of all."""
        return self._adapters.keys()

    def get(self, name: str) -> ServedAdapter | None:
        """The adapter of a name, if there is one."""
        return self._adapters.get(name)

    def read(self, name: str, directory: Path) -> ServedAdapter:
        """Read an adapter, without serving it yet. Blocks: run it in a thread.

        Raises:
            ConfigurationError: the name is none, or there is no adapter in the directory.
            ModelError: the adapter is damaged, for another model, or no LoRA beside linear layers.
        """
        if AdapterName.fullmatch(name) is None:
            raise ConfigurationError(
                f"{name[:100]!r} is no name for an adapter: letters, digits and ._:/@+- make one, 128 at most"
            )
        ends = self._model.ends
        cut = cut_adapter(
            read_peft(directory),
            ends.num_layers,
            ends.layer_name,
            ends.linear_layers,
            dtype=self._model.adapter_dtype,
        )
        return ServedAdapter(name, directory, cut)

    def add(self, adapter: ServedAdapter) -> None:
        """Serve an adapter from now on.

        Raises:
            ConfigurationError: its name is another's or the model's, or there are too many.
        """
        self.require_free(adapter.name)
        shared = {
            layer_id: self._blobs.setdefault(blob.blob_id(), blob)
            for layer_id, blob in adapter.source.blobs.items()
        }
        source = replace(adapter.source, blobs=shared)
        self._adapters[adapter.name] = replace(adapter, source=source)

    def require_free(self, name: str) -> None:
        """Check that an adapter may have a name; raises as `add`."""
        if name == self._model.name or name in self._adapters:
            raise ConfigurationError(f"the name {name!r} is taken: give the adapter another")
        if len(self._adapters) >= MAX_ADAPTERS:
            raise ConfigurationError(
                f"{MAX_ADAPTERS} adapters are served already: remove one before another is added"
            )

    def remove(self, name: str) -> bool:
        """Serve an adapter no longer; False where there is none of that name."""
        return self._adapters.pop(name, None) is not None

    def layer_bytes(self, num_layers: int) -> list[int]:
        """Memory that all of them take beside each layer."""
        return [
            sum(each.source.layer_bytes.get(layer_id, 0) for each in self._adapters.values())
            for layer_id in range(num_layers)
        ]

    # What the library asks

    def authorize(self, peer_id: str) -> None:
        """Nothing is taken from anybody."""
        raise RequestRefusedError("blobs are not taken here", code=ErrorCode.NOT_SUPPORTED)

    def authorize_request(self, peer_id: str) -> None:
        """Let any worker that knows a blob's id have the blob."""

    async def provide(self, peer_id: str, blob_id: bytes) -> BlobSource | None:
        """A part of an adapter, for a worker."""
        return self._blobs.get(blob_id)
