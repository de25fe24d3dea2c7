"""A run's model alone, in a directory of its own, as transformers and `neurogrid serve` open it.

An adapter is merged into its model for that. Weights are read, changed and written tensor by tensor.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from neurogrid.errors import CheckpointError, ConfigurationError
from neurogrid.model.files.checkpoint_files import INDEX_FILE
from neurogrid.model.files.safetensors_header import FILE_DTYPES, TensorEntry, encode_header
from neurogrid.model.files.tensors import dtype_name, tensor_to_bytes
from neurogrid.training.checkpoints.merging import Merging
from neurogrid.training.checkpoints.places import TEMPORARY, TOKENIZER_FILES
from neurogrid.training.checkpoints.reading import latest_checkpoint
from neurogrid.training.stages.lora import is_adapter

__all__ = ["EXPORT_DTYPES", "export"]

EXPORT_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_CONFIG: Final = "config.json"
_GENERATION_CONFIG: Final = "generation_config.json"


def export(run_dir: Path, out: Path, *, dtype: str = "float32", base: Path | None = None) -> Path:
    """Write the newest checkpoint of a run to `out`, which is not there yet or empty; the checkpoint that it was.

    Args:
        run_dir: of a run, or a checkpoint of one, or an adapter of PEFT.
        dtype: of `EXPORT_DTYPES`; float32 is what was trained, bit for bit.
        base: the directory of the model that an adapter is for; None for that which it names.

    Raises:
        ConfigurationError: `out` is there, there is no checkpoint, no such dtype, or no model for an adapter.
        CheckpointError: the checkpoint is damaged, weights do not fit into float16, or `out` cannot be written. Nothing
            is left at `out` then.
        UnsupportedModelError: an adapter is for a model into which it cannot be merged.
    """
    if dtype not in EXPORT_DTYPES:
        raise ConfigurationError(f"the dtype is one of {', '.join(EXPORT_DTYPES)}, not {dtype!r}")
    is_one = (run_dir / _CONFIG).is_file() or is_adapter(run_dir)
    source = run_dir.resolve() if is_one else latest_checkpoint(run_dir / "checkpoints")
    if source is None:
        raise ConfigurationError(f"{run_dir}: has no checkpoint to export yet")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigurationError(f"{out}: is there already; name a directory that is not")
    if base is not None and not is_adapter(source):
        raise ConfigurationError(
            f"--base is for an adapter, and {source} is a whole model: leave it out"
        )
    merging = Merging.open(source, base) if is_adapter(source) else None
    draft = out.parent / f"{TEMPORARY}{out.name}"
    try:
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir(parents=True)
        try:
            if merging is None:
                for file in sorted(source.iterdir()):
                    if file.is_file():
                        _export_file(file, draft / file.name, dtype)
            else:
                _export_merged(merging, source, draft, dtype)
            _correct_index(draft)
            draft.rename(out)
        except BaseException:  # interrupted, too: nothing of it is left
            shutil.rmtree(draft, ignore_errors=True)
            raise
    except (OSError, SafetensorError) as exc:
        raise CheckpointError(f"{out}: cannot be written: {exc}") from exc
    return source


def _export_file(file: Path, to: Path, dtype: str) -> None:
    if file.suffix == ".safetensors" and dtype != "float32":
        _rewrite(file, to, EXPORT_DTYPES[dtype], lambda name, tensor: tensor)
    elif file.name == _CONFIG:
        config = json.loads(file.read_bytes())
        config.pop("torch_dtype", None)
        to.write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n", encoding="utf-8")
    else:
        shutil.copyfile(file, to)


def _export_merged(merging: Merging, adapter: Path, draft: Path, dtype: str) -> None:
    """Write the model of an adapter, changed by it; with the tokenizer of the adapter, if that has one."""
    for file in merging.files:
        _rewrite(file, draft / file.name, EXPORT_DTYPES[dtype], merging.merged)
    own = [name for name in TOKENIZER_FILES if (adapter / name).is_file()]
    for folder, names in (
        (merging.base, (_CONFIG, _GENERATION_CONFIG)),
        (adapter if own else merging.base, TOKENIZER_FILES),
    ):
        for name in names:
            if (folder / name).is_file():
                _export_file(folder / name, draft / name, dtype)
    index = merging.base / INDEX_FILE
    if index.is_file() and len(merging.files) > 1:
        shutil.copyfile(index, draft / INDEX_FILE)


def _rewrite(
    file: Path, to: Path, dtype: torch.dtype, change: Callable[[str, Tensor], Tensor]
) -> None:
    """Write the tensors of a file into another, in order; one is in memory at a time.

    Args:
        dtype: of those that are floating point.
        change: a tensor of that name into one of the same shape.
    """
    with safe_open(file, framework="pt") as opened:
        entries: dict[str, TensorEntry] = {}
        start = 0
        for name in opened.keys():  # noqa: SIM118 - it is no mapping
            entry = opened.get_slice(name)
            stored = FILE_DTYPES.get(entry.get_dtype())
            if stored is None:
                raise CheckpointError(f"{file}: {name[:80]} is of {entry.get_dtype()[:16]}")
            told, given = entry.get_dtype(), stored
            if stored.is_floating_point:
                told, given = dtype_name(dtype), dtype
            shape = tuple(entry.get_shape())
            stop = start + math.prod(shape) * given.itemsize
            entries[name] = TensorEntry(told, shape, start, stop)
            start = stop
        with to.open("xb") as stream:
            stream.write(encode_header(entries, opened.metadata() or {"format": "pt"}))
            for name in entries:
                tensor = opened.get_tensor(name)
                if tensor.is_floating_point():
                    wide = change(name, tensor)
                    tensor = wide.to(dtype)
                    if not bool(tensor.isfinite().all()) and bool(wide.isfinite().all()):
                        raise CheckpointError(
                            f"{file}: {name[:80]} has numbers that {dtype} has not: take bfloat16"
                        )
                stream.write(tensor_to_bytes(tensor))


def _correct_index(folder: Path) -> None:
    """Let an index of shards say how many bytes they have now."""
    index = folder / INDEX_FILE
    if index.is_file():
        told = json.loads(index.read_bytes())
        total = sum(map(_num_data_bytes, folder.glob("*.safetensors")))
        told["metadata"] = told.get("metadata", {}) | {"total_size": total}
        index.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def _num_data_bytes(file: Path) -> int:
    with file.open("rb") as opened:
        return file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")
