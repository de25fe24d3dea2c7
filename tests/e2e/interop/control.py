"""What a test asks of a foreign peer, whatever the peer's language: sans-I/O.

A foreign peer is a process with a control socket. A connection to it carries requests and their answers; after
the request for a stream it carries that stream. For inbound streams the process connects to a socket of ours,
says in a first message what it brings, and then carries the bytes. The two languages differ only in how these
few messages are written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Answer", "Control", "RequestFailedError", "StreamStart"]


class RequestFailedError(Exception):
    """The foreign peer could not do what it was asked to, and says why."""


@dataclass(frozen=True)
class StreamStart:
    """What is said before the bytes of a stream.

    Attributes:
        protocol: what was negotiated.
        name: what a request to reset the stream calls it; None where there is no such request.
    """

    protocol: str
    name: str | None = None


@dataclass(frozen=True)
class Answer:
    """What a foreign peer answers; which fields are set depends on the request.

    Attributes:
        peer_id: its peer id (base58).
        addresses: multiaddrs that it listens on, without their `/p2p/` part.
        peers: the peer ids that it has connections to.
        stream: the stream that was opened.
    """

    peer_id: str = ""
    addresses: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    stream: StreamStart | None = None


class Control(ABC):
    """Encodes requests, decodes answers."""

    @abstractmethod
    def identify(self) -> bytes:
        """Ask who the peer is and where it listens."""

    @abstractmethod
    def connect(self, peer_id: str, address: str) -> bytes:
        """Ask it to dial a multiaddr (without its `/p2p/` part)."""

    @abstractmethod
    def list_peers(self) -> bytes:
        """Ask which peers it is connected to."""

    @abstractmethod
    def disconnect(self, peer_id: str) -> bytes:
        """Ask it to close all its connections to a peer."""

    @abstractmethod
    def open_stream(self, peer_id: str, protocols: Sequence[str]) -> bytes:
        """Ask for a stream to a connected peer: the connection is the stream from then on."""

    @abstractmethod
    def accept_streams(self, path: str, protocols: Sequence[str]) -> bytes:
        """Ask it to bring inbound streams of these protocols to the Unix socket at `path`."""

    @abstractmethod
    def take_answer(self, buffer: bytearray) -> Answer | None:
        """Take the answer to a request off `buffer`; None while it is incomplete.

        Raises:
            RequestFailedError: the peer says that it could not.
        """

    @abstractmethod
    def take_stream_start(self, buffer: bytearray) -> StreamStart | None:
        """Take what stands before the bytes of an inbound stream; None while it is incomplete."""

    def reset_stream(self, name: str, after_bytes: int) -> bytes:
        """Ask it to reset a stream, once `after_bytes` bytes of ours are on it."""
        raise NotImplementedError("there is no such request")
