"""Which port numbers the commands listen on, for TCP and for QUIC. Ports are bound here, and nothing is sent."""

from __future__ import annotations

import socket

import pytest

from neurogrid.cli.options.ports import places_on_port
from neurogrid.errors import ConfigurationError

HERE = "127.0.0.1"


def test_a_free_port_is_the_same_number_for_both() -> None:
    tcp, quic = places_on_port(HERE, 0, quic=True)
    port = tcp.rpartition("/")[2]
    assert tcp == f"/ip4/{HERE}/tcp/{port}"
    assert quic == f"/ip4/{HERE}/udp/{port}/quic-v1"
    assert port != "0"
    assert places_on_port(HERE, 0, quic=False) == (f"/ip4/{HERE}/tcp/0",)


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_port_of_which_one_half_is_taken(kind: socket.SocketKind) -> None:
    with socket.socket(socket.AF_INET, kind) as holder:
        holder.bind((HERE, 0))
        if kind is socket.SOCK_STREAM:
            holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigurationError) as caught:
            places_on_port(HERE, port, quic=True)
        is_udp = kind is socket.SOCK_DGRAM
        assert (f"/udp/{port}/quic-v1" in str(caught.value)) == is_udp
        assert ("--no-quic" in str(caught.value)) == is_udp
        if is_udp:
            assert places_on_port(HERE, port, quic=False) == (f"/ip4/{HERE}/tcp/{port}",)
