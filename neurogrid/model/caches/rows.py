"""The caches of sessions that decode together: one storage, a slot for each, a length for each.

A session's key and value states are copied in when it first decodes with others, and out when it
runs alone again; between those, a step writes one token a row and copies nothing else. Keys of a
layer that sees everything lie at their position, keys of one with a window of W at position modulo
W. What is beyond a row's length is masked (row_masks.py). States of constant size, of linear
attention and convolutions, stay with their session and are joined and parted around each forward.

Nothing of a forward counts before `commit`: what it wrote lies beyond the lengths or is its own
copy. So a forward that failed changes no session, and its rows may be run again, alone.

It knows no family. It does not choose which sessions decode together (row_groups.py).

Shape legend: R rows of a forward, S slots, H heads, C places for keys, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, PreTrainedConfig

from neurogrid.model.caches.cache import StageCache
from neurogrid.model.caches.row_store import RowStore
from neurogrid.model.kernels import CODED_DTYPE, decode_states, encode_states

__all__ = ["RowPool"]

# Places are added so many at a time, or an eighth of what is there if that is more, and slots by a quarter: most
# steps copy nothing then, and little is unused.
_MIN_GROWTH = 64
# Storage is copied to a smaller one when it is more than so many times what the sessions left would get anew.
_MAX_WASTE = 2


class RowPool(DynamicCache):
    """States of the sessions that decode together, over all decoder layers.

    Args:
        config: the model's config, as given to the model that is run.
        is_coded: whether keys and values of its sessions are codes.

    Sessions leave by themselves when nobody holds their `StageCache` any more, and are sent away when they have not
    decoded for a while (`let_go`): a slot has room for the longest session, whichever is in it. Not thread-safe.
    """

    def __init__(self, config: PreTrainedConfig, *, is_coded: bool = False) -> None:
        super().__init__(config=config)
        self.is_coded = is_coded
        self._blank = list(self.layers)
        self._windows = [getattr(layer, "sliding_window", None) or 0 for layer in self.layers]
        self._stores: dict[int, RowStore] = {}
        self._slots: WeakKeyDictionary[StageCache, int] = WeakKeyDictionary()
        self._num_known = 0  # in `_slots` when it was last looked at
        self._batch: list[StageCache] = []
        self._batch_slots: list[int] = []
        self._lengths: list[int] = []
        self._gathered: list[int] = []

    def __len__(self) -> int:
        """Decoder layers, as for every cache of transformers."""
        return len(self.layers)

    def __contains__(self, cache: StageCache) -> bool:
        return cache in self._slots

    @property
    def num_rows(self) -> int:
        """Sessions whose states are here."""
        return len(self._slots)

    @property
    def num_bytes(self) -> int:
        """Bytes of the storage, free slots and places included."""
        return sum(store.num_bytes for store in self._stores.values())

    def state_bytes(self, layer_id: int) -> int:
        """Bytes of one slot of a layer."""
        store = self._stores.get(layer_id)
        return store.num_bytes // store.num_slots if store else 0

    def token_bytes(self, layer_id: int) -> int:
        """Bytes of one place of a slot of a layer."""
        store = self._stores.get(layer_id)
        return self.state_bytes(layer_id) // store.capacity if store else 0

    def order(self, caches: Sequence[StageCache], *, now: int) -> list[int]:
        """Take the sessions in, and say in which order their rows lie: indices into `caches`.

        Args:
            now: the number of this forward, for `let_go`.
        """
        if self.num_rows < self._num_known:
            self._shrink()
        joining = [cache for cache in caches if cache not in self._slots]
        num_slots = self.num_rows + len(joining)
        for cache in joining:
            self._take_in(cache, num_slots)
        for cache in caches:
            cache.last_batched = now
        self._num_known = self.num_rows
        slots = [self._slots[cache] for cache in caches]
        order = sorted(range(len(caches)), key=slots.__getitem__)
        ordered = [slots[i] for i in order]
        if ordered[-1] - ordered[0] >= len(ordered):
            if ordered != self._gathered:
                # Others lie between them: these rows are copied out of the storage for this forward.
                self._gathered = ordered
            else:
                self._bring_together([caches[i] for i in order])
        return order

    def begin(
        self, caches: Sequence[StageCache], start: int, stop: int, positions: Sequence[int]
    ) -> None:
        """Prepare a forward of layers [start, stop) with a token for each of `caches`, in `order`."""
        self._batch = list(caches)
        self._batch_slots = [self._slots[cache] for cache in caches]
        self._lengths = list(positions)
        for layer_id in range(start, stop):
            layers = [cache.layers[layer_id] for cache in caches]
            if any(True for _ in _row_states(layers[0])):
                self.layers[layer_id] = _joined(layers)

    def commit(self, start: int, stop: int) -> None:
        """Advance all rows of the forward over layers [start, stop), after it ended well."""
        for layer_id in range(start, stop):
            batched = self.layers[layer_id]
            if batched is not self._blank[layer_id]:
                _part(batched, [cache.layers[layer_id] for cache in self._batch])
        for cache in self._batch:
            cache.commit_row(start, stop)

    def end(self) -> None:
        """Let go of what a forward needed, whether it ended well or not."""
        self.layers[:] = self._blank
        self._batch = []

    def let_go(self, before: int) -> None:
        """Send those away whose last forward with others was before that of this number."""
        for cache in [cache for cache in self._slots if cache.last_batched < before]:
            self.leave(cache)

    def leave(self, cache: StageCache) -> None:
        """Copy a session's states back into its own cache, and free its slot."""
        slot = self._slots[cache]
        states = []
        for layer_id, store in self._stores.items():
            length = cache.layer_length(layer_id)
            if length:
                window = self._windows[layer_id]
                kept = min(length, window - 1) if window else length
                places = _places(length - kept, length, window)
                states.append((layer_id, store.read(slot, places), length))
        for layer_id, (keys, values), length in states:
            layer: Any = cache.layers[layer_id]
            layer.keys, layer.values = keys, values
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = length
        del self._slots[cache]
        cache.home = None

    # What a forward asks

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self._lengths)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._num_places(layer_idx), 0

    def first_keys(self, layer_idx: int) -> list[tuple[int, int]]:
        """Position of the first token whose keys `update` gives, and its place among them, for each row."""
        window = self._windows[layer_idx]
        if not window:
            return [(0, 0)] * len(self._lengths)
        positions = [max(length - window + 1, 0) for length in self._lengths]
        return [(position, position % window) for position in positions]

    def has_previous_state(self, layer_idx: int | None = None, *args: Any, **kwargs: Any) -> bool:
        if layer_idx is None:
            return True
        return bool(super().has_previous_state(layer_idx, *args, **kwargs))

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token a row; gives keys and values of all rows, [R, H, places, D], in the form of what is given."""
        if not self.is_coded or key_states.dtype == CODED_DTYPE:
            return self._write(key_states, value_states, layer_idx)
        keys, values = self._write(
            encode_states(key_states), encode_states(value_states), layer_idx
        )
        return decode_states(keys, key_states.dtype), decode_states(values, value_states.dtype)

    def _write(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slots, window = self._batch_slots, self._windows[layer_idx]
        store = self._store(layer_idx, key_states, value_states)
        store.grow(max(slots) + 1, self._capacity(layer_idx, max(self._lengths) + 1))
        places = [n % window if window else n for n in self._lengths]
        store.write(slots, places, key_states[:, :, 0], value_states[:, :, 0])
        return store.rows(slots, self._num_places(layer_idx))

    # Storage

    def _num_places(self, layer_id: int) -> int:
        window = self._windows[layer_id]
        longest = max(self._lengths) + 1
        return min(longest, window) if window else longest

    def _capacity(self, layer_id: int, num_tokens: int) -> int:
        """Places to have for a session of `num_tokens`: those that are there, if they are enough."""
        store = self._stores.get(layer_id)
        if store is not None and store.capacity >= num_tokens:
            return num_tokens
        return self._new_capacity(layer_id, num_tokens)

    def _new_capacity(self, layer_id: int, num_tokens: int) -> int:
        window = self._windows[layer_id]
        growth = max(_MIN_GROWTH, num_tokens // 8)
        capacity = -(-num_tokens // growth) * growth
        return min(capacity, window) if window else capacity

    def _store(self, layer_id: int, keys: torch.Tensor, values: torch.Tensor) -> RowStore:
        store = self._stores.get(layer_id)
        if store is None:
            store = self._stores[layer_id] = RowStore(keys, values)
        return store

    def _take_in(self, cache: StageCache, num_slots: int) -> None:
        """Copy a session's states into a free slot, of so many that are to be had."""
        if cache.home is not None:
            cache.home.leave(cache)
        taken = set(self._slots.values())
        slot = next(i for i in range(len(taken) + 1) if i not in taken)
        moved = []
        for layer_id, each in enumerate(cache.layers):
            layer: Any = each
            length = cache.layer_length(layer_id)
            if length == 0 or not isinstance(getattr(layer, "keys", None), torch.Tensor):
                continue
            keys, values, window = layer.keys, layer.values, self._windows[layer_id]
            if keys.dim() != 4 or keys.shape[-2] != (min(length, window - 1) if window else length):
                raise ValueError(
                    f"layer {layer_id} keeps {list(keys.shape)} for {length} tokens: no row of a batch"
                )
            store = self._store(layer_id, keys, values)
            if slot < store.num_slots:
                slots = store.num_slots
            else:
                slots = max(num_slots, slot + 1, store.num_slots + store.num_slots // 4)
            store.grow(slots, self._capacity(layer_id, length + 1))
            store.fill(slot, _places(length - keys.shape[-2], length, window), keys, values)
            moved.append(layer)
        for layer in moved:
            layer.keys = layer.keys.new_empty(0)
            layer.values = layer.values.new_empty(0)
        self._slots[cache] = slot
        cache.home = self

    def _bring_together(self, caches: Sequence[StageCache]) -> None:
        """Move the slots of `caches` to the front, in their order."""
        others = [cache for cache in self._slots if cache not in caches]
        others.sort(key=self._slots.__getitem__)
        everybody = [*caches, *others]
        slots = [self._slots[cache] for cache in everybody]
        self._stores = {
            i: store.reordered(slots, store.capacity) for i, store in self._stores.items()
        }
        for slot, cache in enumerate(everybody):
            self._slots[cache] = slot

    def _shrink(self) -> None:
        """Give back storage that stands mostly empty: sessions came, and have gone."""
        caches = sorted(self._slots, key=self._slots.__getitem__)
        if not caches:
            self._stores.clear()
            return
        slots = [self._slots[cache] for cache in caches]
        capacities = {
            i: self._new_capacity(i, max(cache.layer_length(i) for cache in caches) + 1)
            for i in self._stores
        }
        enough = sum(
            store.bytes_for(len(slots), capacities[i]) for i, store in self._stores.items()
        )
        if self.num_bytes > _MAX_WASTE * enough:
            self._stores = {
                i: store.reordered(slots, capacities[i]) for i, store in self._stores.items()
            }
            for slot, cache in enumerate(caches):
                self._slots[cache] = slot


def _places(start: int, stop: int, window: int) -> slice | torch.Tensor:
    """Places of tokens start..stop-1 of a session in its store, which goes around in `window`; not where that is 0."""
    return torch.arange(start, stop) % window if window else slice(start, stop)


def _row_states(layer: object) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """States of constant size of one layer: what holds each, under which key, and the tensor."""
    holder = vars(layer)
    for name, value in holder.items():
        if name in ("keys", "values"):
            continue
        if isinstance(value, torch.Tensor) and value.dim() > 1:
            yield holder, name, value
        elif isinstance(value, dict):
            for key, inner in value.items():
                if isinstance(inner, torch.Tensor):
                    yield value, key, inner


def _joined(layers: Sequence[object]) -> Any:
    """A layer like each of `layers`, with the states of all, rows in their order."""
    joined = copy.copy(layers[0])
    for name, value in vars(joined).items():
        if isinstance(value, dict):
            setattr(joined, name, dict(value))
    theirs = zip(*(_row_states(layer) for layer in layers), strict=True)
    for (holder, key, _), rows in zip(list(_row_states(joined)), theirs, strict=True):
        holder[key] = torch.cat([tensor for _, _, tensor in rows])
    return joined


def _part(joined: object, layers: Sequence[object]) -> None:
    """Copy each row's states back to its own layer."""
    for row, layer in enumerate(layers):
        for (_, _, mine), (_, _, its) in zip(
            list(_row_states(layer)), _row_states(joined), strict=True
        ):
            mine.copy_(its[row : row + 1])
