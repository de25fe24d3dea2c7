"""QUIC for py-libp2p: connections over UDP that bring their own security and streams.

Ours, because the stock transport loses what arrives while a reader is slow, and resets streams that are idle. The
packets are qh3's; what libp2p needs of TLS, flow control by what was read, and the driver for trio are here.

Three cores were weighed, by what both ends move on one core of one machine. aioquic 1.7, all Python: 36 MB/s. qh3 2.1,
all Rust: 193 MB/s, but it gives credit as soon as bytes are taken out of one queue for all streams, so that a stream
that nobody reads either holds up the others or takes memory without bound; nothing outside can change that. qh3 1.9,
a Python state machine over ciphers, packets and buffers in Rust: 86 MB/s, and what it lacks can be put in.

Names are imported when they are first asked for: the core with the first host that is opened, not with the library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neurogrid.p2p.quic.limits import QuicLimits
    from neurogrid.p2p.quic.preference import prefer_tcp
    from neurogrid.p2p.quic.quic_stream import QuicMuxedStream
    from neurogrid.p2p.quic.transport import QuicTransport

__all__ = ["QuicLimits", "QuicMuxedStream", "QuicTransport", "prefer_tcp"]

_HOMES = {
    "QuicLimits": "limits",
    "QuicMuxedStream": "quic_stream",
    "QuicTransport": "transport",
    "prefer_tcp": "preference",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
