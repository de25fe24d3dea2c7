"""The cache of one session at one stage: key and value states of held layers, a length for all.

A base model asks its cache how long it is before it knows which layers will run: masks and
positions depend on it. So the answers come from one counter and from the *type* of the layer asked
about, held or not; memory is made only where a layer writes. Asking a held layer instead is wrong
as soon as the layer asked about is of another type than those held (Gemma 2 and 3, GPT-OSS, LFM2).

It does not know what a forward computes. Its strategy: `begin` fixes the length for one forward
over layers [start, stop), `commit` advances it; a forward that raised in between leaves layers with
states of different lengths, so the cache is then refused (`spoil`).

A cache can be cut back to its first tokens, or these be copied into another (`shortest_cut` says how
many of them at least): keys and values of a token depend on those before it alone. States of constant
size, and windows that have dropped tokens, cannot go back; windows can as far as their last forward began,
if that was one of several tokens and few: what it dropped is kept until the next one (`can_be_cut`).

A coded cache holds keys and values as codes of 8 bits (kernels/coded_states.py). A layer that knows of that gives and
gets codes; any other gets all of its own keys and values in its dtype, for as long as it runs. States of constant size
stay as they are.

While the session decodes in a batch with others, its states live in their pool (rows.py), and this
object keeps the lengths. A forward of its own brings them back first.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from neurogrid.errors import ModelError, UnsupportedModelError
from neurogrid.model.caches.prepared import PreparedPass
from neurogrid.model.caches.state_room import StateRoom
from neurogrid.model.images.places import ImagePlaces
from neurogrid.model.kernels import CODED_DTYPE, decode_states, encode_states

__all__ = ["MAX_FEW", "Home", "LayerStates", "StageCache"]

LayerStates: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, as a cache keeps them: [1, H, tokens, size]."""

# Tokens of a forward that may be forgotten again one by one, and that are written to their places: more are a prompt's.
MAX_FEW = 64

# A window's view may pin the storage of a whole prefill; copied out once it wastes more than this.
_MAX_WASTE = 2


class Home(Protocol):
    """Storage of a session's key and value states while they are not in its own cache."""

    def leave(self, cache: StageCache) -> None:
        """Bring the states back into `cache`."""

    def state_bytes(self, layer_id: int) -> int:
        """Bytes that a session has there for one layer, room to grow included."""

    def token_bytes(self, layer_id: int) -> int:
        """Bytes that a token takes there in one layer."""


