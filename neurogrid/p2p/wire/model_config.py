"""The ModelConfig message: JSON for any version, with the checkpoint's own config as one more key.

A config that arrives is data: it is parsed, its types and signs are checked, and nothing is looked
up, imported or built from it. What a family makes of its own config, and which sizes fit a machine,
is for the model layer to say.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

from neurogrid.errors import ConfigFormatError, LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.wire.faults import over_limit
from neurogrid.p2p.wire.forms import BOOLEAN, Form, array, nullable, optional, uint
from neurogrid.p2p.wire.limits import DEFAULT_LIMITS, MAX_DEPTH, MAX_LAYERS, MAX_NAME_BYTES
from neurogrid.p2p.wire.maps import Fields
from neurogrid.p2p.wire.messages import Data
from neurogrid.p2p.wire.types import CONFIG_DTYPES, ErrorCode

__all__ = ["ModelConfig", "serialize_config", "deserialize_config"]

DEFAULT_ROPE_THETA: Final = 10_000.0
# What a reader in another language can hold in an int.
_MAX_SIZE: Final = 2**31 - 1
_MAX_LABEL_CHARS: Final = 64
_TOO_DEEP: Final = f"it is nested deeper than {MAX_DEPTH} levels"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The description of a model that a worker needs before its weights (`protocol_spec/messages.md`).

    Attributes:
        model_name: at most 1,024 bytes of UTF-8, printable.
        hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim, vocab_size,
            max_seq_len: from 1 to 2**31 - 1; num_layers at most `MAX_LAYERS`; max_seq_len in
                tokens.
        rms_norm_eps: finite, not negative.
        rope_theta: finite, positive.
        layer_types: one short name a layer, or None.
        tie_embeddings: whether the head is the embedding, or None where not said.
        dtype: what stages compute in, a key of `CONFIG_DTYPES`, or None.
        model_type: the family's name as in transformers, or None.
        checkpoint_config: the checkpoint's own config.json, or None.
        quantization: the record of what of the layers is codes, or None for nothing.
    """

    model_name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int
    rms_norm_eps: float
    rope_theta: float = DEFAULT_ROPE_THETA
    layer_types: tuple[str, ...] | None = None
    tie_embeddings: bool | None = None
    dtype: str | None = None
    model_type: str | None = None
    checkpoint_config: Mapping[str, object] | None = None
    quantization: Mapping[str, object] | None = None


def _is_name(value: object) -> bool:
    return (
        isinstance(value, str)
        and value.isprintable()
        and len(value.encode("utf-8")) <= MAX_NAME_BYTES
    )


def _is_label(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value) <= _MAX_LABEL_CHARS


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= sys.float_info.max


_SIZE: Final = uint(_MAX_SIZE, smallest=1)
_NAME: Final = Form(f"a printable string of at most {MAX_NAME_BYTES} bytes", _is_name)
_NUMBER: Final = Form("a finite number, not negative", _is_number, read=float)
_LABEL: Final = Form(f"a name of at most {_MAX_LABEL_CHARS} printable characters", _is_label)
_DTYPE: Final = Form(
    f"one of {', '.join(CONFIG_DTYPES)}",
    lambda value: isinstance(value, str) and value in CONFIG_DTYPES,
)
_OBJECT: Final = Form("an object", lambda value: isinstance(value, dict))
# Of each field, in their order.
_FORMS: Final = {
    "model_name": _NAME,
    "hidden_size": _SIZE,
    "intermediate_size": _SIZE,
    "num_layers": uint(MAX_LAYERS, smallest=1),
    "num_heads": _SIZE,
    "num_kv_heads": _SIZE,
    "head_dim": _SIZE,
    "vocab_size": _SIZE,
    "max_seq_len": _SIZE,
    "rms_norm_eps": _NUMBER,
    "rope_theta": replace(
        optional(_NUMBER),
        absent=DEFAULT_ROPE_THETA,
        read=lambda theta: float(theta) or DEFAULT_ROPE_THETA,
    ),
    "layer_types": nullable(array(_LABEL, MAX_LAYERS)),
    "tie_embeddings": nullable(BOOLEAN),
    "dtype": nullable(_DTYPE),
    "model_type": nullable(_NAME),
    "checkpoint_config": nullable(_OBJECT),
    "quantization": nullable(_OBJECT),
}


