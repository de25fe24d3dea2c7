"""What the link relies on in py-libp2p, by name: when the pinned version moves, this says what has changed.

Each test names the place of ours that has to follow.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import libp2p
import pytest
from libp2p.abc import IMuxedConn, IMuxedStream, ISecureConn, ISecureTransport
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.stream.net_stream import NetStream
from libp2p.network.swarm import Swarm
from libp2p.protocol_muxer.generic_selector import GenericMultistreamSelector
from libp2p.security.base_session import BaseSession
from libp2p.security.noise.io import BaseNoiseMsgReadWriter, NoiseTransportReadWriter
from libp2p.security.noise.patterns import PatternXX
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL_ID
from libp2p.security.noise.transport import Transport
from libp2p.security.secure_session import SecureSession
from libp2p.security.security_multistream import SecurityMultistream
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.transport.upgrader import TransportUpgrader

from neurogrid.p2p.link import LinkStream, install_link
from neurogrid.p2p.link.connection import LinkConnection
from neurogrid.p2p.link.session import NoiseSession, NoiseTransport
from tests.unit.test_link_noise import handshake

VERSION = "0.8.1"


def parameters(function: Callable[..., object]) -> list[str]:
    return list(inspect.signature(function).parameters)


def source(thing: object) -> str:
    return inspect.getsource(thing)  # type: ignore[arg-type]


def test_the_version_is_the_one_that_was_read() -> None:
    pinned = re.search(
        r'"libp2p==([\d.]+)"', (Path(__file__).parents[2] / "pyproject.toml").read_text()
    )
    assert pinned is not None
    assert pinned[1] == VERSION
    assert importlib.metadata.version("libp2p") == VERSION, (
        "py-libp2p moved: read what this module names anew, then change VERSION"
    )


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (Transport.secure_inbound, ["self", "conn"]),
        (Transport.secure_outbound, ["self", "conn", "peer_id"]),
        (ISecureTransport.secure_inbound, ["self", "conn"]),
        (ISecureTransport.secure_outbound, ["self", "conn", "peer_id"]),
        (SecurityMultistream.__init__, ["self", "secure_transports_by_protocol"]),
        (
            MuxerMultistream.__init__,
            ["self", "muxer_transports_by_protocol", "negotiate_timeout"],
        ),
        (MuxerMultistream.new_conn, ["self", "conn", "peer_id"]),
        (MuxerMultistream.add_transport, ["self", "protocol", "transport"]),
        (
            MuxerMultistream._annotate_connection,
            ["muxed_conn", "secured_conn", "protocol"],
        ),
        (
            GenericMultistreamSelector.select,
            ["self", "conn", "is_initiator", "negotiate_timeout"],
        ),
        (RawConnection.__init__, ["self", "stream", "initiator", "connection_type", "addresses"]),
        (NetStream.__init__, ["self", "muxed_stream", "swarm_conn", "metric_send_channel"]),
        (Swarm.upgrade_inbound_raw_conn, ["self", "raw_conn", "maddr"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", None),
)
def test_signatures(function: Callable[..., object], expected: list[str]) -> None:
    """For link/install.py, link/session.py and inbound.py."""
    assert parameters(function) == expected


def test_our_classes_implement_the_interfaces() -> None:
    """For link/connection.py, link/stream.py and link/session.py."""
    for ours, theirs in (
        (LinkConnection, IMuxedConn),
        (LinkStream, IMuxedStream),
        (NoiseSession, ISecureConn),
        (NoiseTransport, ISecureTransport),
    ):
        assert issubclass(ours, theirs)
        assert ours.__abstractmethods__ == frozenset()


def test_a_finished_handshake_has_two_cipher_states() -> None:
    """For `NoiseSession.__init__`: keys and counters of both directions."""
    one, other = handshake()
    ours = one.noise_protocol.cipher_state_encrypt
    theirs = other.noise_protocol.cipher_state_decrypt
    assert ours.k == theirs.k
    assert (len(ours.k), ours.n, theirs.n) == (32, 0, 0)


def test_the_noise_session_is_where_we_look_for_it() -> None:
    """For `NoiseSession.__init__`: SecureSession.conn, and in it noise_state."""
    made = source(PatternXX.handshake_inbound) + source(PatternXX.handshake_outbound)
    assert made.count("NoiseTransportReadWriter(conn, noise_state)") == 2
    assert made.count("return SecureSession(") == 2
    assert "self.noise_state = noise_state" in source(BaseNoiseMsgReadWriter.__init__)
    assert issubclass(NoiseTransportReadWriter, BaseNoiseMsgReadWriter)
    assert "self.conn = conn" in source(SecureSession.__init__)
    assert PatternXX.handshake_inbound.__module__ == "libp2p.security.noise.patterns"
    for name in ("local_peer", "local_private_key", "remote_peer", "remote_permanent_pubkey"):
        assert f"self.{name} = {name}" in source(BaseSession.__init__)


def test_the_handshake_reads_no_byte_too_many() -> None:
    """For `NoiseSession`: what follows the handshake must still be in the socket."""
    assert "read_exactly(self.read_write_closer, length)" in source(
        libp2p.io.msgio.BaseMsgReadWriter.read_msg
    )


def test_the_socket_is_where_we_look_for_it() -> None:
    """For `NoiseSession.detach_socket`: RawConnection.stream.stream.socket, and the address is remembered."""
    assert "self.stream = stream" in source(RawConnection.__init__)
    assert "self.stream = stream" in source(TrioTCPStream.__init__)
    assert "self._cached_remote_address = result" in source(TrioTCPStream.get_remote_address)


def test_the_muxer_is_chosen_where_we_replace_it() -> None:
    """For link/install.py: the upgrader's two tables, and that `new_conn` makes the connection."""
    made = source(TransportUpgrader.__init__)
    assert "self.security_multistream = SecurityMultistream(" in made
    assert "self.muxer_multistream = MuxerMultistream(" in made
    assert "self.muxer_multistream.new_conn(conn, peer_id)" in source(
        TransportUpgrader.upgrade_connection
    )
    assert "self.negotiate_timeout = negotiate_timeout" in source(MuxerMultistream.__init__)


