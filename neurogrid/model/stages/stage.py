"""Some layers of a model, and its two ends: what a worker and what the coordinator run.

A `Stage` holds any of the decoder layers, takes a hidden state and gives one back. `Ends` turns
token ids into the first hidden state and the last one into logits. Both are the checkpoint's own
model with slots for layers (skeleton.py), so nothing here knows a family. Equality with the whole
model is not promised by these classes but proven by `check_splittable`, for each config.

Rows of several sessions may share a forward pass (`Stage.forward_rows`), where the check allows it.
Equal then means up to rounding; a session that runs alone gets the bits of the whole model, unless its layers were
sped up.

More than 600 lines, since the two have the same skeleton, and a pass goes from the one's into the other's.

Not thread-safe: one call at a time. No I/O, no sessions: to keep the caches is another's concern.

Shape legend: B batch (always 1), T tokens, D hidden size, V vocabulary, R rows (of 1 token each).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from neurogrid.model.adapters import Adapter, RowAdapters
from neurogrid.model.caches.cache import StageCache
from neurogrid.model.caches.prepared import PreparedPass, markers, same_calls
from neurogrid.model.caches.row_groups import group_rows
from neurogrid.model.caches.row_masks import rows_masked
from neurogrid.model.caches.rows import RowPool
from neurogrid.model.files.quantization import Quantization
from neurogrid.model.images.places import ImageWay, image_way
from neurogrid.model.stages.end_passes import EndPasses
from neurogrid.model.stages.few_rows import speed_up_few_rows
from neurogrid.model.stages.fused_layers import fuse_layer, has_same_bits, is_fused
from neurogrid.model.stages.skeleton import Skeleton

__all__ = ["MAX_ROWS", "Ends", "Row", "Stage"]

# Rows of one forward. Beyond that a step takes longer for everybody and the gain is small.
MAX_ROWS = 64
# A session that has not decoded with others for so many rounds takes its states along. In a round each pool has a
# forward, and a prefill between them has one; with micro-batches a session has a token in every second or third.
IDLE_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Row:
    """The next token of one session, to be run together with those of others.

    Attributes:
        hidden: [1, 1, D], any floating dtype.
        position: of the token: what the session has cached, at least 1.
        cache: the session's.
        adapter: the session's, which `Stage.take_adapter` was told; None for none.
    """

    hidden: torch.Tensor
    position: int
    cache: StageCache
    adapter: Adapter | None = None


class Stage:
    """Decoder layers of a model, loaded one by one.

    Args:
        config: the model's config, from `build_config`.
        dtype: what weights are cast to and hidden states are computed in.
        device: where the layers live.
        quantization: what of the layers comes as codes; None for nothing.

    Attributes:
        num_layers: decoder layers of the whole model.
        hidden_size: the D of hidden states.
        codes_caches: whether new caches keep keys and values as codes.
        max_decoded: the tokens of coded caches that a layer which knows of no codes may have in its dtype at once, for
            the rows of one forward; None for any number.

    Raises:
        UnsupportedModelError: the config names no causal language model whose layers can be told.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        quantization: Quantization | None = None,
    ) -> None:
        self._device = torch.device(device)
        self._quantization = quantization
        self._skeleton = Skeleton(config, dtype=dtype, device=self._device)
        self._skeleton.shape_ends()
        self._dtype = dtype
        self._held: set[int] = set()
        # Kept alive by the sessions that are in them.
        self._pools: WeakSet[RowPool] = WeakSet()
        self._num_forwards = 0
        self._adapters = RowAdapters()
        self._weight_bytes: dict[tuple[int, int], int] = {}
        # Whether a pass over a range can be prepared, once somebody has looked.
        self._is_plain: dict[tuple[int, int], bool] = {}
        self.num_layers = self._skeleton.num_layers
        self.hidden_size = self._skeleton.hidden_size
        self.codes_caches = False
        self.max_decoded: int | None = None

    @property
    def held_layers(self) -> frozenset[int]:
        """The layers that are loaded."""
        return frozenset(self._held)

    @property
    def pools(self) -> frozenset[RowPool]:
        """Pools of the sessions that decode together."""
        return frozenset(self._pools)

    @property
    def image_way(self) -> ImageWay:
        """Treatment of images in the layers."""
        return image_way(self._skeleton.config)

    @property
    def model(self) -> PreTrainedModel:
        """The model that runs: what stands outside the layers is there in shape only."""
        return self._skeleton.model

    def layer(self, layer_id: int) -> nn.Module:
        """The module of a held layer."""
        if layer_id not in self._held:
            raise ValueError(f"layer {layer_id} is not held here")
        return self._skeleton.layer(layer_id)

    def load_layer(
        self, layer_id: int, tensors: Mapping[str, torch.Tensor], *, owns_memory: bool = False
    ) -> None:
        """Load a layer, in place of what it held before.

        On the CPU a tensor that needs no cast and no conversion and is aligned to 64 bytes is used
        as it is: the caller gives it up and must not change it afterwards. Nor may the layer change,
        while others are sent the same memory under its hash, unless it owns its memory.

        Args:
            layer_id: 0..num_layers-1.
            tensors: under their checkpoint names, in the checkpoint's layout; all of the layer's.
            owns_memory: copy them, because the layer's parameters are going to change.

        Raises:
            ValueError: no such layer, or a tensor of another layer.
            CheckpointError: a tensor is missing, unknown, or of a wrong shape.
        """
        if not 0 <= layer_id < self.num_layers:
            raise ValueError(
                f"layer {layer_id} given, the model has layers 0..{self.num_layers - 1}"
            )
        if owns_memory:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        if self._quantization is None:
            self._skeleton.load_layer(layer_id, tensors)
        else:
            self._skeleton.load_quantized_layer(layer_id, tensors, self._quantization)
        self._held.add(layer_id)
        self._weight_bytes.clear()

    def speed_up_layer(self, layer_id: int, *, fuse: bool = False) -> None:
        """Let few rows go through a held layer faster; its results stay equal up to rounding.

        Args:
            fuse: compile it as a whole, too: only where `SplitTraits.fuses` says that it may be.
        """
        layer = self.layer(layer_id)
        speed_up_few_rows(layer)
        if fuse and self._device.type == "cpu":
            fuse_layer(layer, self._dtype, adapters=self._adapters)

    def linear_layers(self, layer_id: int) -> dict[str, tuple[int, int]]:
        """See `Skeleton.linear_layers`."""
        return self._skeleton.linear_layers(layer_id)

    def take_adapter(self, adapter: Adapter) -> None:
        """Have the layers ready for rows with an adapter, all of whose layers are held."""
        for layer_id in adapter.layers:
            self._adapters.attach(layer_id, self.layer(layer_id), adapter)

    @property
    def has_fused(self) -> bool:
        """Whether a held layer is compiled."""
        return any(is_fused(self.layer(layer_id)) for layer_id in self._held)

    def has_same_bits(self, start: int, stop: int) -> bool:
        """Whether a token gets the same bits in layers [start, stop), whatever it is computed with: of its own
        sequence, as in a prompt, or of others. Only where `SplitTraits.same_bits` says that it may be."""
        return all(
            layer_id in self._held and has_same_bits(self.layer(layer_id))
            for layer_id in range(start, stop)
        )

    def drop_layer(self, layer_id: int) -> None:
        """Free one layer. Caches made for it are of no use any more."""
        if layer_id in self._held:
            self._skeleton.drop_layer(layer_id)
            self._held.discard(layer_id)

    def new_cache(self, *, max_length: int | None = None) -> StageCache:
        """An empty cache for one session, which may come to hold so many tokens."""
        return StageCache(self._skeleton.config, max_length=max_length, is_coded=self.codes_caches)

    def forward(
        self,
        hidden_BTD: torch.Tensor,
        *,
        start: int,
        stop: int,
        position: int,
        cache: StageCache,
        adapter: Adapter | None = None,
    ) -> torch.Tensor:
        """Run layers [start, stop), all of them held.

        Args:
            hidden_BTD: [1, T, D], what left layer start-1, or the embedding; any floating dtype.
            position: of its first token in the sequence: the tokens that these layers have cached.
            cache: the session's, from `new_cache`. Advanced by T; if the forward raises after it
                may have been written to, it is spoiled and says so when it is used again.
            adapter: the session's, which `take_adapter` was told; None for none.

        Returns:
            [1, T, D] in the stage's dtype, on its device.

        Raises:
            ValueError: a layer that is not held, a wrong shape, or a position that does not
                continue the cache. The cache is unchanged.
            ModelError: the cache was spoiled before.
        """
        self._check_range(start, stop)
        _check_hidden(hidden_BTD, self.hidden_size)
        num_tokens = hidden_BTD.shape[1]
        with torch.inference_mode(), self._adapters.of([adapter]):
            self._next_forward()
            hidden_BTD = hidden_BTD.to(self._device, self._dtype)
            cache.begin(start, stop, position)
            prepared, cache.prepared = cache.prepared, None
            try:
                if prepared is not None and self._fits(prepared, start, stop, position, num_tokens):
                    result_BTD = prepared.run(hidden_BTD, cache)
                else:
                    result_BTD = self._skeleton.run_layers(
                        hidden_BTD, start, stop, position, cache, cache.images
                    )
                cache.commit(start, stop, num_tokens)
            except BaseException as exc:  # some layers have their new states, and some not
                cache.spoil(f"{type(exc).__name__}: {exc}")
                raise
        return result_BTD

    def prepare(self, *, start: int, stop: int, position: int, cache: StageCache) -> None:
        """Do beforehand what a `forward` of one token at `position` needs besides its hidden state, if one comes.

        Of no consequence but for its time. Args: as of `forward`, after which this is called.
        """
        if cache.home is not None or self._is_plain.get((start, stop)) is False:
            return
        cache.check(start, stop, position)
        with torch.inference_mode():
            cache.pretend(position)
            like_BTD = torch.empty(1, 1, self.hidden_size, dtype=self._dtype, device=self._device)
            calls, *others = (
                self._skeleton.record_layers(marker_BTD, start, stop, position, cache, cache.images)
                for marker_BTD in markers(like_BTD)[: 1 if (start, stop) in self._is_plain else 2]
            )
            if others:
                other = others[0]
                is_plain = calls is not None and other is not None and same_calls(calls, other)
                self._is_plain[start, stop] = is_plain
            if calls is not None and self._is_plain[start, stop]:
                cache.prepared = PreparedPass(start, stop, position, calls)

    def _fits(
        self, prepared: PreparedPass, start: int, stop: int, position: int, num_tokens: int
    ) -> bool:
        """Whether it is for this forward, and of the layers that are held now."""
        is_meant = (prepared.start, prepared.stop, prepared.position) == (start, stop, position)
        return (
            is_meant
            and num_tokens == 1
            and all(call.layer is self.layer(start + i) for i, call in enumerate(prepared.calls))
        )

    def group_rows(
        self, rows: Sequence[Row], *, start: int, stop: int, bounds: Sequence[int]
    ) -> list[list[int]]:
        """Split rows, each of another session, into groups for `forward_rows`: by their lengths, and where rows of an
        adapter cannot be told from others, by their adapters.

        Args:
            bounds: lengths that rows of one forward must not straddle: `SplitTraits.row_bounds`.

        Returns:
            Indices into `rows`.
        """
        self._check_range(start, stop)
        weight_bytes = self._weight_bytes.get((start, stop))
        if weight_bytes is None:
            layers = [self.layer(layer_id) for layer_id in range(start, stop)]
            weight_bytes = sum(each.nbytes for layer in layers for each in layer.parameters())
            self._weight_bytes[start, stop] = weight_bytes
        token_bytes = sum(rows[0].cache.token_bytes(layer_id) for layer_id in range(start, stop))
        groups = group_rows(
            [row.position for row in rows],
            weight_bytes=weight_bytes,
            token_bytes=token_bytes,
            max_rows=MAX_ROWS,
            bounds=bounds,
            max_places=self.max_decoded if self._decodes(rows[0].cache, start, stop) else None,
        )
        if all(row.adapter is None or row.adapter.mixes for row in rows):
            return groups
        return [part for group in groups for part in _by_adapter(group, rows)]

    def _decodes(self, cache: StageCache, start: int, stop: int) -> bool:
        """Whether a layer gets what the cache has in its dtype, and not as codes."""
        layers = (self.layer(layer_id) for layer_id in range(start, stop))
        return cache.is_coded and not all(map(is_fused, layers))

    def forward_rows(self, rows: Sequence[Row], *, start: int, stop: int) -> list[torch.Tensor]:
        """Run layers [start, stop), all of them held, on one token of each of several sessions.

        One row alone goes the way of `forward`, and gets the same bits. All or nothing: if this
        raises, no session has advanced, and each may go on alone.

        Args:
            rows: one or more, each of another session that has cached a token or more.

        Returns:
            [1, 1, D] for each row, in their order, in the stage's dtype, on its device.

        Raises:
            ValueError, ModelError: as `forward`, for any of the rows.
        """
        if len(rows) == 1:
            row = rows[0]
            return [
                self.forward(
                    row.hidden,
                    start=start,
                    stop=stop,
                    position=row.position,
                    cache=row.cache,
                    adapter=row.adapter,
                )
            ]
        self._check_range(start, stop)
        for row in rows:
            _check_hidden(row.hidden, self.hidden_size)
            if row.hidden.shape[1] != 1 or row.position < 1:
                raise ValueError("rows are of one token each, and of sessions that have begun")
            row.cache.check(start, stop, row.position)
        if len({id(row.cache) for row in rows}) != len(rows):
            raise ValueError("two rows of one session cannot run together")
        if len({row.cache.is_coded for row in rows}) > 1:
            raise ValueError("rows of coded caches and of others cannot run together")
        with torch.inference_mode():
            return self._run_rows(rows, start, stop)

    def _run_rows(self, rows: Sequence[Row], start: int, stop: int) -> list[torch.Tensor]:
        self._next_forward()
        pool = self._pool_of(rows)
        order = pool.order([row.cache for row in rows], now=self._num_forwards)
        ordered = [rows[i] for i in order]
        positions = [row.position for row in ordered]
        # A row has one token, of text: all parts of its position are one number.
        turned = [
            position + row.cache.shift(position)
            for row, position in zip(ordered, positions, strict=True)
        ]
        hidden_R1D = torch.cat([row.hidden.to(self._device, self._dtype) for row in ordered])
        try:
            pool.begin([row.cache for row in ordered], start, stop, positions)
            with rows_masked(positions), self._adapters.of([row.adapter for row in ordered]):
                result_R1D = self._skeleton.run_layers(hidden_R1D, start, stop, turned, pool)
            pool.commit(start, stop)
        finally:
            pool.end()
        results: list[torch.Tensor] = [result_R1D] * len(rows)
        for place, i in enumerate(order):
            results[i] = result_R1D[place : place + 1]
        return results

    def _next_forward(self) -> None:
        """Count a forward, and now and then look for sessions that are in a pool to no purpose."""
        self._num_forwards += 1
        if self._num_forwards % IDLE_ROUNDS:
            return
        pools = self.pools
        for pool in pools:
            pool.let_go(self._num_forwards - IDLE_ROUNDS * (len(pools) + 1))

    def _pool_of(self, rows: Sequence[Row]) -> RowPool:
        """Choose the pool with the most of these rows; make one if they are under half of these, and of that pool."""
        is_coded = rows[0].cache.is_coded
        counts = {
            pool: sum(row.cache in pool for row in rows)
            for pool in self._pools
            if pool.is_coded is is_coded
        }
        pool = max(counts, key=counts.__getitem__, default=None)
        if pool is None or 2 * counts[pool] < min(pool.num_rows, len(rows)):
            pool = RowPool(self._skeleton.config, is_coded=is_coded)
            self._pools.add(pool)
        return pool

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start < stop <= self.num_layers:
            raise ValueError(f"layers {start}..{stop - 1} are no range of {self.num_layers} layers")
        absent = [i for i in range(start, stop) if i not in self._held]
        if absent:
            raise ValueError(f"layer {absent[0]} is not held here")


