"""Merkle trees over digests, which bind a witness to exactly what it had. Pure.

Source: protocol_spec/training/witnessed.md, "The tree".
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

__all__ = ["MAX_LEAVES", "MerklePath", "merkle_path", "merkle_root"]

MAX_LEAVES: Final = 65_536
_DIGEST: Final = 32
_EMPTY: Final = b"neurogrid tree 1\0"
_LEAF: Final = b"neurogrid leaf 1\0"
_NODE: Final = b"neurogrid node 1\0"


@dataclass(frozen=True, slots=True)
class MerklePath:
    """Path that shows that a digest is in a tree.

    Attributes:
        place: of the digest among all, ascending, from 0.
        num_leaves: of the tree.
        digests: 32 bytes each, from the leaves up: those beside the way to the root.
    """

    place: int
    num_leaves: int
    digests: tuple[bytes, ...]

    def shows(self, root: bytes, digest: bytes) -> bool:
        """Whether the digest is in the tree with this root, at this place."""
        if not (0 <= self.place < self.num_leaves <= MAX_LEAVES) or len(digest) != _DIGEST:
            return False
        node, place, width = _leaf(digest), self.place, self.num_leaves
        beside = list(reversed(self.digests))
        while width > 1:
            if place ^ 1 < width:
                if not beside or len(beside[-1]) != _DIGEST:
                    return False
                other = beside.pop()
                node = _node(other, node) if place % 2 else _node(node, other)
            place, width = place // 2, (width + 1) // 2
        return node == root and not beside


def merkle_root(digests: Iterable[bytes]) -> bytes:
    """The root of the tree over these digests, each once, in ascending order: 32 bytes.

    Raises:
        ValueError: a digest is not 32 bytes, or they are too many.
    """
    level = [_leaf(digest) for digest in _ascending(digests)]
    if not level:
        return hashlib.sha256(_EMPTY).digest()
    while len(level) > 1:
        level = _above(level)
    return level[0]


def merkle_path(digests: Iterable[bytes], digest: bytes) -> MerklePath:
    """Compute the path that shows that one of these digests is in their tree.

    Raises:
        ValueError: it is not among them, one is not 32 bytes, or they are too many.
    """
    ordered = _ascending(digests)
    if digest not in ordered:
        raise ValueError("the digest is not in the tree")
    place = ordered.index(digest)
    level, beside, at = [_leaf(each) for each in ordered], [], place
    while len(level) > 1:
        if at ^ 1 < len(level):
            beside.append(level[at ^ 1])
        level, at = _above(level), at // 2
    return MerklePath(place, len(ordered), tuple(beside))


def _ascending(digests: Iterable[bytes]) -> list[bytes]:
    ordered = sorted(set(digests))
    if len(ordered) > MAX_LEAVES:
        raise ValueError(f"a tree has at most {MAX_LEAVES} leaves, not {len(ordered)}")
    if any(len(digest) != _DIGEST for digest in ordered):
        raise ValueError("a leaf of a tree is a digest of 32 bytes")
    return ordered


def _above(level: list[bytes]) -> list[bytes]:
    """The nodes above these; one without another beside it goes up as it is."""
    pairs = [_node(*level[at : at + 2]) for at in range(0, len(level) - 1, 2)]
    return pairs + level[len(level) - len(level) % 2 :]


def _leaf(digest: bytes) -> bytes:
    return hashlib.sha256(_LEAF + digest).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(_NODE + left + right).digest()
