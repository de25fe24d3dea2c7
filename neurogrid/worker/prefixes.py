"""Prefixes on disk: the caches of sessions that were closed, for others that begin with the same tokens.

A prefix is a blob like a layer's: in a cache of its own (`BlobCache`), within a limit, the least recently used going
first, and nothing that is read is believed before it is hashed. Under which name its coordinator asks for it is told by
a note; name, owner and what it was computed with are in the blob, too, so that no note leads to the wrong one.

The methods block: they are called in threads.

Source: protocol_spec/sessions.md, "Prefixes on disk".
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from neurogrid.errors import CheckpointError, UnsupportedModelError
from neurogrid.model.caches.cache import LayerStates
from neurogrid.model.files.blob import parse_blob, write_blob
from neurogrid.node.cache_directory import CacheSettings, open_directory
from neurogrid.p2p.transfer import BlobCache, BlobInfo, StoredBlob
from neurogrid.p2p.wire import BLOB_ID_BYTES, CHUNK_BYTES, chunk_digest

__all__ = ["PrefixIdentity", "WorkerPrefixes"]

logger = logging.getLogger(__name__)

# Of one prefix: it is in memory a second time while it is written or read. Bytes.
MAX_PREFIX_BYTES: Final = 1024**3
# Of what its coordinator calls a prefix, and of what it is of: in the names of its tensors.
_KEY: Final = "key"
_LENGTH: Final = "length"
_VERSION: Final = b"neurogrid/prefix/1"


@dataclass(frozen=True)
class PrefixIdentity:
    """Everything on which the numbers of a prefix depend, and whose it is.

    Attributes:
        name: 32 bytes by which its coordinator knows the tokens.
        owner: the peer id of that coordinator.
        start, stop: the layers.
        layers: the blob id of each of them.
        form: of the numbers: what they are computed in and kept as.
        adapter: ids of its parts; empty for none.
    """

    name: bytes
    owner: str
    start: int
    stop: int
    layers: tuple[bytes, ...]
    form: str
    adapter: bytes

    @property
    def key(self) -> bytes:
        """32 bytes that stand for all of it."""
        hasher = hashlib.sha256()
        parts = (self.name, self.owner.encode(), b"".join(self.layers), self.adapter)
        numbers = f"{self.start} {self.stop} {self.form} {torch.__version__}".encode()
        for part in (_VERSION, numbers, *parts):
            hasher.update(len(part).to_bytes(8) + part)
        return hasher.digest()


class WorkerPrefixes:
    """The prefixes of one worker.

    Args:
        settings: where caches are; None for nowhere.
        max_bytes: what prefixes may take on disk; None for none of them.

    Raises:
        ConfigurationError: the cache cannot be used, and must be.
    """

    def __init__(self, settings: CacheSettings | None, max_bytes: int | None) -> None:
        self._cache: BlobCache | None = None
        if settings is None or max_bytes is None:
            return
        blobs, notes = (open_directory(settings, name) for name in ("prefixes", "prefix-names"))
        if blobs is not None:
            self._cache = BlobCache(blobs, max_bytes=max_bytes, notes=notes)

    @property
    def is_kept(self) -> bool:
        """Whether there are any."""
        return self._cache is not None

    def store(
        self, identity: PrefixIdentity, states: Mapping[int, LayerStates], num_tokens: int
    ) -> bool:
        """Write what the layers of a session have of so many tokens; False where it cannot be kept."""
        cache = self._cache
        num_bytes = sum(keys.nbytes + values.nbytes for keys, values in states.values())
        if cache is None or not states or num_bytes > min(MAX_PREFIX_BYTES, cache.max_bytes):
            return False
        tensors = {
            _KEY: torch.tensor(list(identity.key), dtype=torch.uint8),
            _LENGTH: torch.tensor(num_tokens, dtype=torch.int64),
        }
        for layer_id, (keys, values) in states.items():
            tensors[f"{layer_id}.keys"] = _alone(keys)
            tensors[f"{layer_id}.values"] = _alone(values)
        data = memoryview(write_blob(tensors))
        tensors.clear()
        pieces = (data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES))
        info = BlobInfo.of_digests(b"".join(map(chunk_digest, pieces)), len(data))
        if not cache.store(StoredBlob(info, data)):
            return False
        return cache.note(identity.key.hex(), info.blob_id.hex().encode())

    def load(self, identity: PrefixIdentity) -> tuple[dict[int, LayerStates], int] | None:
        """Return the states and tokens that `store` was given, verified; None if they are not there, or no longer good.

        Raises:
            RequestRefusedError: there is no memory for it (OUT_OF_MEMORY).
        """
        cache = self._cache
        noted = cache.noted(identity.key.hex()) if cache is not None else None
        if cache is None or noted is None:
            return None
        try:
            blob_id = bytes.fromhex(noted.decode())
        except ValueError:
            return None
        if len(blob_id) != BLOB_ID_BYTES:
            return None
        stored = cache.load(blob_id, max_bytes=2 * MAX_PREFIX_BYTES)
        if stored is None:
            return None
        try:
            return _states(parse_blob(stored.data), identity)
        except (CheckpointError, UnsupportedModelError, ValueError) as exc:
            logger.warning("the prefix %s is not what its name says: it is dropped: %s", noted, exc)
            path = cache.file(blob_id)
            if path is not None:
                path.unlink(missing_ok=True)
            return None


def _alone(states: torch.Tensor) -> torch.Tensor:
    """The states on the CPU, in memory that has nothing else in it."""
    there = states.cpu().contiguous()
    return there if there.untyped_storage().nbytes() == there.nbytes else there.clone()


def _states(
    tensors: dict[str, torch.Tensor], identity: PrefixIdentity
) -> tuple[dict[int, LayerStates], int]:
    """The states of a blob, by layer, and their tokens.

    Raises:
        ValueError: it is of something else.
    """
    key, length = tensors.pop(_KEY, None), tensors.pop(_LENGTH, None)
    if key is None or bytes(key.flatten().tolist()) != identity.key:
        raise ValueError("it is of other tokens, or was computed otherwise")
    if length is None or length.dtype != torch.int64 or length.dim():
        raise ValueError("it does not say how long it is")
    found = {}
    for layer_id in range(identity.start, identity.stop):
        keys = tensors.pop(f"{layer_id}.keys", None)
        values = tensors.pop(f"{layer_id}.values", None)
        if keys is None and values is None:
            continue  # it has those of another layer
        if keys is None or values is None or keys.dim() != 4 or values.dim() != 4:
            raise ValueError(f"it has no keys and values of layer {layer_id}")
        found[layer_id] = keys, values
    if tensors or not found:
        raise ValueError("it has tensors of other layers, or none")
    return found, int(length)