class Ends:
    """Embedding and head of a model: what stands before its first and after its last layer.

    Args, errors: as for `Stage`. Attributes: `num_layers`, `hidden_size`, and `image_way`, what layers make of images.
    """

    def __init__(
        self, config: PreTrainedConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self._device = torch.device(device)
        self._skeleton = Skeleton(config, dtype=dtype, device=self._device)
        self._dtype = dtype
        self._passes = EndPasses(self._skeleton)
        self._is_loaded = False
        self.num_layers = self._skeleton.num_layers
        self.hidden_size = self._skeleton.hidden_size
        self.vocab_size: int = self._skeleton.config.get_text_config(decoder=True).vocab_size
        self.image_way = image_way(self._skeleton.config)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the tensors outside the layers, under their checkpoint names.

        Raises:
            CheckpointError: one is missing (a head that is tied to the embedding need not be
                there), unknown, or of a wrong shape.
        """
        self._skeleton.load_ends(tensors)
        self._is_loaded = True
        self._passes.find_shortcuts()

    def speed_up(self) -> None:
        """Let few rows go through the head faster; its results stay equal up to rounding."""
        speed_up_few_rows(self._skeleton.model)
        if self._is_loaded:
            self._passes.find_shortcuts()

    def linear_layers(self, layer_id: int) -> dict[str, tuple[int, int]]:
        """See `Skeleton.linear_layers`."""
        return self._skeleton.linear_layers(layer_id)

    def layer_name(self, layer_id: int) -> str:
        """See `Skeleton.layer_name`."""
        return self._skeleton.layer_name(layer_id)

    def linear_shapes(self, layer_id: int) -> Mapping[str, Sequence[int]]:
        """See `LayerLoader.linear_shapes`."""
        return self._skeleton.loader.linear_shapes(layer_id)

    def linear_names(self, layer_id: int, shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
        """See `LayerLoader.linear_names`."""
        return self._skeleton.loader.linear_names(layer_id, shapes)

    def shortest_cut(self, length: int) -> int:
        """The fewest tokens that a session's caches of `length` tokens can be cut back to, on all stages."""
        return self._passes.cache.shortest_cut(length)

    @property
    def can_go_back(self) -> bool:
        """See `StageCache.can_go_back`: of a session's caches on all stages."""
        return self._passes.cache.can_go_back

    def embed(self, token_ids: Sequence[int], *, position: int) -> torch.Tensor:
        """Return the hidden state that enters layer 0: [1, T, D] in the model's dtype.

        Args:
            token_ids: at least one, each in 0..vocab_size-1.
            position: of the first one in the sequence.
        """
        self._check(position)
        return self._embed(token_ids, (1, -1), position)

    def embed_images(
        self,
        token_ids: Sequence[int],
        *,
        position: int,
        embeddings: Sequence[tuple[int, torch.Tensor]],
    ) -> torch.Tensor:
        """As `embed`, with embeddings of images in the place of some tokens.

        Args:
            embeddings: where each begins among these tokens, and [T, D], what stands there.
        """
        self._check(position)
        self._require_tokens(token_ids)
        with torch.inference_mode():
            input_ids_BT = torch.tensor(token_ids, device=self._device)[None]
            embedded_BTE = self._skeleton.embed(input_ids_BT).clone()
            for start, embedding_TD in embeddings:
                stop = start + len(embedding_TD)
                embedded_BTE[0, start:stop] = embedding_TD.to(embedded_BTE)
            return self._passes.embedded(embedded_BTE, position)

    def embed_rows(self, token_ids: Sequence[int], *, positions: Sequence[int]) -> torch.Tensor:
        """Return the hidden states that enter layer 0 for the next token of each of several sessions: [R, 1, D].

        Args:
            token_ids: one for each session, in 0..vocab_size-1.
            positions: of each of them in its sequence.
        """
        self._check(min(positions))
        return self._embed(token_ids, (-1, 1), list(positions))

    def logits_rows(self, hidden_R1D: torch.Tensor, *, positions: Sequence[int]) -> torch.Tensor:
        """Logits [R, V] in float32 for the token after the last one of each of several sessions.

        Args:
            hidden_R1D: what left the last layer for one token of each.
            positions: of those tokens in their sequences.
        """
        self._check(min(positions))
        _check_hidden(hidden_R1D[:1], self.hidden_size)
        with torch.inference_mode():
            hidden_R1D = hidden_R1D.to(self._device, self._dtype)
            logits_R1V = self._passes.head(hidden_R1D, list(positions))
            return logits_R1V[:, -1].float()

    def logits(self, hidden_BTD: torch.Tensor, *, position: int) -> torch.Tensor:
        """Logits [V] in float32 for the token after the last one of `hidden_BTD`.

        Args:
            hidden_BTD: [1, T, D], what left the last layer. Only the last token matters; with all
                of them the bits are those of the whole model, with the last alone they may differ
                by rounding in families that multiply matrices between the layers and the head.
            position: of the first token of `hidden_BTD` in the sequence.
        """
        self._check(position)
        _check_hidden(hidden_BTD, self.hidden_size)
        with torch.inference_mode():
            hidden_BTD = hidden_BTD.to(self._device, self._dtype)
            return self._passes.head(hidden_BTD, position)[0, -1].float()

    def logits_of_all(self, hidden_BTD: torch.Tensor, *, position: int) -> torch.Tensor:
        """Logits [T, V] in float32 for the token after each of `hidden_BTD`. They take 4 V T bytes: give it few.

        Args: as of `logits`.
        """
        self._check(position)
        _check_hidden(hidden_BTD, self.hidden_size)
        with torch.inference_mode():
            hidden_BTD = hidden_BTD.to(self._device, self._dtype)
            return self._passes.head_of_all(hidden_BTD, position)[0].float()

    def final_hidden(self, hidden_BTD: torch.Tensor, *, position: int) -> torch.Tensor:
        """The last hidden states as transformers' base model returns them, [T, D] in float32: after the final norm.

        Args: as of `logits`.
        """
        self._check(position)
        _check_hidden(hidden_BTD, self.hidden_size)
        with torch.inference_mode():
            hidden_BTD = hidden_BTD.to(self._device, self._dtype)
            return self._passes.norm(hidden_BTD, position)[0].float()

    def _check(self, position: int) -> None:
        if not self._is_loaded:
            raise ValueError("the ends of the model are not loaded yet")
        if position < 0:
            raise ValueError(f"position {position} is negative")

    def _require_tokens(self, token_ids: Sequence[int]) -> None:
        if not token_ids or not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            raise ValueError(f"token ids must be one or more of 0..{self.vocab_size - 1}")

    def _embed(
        self, token_ids: Sequence[int], shape: tuple[int, int], position: int | Sequence[int]
    ) -> torch.Tensor:
        self._require_tokens(token_ids)
        with torch.inference_mode():
            input_ids_BT = torch.tensor(token_ids, device=self._device).view(shape)
            return self._passes.embedding(input_ids_BT, position)


def _by_adapter(group: Sequence[int], rows: Sequence[Row]) -> list[list[int]]:
    """Parts of a group with one adapter each."""
    parts: dict[Adapter | None, list[int]] = {}
    for index in group:
        parts.setdefault(rows[index].adapter, []).append(index)
    return [*parts.values()]


def _check_hidden(hidden_BTD: torch.Tensor, hidden_size: int) -> None:
    shape = tuple(hidden_BTD.shape)
    if len(shape) != 3 or shape[0] != 1 or shape[1] < 1 or shape[2] != hidden_size:
        raise ValueError(f"a hidden state of shape [1, T, {hidden_size}] is due, got {list(shape)}")
    if not hidden_BTD.is_floating_point():
        raise ValueError(f"a hidden state of a floating dtype is due, got {hidden_BTD.dtype}")
