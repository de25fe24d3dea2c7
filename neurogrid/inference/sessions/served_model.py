"""What a worker holds: one model's config, its stage, and which bytes each layer came from.

All methods call torch and block: the worker runs them in its torch thread, one at a time. Nothing here
knows peers or the network.

B = batch rows (1), T = tokens, D = hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
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
from neurogrid.model.caches.cache import StageCache
from neurogrid.model.confined import ConfinementError
from neurogrid.model.files.blob import parse_blob
from neurogrid.model.files.config import build_config, config_fingerprint
from neurogrid.model.proof.proof import Proof, Proving
from neurogrid.model.stages.loading import MODEL_CODE_ERRORS
from neurogrid.model.stages.stage import Row, Stage
from neurogrid.p2p.wire import ErrorCode, ModelConfig

__all__ = ["ServedModel", "checkpoint_config_of", "proving", "refusing_config"]

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
    return Proving(checkpoint_config_of(config), config.dtype or DEFAULT_DTYPE)


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


class ServedModel:
    """One model on one device: the layers that are held, each with its content id.

    Attributes:
        name: what its coordinator calls it.
        fingerprint: SHA-256 of the canonical checkpoint config.
        dtype: what the stage computes in.
        costs: bytes of each layer, whether held or not.
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
        self.costs = proof.costs
        self.held: dict[int, HeldLayer] = {}
        self.fingerprint = config_fingerprint(raw)
        self._traits = proof.traits
        try:
            self._stage = Stage(build_config(raw), dtype=self.dtype, device=device)
        except (torch.OutOfMemoryError, MemoryError) as exc:
            raise RequestRefusedError(
                "out of memory while building the model", code=ErrorCode.OUT_OF_MEMORY
            ) from exc
        if self._traits.row_bounds is None:
            logger.warning(
                "sessions of this model run one after another, not together: %s",
                self._traits.rows_refused,
            )

    @property
    def takes_chunks(self) -> bool:
        """Whether a prefill may be run in chunks, and a session be continued by several tokens."""
        return self._traits.takes_chunks

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return self._stage.num_layers

    @property
    def hidden_size(self) -> int:
        """D."""
        return self._stage.hidden_size

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
            self._stage.load_layer(layer_id, parse_blob(blob))
            self._stage.speed_up_layer(layer_id)
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
        self._stage.drop_layer(layer_id)
        del self.held[layer_id]

    def new_cache(self, *, max_length: int | None = None) -> StageCache:
        """An empty cache for one session, which may come to hold so many tokens."""
        return self._stage.new_cache(max_length=max_length)

    def cache_bytes(self, start: int, stop: int, num_tokens: int) -> int:
        """Bytes of one session's cache over layers [start, stop) at `num_tokens` tokens."""
        return sum(cost.cache_bytes(num_tokens) for cost in self.costs[start:stop])

    def require_room(
        self, start: int, stop: int, *, num_tokens: int, num_sessions: int, limit_bytes: int
    ) -> None:
        """Check that the layers and their sessions' caches fit in `limit_bytes`.

        Raises:
            CapacityError: they do not; says what is needed and there.
        """
        needed = sum(cost.weight_bytes for cost in self.costs[start:stop])
        needed += num_sessions * self.cache_bytes(start, stop, num_tokens)
        if needed > limit_bytes:
            raise CapacityError(
                f"layers {start} to {stop - 1} take {needed:,} B with {num_sessions} session"
                f"{'s' if num_sessions != 1 else ''} of {num_tokens} tokens, and this worker "
                f"has {limit_bytes:,} B",
                needed=needed,
                available=limit_bytes,
            )

    def forward(
        self,
        hidden_BTD: torch.Tensor,
        *,
        start: int,
        stop: int,
        position: int,
        cache: StageCache,
    ) -> torch.Tensor:
        """Run layers [start, stop).

        Args:
            hidden_BTD: [1, T, D] in any float dtype; computed in `dtype` on the device.
            position: absolute position of the first token; must be the cache's length.

        Returns:
            [1, T, D] in `dtype`, on the CPU.

        Raises:
            RequestRefusedError: the computation failed (COMPUTE_FAILED or OUT_OF_MEMORY).
        """
        hidden_BTD = hidden_BTD.to(device=self.device, dtype=self.dtype)
        try:
            with torch.inference_mode():
                result = self._stage.forward(
                    hidden_BTD, start=start, stop=stop, position=position, cache=cache
                )
                return result.cpu()
        except (torch.OutOfMemoryError, MemoryError) as exc:
            raise RequestRefusedError(
                f"out of memory in layers {start} to {stop - 1}", code=ErrorCode.OUT_OF_MEMORY
            ) from exc
        except (ModelError, RuntimeError, ValueError) as exc:
            raise RequestRefusedError(
                f"layers {start} to {stop - 1} failed: {_first_line(exc)}",
                code=ErrorCode.COMPUTE_FAILED,
            ) from exc

    def prepare(self, *, start: int, stop: int, position: int, cache: StageCache) -> None:
        """Do beforehand what `forward` of one token at `position` needs besides its hidden state, if one comes."""
        try:
            self._stage.prepare(start=start, stop=stop, position=position, cache=cache)
        except (ModelError, MemoryError, *MODEL_CODE_ERRORS) as exc:
            # What came before is answered already; the forward meets it again, and raises it.
            logger.debug("could not prepare layers %d to %d: %s", start, stop - 1, exc)

    def forward_rows(
        self, rows: Sequence[Row], *, start: int, stop: int
    ) -> list[torch.Tensor | Exception | None]:
        """Run layers [start, stop) on one token of each of several sessions, together where that goes.

        If the rows of a forward fail together, they are run one after another, so that the one that is at fault
        is the only one that fails.

        Returns:
            For each row [1, 1, D] in `dtype`, on the CPU, or the RequestRefusedError that `forward` raises.
        """
        results: list[torch.Tensor | Exception | None] = [None] * len(rows)
        groups = [[i] for i in range(len(rows))]
        bounds = self._traits.row_bounds
        if bounds is not None and len(rows) > 1:
            groups = self._stage.group_rows(rows, start=start, stop=stop, bounds=bounds)
        for group in groups:
            if len(group) > 1:
                try:
                    together = self._stage.forward_rows(
                        [rows[i] for i in group], start=start, stop=stop
                    )
                    # One copy from the device for all of them.
                    result_R1D = torch.cat(together).cpu()
                    for row, i in enumerate(group):
                        results[i] = result_R1D[row : row + 1]
                    continue
                except (ModelError, RuntimeError, ValueError, MemoryError) as exc:
                    logger.warning(
                        "%d sessions failed together, trying each alone: %s",
                        len(group),
                        _first_line(exc),
                    )
            for i in group:
                hidden_BTD, position, cache = rows[i].hidden, rows[i].position, rows[i].cache
                try:
                    results[i] = self.forward(
                        hidden_BTD, start=start, stop=stop, position=position, cache=cache
                    )
                except RequestRefusedError as exc:
                    results[i] = exc
        return results


def _first_line(exc: BaseException) -> str:
    """What an error of others says, short enough to be sent."""
    text = str(exc).strip()
    return text.splitlines()[0][:200] if text else type(exc).__name__
