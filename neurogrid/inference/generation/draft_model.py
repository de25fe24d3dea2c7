"""A draft model: a small one of the same tokens, whole and on this machine, that writes ahead for a large one.

It has a cache of its own for each generation, which goes back to where the two part. What it writes is proposed, and
changes no token. Everything here blocks: it runs in a thread of its own.

T = tokens, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch

from neurogrid.errors import ConfigurationError, ModelError
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.inference.generation.prefixes import shared_length
from neurogrid.inference.speculation.draft_pace import DraftPace
from neurogrid.model.files.blob import parse_blob
from neurogrid.model.stages.device import avoid_planned_attention, select_device
from neurogrid.model.stages.stage import Stage
from neurogrid.node.torch_thread import TorchThread

__all__ = ["Draft", "DraftModel"]

logger = logging.getLogger(__name__)

# Generations that have a draft at once: each has a cache here, of the longest session at most.
_MAX_DRAFTS: Final = 8
# Tokens of a prompt that go through at once.
_PIECE: Final = 512


class DraftModel:
    """A model that writes ahead for another. Made by `load`; in use while its thread runs.

    Args:
        model: its config and ends.
        stage: all of its layers.
        num_tokens: ids that it may write. Of the same tokenizer, models may have another number of rows behind them.
    """

    def __init__(
        self, model: LoadedModel, stage: Stage, thread: TorchThread, num_tokens: int
    ) -> None:
        self.model = model
        self.num_tokens = num_tokens
        self.stage = stage
        self.thread = thread
        self._num_drafts = 0

    @classmethod
    def load(cls, path: Path, target: LoadedModel, thread: TorchThread) -> DraftModel:
        """Read a model that is to write ahead for `target`. Blocks: run it in a thread.

        Raises:
            ConfigurationError: it is no directory, or its tokens are others, or it cannot take tokens back.
            ModelError: a file is missing or broken.
        """
        model = LoadedModel.load(path, name=None, max_seq_len=target.max_seq_len, dtype=None)
        if not model.tokenizer.has_tokens_of(target.tokenizer):
            raise ConfigurationError(
                f"--draft {path}: its tokens are not those of {target.name}: a draft model needs the same tokenizer"
            )
        why_not = model.why_no_speculation
        if why_not is None and model.ends.shortest_cut(model.max_seq_len):
            why_not = (
                "it has layers with a window that drops tokens, which cannot be taken back; with a "
                "--max-seq-len below that it can be used"
            )
        if why_not is not None:
            raise ConfigurationError(f"--draft {path}: {why_not}")
        device = select_device(None)
        avoid_planned_attention(device)
        stage = Stage(
            model.config, dtype=model.dtype, device=device, quantization=model.quantization
        )
        for layer_id in range(model.ends.num_layers):
            blob = bytearray().join(model.layer_blob(layer_id).chunks())
            stage.load_layer(layer_id, parse_blob(memoryview(blob)))
            stage.speed_up_layer(layer_id, fuse=model.traits.fuses)
        return cls(model, stage, thread, min(model.ends.vocab_size, target.ends.vocab_size))

    def draft(self, pace: DraftPace) -> Draft | None:
        """A draft for one more generation; None where there are as many as may be."""
        if self._num_drafts >= _MAX_DRAFTS:
            return None
        self._num_drafts += 1
        return Draft(self, pace)

    def closed(self) -> None:
        """A draft is over."""
        self._num_drafts -= 1


class Draft:
    """Draft of one generation, written by a draft model. Close it at the end. Made by `DraftModel.draft`."""

    def __init__(self, draft_model: DraftModel, pace: DraftPace) -> None:
        self._draft_model = draft_model
        self._pace = pace
        self._cache = draft_model.stage.new_cache(max_length=draft_model.model.max_seq_len)
        self._fed: list[int] = []
        self._is_open = True

    def close(self) -> None:
        """Draft no more, and let go of the cache."""
        if self._is_open:
            self._is_open = False
            self._cache = self._draft_model.stage.new_cache()
            self._fed.clear()
            self._draft_model.closed()
            self._pace.close()

    @property
    def worth(self) -> float:
        """See `DraftPace.worth`."""
        return self._pace.worth if self._is_open else 1.0

    def came(self, token_id: int) -> None:
        """A token was chosen, proposed or not."""
        self._pace.came(token_id)

    async def propose(self, tokens: Sequence[int], most: int, *, least_gain: float) -> list[int]:
        """The tokens to propose behind `tokens`, at most `most`; none where they would not pay."""
        room = self._draft_model.model.max_seq_len - len(tokens)
        if not self._is_open or not self._pace.begins(min(most, room), least_gain=least_gain):
            return []
        return await self._draft_model.thread.run(partial(self._write, tuple(tokens)))

    def _write(self, tokens: Sequence[int]) -> list[int]:
        ends, started = self._draft_model.model.ends, time.perf_counter()
        if max(tokens) >= ends.vocab_size:
            self.close()  # padding of the target's vocabulary, which this one lacks
            return []
        num_shared = min(shared_length(self._fed, tokens), len(tokens) - 1)
        try:
            if num_shared < len(self._fed):
                self._cache.go_back(num_shared)
                del self._fed[num_shared:]
            while len(tokens) - len(self._fed) > _PIECE:
                self._feed(tokens[len(self._fed) : len(self._fed) + _PIECE])
            logits_V = self._feed(tokens[len(self._fed) :])
            # What had to be made up for counts for none of the tokens that are drafted.
            caught_up = time.perf_counter() - started if len(tokens) - num_shared > 2 else 0.0
            while True:
                probabilities_V = logits_V.softmax(-1)
                token_id = int(probabilities_V.argmax())
                if not self._pace.goes_on(token_id, float(probabilities_V[token_id])):
                    break
                logits_V = self._feed([token_id])
        except (ModelError, ValueError, RuntimeError) as exc:
            logger.warning(
                "the draft model failed, and this generation goes on without it: %s", exc
            )
            self.close()
            return []
        seconds = time.perf_counter() - started - caught_up
        return self._pace.drafted(seconds, caught_up=caught_up)

    def _feed(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits [V] after these tokens, of those that may be written."""
        ends, stage, position = (
            self._draft_model.model.ends,
            self._draft_model.stage,
            len(self._fed),
        )
        hidden_BTD = ends.embed(token_ids, position=position)
        hidden_BTD = stage.forward(
            hidden_BTD, start=0, stop=stage.num_layers, position=position, cache=self._cache
        )
        self._fed += token_ids
        last = len(token_ids) - 1
        logits_V = ends.logits(hidden_BTD[:, last:].cpu().contiguous(), position=position + last)
        return logits_V[: self._draft_model.num_tokens]
