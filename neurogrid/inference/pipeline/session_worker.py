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

__all__ = ["Opened", "Prior", "Reached", "SessionWorker", "without_adapters", "without_images"]


@dataclass(frozen=True)
class Prior:
    """A session whose first tokens a new one begins with.

    Attributes:
        num_tokens: how many.
        stays_open: they are copied; otherwise it is over.
        stored: the name of what is on the workers' disks, which has no id; empty for a session that is open.
    """

    session_id: int
    num_tokens: int
    stays_open: bool
    stored: bytes = b""


@dataclass(frozen=True, slots=True)
class Opened:
    """A session that was opened.

    Attributes:
        length: tokens that it has already: those of the prior, or none.
        takes_cuts: whether its activations may begin before its end.
    """

    length: int = 0
    takes_cuts: bool = False


@dataclass(frozen=True, slots=True)
class Reached:
    """Progress of a session on a worker.

    Attributes:
        length: tokens that it has taken; 0 where that is not told.
        last_position: where the last activation began that it took; None where that is not told, or none came.
    """

    length: int = 0
    last_position: int | None = None

    def has_taken(self, position: int, num_tokens: int) -> bool:
        """Whether it has taken an activation of so many tokens at `position`."""
        if self.last_position is None:
            return self.length >= position + num_tokens
        return self.last_position >= position


def without_images(peer_id: str) -> PeerRefusedError:
    """The error of a worker that would take the tokens of images for text."""
    text = f"worker {peer_id} does not know where images are: it is of an older version, and needs to be updated"
    return PeerRefusedError(text, code=ErrorCode.NOT_SUPPORTED, text=text)


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
    async def open_session(self, wanted: SessionOpen) -> Opened:
        """Open a session.

        Raises:
            PeerRefusedError: also where the session was to have an adapter or images, and the worker does not know of
                those.
        """

    @abstractmethod
    async def close_session(self, session_id: int) -> None:
        """Close a session; its cache is freed."""

    async def store_session(self, session_id: int, name: bytes) -> bool:
        """Close a session, and have what it has written to disk first; whether that is there."""
        await self.close_session(session_id)
        return False

    @abstractmethod
    async def session_reached(self, session_id: int) -> Reached:
        """Ask the worker for its progress with a session, which it tells at any time."""