class StageCache(DynamicCache):
    """The cache of one session over all decoder layers, with memory for those that ran.

    Args:
        config: the model's config, as given to the model that is run.
        max_length: tokens that it may come to hold; None where nobody has said.
        is_coded: keep keys and values as codes.

    Attributes:
        home: where its states are; None for here.
        is_coded: as given.
        max_length: as given, or as `allow` was told.
        prepared: the pass over its next token, as far as it is known before; None where it is not.
        last_batched: the number of the last forward in which it was with others, as its stage counts them.
        images: where among its tokens images are, where layers have to know; None for none.

    Not thread-safe; one forward at a time.
    """

    def __init__(
        self, config: PreTrainedConfig, *, max_length: int | None = None, is_coded: bool = False
    ) -> None:
        super().__init__(config=config)
        self.is_coded = is_coded
        num_layers = config.get_text_config(decoder=True).num_hidden_layers
        if len(self.layers) != num_layers:
            raise UnsupportedModelError(
                f"transformers makes a cache of {len(self.layers)} layers for {num_layers} layers"
            )
        # The width of the window of each layer, 0 for a layer that sees everything.
        self._windows = [getattr(layer, "sliding_window", None) or 0 for layer in self.layers]
        self._lengths = [0] * num_layers
        self._length = 0
        # What each window had, and got, in the last forward, while that can be cut; and where that began.
        self._past: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._began: int | None = None
        self._spoiled: str | None = None
        self.allow(max_length)
        self.home: Home | None = None
        self.prepared: PreparedPass | None = None
        self.last_batched = 0
        self.images: ImagePlaces | None = None

    @property
    def length(self) -> int:
        """Tokens cached by the layers that ran so far (the most, where they differ)."""
        return max(self._lengths)

    @property
    def num_bytes(self) -> int:
        """Bytes held by the states of all layers, storage that a view pins included."""
        storages = {}
        for layer in self.layers:
            for tensor in _tensors(vars(layer).values()):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        away = 0
        if self.home is not None:
            away = sum(self.home.state_bytes(i) for i, n in enumerate(self._lengths) if n)
        return sum(storages.values()) + away

    def window(self, layer_id: int) -> int:
        """Tokens that a layer sees, itself included; 0 for one that sees all."""
        return self._windows[layer_id]

    def state_bytes(self, layer_id: int) -> int:
        """Bytes of the states of one layer, without what else their storage may hold."""
        tensors = _tensors(vars(self.layers[layer_id]).values())
        here = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        if self.home is not None and self._lengths[layer_id]:
            return here + self.home.state_bytes(layer_id)
        return here

    def token_bytes(self, layer_id: int) -> int:
        """Bytes that each token takes in one layer; 0 for a window, which grows no more."""
        length = self._lengths[layer_id]
        if length == 0 or self._windows[layer_id]:
            return 0
        if self.home is not None:
            return self.home.token_bytes(layer_id)
        states = [getattr(self.layers[layer_id], name, None) for name in ("keys", "values")]
        return sum(each.nbytes for each in states if isinstance(each, torch.Tensor)) // length

    def state_heads(self, layer_id: int) -> list[tuple[int, int]]:
        """Number and size of the heads of a layer's keys, and of its values; empty where it keeps none."""
        states = [getattr(self.layers[layer_id], name, None) for name in ("keys", "values")]
        return [
            (each.shape[1], each.shape[3])
            for each in states
            if isinstance(each, torch.Tensor) and each.dim() == 4
        ]

    def layer_length(self, layer_id: int) -> int:
        """Tokens cached by one layer."""
        return self._lengths[layer_id]

    def check(self, start: int, stop: int, position: int) -> None:
        """Refuse a forward of layers [start, stop) that could not begin; changes nothing.

        Raises: as `begin`.
        """
        if self._spoiled is not None:
            raise ModelError(
                f"the cache of this session is unusable since a forward failed ({self._spoiled}); "
                "rebuild it with a new cache and one prefill"
            )
        if self._lengths[start:stop].count(position) != stop - start:
            have = sorted(set(self._lengths[start:stop]))
            raise ValueError(
                f"position {position} given, but layers {start}..{stop - 1} have cached "
                f"{' or '.join(map(str, have))} tokens"
            )

    def begin(self, start: int, stop: int, position: int) -> None:
        """Fix the length for a forward of layers [start, stop) whose first token is `position`.

        Raises:
            ValueError: a layer of the range has cached another number of tokens than `position`.
            ModelError: an earlier forward failed half way; the session's cache must be rebuilt.
        """
        self.check(start, stop, position)
        if self.home is not None:
            self.home.leave(self)
        self._forget_past()
        self._length = position

    def commit(self, start: int, stop: int, num_tokens: int) -> None:
        """Advance layers [start, stop) by `num_tokens`, after their forward ended well."""
        length = self._length + num_tokens
        self._lengths[start:stop] = [length] * (stop - start)
        self._began = self._length if self._length and 1 < num_tokens <= MAX_FEW else None
        if num_tokens > MAX_FEW or (num_tokens > 1 and not self._length):
            for layer in self.layers[start:stop]:
                _release_prefill(layer)

    def commit_row(self, start: int, stop: int) -> None:
        """Advance layers [start, stop) by the token that went through them in a batch."""
        self._forget_past()
        self._lengths[start:stop] = [self._lengths[start] + 1] * (stop - start)

    @property
    def is_spoiled(self) -> bool:
        """Whether a forward failed half way, so that it can be used no more."""
        return self._spoiled is not None

    def shortest_cut(self, length: int) -> int:
        """The fewest tokens that a cache of `length` tokens can be cut back to, whichever workers hold its layers."""
        for layer, window in zip(self.layers, self._windows, strict=True):
            can_be_cut = type(layer) is DynamicLayer or (
                type(layer) is DynamicSlidingWindowLayer and length < window
            )
            if not can_be_cut:
                return length
        return 0

    @property
    def can_go_back(self) -> bool:
        """Whether few tokens of a forward can be forgotten again, at any length, whichever workers hold its layers."""
        return all(
            type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in self.layers
        )

    def can_be_cut(self, num_tokens: int) -> bool:
        """Whether it can be cut back to its first `num_tokens` tokens."""
        length = self.length
        if num_tokens >= length:
            return num_tokens == length
        is_last = self._began is not None and self._began < num_tokens and self.can_go_back
        return is_last or self.shortest_cut(length) <= num_tokens

    def go_back(self, num_tokens: int) -> None:
        """As `cut`, for few tokens: the others stay where they are, and so does the memory of those that go."""
        self.prepared = None
        if not self._check_cut(num_tokens):
            return
        self._take_home()
        with torch.inference_mode():
            for i, length in enumerate(self._lengths):
                if length > num_tokens:
                    self._shorten(i, num_tokens)
                    self._lengths[i] = num_tokens
        self._forget_past()

    def _shorten(self, layer_id: int, num_tokens: int) -> None:
        """Forget tokens of one layer; the others stay where they are."""
        layer: Any = self.layers[layer_id]
        if not isinstance(getattr(layer, "keys", None), torch.Tensor):
            return  # it has those of another layer
        if type(layer) is DynamicLayer:
            behind_keys, behind_values = self._rooms[layer_id]
            keys, values = layer.keys, layer.values
            assert keys is not None
            assert values is not None
            layer.keys = behind_keys.cut(keys, num_tokens)
            layer.values = behind_values.cut(values, num_tokens)
        else:
            self.layers[layer_id] = self._window_of(layer_id, num_tokens)

    def _window_of(self, layer_id: int, num_tokens: int) -> Any:
        """A window's states as they were after `num_tokens` tokens, fewer than now; copies."""
        layer: Any = self.layers[layer_id]
        past = self._past.get(layer_id)
        if past is None:
            return _first_tokens(layer, num_tokens)
        assert self._began is not None
        window = self._windows[layer_id]
        stop = min(self._began, window - 1) + num_tokens - self._began
        twin = copy.copy(layer)
        twin.keys, twin.values = (
            each[..., max(stop - window + 1, 0) : stop, :].clone() for each in past
        )
        twin.cumulative_length = num_tokens
        return twin

    def _forget_past(self) -> None:
        self._past.clear()
        self._began = None

    def cut(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` tokens. All layers that ran have the same number of them.

        Raises:
            ValueError: it cannot be cut back to that. The cache is unchanged.
            ModelError: an earlier forward failed half way.
        """
        self.prepared = None
        if self._check_cut(num_tokens):
            self._take_home()
            self._become(self, num_tokens)
            self._forget_past()

    def copy(self, num_tokens: int) -> StageCache:
        """A cache of the first `num_tokens` tokens, which shares nothing with this one.

        Raises: as `cut`.
        """
        self._check_cut(num_tokens)
        self._take_home()
        twin = copy.copy(self)
        twin.prepared = None
        twin._lengths = list(self._lengths)
        twin.allow(self.max_length)
        twin.layers = list(self.layers)
        twin._become(self, num_tokens)
        twin._past, twin._began = {}, None
        return twin

    def _check_cut(self, num_tokens: int) -> bool:
        """Whether tokens are to go; raises what `cut` does."""
        if self._spoiled is not None:
            raise ModelError(f"the cache of this session is unusable: {self._spoiled}")
        if not self.can_be_cut(num_tokens):
            raise ValueError(f"a cache of {self.length} tokens cannot be cut back to {num_tokens}")
        return num_tokens < self.length

    def _take_home(self) -> None:
        if self.home is not None:
            self.home.leave(self)

    def _become(self, other: StageCache, num_tokens: int) -> None:
        """Have copies of the first tokens of what `other` has."""
        with torch.inference_mode():
            for i, length in enumerate(other._lengths):
                is_cut = num_tokens < length
                if is_cut and other._windows[i]:
                    self.layers[i] = other._window_of(i, num_tokens)
                else:
                    self.layers[i] = _first_tokens(other.layers[i], num_tokens if is_cut else None)
                self._lengths[i] = min(length, num_tokens)

    def shift(self, position: int) -> int:
        """Offset that images before a token of text add to its position."""
        return 0 if self.images is None else self.images.shift(position)

    def states(self) -> dict[int, LayerStates]:
        """Keys and values of all layers that have some, for `restore`; as long as nothing is computed for it.

        Of a cache that `can_go_back`: others have states besides.
        """
        assert self.can_go_back
        self._take_home()
        found = {}
        for layer_id, length in enumerate(self._lengths):
            layer: Any = self.layers[layer_id]
            if length and isinstance(getattr(layer, "keys", None), torch.Tensor):
                found[layer_id] = layer.keys, layer.values
        return found

    def restore(
        self, states: Mapping[int, LayerStates], start: int, stop: int, num_tokens: int
    ) -> None:
        """Have what another cache had over layers [start, stop) when it had so many tokens. This one is empty.

        Raises:
            ValueError: that cannot be of so many tokens. The cache is of no use then.
        """
        assert self.can_go_back
        if self.length:
            raise ValueError(f"this one has {self.length} tokens")
        for layer_id, (keys, values) in states.items():
            window = self._windows[layer_id]
            kept = min(num_tokens, window - 1) if window else num_tokens
            if (keys.shape[0], keys.shape[2]) != (1, kept) or keys.shape[:3] != values.shape[:3]:
                raise ValueError(
                    f"layer {layer_id} keeps {list(keys.shape)} of {num_tokens} tokens"
                )
            if (keys.dtype == CODED_DTYPE) is not self.is_coded or keys.dtype != values.dtype:
                raise ValueError(f"layer {layer_id} keeps {keys.dtype}")
            layer: Any = self.layers[layer_id]
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            if window:
                layer.cumulative_length = num_tokens
        self._lengths[start:stop] = [num_tokens] * (stop - start)

    def spoil(self, reason: str) -> None:
        """Refuse all further use: a forward failed for `reason` after it may have written."""
        self._spoiled = reason

    def pretend(self, position: int) -> None:
        """Answer as if `position` tokens were cached, for a pass in which no layer runs."""
        self._length = position

    def allow(self, max_length: int | None) -> None:
        """Have no memory for more tokens than these from the next one on, also where another session takes it over."""
        self.max_length = max_length
        # Behind the keys and behind the values of each layer.
        self._rooms = [(StateRoom(), StateRoom()) for _ in self.layers]

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to a layer's keys and values; gives those of all tokens, in the form of what is given."""
        if not self.is_coded or key_states.dtype == CODED_DTYPE:
            return self._append(key_states, value_states, layer_idx, *args, **kwargs)
        keys, values = self._append(
            encode_states(key_states), encode_states(value_states), layer_idx, *args, **kwargs
        )
        return decode_states(keys, key_states.dtype), decode_states(values, value_states.dtype)

    def _append(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layers[layer_idx]
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        num_tokens = key_states.shape[-2]
        if type(layer) is DynamicSlidingWindowLayer and self._length and 1 < num_tokens <= MAX_FEW:
            past = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            self._past[layer_idx] = past
            return past
        # The next tokens of a layer that sees all; what else there is grows seldom, or not at all.
        if (
            type(layer) is not DynamicLayer
            or num_tokens > MAX_FEW
            or not self._length
            or keys is None
            or values is None
        ):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        behind_keys, behind_values = self._rooms[layer_idx]
        layer.keys = keys = behind_keys.append(keys, key_states, max_length=self.max_length)
        layer.values = values = behind_values.append(
            values, value_states, max_length=self.max_length
        )
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        window = self._windows[layer_idx]
        if window == 0:
            return self._length + query_length, 0
        kept = min(self._length, window - 1)
        return kept + query_length, max(self._length - window + 1, 0)

    def first_keys(self, layer_idx: int) -> list[tuple[int, int]]:
        """The position of the first token whose keys `update` gives, and its place among them."""
        window = self._windows[layer_idx]
        return [(max(self._length - window + 1, 0) if window else 0, 0)]

    def has_previous_state(self, layer_idx: int | None = None, *args: Any, **kwargs: Any) -> bool:
        # What else can be asked differs between versions; it is about a layer that runs.
        if layer_idx is None:
            return self._length > 0
        return bool(super().has_previous_state(layer_idx, *args, **kwargs))


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (dict, list, tuple)):
            yield from _tensors(value)


def _first_tokens(layer: Any, num_tokens: int | None) -> Any:
    """A copy of a layer's states; of its first tokens alone, where a number is given."""
    if num_tokens is None:
        return copy.deepcopy(layer)
    twin = copy.copy(layer)
    twin.keys = layer.keys[..., :num_tokens, :].clone()
    twin.values = layer.values[..., :num_tokens, :].clone()
    if hasattr(twin, "cumulative_length"):
        twin.cumulative_length = num_tokens
    return twin


def _release_prefill(layer: object) -> None:
    """Copy the states out of a storage that is mostly not theirs any more."""
    for name in ("keys", "values"):
        states = getattr(layer, name, None)
        if (
            isinstance(states, torch.Tensor)
            and states.untyped_storage().nbytes() > _MAX_WASTE * states.numel() * states.itemsize
        ):
            setattr(layer, name, states.clone())