def serialize_config(config: ModelConfig) -> bytes:
    """The Data of a ModelConfig message: compact JSON in UTF-8; what is None is left out.

    Raises:
        LocalProtocolError: a field is out of its range, or the whole over the limit.
    """
    names = ModelConfig.__dataclass_fields__
    entries = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    try:
        text = json.dumps(entries, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        data = text.encode("utf-8")
        deserialize_config(data)
    except (TypeError, ValueError, RecursionError, RemoteProtocolError) as error:
        raise LocalProtocolError(f"the model config cannot be sent: {error}") from error
    return data


def deserialize_config(data: Data) -> ModelConfig:
    """Read the Data of a ModelConfig message. Keys that are not known are ignored; null is absent.

    Raises:
        ConfigFormatError: empty, `null`, no JSON object, a key twice, a field missing, of another
            type or out of its range, NaN or infinity, or nested too deep (CONFIG_INVALID).
        RemoteProtocolError: too long (LIMIT_EXCEEDED).
    """
    if len(data) > DEFAULT_LIMITS.model_config:
        raise over_limit(
            f"a model config of {len(data)} bytes; the limit is {DEFAULT_LIMITS.model_config}"
        )
    if not data:
        raise _invalid("it is empty")
    try:
        parsed = json.loads(
            bytes(data).decode("utf-8"),
            object_pairs_hook=_object_without_doubles,
            parse_constant=_refuse_constant,
        )
    except RecursionError as error:
        raise _invalid(_TOO_DEEP) from error
    except ValueError as error:
        raise _invalid(f"it is no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise _invalid(f"it is {'null' if parsed is None else 'no object'}")
    for _ in _levels(list(parsed.values())):
        pass  # also what is under keys that are not known
    for key, form in _FORMS.items():
        if not form.is_optional and parsed.get(key) is None:
            raise _invalid(f"{key} is missing")
    entries = Fields("the message", parsed)
    try:
        config = ModelConfig(*(form.take(entries, key) for key, form in _FORMS.items()))
    except RemoteProtocolError as error:
        raise _invalid(str(error)) from error
    _check(config)
    return config


def _check(config: ModelConfig) -> None:
    if config.layer_types is not None and len(config.layer_types) != config.num_layers:
        raise _invalid(f"layer_types must be an array of {config.num_layers} names")
    for key in ("checkpoint_config", "quantization"):
        for level in _levels([getattr(config, key)]):
            if not all(map(_is_sound, level)):
                raise _invalid(f"{key} holds an infinite number or half a character")


def _is_sound(item: object) -> bool:
    """Whether a value can be written again: 1e999 and a lone surrogate are valid JSON to a reader."""
    if isinstance(item, str):
        return not any("\ud800" <= c <= "\udfff" for c in item)
    return not isinstance(item, float) or math.isfinite(item)


def _levels(level: list[object]) -> Iterator[list[object]]:
    """The values, then what is within them, and so on; `level` is that under the keys of the whole.

    Raises:
        ConfigFormatError: `MAX_DEPTH` is exceeded.
    """
    depth = 0
    while level:
        yield level
        containers = [item for item in level if isinstance(item, dict | list)]
        depth += 1
        if containers and depth > MAX_DEPTH:
            raise _invalid(_TOO_DEEP)
        level = [child for item in containers for child in _children(item)]


def _children(item: dict[str, object] | list[object]) -> list[object]:
    return [*item.keys(), *item.values()] if isinstance(item, dict) else item


def _object_without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return entries


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _invalid(reason: str) -> ConfigFormatError:
    return ConfigFormatError(
        f"the model config is refused: {reason}", code=ErrorCode.CONFIG_INVALID
    )
