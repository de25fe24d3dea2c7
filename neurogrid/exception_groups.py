"""Let an error of ours leave a nursery as itself.

Trio wraps whatever leaves a nursery in an exception group, one for each nursery on the way. A caller of
`open_host` wants `ConfigurationError`, not a tree with one leaf.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio

from neurogrid.errors import NeuroGridError

__all__ = ["unwrap_errors"]

_OURS = (NeuroGridError, trio.Cancelled)


@contextmanager
def unwrap_errors() -> Iterator[None]:
    """Raise the leaf of an exception group instead of the group.

    Where several tasks failed with errors of ours, the first is raised: the others are its consequences
    or its like. Where some were cancelled meanwhile, so is the caller: whoever cancels asks for no outcome. A
    group that holds anything else beside passes through whole.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        leaves = list(_leaves(group))
        if len(leaves) == 1 or all(isinstance(leaf, _OURS) for leaf in leaves):
            cancelled = [leaf for leaf in leaves if isinstance(leaf, trio.Cancelled)]
            first = (cancelled or leaves)[0]
            raise first from first.__cause__
        raise


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
