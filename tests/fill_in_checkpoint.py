"""The embedded model with tokens for filling in, which it was not trained for: the last ones of its vocabulary."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from neurogrid.model.embedded import embedded_model_path

__all__ = ["QWEN", "make_fill_in_checkpoint"]

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|repo_name|>")
"""As Qwen2.5-Coder has them, of which none counts as special there."""


def make_fill_in_checkpoint(path: Path, names: Sequence[str] = QWEN) -> Path:
    """Write it to the directory `path`, which is made."""
    shutil.copytree(embedded_model_path(), path)
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    model = content["model"]
    last = sorted(model["vocab"], key=model["vocab"].__getitem__)[-len(names) :]
    ids = [model["vocab"].pop(name) for name in last]
    model["merges"] = model["merges"][: -len(names)]  # the merges that make those
    model["vocab"] |= dict(zip(names, ids, strict=True))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"] += [
        {"id": token_id, "content": name, **flags, "special": False}
        for name, token_id in zip(names, ids, strict=True)
    ]
    file.write_text(json.dumps(content, ensure_ascii=False))
    return path
