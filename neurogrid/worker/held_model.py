"""The model that a worker holds: its config, its stage, and which bytes each layer came from.

All methods call torch and block: the worker runs them in its torch thread, one at a time. Nothing here
knows peers, the network, or what the layers are held for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from neurogrid.errors import (
    CapacityError,
    CheckpointError,
    ConfigurationError,
    ModelError,
    RequestRefusedError,
    UnsupportedModelError,
)
from neurogrid.model.confined import ConfinementError
from neurogrid.model.files.blob import parse_blob
from neurogrid.model.files.config import build_config
from neurogrid.model.files.quantization import Quantization, model_fingerprint
from neurogrid.model.proof.proof import Proof, Proving
from neurogrid.model.stages.stage import Stage
from neurogrid.p2p.wire import ErrorCode, ModelConfig
from neurogrid.planner import name_range

__all__ = ["HeldModel", "checkpoint_config_of", "proving", "refusing_config"]

logger = logging.getLogger(__name__)

DEFAULT_DTYPE = "float16"


def checkpoint_config_of(config: ModelConfig) -> Mapping[str, object]:
    """The checkpoint's own config from the message, or what the ten fields of 1.0.0 say.

    Those ten describe a Llama: without `model_type` that is the family they mean.
    """
    if config.checkpoint_config is not None:
        return config.checkpoint_config
    return {
        "model_type": config.model_type or "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": bool(config.tie_embeddings),
        **({"layer_types": list(config.layer_types)} if config.layer_types else {}),
    }


def proving(config: ModelConfig) -> Proving:
    """The proof of a config that came, yet to be made.

    Raises:
        UnsupportedModelError: it is over a bound.
    """
    return Proving(checkpoint_config_of(config), config.dtype or DEFAULT_DTYPE, config.quantization)


@contextmanager
def refusing_config() -> Iterator[None]:
    """Make of what is found wrong with a config what its sender is told.

    Raises:
        RequestRefusedError: CONFIG_INVALID, MODEL_UNSUPPORTED or, where its trial was given up, LIMIT_EXCEEDED.
    """
    try:
        yield
    except ModelError as exc:
        raise RequestRefusedError(str(exc), code=ErrorCode.MODEL_UNSUPPORTED) from exc
    except ConfinementError as exc:
        raise RequestRefusedError(str(exc), code=ErrorCode.LIMIT_EXCEEDED) from exc
    except ConfigurationError as exc:
        raise RequestRefusedError(str(exc), code=ErrorCode.CONFIG_INVALID) from exc


@dataclass(frozen=True)
class HeldLayer:
    """A layer in memory.

    Attributes:
        blob_id: the content id of the blob that it was loaded from.
        is_own: whether that was the worker's own file, and not sent by a peer.
    """

    blob_id: bytes
    is_own: bool


class HeldModel:
    """One model on one device: the layers that are held, each with its content id.

    Attributes:
        name: what its coordinator calls it.
        fingerprint: of the checkpoint's config, and of what is quantised.
        dtype: what the stage computes in.
        quantization: what of the layers is codes; None for nothing.
        costs: bytes of each layer, whether held or not, with the caches of `use_caches`.
        traits: what the proof found out that sessions must know.
        stage: the modules of the layers.
    """

    def __init__(self, config: ModelConfig, proof: Proof, *, device: torch.device) -> None:
        """Build the skeleton of a config that is proven; allocates no weights.

        Args:
            proof: what `proving(config)` gave.

        Raises:
            RequestRefusedError: the device has no room even for what stands outside the layers (OUT_OF_MEMORY).
        """
        raw = checkpoint_config_of(config)
        self.name = config.model_name
        self.device = device
        self.dtype = proof.dtype
        self._plain_costs = self.costs = proof.costs
        self.held: dict[int, HeldLayer] = {}
        self.quantization = Quantization.from_record(config.quantization)
        self.fingerprint = model_fingerprint(raw, self.quantization)
        self.traits = proof.traits
        try:
            self.stage = Stage(
                build_config(raw), dtype=self.dtype, device=device, quantization=self.quantization
            )
        except (torch.OutOfMemoryError, MemoryError) as exc:
            raise RequestRefusedError(
                "out of memory while building the model", code=ErrorCode.OUT_OF_MEMORY
            ) from exc
        if self.traits.row_bounds is None:
            logger.warning(
                "sessions of this model run one after another, not together: %s",
                self.traits.rows_refused,
            )

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return self.stage.num_layers

    @property
    def hidden_size(self) -> int:
        """D."""
        return self.stage.hidden_size

    def use_caches(self, *, coded: bool, max_length: int | None = None) -> None:
        """Have the caches of sessions to come, of so many tokens at most, as they are, or as codes."""
        self.costs = tuple(cost.coded for cost in self._plain_costs) if coded else self._plain_costs
        self.stage.codes_caches, self.stage.max_decoded = coded, max_length

    def has_same_bits(self, start: int, stop: int) -> bool:
        """Whether a token gets the same bits in layers [start, stop), all held, whatever it is computed with."""
        return self.traits.same_bits and self.stage.has_same_bits(start, stop)

    def is_same(self, other: HeldModel) -> bool:
        """Whether a layer of the one may stand in the other: the same config, computed in the same dtype."""
        return (self.fingerprint, self.dtype) == (other.fingerprint, other.dtype)

    @property
    def held_bytes(self) -> int:
        """Bytes of the weights that are held."""
        return sum(self.costs[layer_id].weight_bytes for layer_id in self.held)

    def load(
        self, layer_id: int, blob: memoryview, blob_id: bytes, *, is_own: bool = False
    ) -> None:
        """Load a verified blob into the stage.

        Raises:
            RequestRefusedError: the blob is no safetensors file of that layer (TRANSFER_INVALID), or
                the device has no room (OUT_OF_MEMORY).
        """
        self.held.pop(layer_id, None)
        try:
            self.stage.load_layer(layer_id, parse_blob(blob))
            self.stage.speed_up_layer(layer_id, fuse=self.traits.fuses)
        except (CheckpointError, UnsupportedModelError, ValueError) as exc:
            raise RequestRefusedError(
                f"the weights of layer {layer_id} do not fit its config: {exc}",
                code=ErrorCode.TRANSFER_INVALID,
            ) from exc
        except (torch.OutOfMemoryError, MemoryError) as exc:
            raise RequestRefusedError(
                f"out of memory while loading layer {layer_id}", code=ErrorCode.OUT_OF_MEMORY
            ) from exc
        self.held[layer_id] = HeldLayer(blob_id, is_own)

    def keep_only(self, start: int, stop: int) -> None:
        """Free the layers outside [start, stop)."""
        for layer_id in [layer for layer in self.held if not start <= layer < stop]:
            self.drop(layer_id)

    def drop_received(self) -> None:
        """Free the layers that peers have sent."""
        for layer_id in [layer for layer, held in self.held.items() if not held.is_own]:
            self.drop(layer_id)

    def drop(self, layer_id: int) -> None:
        """Free one layer."""
        self.stage.drop_layer(layer_id)
        del self.held[layer_id]

    def cache_bytes(self, start: int, stop: int, num_tokens: int) -> int:
        """Bytes of one session's cache over layers [start, stop) at `num_tokens` tokens."""
        return sum(cost.cache_bytes(num_tokens) for cost in self.costs[start:stop])

    def needed_bytes(
        self, start: int, stop: int, *, num_tokens: int, num_sessions: int, coded: bool = False
    ) -> int:
        """Bytes of layers [start, stop), and of the caches of so many sessions over them, coded or as they are."""
        costs = [cost.coded if coded else cost for cost in self._plain_costs[start:stop]]
        return sum(
            cost.weight_bytes + num_sessions * cost.cache_bytes(num_tokens) for cost in costs
        )

    def require_room(
        self,
        start: int,
        stop: int,
        *,
        num_tokens: int,
        num_sessions: int,
        limit_bytes: int,
        coded: bool = False,
    ) -> None:
        """Check that the layers and their sessions' caches, coded or as they are, fit in `limit_bytes`.

        Raises:
            CapacityError: they do not; says what is needed and there.
        """
        needed = self.needed_bytes(
            start, stop, num_tokens=num_tokens, num_sessions=num_sessions, coded=coded
        )
        if needed > limit_bytes:
            raise CapacityError(
                f"{needed:,} B are needed for {name_range(range(start, stop))} with {num_sessions} "
                f"session{'s' if num_sessions != 1 else ''} of {num_tokens} tokens, and this worker "
                f"has {limit_bytes:,} B",
                needed=needed,
                available=limit_bytes,
            )
