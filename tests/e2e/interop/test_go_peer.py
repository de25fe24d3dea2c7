"""go-libp2p speaks `/neurogrid/tensor/1.0.0` with us, over Noise and over TLS."""

from __future__ import annotations

from contextlib import AbstractContextManager

from tests.e2e.interop.foreign_peer import ForeignProcess
from tests.e2e.interop.go_peer import start_go_peer
from tests.e2e.interop.suite import PeerSuite


class TestGoPeer(PeerSuite):
    """The daemon carries a stream to a socket and back by two copies, and whichever fails resets the stream.

    When we end the stream, it closes the socket once every byte is on it, and the other copy fails on the
    closed socket: what it receives is whole, but our `send`, which waits for the receiver's end, always sees a
    reset. When its client ends first, it closes both ways of the stream, one after the other, and the
    other copy may fail in between: then our side may see a reset instead of the end. A Go program that reads
    and writes its streams itself does neither.
    """

    confirms = False

    def start_peer(self, security: str) -> AbstractContextManager[ForeignProcess]:
        return start_go_peer(security)
