"""Ports that tests use by number."""

from __future__ import annotations

import random
import socket

__all__ = ["free_port"]

# Below those that Linux gives to whoever asks for any, which are also those that connections go out from.
PORTS = range(20_000, 32_000)

# Not the one that hypothesis seeds.
_draw = random.SystemRandom()


def free_port(kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    """A port of 127.0.0.1 that nobody has, and that nobody gets who does not ask for it by number."""
    while True:
        port = _draw.choice(PORTS)
        with socket.socket(socket.AF_INET, kind) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
