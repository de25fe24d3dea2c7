"""The model as its coordinator has it: config, costs, tokenizer, and the two ends in memory.

Nothing here knows workers. What can be wrong with a model or a prompt is found here, so that it is told
before anybody waits for workers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from neurogrid.errors import ConfigurationError, ModelError, UnsupportedModelError
from neurogrid.inference.generation.sight import Sight
from neurogrid.inference.pipeline.prefill import MAX_CHUNK, max_piece
from neurogrid.model.confined import ConfinementError
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.config import build_config, eos_token_ids
from neurogrid.model.files.pooling import Pooling, read_pooling
from neurogrid.model.files.tokenizer import Tokenizer
from neurogrid.model.grammars import GrammarCompiler
from neurogrid.model.images.reader import ImageReader
from neurogrid.model.proof.miniature import SplitTraits
from neurogrid.model.proof.miniature_caches import check_coded_caches
from neurogrid.model.proof.miniature_experts import check_experts
from neurogrid.model.proof.proof import OWN_SECONDS, Proof, Proving
from neurogrid.model.source import ModelSource
from neurogrid.model.stages.cost import LayerCost, layer_cost, workspace_bytes
from neurogrid.model.stages.image_tower import ImageTower
from neurogrid.model.stages.stage import Ends
from neurogrid.model.unused_memory import give_back_memory
from neurogrid.p2p.wire.limits import DEFAULT_LIMITS, MAX_MAP_BYTES
from neurogrid.planner import LayerSize, ModelSize

__all__ = ["LoadedModel"]

logger = logging.getLogger(__name__)

# The first one is slow, for pages and kernels; of the others the fastest counts.
NUM_MEASUREMENTS = 4
# Workspace that is not worth counting: a process has it beside what it lends. Bytes.
UNCOUNTED_BYTES = 64 * 1024 * 1024
# Activations of one message beside their envelope. Bytes.
MAX_WHOLE_BYTES = DEFAULT_LIMITS.tensor - MAX_MAP_BYTES
# What a step costs besides computing and the way: at each stage, to read and write a message and to change threads;
# and here, for each token. Measured with stages of next to no work, on two cores of an EPYC. Seconds.
STAGE_SECONDS = 0.6e-3
TOKEN_SECONDS = 0.6e-3


@dataclass(frozen=True)
class LoadedModel(ModelSource):
    """Everything of a model but its layers. Made by `load`.

    Attributes:
        max_seq_len: tokens of a session; what was asked for, or the model's own bound if less, or what one message
            holds where a prompt cannot be cut.
        ends: embedding and head, loaded.
        costs: bytes of each layer, with caches as `has_coded_caches` says.
        traits: what the proof found out that generation must know.
        eos_token_ids: tokens that end a generation.
        sight: what takes images; None where the model takes none here.
        why_no_sight: why not, in that case.
    """

    ends: Ends
    costs: tuple[LayerCost, ...]
    traits: SplitTraits
    eos_token_ids: frozenset[int]
    sight: Sight | None = None
    why_no_sight: str = "the model is one of text"

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        name: str | None,
        max_seq_len: int,
        dtype: str | None,
        quantize: str | None = None,
        has_coded_caches: bool = False,
    ) -> LoadedModel:
        """Read config and ends, and prove that the model may be split. Blocks: run it in a thread.

        Args:
            path: a checkpoint directory, or a file in GGUF.
            name: None for that of the directory or file.
            max_seq_len: tokens of the longest session wanted.
            dtype: to compute in; None for the checkpoint's own.
            quantize: the method that layers travel and are held by, a key of `METHODS`; None for as they are.
            has_coded_caches: keep keys and values as codes.

        Raises:
            ConfigurationError: there is no such directory.
            ModelError: a file is missing or broken, or the architecture cannot be split, or not have coded caches.
        """
        checkpoint = Checkpoint.open(path)
        try:
            proof = Proving(checkpoint.config, dtype, image_config=checkpoint.image_config).result(
                seconds=OWN_SECONDS
            )
        except ConfinementError as exc:
            raise UnsupportedModelError(f"{path}: {exc}") from exc
        traits, compute_dtype = proof.traits, proof.dtype
        config = build_config(checkpoint.config)
        ends = Ends(config, dtype=compute_dtype, device=torch.device("cpu"))
        ends.load(checkpoint.end_tensors(compute_dtype))
        ends.speed_up()
        quantization = checkpoint.quantization(quantize, ends)
        costs = proof.costs
        if quantization is not None:
            check_experts(config, quantization)
            costs = layer_cost(config, compute_dtype, quantization)
        sight, why_no_sight = _open_sight(checkpoint, proof, ends)
        if has_coded_caches:
            check_coded_caches(config, rows=traits.row_bounds is not None, fuses=traits.fuses)
            costs = tuple(cost.coded for cost in costs)
        give_back_memory()
        bound = getattr(config, "max_position_embeddings", None) or max_seq_len
        max_seq_len = min(max_seq_len, bound)
        whole = MAX_WHOLE_BYTES // (ends.hidden_size * compute_dtype.itemsize)
        if not traits.takes_chunks and whole < max_seq_len:
            logger.warning(
                "sessions have at most %d tokens, not %d: this model's prompts cannot be cut, and go in one message",
                whole,
                max_seq_len,
            )
            max_seq_len = whole
        return cls(
            name=name or checkpoint.name,
            checkpoint=checkpoint,
            config=config,
            ends=ends,
            dtype=compute_dtype,
            costs=costs,
            quantization=quantization,
            has_coded_caches=has_coded_caches,
            traits=traits,
            max_seq_len=max_seq_len,
            eos_token_ids=eos_token_ids(checkpoint.config, checkpoint.generation_config),
            sight=sight,
            why_no_sight=why_no_sight,
        )

    def with_quantization(self, method: str | None) -> LoadedModel:
        """The same with its layers in another form. Blocks for a while.

        Args:
            method: a key of `METHODS`; None for as they are.

        Raises:
            ConfigurationError: they are codes already.
            ModelError: they cannot have that form.
        """
        quantization = self.checkpoint.quantization(method, self.ends)
        if quantization is not None:
            check_experts(self.config, quantization)
        costs = layer_cost(self.config, self.dtype, quantization)
        if self.has_coded_caches:
            costs = tuple(cost.coded for cost in costs)
        return replace(self, quantization=quantization, costs=costs)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, read when first asked for.

        Raises:
            CheckpointError: the model directory has none.
        """
        return self.checkpoint.open_tokenizer()

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiler of grammars for this model's tokens.

        Raises:
            CheckpointError: the model directory has no tokenizer.
        """
        return GrammarCompiler(
            self.tokenizer, vocab_size=self.ends.vocab_size, end_token_ids=self.eos_token_ids
        )

    @cached_property
    def pooling(self) -> Pooling:
        """Pooling of the model's hidden states to an embedding.

        Raises:
            UnsupportedModelError: they cannot be pooled here; says why.
        """
        return read_pooling(self.checkpoint.path, self.checkpoint.config)

    @property
    def max_piece(self) -> int | None:
        """The most tokens that go to a stage in one message; None where those of a prompt cannot be sent apart."""
        if not self.traits.takes_chunks:
            return None
        return max_piece(self.ends.hidden_size * self.dtype.itemsize)

    @property
    def adapter_dtype(self) -> torch.dtype | None:
        """Dtype of adapters that were saved in a wider one; None to leave them in that.

        Rounded to bfloat16 an adapter is off by less than weights are that have bfloat16's bits or fewer.
        """
        is_narrow = self.quantization is not None or self.dtype is torch.bfloat16
        return torch.bfloat16 if is_narrow else None

    @property
    def replays(self) -> bool:
        """Whether sums depend on the shapes of the calls so much that lost caches need the same calls again, on workers
        that do not say otherwise (`Selection.has_same_bits`)."""
        return self.is_rounded

    @property
    def is_rounded(self) -> bool:
        """Whether what a token leaves is rounded so much that another order of summation can change its neighbours."""
        return self.dtype is not torch.float32 or self.has_coded_caches

    @property
    def why_no_speculation(self) -> str | None:
        """Reason that no tokens can be proposed to the model's sessions; None where they can."""
        if not self.traits.takes_chunks:
            return "this model takes no several tokens at once once a session has begun"
        if not self.ends.can_go_back:
            return "this model keeps states of one size (recurrent, or of a convolution), which cannot be taken back"
        if not self.traits.rolls_back:
            return "on a miniature of this model, tokens that were taken back left traces"
        return None

    def size(
        self,
        *,
        num_sessions: int,
        ends_seconds: float = 0.0,
        beside_bytes: Sequence[int] | None = None,
    ) -> ModelSize:
        """Return what the planner has to know, with the caches of so many sessions.

        Args:
            beside_bytes: memory that each layer is to have besides, as for adapters; None for none.
        """
        return ModelSize(
            tuple(
                LayerSize(
                    cost.weight_bytes,
                    num_sessions * cost.cache_bytes(self.max_seq_len) + beside,
                    cost.step_bytes,
                )
                for cost, beside in zip(
                    self.costs, beside_bytes or [0] * len(self.costs), strict=True
                )
            ),
            workspace_bytes=max(self._workspace_bytes() - UNCOUNTED_BYTES, 0),
            activation_bytes=self.ends.hidden_size * self.dtype.itemsize,
            ends_seconds=ends_seconds + TOKEN_SECONDS if ends_seconds else 0.0,
            stage_seconds=STAGE_SECONDS,
            is_quantised=self.checkpoint.is_quantised,
        )

    @cached_property
    def _decoded_bytes(self) -> int:
        """Bytes of all keys and values of a session in one layer, the largest, decoded where it knows of no codes."""
        plain = layer_cost(self.config, self.dtype)
        return max(cost.cache_bytes(self.max_seq_len) for cost in plain)

    def _workspace_bytes(self) -> int:
        """Bytes that a stage needs for a moment: for the largest piece of a prompt, and the last of a long one."""
        longest, whole = self.max_seq_len, self.max_seq_len
        if self.max_piece is not None:
            whole = min(longest, self.max_piece)
        pieces = [(whole, whole), (min(longest, MAX_CHUNK), longest)]
        most = max(workspace_bytes(self.config, self.dtype, *piece) for piece in pieces)
        if not self.has_coded_caches:
            return most
        return most + self._decoded_bytes

    def ends_seconds(self) -> float:
        """Measure the seconds that embedding and head of one token take here. Blocks."""
        token_ids = [0]
        seconds = []
        for _ in range(NUM_MEASUREMENTS):
            started = time.perf_counter()
            hidden_BTD = self.ends.embed(token_ids, position=0)
            self.ends.logits(hidden_BTD, position=0)
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    def check_prompt(self, token_ids: Sequence[int], *, num_new: int = 1) -> None:
        """Refuse a prompt that cannot be served.

        Args:
            num_new: tokens that there has to be room for behind it; 0 for a prompt that is read and not continued.

        Raises:
            ConfigurationError: empty, too long for a session, or with an id that is no token of the model.
        """
        if not token_ids:
            raise ConfigurationError("the prompt is empty, and this tokenizer adds no first token")
        if len(token_ids) + num_new > self.max_seq_len:
            bound = f"sessions have at most {self.max_seq_len} (--max-seq-len, or the model's own bound)"
            if not num_new:
                raise ConfigurationError(f"the prompt has {len(token_ids)} tokens: {bound}")
            raise ConfigurationError(
                f"the prompt has {len(token_ids)} tokens and leaves no room for an answer: {bound}"
            )
        if not 0 <= min(token_ids) <= max(token_ids) < self.ends.vocab_size:
            raise ConfigurationError(
                f"the prompt has the token {max(token_ids)}, and the model has tokens 0 to "
                f"{self.ends.vocab_size - 1}: is the tokenizer that of this model?"
            )


def _open_sight(checkpoint: Checkpoint, proof: Proof, ends: Ends) -> tuple[Sight | None, str]:
    """Open the sight of a model that takes images; else None, and why it is served without."""
    config = checkpoint.image_config
    if config is None:
        return None, "the model is one of text"
    try:
        if proof.why_no_images:
            raise UnsupportedModelError(proof.why_no_images)
        tower = ImageTower(
            config, dtype=proof.dtype, device="cpu", tensors=checkpoint.image_tensors()
        )
        reader = ImageReader.open(
            checkpoint.path, model_type=str(config["model_type"]), token_id=tower.token_id
        )
    except ModelError as exc:
        logger.warning("served without images: %s", exc)
        return None, str(exc)
    logger.info("images are taken: what sees them has %.1f MB here", tower.num_bytes / 1e6)
    return Sight(reader, tower, way=ends.image_way), ""
