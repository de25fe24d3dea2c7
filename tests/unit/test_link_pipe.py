"""What a socket is told before frames go through it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from neurogrid.p2p.link.pipe import UNPACED, leave_unpaced_within_machine

pytestmark = pytest.mark.skipif(
    not hasattr(socket, "TCP_CONGESTION"), reason="no congestion control to choose"
)


@contextmanager
def connected(source: str) -> Iterator[socket.socket]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), source_address=(source, 0)) as sock,
    ):
        yield sock


def control(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def test_a_connection_within_this_machine_is_not_paced() -> None:
    with connected("127.0.0.1") as sock:
        leave_unpaced_within_machine(sock)
        assert control(sock) == UNPACED


def test_a_connection_between_two_addresses_is_left_as_the_system_has_it() -> None:
    with connected("127.0.0.2") as sock:
        before = control(sock)
        leave_unpaced_within_machine(sock)
        assert control(sock) == before


def test_a_socket_that_is_gone_is_no_error_here() -> None:
    with connected("127.0.0.1") as sock:
        pass
    leave_unpaced_within_machine(sock)
