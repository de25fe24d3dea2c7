"""Facts that Ollama's API tells of models: the one that is served, and the adapters beside it.

What Ollama reads from its own files is told as far as a checkpoint has it. The digest is of the model's name and
config, in hexadecimals: it differs where models do, and is no digest of their weights.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.model.files.fill_in import read_fill_in
from neurogrid.server.ollama.request_reader import TAG

__all__ = ["listed", "shown"]


def listed(coordinator: Coordinator) -> list[dict[str, object]]:
    """The models of `/api/tags`."""
    return [_entry(coordinator, name, parent) for name, parent in _names(coordinator)]


def shown(coordinator: Coordinator, name: str) -> dict[str, object]:
    """Return the facts that `/api/show` tells of a model, by the name that `/v1/models` has."""
    model = coordinator.model
    parent = dict(_names(coordinator))[name]
    config: Any = model.config.get_text_config(decoder=True)
    family = str(config.model_type)
    facts = {
        "block_count": model.ends.num_layers,
        "context_length": getattr(config, "max_position_embeddings", None),
        "embedding_length": model.ends.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count": getattr(config, "num_attention_heads", None),
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None),
        "vocab_size": model.ends.vocab_size,
    }
    return {
        "modelfile": f"FROM {parent or name}\n",
        "parameters": "\n".join(
            f"{key} {value}"
            for key, value in sorted(model.checkpoint.generation_config.items())
            if key in ("temperature", "top_k", "top_p", "min_p") and value is not None
        ),
        "template": model.tokenizer.chat_template_text(),
        "details": _details(model, parent),
        "model_info": {
            "general.architecture": family,
            "general.basename": name,
            **{f"{family}.{key}": value for key, value in facts.items() if value is not None},
        },
        "capabilities": _capabilities(model),
        "modified_at": _modified_at(model),
    }


def _capabilities(model: LoadedModel) -> list[str]:
    tokenizer = model.tokenizer
    named = {
        "vision": model.sight is not None,
        "tools": tokenizer.template_names("tools", tools=True),
        "thinking": tokenizer.template_names("enable_thinking"),
        "insert": read_fill_in(tokenizer) is not None,
    }
    return ["completion", "embedding", *(name for name, has in named.items() if has)]


def _names(coordinator: Coordinator) -> Iterator[tuple[str, str]]:
    """Each model's name, and its parent's, which is empty for the model itself."""
    yield coordinator.model.name, ""
    for adapter in coordinator.adapters:
        yield adapter.name, coordinator.model.name


def _entry(coordinator: Coordinator, name: str, parent: str) -> dict[str, object]:
    model = coordinator.model
    tagged = name if ":" in name.rpartition("/")[2] else name + TAG
    digest = hashlib.sha256(name.encode() + b"\0" + model.fingerprint).hexdigest()
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": _modified_at(model),
        "size": sum(found.st_size for found in _stats(model)),
        "digest": digest,
        "details": _details(model, parent),
    }


def _details(model: LoadedModel, parent: str) -> dict[str, object]:
    config: Any = model.config
    family = str(config.model_type)
    in_gguf = any(file.suffix == ".gguf" for file in model.checkpoint.files)
    form = str(model.dtype).removeprefix("torch.")
    return {
        "parent_model": parent,
        "format": "gguf" if in_gguf else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": form if model.quantization is None else model.quantization.method,
    }


def _stats(model: LoadedModel) -> Iterator[os.stat_result]:
    """Yield the status of each file of a model that is still there: the model is served without them, too."""
    for file in model.checkpoint.files:
        with suppress(OSError):
            yield file.stat()


def _modified_at(model: LoadedModel) -> str:
    newest = max((found.st_mtime for found in _stats(model)), default=0.0)
    return datetime.fromtimestamp(newest, UTC).isoformat().replace("+00:00", "Z")
