"""Members of stages: whoever was in one stays there, and others come where they are needed most. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["fill", "place"]

Stages = tuple[tuple[str, ...], ...]


def place(before: Sequence[Sequence[str]], usable: Sequence[str], num_stages: int) -> Stages:
    """A member for each stage, at least.

    Those that were in a stage stay, unless another stage has nobody: then whoever is free comes, or one of the stage
    that has most.

    Args:
        before: the stages of the arrangement before; of none no member is left, or there was none.
        usable: members that can be stages, those to be preferred first; at least as many as stages.
        num_stages: of the chain.
    """
    here = set(usable)
    stages = [
        [peer for peer in (before[index] if index < len(before) else ()) if peer in here]
        for index in range(num_stages)
    ]
    placed = {peer for stage in stages for peer in stage}
    free = [peer for peer in usable if peer not in placed]
    for stage in stages:
        if not stage:
            stage.append(free.pop(0) if free else max(stages, key=len).pop())
    return tuple(map(tuple, stages))


def fill(
    stages: Stages,
    usable: Sequence[str],
    most: int,
    fits: Callable[[str, int], bool],
    sizes: Sequence[float],
) -> Stages:
    """The same with those who are free, each in the stage whose members have most to do.

    Args:
        usable: members that can be stages, those to be preferred first.
        most: members of a stage.
        fits: whether a member has room for a stage.
        sizes: of each stage, in any unit: what its members share.
    """
    found = [list(stage) for stage in stages]
    placed = {peer for stage in stages for peer in stage}
    for peer in usable:
        if peer in placed:
            continue
        open_ones = [i for i in range(len(found)) if len(found[i]) < most and fits(peer, i)]
        if open_ones:
            found[max(open_ones, key=lambda i: sizes[i] / len(found[i]))].append(peer)
    return tuple(map(tuple, found))
