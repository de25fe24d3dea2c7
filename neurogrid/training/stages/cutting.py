"""Cut of a model into stages, by the bytes that its layers take and those that members have. Pure.

A stage computes in proportion to its parameters, so the cut that is wanted has the largest stage as small as can be;
the ends, which one machine has besides its layers, count with theirs. Of cuts that are as good, the one is taken that
leaves the least to the stages before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from neurogrid.errors import ConfigurationError

__all__ = ["StageSizes", "cut_layers"]


@dataclass(frozen=True, slots=True)
class StageSizes:
    """Bytes that the parts of a model take: weights, with gradients and the optimiser's state of those that learn.

    Attributes:
        layers: of each layer.
        first, last: of what stands outside the layers, at the first and the last stage.
        alone: of that, at a stage which is both.
        layer_copies: beside what is there, while the last layer is opened: what it is made of.
        end_copies: the same of what stands outside the layers, which is opened first.
        fewest_last: layers that the last of several stages has at least.
    """

    layers: tuple[int, ...]
    first: int
    last: int
    alone: int
    layer_copies: int = 0
    end_copies: int = 0
    fewest_last: int = 1

    def held(self, start: int, stop: int) -> int:
        """Bytes of the stage with layers [start, stop), without what a step takes."""
        return sum(self.layers[start:stop]) + self._ends(start, stop)

    def needed(self, start: int, stop: int) -> int:
        """Bytes of memory that the stage takes: to open it, and then without what a step takes."""
        ends = self._ends(start, stop)
        held = self.held(start, stop) + self.layer_copies
        return max(held, ends + self.end_copies if ends else 0)

    def _ends(self, start: int, stop: int) -> int:
        is_first, is_last = start == 0, stop == len(self.layers)
        if is_first:
            return self.alone if is_last else self.first
        return self.last if is_last else 0


def cut_layers(sizes: StageSizes, room: Sequence[int]) -> tuple[int, ...]:
    """The bounds of stages: stage i has layers [bounds[i], bounds[i + 1]).

    Args:
        room: bytes that the member of each stage offers, in their order; 0 for any.

    Raises:
        ConfigurationError: there are more stages than layers, or they fit in no cut; says what is missing.
    """
    num_layers, num_stages = len(sizes.layers), len(room)
    fewest_last = sizes.fewest_last if num_stages > 1 else 1
    if num_stages > num_layers - fewest_last + 1:
        why = f", the last of which has {fewest_last} layers at least" if fewest_last > 1 else ""
        raise ConfigurationError(
            f"{num_layers} layers cannot be cut into {num_stages} stages{why}: lower [layout] stages"
        )
    # By stages and layers so far: the largest stage, and where the last one begins.
    best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for stage, offered in enumerate(room):
        found: dict[int, tuple[int, int]] = {}
        left = num_stages - stage - 1
        for start, (largest, _) in best[-1].items():
            if left == 0 and num_layers - start < fewest_last:
                continue
            for stop in range(start + 1, num_layers - left + 1):
                if (stop == num_layers) != (left == 0):
                    continue
                if offered and sizes.needed(start, stop) > offered:
                    break
                candidate = max(largest, sizes.held(start, stop)), start
                if stop not in found or candidate < found[stop]:
                    found[stop] = candidate
        best.append(found)
    if num_layers not in best[-1]:
        total, offered = sizes.held(0, num_layers), sum(room)
        raise ConfigurationError(
            f"the model does not fit into {num_stages} stages: weights, gradients and optimiser take {total:,} bytes, "
            f"and its members have room for {offered:,}, none of which may be too small for a layer of "
            f"{max(sizes.layers) + sizes.layer_copies:,}. Cut it into more stages ([layout] stages), learn an adapter "
            "([adapter] r), or lend more (--memory-limit)"
        )
    bounds, stop = [num_layers], num_layers
    for stage in range(num_stages, 0, -1):
        stop = best[stage][stop][1]
        bounds.append(stop)
    return tuple(reversed(bounds))
