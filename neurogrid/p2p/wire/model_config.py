"""The ModelConfig message: JSON for any version, with the checkpoint's own config as one more key.

A config that arrives is data: it is parsed, its types and signs are checked, and nothing is looked
up, imported or built from it. What a family makes of its own config, and which sizes fit a machine,
is for the model layer to say.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NoReturn

from neurogrid.errors import ConfigFormatError, LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.wire.faults import over_limit
from neurogrid.p2p.wire.limits import DEFAULT_LIMITS, MAX_DEPTH, MAX_LAYERS, MAX_NAME_BYTES
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
    return _Reader(parsed).config()


class _Reader:
    """Typed access to the parsed object; each getter raises when the entry is not as it must be."""

    def __init__(self, entries: dict[str, object]) -> None:
        self._entries = {key: value for key, value in entries.items() if value is not None}

    def config(self) -> ModelConfig:
        num_layers = self._size("num_layers", MAX_LAYERS)
        return ModelConfig(
            model_name=self._name("model_name", MAX_NAME_BYTES),
            hidden_size=self._size("hidden_size"),
            intermediate_size=self._size("intermediate_size"),
            num_layers=num_layers,
            num_heads=self._size("num_heads"),
            num_kv_heads=self._size("num_kv_heads"),
            head_dim=self._size("head_dim"),
            vocab_size=self._size("vocab_size"),
            max_seq_len=self._size("max_seq_len"),
            rms_norm_eps=self._number("rms_norm_eps"),
            rope_theta=(self._number("rope_theta") if "rope_theta" in self._entries else 0.0)
            or DEFAULT_ROPE_THETA,
            layer_types=self._layer_types(num_layers),
            tie_embeddings=self._boolean("tie_embeddings"),
            dtype=self._dtype(),
            model_type=self._name("model_type", MAX_NAME_BYTES)
            if "model_type" in self._entries
            else None,
            checkpoint_config=self._checkpoint_config(),
        )

    def _get(self, key: str) -> object:
        if key not in self._entries:
            raise _invalid(f"{key} is missing")
        return self._entries[key]

    def _size(self, key: str, largest: int = _MAX_SIZE) -> int:
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
            raise _invalid(f"{key} must be an integer from 1 to {largest}")
        return value

    def _number(self, key: str) -> float:
        value = self._get(key)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value < math.inf
        ):
            raise _invalid(f"{key} must be a finite number, not negative")
        try:
            return float(value)
        except OverflowError as error:
            raise _invalid(f"{key} is too large") from error

    def _name(self, key: str, max_bytes: int) -> str:
        value = self._get(key)
        if not isinstance(value, str) or not value.isprintable():
            raise _invalid(f"{key} must be a printable string")
        if len(value.encode("utf-8")) > max_bytes:
            raise _invalid(f"{key} has more than {max_bytes} bytes")
        return value

    def _boolean(self, key: str) -> bool | None:
        value = self._entries.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise _invalid(f"{key} must be true or false")

    def _dtype(self) -> str | None:
        value = self._entries.get("dtype")
        if value is None or (isinstance(value, str) and value in CONFIG_DTYPES):
            return value
        raise _invalid(f"dtype must be one of {', '.join(CONFIG_DTYPES)}")

    def _layer_types(self, num_layers: int) -> tuple[str, ...] | None:
        value = self._entries.get("layer_types")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != num_layers:
            raise _invalid(f"layer_types must be an array of {num_layers} names")
        if not all(
            isinstance(n, str) and n.isprintable() and len(n) <= _MAX_LABEL_CHARS for n in value
        ):
            raise _invalid(f"layer_types must hold names of at most {_MAX_LABEL_CHARS} characters")
        return tuple(value)

    def _checkpoint_config(self) -> dict[str, object] | None:
        value = self._entries.get("checkpoint_config")
        if value is None:
            return None
        if not isinstance(value, dict):
            raise _invalid("checkpoint_config must be an object")
        for level in _levels([value]):
            if not all(map(_is_sound, level)):
                raise _invalid("checkpoint_config holds an infinite number or half a character")
        return value


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
