"""A data directory that is there whole, or not at all; and the slices in it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from safetensors.numpy import save

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.transfer import BytesSource
from neurogrid.p2p.wire import blob_id
from neurogrid.training.data.manifest import MAX_SLICE_BYTES, SliceInfo
from neurogrid.training.data.preparing.samples import Samples
from neurogrid.training.data.preparing.shuffling import in_order
from neurogrid.training.data.slices import MANIFEST_NAME, SLICES_NAME, slice_path

__all__ = ["default_slice_samples", "open_directory", "write_slices"]

# A chunk of a blob: less than that costs a request for little.
_SLICE_BYTES: Final = 1024 * 1024
# So that members of uneven speed, and held-out data, have slices of their own.
_FEWEST_SLICES: Final = 16


def default_slice_samples(num_samples: int, sample_bytes: int) -> int:
    """Samples of a slice: a mebibyte, less where there is little, one where that is more."""
    return max(1, min(_SLICE_BYTES // sample_bytes, -(-num_samples // _FEWEST_SLICES)))


@contextmanager
def open_directory(out: Path) -> Iterator[Path]:
    """A directory beside `out`, which takes its place if all goes well.

    Raises:
        ConfigurationError: `out` is there already, and not empty; or it cannot be written.
    """
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            what = "has data already" if (out / MANIFEST_NAME).exists() else "is not empty"
            raise ConfigurationError(f"{out} {what}: give a directory that is new or empty")
        out.parent.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            (directory / SLICES_NAME).mkdir()
            yield directory
            directory.chmod(0o755)
            os.replace(directory, out)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    except OSError as exc:
        raise ConfigurationError(f"{out} cannot be made: {exc}") from exc


def write_slices(
    directory: Path, samples: Samples, slice_samples: int, *, seed: int
) -> tuple[SliceInfo, ...]:
    """Write samples in the order of a seed, over all of them, slice by slice.

    Raises:
        ConfigurationError: a slice would be too large.
    """
    infos = []
    for start in range(0, len(samples), slice_samples):
        stop = min(start + slice_samples, len(samples))
        data = save(dict(samples.load(in_order(seed, len(samples), start, stop))))
        if len(data) > MAX_SLICE_BYTES:
            raise ConfigurationError(
                f"a slice of {stop - start} samples has {len(data):,} B, and may have {MAX_SLICE_BYTES:,}: "
                "take fewer slice_samples"
            )
        info = SliceInfo(blob_id([BytesSource(data).digests()]), stop - start, len(data))
        slice_path(directory, info).write_bytes(data)
        infos.append(info)
    return tuple(infos)
