"""Members of stages: whoever was in one stays there, and others come where they are needed most. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations, pairwise, product
from typing import Final

__all__ = ["AreApart", "contacts", "fill", "place", "place_apart"]

Stages = tuple[tuple[str, ...], ...]

AreApart = Callable[[str, str], bool]
"""Whether two members cannot reach each other."""

# Members that are tried in places, before it is given up to find places for all.
_MAX_TRIES: Final = 20_000


def contacts(stages: Sequence[Sequence[str]], *, is_tied: bool = True) -> Iterator[tuple[str, str]]:
    """Members that send each other something: of one stage, of one and the next, and of both ends.

    Args:
        stages: the members of each.
        is_tied: whether something that learns is in both ends; else these send each other nothing.
    """
    for stage in stages:
        yield from combinations(stage, 2)
    for stage, following in pairwise(stages):
        yield from product(stage, following)
    if is_tied and len(stages) > 2:
        yield from product(stages[0], stages[-1])


def place(before: Sequence[Sequence[str]], usable: Sequence[str], num_stages: int) -> Stages:
    """A member for each stage, at least.

    Those that were in a stage stay, unless another stage has nobody: then whoever is free comes, or one of the stage
    that has most.

    Args:
        before: the stages of the arrangement before; of none no member is left, or there was none.
        usable: members that can be stages, those to be preferred first; at least as many as stages.
        num_stages: of the chain.
    """
    stages = _left_of(before, usable, num_stages)
    placed = {peer for stage in stages for peer in stage}
    free = [peer for peer in usable if peer not in placed]
    for stage in stages:
        if not stage:
            stage.append(free.pop(0) if free else max(stages, key=len).pop())
    return tuple(map(tuple, stages))


def place_apart(
    before: Sequence[Sequence[str]],
    usable: Sequence[str],
    num_stages: int,
    are_apart: AreApart,
    *,
    is_tied: bool = True,
) -> Stages | None:
    """Place members as `place` does, so that all reach those that they are in contact with; None where none are found.

    Those that were in a stage stay where they can. Others come in the place of those that cannot: such as are free
    first, then those that are not alone in their stage, of the one that has most.
    """
    left = _left_of(before, usable, num_stages)
    free = [peer for peer in usable if peer not in chain(*left)]
    spare = [peer for own in sorted(left, key=len, reverse=True) for peer in own[1:]]
    chosen = _choose([[*own, *free] for own in left], are_apart, is_tied) or _choose(
        [[*own, *free, *spare, *usable] for own in left], are_apart, is_tied
    )
    if chosen is None:
        return None
    stages = [[peer] for peer in chosen]
    for index, stage in enumerate(left):
        for peer in stage:
            if peer not in chain(*stages) and _reaches(stages, index, peer, are_apart, is_tied):
                stages[index].append(peer)
    return tuple(map(tuple, stages))


def fill(
    stages: Stages,
    usable: Sequence[str],
    most: int,
    fits: Callable[[str, int], bool],
    sizes: Sequence[float],
    are_apart: AreApart = lambda peer, other: False,
    *,
    is_tied: bool = True,
) -> Stages:
    """Add the members that are free to stages, each to the one whose members have most to do.

    Args:
        usable: members that can be stages, those to be preferred first.
        most: members of a stage.
        fits: whether a member has room for a stage.
        sizes: of each stage, in any unit: what its members share.
        are_apart: such members come where they are not in contact, or nowhere.
        is_tied: as of `contacts`.
    """
    found = [list(stage) for stage in stages]
    placed = {peer for stage in stages for peer in stage}
    for peer in usable:
        if peer in placed:
            continue
        open_ones = [
            i
            for i in range(len(found))
            if len(found[i]) < most
            and fits(peer, i)
            and _reaches(found, i, peer, are_apart, is_tied)
        ]
        if open_ones:
            found[max(open_ones, key=lambda i: sizes[i] / len(found[i]))].append(peer)
    return tuple(map(tuple, found))


def _choose(
    candidates: Sequence[Sequence[str]], are_apart: AreApart, is_tied: bool
) -> list[str] | None:
    """Choose one of the candidates for each stage, the first that there are; None where they are not found."""
    chosen: list[str] = []
    ways = [iter(candidates[0])]
    for _ in range(_MAX_TRIES):
        peer = next(ways[-1], None)
        if peer is None:
            ways.pop()
            if not ways:
                return None
            chosen.pop()
            continue
        is_last = len(chosen) == len(candidates) - 1
        beside = [*chosen[-1:], *(chosen[:1] if is_last and is_tied else ())]
        if peer in chosen or any(are_apart(peer, other) for other in beside):
            continue
        chosen.append(peer)
        if is_last:
            return chosen
        ways.append(iter(candidates[len(chosen)]))
    return None


def _left_of(
    before: Sequence[Sequence[str]], usable: Sequence[str], num_stages: int
) -> list[list[str]]:
    """Return the usable members of each stage of the arrangement before; none where it had no such stage."""
    here = set(usable)
    return [
        [peer for peer in (before[index] if index < len(before) else ()) if peer in here]
        for index in range(num_stages)
    ]


def _reaches(
    stages: Sequence[Sequence[str]], index: int, peer: str, are_apart: AreApart, is_tied: bool
) -> bool:
    """Whether a member more of a stage would reach all that it is in contact with."""
    last = len(stages) - 1
    beside = {index, max(index - 1, 0), min(index + 1, last)}
    if is_tied and index in (0, last):
        beside |= {0, last}
    return not any(are_apart(peer, other) for each in beside for other in stages[each])
