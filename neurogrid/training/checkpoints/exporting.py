"""A run's model alone, in a directory of its own, as transformers and `neurogrid serve` open it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from neurogrid.errors import CheckpointError, ConfigurationError
from neurogrid.training.checkpoints.places import TEMPORARY
from neurogrid.training.checkpoints.reading import latest_checkpoint

__all__ = ["EXPORT_DTYPES", "export"]

EXPORT_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def export(run_dir: Path, out: Path, *, dtype: str = "float32") -> Path:
    """Write the newest checkpoint of a run to `out`, which is not there yet or empty; the checkpoint that it was.

    Args:
        run_dir: of a run, or a checkpoint of one.
        dtype: of `EXPORT_DTYPES`; float32 is what was trained, bit for bit.

    Raises:
        ConfigurationError: `out` is there, there is no checkpoint, or no such dtype.
        CheckpointError: the checkpoint is damaged, weights do not fit into float16, or `out` cannot be written. Nothing
            is left at `out` then.
    """
    if dtype not in EXPORT_DTYPES:
        raise ConfigurationError(f"the dtype is one of {', '.join(EXPORT_DTYPES)}, not {dtype!r}")
    is_one = (run_dir / "config.json").is_file()
    source = run_dir.resolve() if is_one else latest_checkpoint(run_dir / "checkpoints")
    if source is None:
        raise ConfigurationError(f"{run_dir}: has no checkpoint to export yet")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigurationError(f"{out}: is there already; name a directory that is not")
    draft = out.parent / f"{TEMPORARY}{out.name}"
    try:
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir(parents=True)
        try:
            for file in sorted(source.iterdir()):
                if file.is_file():
                    _export_file(file, draft / file.name, dtype)
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
        _convert(file, to, EXPORT_DTYPES[dtype])
    elif file.name == "config.json":
        config = json.loads(file.read_bytes())
        config.pop("torch_dtype", None)
        to.write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n", encoding="utf-8")
    else:
        shutil.copyfile(file, to)


def _convert(file: Path, to: Path, dtype: torch.dtype) -> None:
    tensors = {}
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
        for name in opened.keys():  # noqa: SIM118 - it is no mapping
            tensor = opened.get_tensor(name)
            if tensor.is_floating_point():
                narrow = tensor.to(dtype)
                if not bool(narrow.isfinite().all()) and bool(tensor.isfinite().all()):
                    raise CheckpointError(
                        f"{file}: {name[:80]} has numbers that {dtype} has not: take bfloat16"
                    )
                tensor = narrow
            tensors[name] = tensor
    save_file(tensors, to, metadata)


def _correct_index(folder: Path) -> None:
    """Let an index of shards say how many bytes they have now."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        told = json.loads(index.read_bytes())
        total = sum(map(_num_data_bytes, folder.glob("*.safetensors")))
        told["metadata"] = told.get("metadata", {}) | {"total_size": total}
        index.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def _num_data_bytes(file: Path) -> int:
    with file.open("rb") as opened:
        return file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")
