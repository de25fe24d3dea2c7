"""A model in stages on one machine, as workers would hold it, from a checkpoint that was saved.

For the check on a miniature (miniature.py), which compares it with the whole model. It judges
nothing itself.

Shape legend: T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedConfig

from neurogrid.model.caches.cache import StageCache
from neurogrid.model.files.tensor_names import is_end_tensor, layer_of
from neurogrid.model.images.places import ImagePlaces
from neurogrid.model.stages.stage import Ends, Row, Stage

__all__ = ["Session", "Split", "saved_tensors"]


def saved_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The model's tensors under the names and in the layout of a checkpoint."""
    with tempfile.TemporaryDirectory(prefix="neurogrid-") as folder:
        model.save_pretrained(folder)
        tensors: dict[str, torch.Tensor] = {}
        for path in sorted(Path(folder).glob("*.safetensors")):
            tensors |= load_file(path)
        return {name: tensor.clone() for name, tensor in tensors.items()}


class Split:
    """The miniature in stages, cut at `cuts`, and its ends; its layers fused where they can be, or as they are.

    Args:
        ends: those of another split of these tensors, as the coordinator has one for all ways to cut a model.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        tensors: Mapping[str, torch.Tensor],
        cuts: Sequence[int],
        *,
        is_fused: bool = False,
        ends: Ends | None = None,
    ) -> None:
        if ends is None:
            ends = Ends(config, dtype=torch.float32, device="cpu")
            ends.load({n: t for n, t in tensors.items() if is_end_tensor(n)})
        self.ends = ends
        num_layers = ends.num_layers
        self.ranges = list(zip((0, *cuts), (*cuts, num_layers), strict=True))
        self.stages: list[Stage] = []
        for start, stop in self.ranges:
            stage = Stage(config, dtype=torch.float32, device="cpu")
            for layer_id in range(start, stop):
                stage.load_layer(
                    layer_id,
                    {n: t for n, t in tensors.items() if layer_of(n, num_layers) == layer_id},
                )
                if is_fused:
                    stage.speed_up_layer(layer_id, fuse=True)
            self.stages.append(stage)

    def new_session(
        self,
        images: ImagePlaces | None = None,
        embeddings: Sequence[tuple[int, torch.Tensor]] = (),
    ) -> Session:
        """A sequence of no tokens, which will have images where these are, and as that."""
        return Session(self, images, embeddings)

    def step_rows(
        self, sessions: Sequence[Session], token_ids: Sequence[int]
    ) -> list[torch.Tensor]:
        """Logits [V] of each session after its next token, all of them in one forward a stage."""
        positions = [session.position for session in sessions]
        hidden = list(self.ends.embed_rows(token_ids, positions=positions).chunk(len(sessions)))
        for i, (stage, (start, stop)) in enumerate(zip(self.stages, self.ranges, strict=True)):
            rows = [
                Row(hidden_BTD, session.position, session.caches[i])
                for session, hidden_BTD in zip(sessions, hidden, strict=True)
            ]
            hidden = stage.forward_rows(rows, start=start, stop=stop)
        logits_RV = self.ends.logits_rows(torch.cat(hidden), positions=positions)
        for session in sessions:
            session.position += 1
        return list(logits_RV)


class Session:
    """One sequence going through a `Split`."""

    def __init__(
        self,
        split: Split,
        images: ImagePlaces | None,
        embeddings: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        self._split = split
        self._images = images
        self._embeddings = embeddings
        self.caches: list[StageCache] = []
        self.restart()

    def restart(self) -> None:
        self.caches = [stage.new_cache() for stage in self._split.stages]
        for cache in self.caches:
            cache.images = self._images
        self.position = 0

    def step(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits [V] after `token_ids`, from all that left the last layer."""
        position = self.position
        return self._split.ends.logits(self._run(token_ids), position=position)

    def step_of_last(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits [V] after `token_ids`, from the last token's hidden state alone."""
        hidden_B1D = self._run(token_ids)[:, -1:]
        return self._split.ends.logits(hidden_B1D, position=self.position - 1)

    def step_each(self, token_ids: Sequence[int]) -> list[torch.Tensor]:
        """Logits [V] after each of `token_ids`, from its hidden state alone."""
        start, ends = self.position, self._split.ends
        hidden_BTD = self._run(token_ids)
        return [
            ends.logits(hidden_BTD[:, i : i + 1], position=start + i) for i in range(len(token_ids))
        ]

    def go_back(self, num_tokens: int) -> None:
        """Forget what of the last step is behind the first `num_tokens` tokens of all."""
        if num_tokens < self.position:
            for cache in self.caches:
                cache.go_back(num_tokens)
            self.position = num_tokens

    def _run(self, token_ids: Sequence[int]) -> torch.Tensor:
        split, position = self._split, self.position
        stop = position + len(token_ids)
        here = [
            (start - position, each) for start, each in self._embeddings if position <= start < stop
        ]
        if here:
            hidden_BTD = split.ends.embed_images(token_ids, position=position, embeddings=here)
        else:
            hidden_BTD = split.ends.embed(token_ids, position=position)
        for stage, cache, (start, stop) in zip(
            split.stages, self.caches, split.ranges, strict=True
        ):
            hidden_BTD = stage.forward(
                hidden_BTD, start=start, stop=stop, position=position, cache=cache
            )
        self.position += len(token_ids)
        return hidden_BTD
