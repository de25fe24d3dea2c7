"""Words that texts and logs of both sides use for the same thing."""

from __future__ import annotations

__all__ = ["name_range"]


def name_range(layers: range) -> str:
    """Layers for a text: `layer 3`, `layers 0 to 5`."""
    first, last = layers.start, layers.stop - 1
    return f"layer {first}" if first == last else f"layers {first} to {last}"
