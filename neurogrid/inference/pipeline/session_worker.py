"""A worker that sessions go through, seen from its coordinator, one class a version.

Source: protocol_spec/sessions.md.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from neurogrid.errors import PeerRefusedError
from neurogrid.fleet.remote_worker import RemoteWorker
from neurogrid.p2p.wire import ErrorCode, SessionOpen

__all__ = ["Prior", "SessionWorker", "without_adapters"]


@dataclass(frozen=True)
class Prior:
    """A session whose first tokens a new one begins with.

    Attributes:
        num_tokens: how many.
        stays_open: they are copied; otherwise it is over.
    """

    session_id: int
    num_tokens: int
    stays_open: bool


def without_adapters(peer_id: str) -> PeerRefusedError:
    """The error of a worker that would answer with the base model where an adapter was asked for."""
    text = f"worker {peer_id} does not know of adapters: it is of an older version, and needs to be updated"
    return PeerRefusedError(text, code=ErrorCode.NOT_SUPPORTED, text=text)


class SessionWorker(RemoteWorker):
    """A worker of a coordinator. Its methods raise TransportError or PeerRefusedError.

    Attributes:
        takes_priors: whether a session may begin with the tokens of another.
        takes_chunks: whether a session that has begun takes several tokens at once.
    """

    takes_priors: ClassVar[bool] = False
    takes_chunks: ClassVar[bool] = False

    @abstractmethod
    async def open_session(self, wanted: SessionOpen) -> int:
        """Open a session.

        Returns:
            Tokens that it has already: those of the prior, or none.

        Raises:
            PeerRefusedError: also where the session was to have an adapter, and the worker does not know of those.
        """

    @abstractmethod
    async def close_session(self, session_id: int) -> None:
        """Close a session; its cache is freed."""

    @abstractmethod
    async def session_length(self, session_id: int) -> int:
        """Tokens that it has taken of a session, told at any time; 0 from one that cannot tell."""
