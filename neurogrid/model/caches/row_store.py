"""Keys and values of one layer, of the sessions that decode together: a slot for each, places for its tokens.

It knows no session: which one has which slot, and how much of it counts, is `RowPool`'s (rows.py).

Storage grows and shrinks as sessions come and go. In the C library's heap such blocks of ever other sizes leave holes
that other, small blocks keep open: a worker grew by tens of MiB over thousands of sessions and used none of it. So
each has a mapping of its own.

Shape legend: S slots, H heads, C places for keys, D head size.
"""

from __future__ import annotations

import copy
import math
import mmap
import sys

import torch

__all__ = ["RowStore"]


class RowStore:
    """Keys and values of one layer: [S, H, C, D], zeros where nothing was written."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """An empty one for states like these, [..., H, any, D]."""
        self.keys = keys.new_empty(0, keys.shape[1], 0, keys.shape[3])
        self.values = values.new_empty(0, values.shape[1], 0, values.shape[3])

    @property
    def num_slots(self) -> int:
        return self.keys.shape[0]

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def bytes_for(self, num_slots: int, capacity: int) -> int:
        """Return the bytes that so many slots and places would take."""
        heads = (
            self.keys.shape[1] * self.keys.shape[3] + self.values.shape[1] * self.values.shape[3]
        )
        return num_slots * capacity * heads * self.keys.itemsize

    def grow(self, num_slots: int, capacity: int) -> None:
        """Have at least so many slots and places."""
        if num_slots > self.num_slots or capacity > self.capacity:
            num_slots, capacity = max(num_slots, self.num_slots), max(capacity, self.capacity)
            keys, values = (_grown(each, num_slots, capacity) for each in (self.keys, self.values))
            self.keys, self.values = keys, values

    def fill(
        self, slot: int, places: slice | torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Put a session's [1, H, tokens, D] into a slot, and nothing of an earlier one beside it."""
        for mine, its in ((self.keys, keys), (self.values, values)):
            mine[slot].zero_()
            mine[slot, :, places] = its[0]

    def read(self, slot: int, places: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of what `fill` put there and `write` added: [1, H, tokens, D]."""
        keys, values = (each[slot, :, places][None] for each in (self.keys, self.values))
        return keys.clone(), values.clone()

    def write(
        self, slots: list[int], places: list[int], keys_RHD: torch.Tensor, values_RHD: torch.Tensor
    ) -> None:
        rows = torch.tensor([slots, places], device=self.keys.device)
        self.keys[rows[0], :, rows[1]] = keys_RHD
        self.values[rows[0], :, rows[1]] = values_RHD

    def rows(self, slots: list[int], num_places: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first places of the slots; without a copy if they are neighbours."""
        keys, values = self.keys[:, :, :num_places], self.values[:, :, :num_places]
        first = slots[0]
        if slots[-1] - first < len(slots):
            return keys[first : first + len(slots)], values[first : first + len(slots)]
        rows = torch.tensor(slots, device=keys.device)
        return keys.index_select(0, rows), values.index_select(0, rows)

    def reordered(self, slots: list[int], capacity: int) -> RowStore:
        """A store that has only these slots, in this order, and so many places of each at most."""
        self.grow(max(slots) + 1, self.capacity)  # some rows may not have been here yet
        store = copy.copy(self)
        rows = torch.tensor(slots, device=self.keys.device, dtype=torch.long)
        store.keys, store.values = (
            _taken(each[:, :, :capacity], rows) for each in (self.keys, self.values)
        )
        return store


def _grown(states: torch.Tensor, num_slots: int, capacity: int) -> torch.Tensor:
    grown = _zeros(states, num_slots, capacity)
    grown[: states.shape[0], :, : states.shape[2]] = states
    return grown


def _taken(states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    taken = _zeros(states, len(rows), states.shape[2])
    return torch.index_select(states, 0, rows, out=taken)


def _zeros(like: torch.Tensor, num_slots: int, capacity: int) -> torch.Tensor:
    """[slots, H, places, D], on the CPU in memory of its own that the system has back as soon as it is let go."""
    shape = (num_slots, like.shape[1], capacity, like.shape[3])
    num_bytes = math.prod(shape) * like.itemsize
    if like.device.type != "cpu" or not num_bytes:
        return like.new_zeros(shape)
    return torch.frombuffer(_memory(num_bytes), dtype=like.dtype).view(shape)


def _memory(num_bytes: int) -> mmap.mmap:
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, num_bytes)
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as exc:  # callers expect what allocators say
        raise MemoryError(f"no room for {num_bytes:,} B of sessions that decode together") from exc
