"""The hashes of a checkpoint's layers, kept beside the next start, so that gigabytes are hashed once.

One small JSON file for each model directory. What it says of a layer counts as long as every file that the layer
lies in has the size, the times and the inode that it had when it was opened to be hashed. Files that had just been
written then are not noted: they could change again within one tick of the file system's clock. A worker that gets a
layer hashes it all the same, so hashes that are wrong nevertheless are found out, and `forget` drops them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Final

from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.quantization import Quantization
from neurogrid.p2p.wire.blob_id import DIGEST_BYTES

__all__ = ["HashCache"]

logger = logging.getLogger(__name__)

# Of this layout, of the hash, and of how a layer's bytes are made of its tensors.
_VERSION: Final = 2
# The coarsest clock of a file system in use (FAT), in nanoseconds.
_TICK_NS: Final = 2_000_000_000
# The digests of a model of 2 TB have 64 MB, in base64 85 MB.
_MAX_BYTES: Final = 128 * 1024 * 1024

# Size, modified, changed (both in nanoseconds), inode.
_State = list[int]


class HashCache:
    """The hashes of one checkpoint. Made by `open`.

    Attributes:
        num_known: layers whose hashes were found.
    """

    def __init__(
        self, file: Path, checkpoint: Checkpoint, quantization: Quantization | None = None
    ) -> None:
        self._file = file
        self._checkpoint = checkpoint
        self._quantization = quantization
        self._states = {str(path): _state_of(path) for path in checkpoint.files}
        self._is_settled = {
            path: state is not None and time.time_ns() - max(state[1:3]) > _TICK_NS
            for path, state in self._states.items()
        }
        self.num_known = 0

    @classmethod
    def open(
        cls, directory: Path, checkpoint: Checkpoint, quantization: Quantization | None = None
    ) -> HashCache:
        """Give the layers of `checkpoint` the hashes that are kept in `directory`. Open it before any is hashed.

        Args:
            quantization: the layers as they travel.
        """
        what = os.fsencode(checkpoint.path.resolve())
        if quantization is not None:
            # No path has a zero in it.
            what += b"\0" + json.dumps(quantization.record(), sort_keys=True).encode()
        name = hashlib.sha256(what).hexdigest()
        cache = cls(directory / f"{name}.json", checkpoint, quantization)
        try:
            with cache._file.open("rb") as file:
                table = json.loads(file.read(_MAX_BYTES))
            if table["version"] == _VERSION:
                cache._restore(table["files"], table["layers"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
            logger.warning("%s is of no use, the model is hashed anew: %s", cache._file, exc)
        return cache

    def save(self) -> None:
        """Keep the hashes of the layers that are hashed by now. Nothing is lost but time if that cannot be."""
        checkpoint = self._checkpoint
        now = {str(path): _state_of(path) for path in checkpoint.files}
        good = {path for path in now if self._is_settled[path] and now[path] == self._states[path]}
        layers = {}
        for layer_id in sorted(checkpoint.present_layers):
            blob = checkpoint.layer_blob(layer_id, self._quantization)
            if blob.is_hashed and good.issuperset(map(str, checkpoint.layer_files(layer_id))):
                digests = base64.b64encode(blob.digests()).decode()
                layers[str(layer_id)] = [blob.num_bytes, digests]
        if len(layers) <= self.num_known:
            return
        files = {path: now[path] for path in sorted(good)}
        try:
            handle, name = tempfile.mkstemp(dir=self._file.parent, suffix=".tmp")
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump({"version": _VERSION, "files": files, "layers": layers}, file)
                os.replace(name, self._file)
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as exc:
            logger.warning("the hashes of the model cannot be kept: %s", exc)

    def forget(self) -> None:
        """The hashes were wrong: drop them."""
        self._file.unlink(missing_ok=True)

    def _restore(self, files: dict[str, _State], layers: dict[str, list[object]]) -> None:
        same = {
            path
            for path, state in files.items()
            if self._states.get(path) == state and self._is_settled[path]
        }
        for key, (num_bytes, text) in layers.items():
            layer_id = int(key)
            if layer_id not in self._checkpoint.present_layers:
                continue
            if not same.issuperset(map(str, self._checkpoint.layer_files(layer_id))):
                continue
            blob = self._checkpoint.layer_blob(layer_id, self._quantization)
            digests = base64.b64decode(str(text), validate=True)
            if num_bytes == blob.num_bytes and len(digests) == DIGEST_BYTES * blob.num_chunks:
                blob.trust_digests(digests)
                self.num_known += 1


def _state_of(path: Path) -> _State | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