def test_the_swarm_asks_for_no_more_than_we_have() -> None:
    """For link/connection.py: what the swarm touches of a muxed connection."""
    touched = set(
        re.findall(
            r"muxed_conn\.([a-z_]+)",
            source(SwarmConn)
            + source(Swarm.add_conn)
            + source(Swarm.upgrade_outbound_raw_conn)
            + source(Swarm.upgrade_inbound_raw_conn),
        )
    )
    # Set by the swarm on the connection, or asked for with hasattr().
    theirs = {"set_resource_scope"}
    connection = set(dir(LinkConnection)) | {"event_started", "peer_id"}
    assert touched - theirs <= connection


def test_a_stream_is_finished_by_a_method_of_its_own() -> None:
    """For `LinkStream.close_write`: `NetStream.close_write` must not call `close`, which drops what comes."""
    assert 'getattr(self.muxed_stream, "close_write", None)' in source(NetStream.close_write)


def test_installing_replaces_both_and_keeps_the_order() -> None:
    host = libp2p.new_host(key_pair=create_new_key_pair())
    upgrader = host.get_network().upgrader
    before = list(upgrader.security_multistream.transports)
    muxers = list(upgrader.muxer_multistream.transports)
    install_link(host.get_network())
    assert list(upgrader.security_multistream.transports) == before
    assert isinstance(upgrader.security_multistream.transports[NOISE_PROTOCOL_ID], NoiseTransport)
    assert list(upgrader.muxer_multistream.transports) == muxers
    assert type(upgrader.muxer_multistream) is not MuxerMultistream
