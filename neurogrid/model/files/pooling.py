"""Pooling of a checkpoint's hidden states to an embedding: as the files of sentence-transformers say, or a default.

Models that are made for embeddings come with `modules.json`, which lists a transformer, a pooling and mostly a
normalisation, and with the pooling's own config. Others get what vLLM gives them: the state of the last token,
normalised.

Source: https://sbert.net/docs/sentence_transformer/usage/custom_models.html
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from neurogrid.errors import UnsupportedModelError

__all__ = ["Pooling", "PoolingMode", "read_pooling"]

# Each is a few lines.
MAX_FILE_BYTES: Final = 64 * 1024

_FOLDER: Final = re.compile(r"\d{1,2}_Pooling", re.ASCII)


class PoolingMode(enum.Enum):
    """Mode of pooling: the hidden states of a text that make its embedding, named as in sentence-transformers."""

    FIRST = "cls"
    LAST = "lasttoken"
    MEAN = "mean"
    MAX = "max"
    MEAN_SQRT_LENGTH = "mean_sqrt_len_tokens"
    WEIGHTED_MEAN = "weightedmean"
    """Each by its place, from 1."""


_KEYS: Final = {
    "pooling_mode_cls_token": PoolingMode.FIRST,
    "pooling_mode_lasttoken": PoolingMode.LAST,
    "pooling_mode_mean_tokens": PoolingMode.MEAN,
    "pooling_mode_max_tokens": PoolingMode.MAX,
    "pooling_mode_mean_sqrt_len_tokens": PoolingMode.MEAN_SQRT_LENGTH,
    "pooling_mode_weightedmean_tokens": PoolingMode.WEIGHTED_MEAN,
}


@dataclass(frozen=True)
class Pooling:
    """Pooling of a text's hidden states to its embedding.

    Attributes:
        normalises: whether the embedding has length 1.
    """

    mode: PoolingMode = PoolingMode.LAST
    normalises: bool = True


def read_pooling(path: Path, config: Mapping[str, Any]) -> Pooling:
    """The pooling of a checkpoint.

    Args:
        path: its directory, or a file, which has none of the files that say so.
        config: its config.json.

    Raises:
        UnsupportedModelError: it has something behind the pooling, or several poolings, that are not here; its tokens
            see those behind them; or its files are not what they should be.
    """
    _check_causal(config)
    modules_file = path / "modules.json"
    if not path.is_dir() or not modules_file.is_file():
        return Pooling()
    modules = _read(modules_file)
    if not isinstance(modules, list) or not all(isinstance(item, dict) for item in modules):
        raise UnsupportedModelError(f"{modules_file}: it is no list of modules")
    kinds = [str(item.get("type")).rpartition(".")[2] for item in modules]
    beyond = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if beyond or kinds.count("Pooling") > 1:
        raise UnsupportedModelError(
            f"embeddings of this model go through {' and '.join(beyond) or 'several poolings'} (modules.json), which "
            "is not offered here"
        )
    if "Pooling" not in kinds:
        return Pooling(normalises="Normalize" in kinds)
    folder = str(modules[kinds.index("Pooling")].get("path"))
    if _FOLDER.fullmatch(folder) is None:
        raise UnsupportedModelError(f"{modules_file}: the pooling's path is {folder[:40]!r}")
    return Pooling(_mode(path / folder / "config.json"), "Normalize" in kinds)


def _check_causal(config: Mapping[str, Any]) -> None:
    """Refuse models whose tokens see those behind them: here a token is computed before the next ones are known."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        if part.get("is_causal") is False or part.get("use_bidirectional_attention"):
            raise UnsupportedModelError(
                "tokens of this model see those behind them (is_causal, use_bidirectional_attention in config.json), "
                "and layers are computed for causal models alone here"
            )


def _mode(file: Path) -> PoolingMode:
    config = _read(file)
    if not isinstance(config, dict):
        raise UnsupportedModelError(f"{file}: it is no object")
    named = config.get("pooling_mode")
    if isinstance(named, str):
        modes = [mode for mode in PoolingMode if mode.value == named]
    else:
        modes = [mode for key, mode in _KEYS.items() if config.get(key) is True]
    if len(modes) != 1:
        raise UnsupportedModelError(
            f"{file}: it names {len(modes)} ways of pooling that are known here, and not one"
        )
    return modes[0]


def _read(file: Path) -> object:
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES:,} B")
        value: object = json.loads(data)
        return value
    except (OSError, ValueError, RecursionError) as exc:
        raise UnsupportedModelError(f"{file}: it cannot be read: {str(exc)[:200]}") from exc
