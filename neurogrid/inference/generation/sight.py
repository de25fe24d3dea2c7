"""Sight of a coordinator: the embeddings of a prompt's images, made once for an image that comes again.

The tower is here, as the ends are, and the layers are on the workers, which get hidden states as of any prompt. One
prompt's images go through it at a time, in a thread of their own: they hold up tokens of others by the cores alone that
they share.

T = tokens, D = hidden size.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import trio

from neurogrid.model.images.places import ImagePlaces, ImageWay
from neurogrid.model.images.reader import ImageInputs, ImageReader
from neurogrid.model.stages.image_tower import ImageTower
from neurogrid.p2p.wire import encode_image_spans

__all__ = ["SeenImages", "Sight"]

logger = logging.getLogger(__name__)

# Embeddings of images that came of late: a conversation brings all of its images again with each turn. Bytes.
MAX_KEPT_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class SeenImages:
    """The images of a prompt, as what stands in the place of their tokens.

    Attributes:
        digests: of each, as `ImageInputs` has them.
        embeddings: of each image, [T, D].
    """

    places: ImagePlaces
    digests: tuple[bytes, ...]
    embeddings: tuple[torch.Tensor, ...] = field(repr=False)

    def identities(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens of a sequence, each of an image as a number below 0 that those of no other image have.

        Sequences that begin with the same of these have the same in their caches.
        """
        found = list(token_ids)
        for span, digest in zip(self.places.spans, self.digests, strict=True):
            number = -1 - int.from_bytes(digest[:16], "big")
            found[span.start : span.stop] = [number] * span.num_tokens
        return found[: len(token_ids)]

    @property
    def told(self) -> bytes:
        """Spans of the images, encoded as in a SessionOpen; empty where layers need not know of them."""
        if self.places.way is ImageWay.AS_TEXT:
            return b""
        return encode_image_spans(self.places.spans)

    def between(self, start: int, stop: int) -> list[tuple[int, torch.Tensor]]:
        """Pieces of embeddings, [T, D], among tokens [start, stop), each with where it begins among these."""
        found = []
        for span, each in zip(self.places.spans, self.embeddings, strict=True):
            first, last = max(span.start, start), min(span.stop, stop)
            if first < last:
                found.append((first - start, each[first - span.start : last - span.start]))
        return found

    def whole(self, start: int, lengths: Sequence[int]) -> list[int]:
        """Lengths of pieces of tokens from `start` on, with none that ends in an image that has to be whole."""
        edges, at = [start], start
        for length in lengths:
            at += length
            edges.append(at)
        kept = [edge for edge in edges[1:-1] if not self.places.cuts(edge, edge)]
        kept = [start, *kept, edges[-1]]
        return [stop - first for first, stop in pairwise(kept)]

    def outside(self, length: int) -> int:
        """The most tokens up to `length` that end in no image."""
        for span in self.places.spans:
            if span.start < length < span.stop:
                return span.start
        return length


class Sight:
    """Processor and tower of a model that takes images.

    Attributes:
        reader: makes prompts with images ready.
    """

    def __init__(self, reader: ImageReader, tower: ImageTower, *, way: ImageWay) -> None:
        self.reader = reader
        self._tower = tower
        self._way = way
        self._turn = trio.Lock()
        # The longest unused first.
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()

    async def see(self, images: ImageInputs) -> SeenImages:
        """Return the embeddings that stand in the place of each image, computed or kept.

        Raises:
            ModelError: the tower gives none for these images.
        """
        places = ImagePlaces(images.spans, self._way)
        async with self._turn:
            if not all(digest in self._kept for digest in images.digests):
                counts = [span.num_tokens for span in images.spans]
                started = time.perf_counter()
                found = await trio.to_thread.run_sync(
                    self._tower.embeddings, images.tensors, counts
                )
                logger.debug("%d images seen in %.2f s", len(counts), time.perf_counter() - started)
                embeddings = tuple(found)
            else:
                embeddings = tuple(self._kept[digest] for digest in images.digests)
            self._keep(images.digests, embeddings)
        return SeenImages(places, images.digests, embeddings)

    def _keep(self, digests: Sequence[bytes], embeddings: Sequence[torch.Tensor]) -> None:
        for digest, each in zip(digests, embeddings, strict=True):
            known = self._kept.pop(digest, None)
            # A copy: a part of one tensor would keep all of it.
            self._kept[digest] = each.clone() if known is None else known
        while sum(each.nbytes for each in self._kept.values()) > MAX_KEPT_BYTES:
            self._kept.popitem(last=False)
