"""Places of the images in a session, and what its layers make of them.

To most models an image is embeddings among others. What a few do besides is in one table here, by the type of their
text model; `check_images` proves it for each config, on a miniature.

Source: protocol_spec/sessions.md, "Images".

Shape legend: T tokens.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import Cache, PreTrainedConfig

from neurogrid.p2p.wire import ImageSpan

__all__ = ["ImagePlaces", "ImageWay", "image_way"]


class ImageWay(enum.Enum):
    """Way in which layers treat tokens that are an image."""

    AS_TEXT = enum.auto()
    """Layers treat the tokens as text: they need not know."""
    BOTH_WAYS = enum.auto()
    """A token sees all of its image, also what is behind it."""
    PLANE = enum.auto()
    """The tokens lie in a plane, and have positions of three parts."""


_WAYS: Final[Mapping[str, ImageWay]] = {
    "gemma3_text": ImageWay.BOTH_WAYS,
    "qwen2_5_vl_text": ImageWay.PLANE,
    "qwen2_vl_text": ImageWay.PLANE,
}


def image_way(config: PreTrainedConfig) -> ImageWay:
    """Return the way in which the layers of a text model treat images."""
    return _WAYS.get(config.model_type, ImageWay.AS_TEXT)


@dataclass(frozen=True)
class ImagePlaces:
    """Places of the images in one session.

    Attributes:
        spans: in order, none in another.
        way: what the layers make of them.
    """

    spans: tuple[ImageSpan, ...]
    way: ImageWay

    def cuts(self, start: int, stop: int) -> bool:
        """Whether tokens [start, stop) have a part of an image that only makes sense whole."""
        if self.way is not ImageWay.BOTH_WAYS:
            return False
        return any(span.start < edge < span.stop for span in self.spans for edge in (start, stop))

    def is_whole(self, start: int, stop: int) -> bool:
        """Whether tokens [start, stop) have an image that only makes sense whole."""
        return self.way is ImageWay.BOTH_WAYS and self._has_any(start, stop)

    def _has_any(self, start: int, stop: int) -> bool:
        return any(span.start < stop and start < span.stop for span in self.spans)

    def shift(self, position: int) -> int:
        """Return the shift that is added to the position of a token of text for the rotary embedding."""
        if self.way is not ImageWay.PLANE:
            return 0
        return sum(
            max(span.rows, span.columns) - span.num_tokens
            for span in self.spans
            if span.stop <= position
        )

    def positions(self, start: int, stop: int) -> torch.Tensor:
        """The three parts of the positions of tokens [start, stop): int64 [3, 1, T]."""
        parts: list[torch.Tensor] = []
        at = start
        for span in (*self.spans, None):
            text_stop = min(stop, span.start) if span is not None else stop
            if at < text_stop:
                first = at + self.shift(at)
                parts.append(torch.arange(first, first + text_stop - at).expand(3, -1))
                at = text_stop
            if span is None or at >= stop or at >= span.stop:
                continue
            number = torch.arange(at - span.start, min(stop, span.stop) - span.start)
            across = torch.stack([number * 0, number // span.columns, number % span.columns])
            parts.append(across + span.start + self.shift(span.start))
            at = min(stop, span.stop)
        return torch.cat(parts, dim=1)[:, None]

    def arguments(
        self,
        config: PreTrainedConfig,
        hidden_BTD: torch.Tensor,
        position: int,
        cache: Cache,
    ) -> dict[str, Any]:
        """Return arguments of the base model of text from `position` on, besides or in place of those that it is given.

        Args:
            hidden_BTD: of the shape, dtype and device of what it is given.
            cache: of the tokens before them.

        Raises:
            ValueError: they have a part of an image that only makes sense whole.
        """
        stop = position + hidden_BTD.shape[1]
        if self.cuts(position, stop):
            raise ValueError(f"tokens {position} to {stop - 1} have a part of an image")
        device = hidden_BTD.device
        if self.way is ImageWay.PLANE:
            return {"position_ids": self.positions(position, stop).to(device)}
        if not self.is_whole(position, stop):
            return {}
        # Importing a family's code takes a while, and few need it.
        from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model

        return {
            "attention_mask": create_masks_for_vision_model(
                config=config,
                inputs_embeds=hidden_BTD,
                attention_mask=None,
                past_key_values=cache,
                position_ids=torch.arange(position, stop, device=device)[None],
                # By the positions of keys and queries, not by their places.
                block_sequence_ids=_blocks(self.spans, stop).to(device)[None],
            )
        }


def _blocks(spans: Sequence[ImageSpan], stop: int) -> torch.Tensor:
    """The number of the image of each token before `stop`, -1 for text: int64 [T]."""
    blocks_T = torch.full((stop,), -1)
    for number, span in enumerate(spans):
        blocks_T[span.start : span.stop] = number
    return blocks_T
