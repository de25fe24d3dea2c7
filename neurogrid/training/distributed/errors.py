"""The error of a process group, which scripts catch as they catch that of any other backend."""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed import DistBackendError

from neurogrid.errors import TransportError

__all__ = ["RankError"]


class RankError(TransportError, DistBackendError):
    """A rank did not do its part: it is gone, hangs, refuses, or sent what does not belong there.

    Attributes:
        ranks: which, in their group.
    """

    # The process group is of no more use; another one is made by all ranks together.
    retryable = False

    def __init__(self, message: str, *, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
