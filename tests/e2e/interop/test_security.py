"""What secures our connections: a peer id is always proven, and a handshake that fails hurts nobody else."""

from __future__ import annotations

import pytest
import trio
from cryptography import x509
from libp2p import new_host
from libp2p.abc import ISecureTransport
from libp2p.custom_types import TProtocol
from libp2p.network.exceptions import SwarmException
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from libp2p.security.secio.transport import ID as SECIO
from libp2p.security.secio.transport import Transport as SecioTransport
from libp2p.security.tls.transport import PROTOCOL_ID as TLS
from libp2p.security.tls.transport import TLSTransport
from multiaddr import Multiaddr

from neurogrid.errors import PeerUnreachableError
from neurogrid.p2p import open_host
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.libp2p import security
from neurogrid.p2p.libp2p.security import AES_NOISE

DEADLINE = 120.0
LIBP2P_EXTENSION = "1.3.6.1.4.1.53594.1.1"


def stock_security(name: str, identity: Identity) -> dict[TProtocol, ISecureTransport]:
    if name == "plaintext":
        return {PLAINTEXT_PROTOCOL_ID: InsecureTransport(identity.key_pair)}
    return {TProtocol(SECIO): SecioTransport(identity.key_pair)}


def multistream(line: str) -> bytes:
    return bytes([len(line) + 1]) + line.encode() + b"\n"


def have_aes(monkeypatch: pytest.MonkeyPatch, *, quicker: bool) -> None:
    """Let hosts that are opened from now on find this processor quicker with AES-GCM, or slower."""
    monkeypatch.setattr(security, "is_aes_quicker", lambda: quicker)


@pytest.mark.parametrize(
    ("quicker", "offered"),
    [(False, ["/noise", "/tls/1.0.0"]), (True, [AES_NOISE, "/noise", "/tls/1.0.0"])],
)
def test_noise_is_offered_first_and_tls_last_and_nothing_else(
    quicker: bool, offered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    have_aes(monkeypatch, quicker=quicker)
    assert list(security.security_options(Identity.generate())) == offered


@pytest.mark.parametrize("dialler", [False, True], ids=["without-dials", "with-dials"])
@pytest.mark.parametrize("listener", [False, True], ids=["without-listens", "with-listens"])
def test_aes_is_for_two_that_are_quicker_with_it(
    dialler: bool, listener: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        with trio.fail_after(DEADLINE):
            have_aes(monkeypatch, quicker=listener)
            async with open_host() as host:
                have_aes(monkeypatch, quicker=dialler)
                async with open_host() as other:
                    await other.connect(host.addresses[0])
                    for end in (host, other):
                        [connection] = end.libp2p.get_network().get_connections()
                        chosen = connection.muxed_conn.negotiated_security_protocol
                        assert chosen == (AES_NOISE if dialler and listener else "/noise")

    trio.run(scenario)


def test_the_libp2p_extension_comes_first_in_the_certificate() -> None:
    transport = security.security_options(Identity.generate())[TLS]
    assert isinstance(transport, TLSTransport)
    certificate = x509.load_pem_x509_certificate(transport.get_certificate_pem().encode())
    assert certificate.extensions[0].oid.dotted_string == LIBP2P_EXTENSION
    assert not certificate.extensions[0].critical


@pytest.mark.parametrize("name", ["plaintext", "secio"])
def test_a_peer_that_proves_its_id_by_nothing_of_ours_is_not_let_in(name: str) -> None:
    async def scenario() -> None:
        with trio.fail_after(DEADLINE):
            async with open_host() as host:
                connected: list[str] = []
                host.on_connected(connected.append)
                identity = Identity.generate()
                stranger = new_host(
                    key_pair=identity.key_pair, sec_opt=stock_security(name, identity)
                )
                async with stranger.run([]):
                    with pytest.raises(SwarmException):
                        await stranger.connect(info_from_p2p_addr(Multiaddr(host.addresses[0])))
                    await stranger.close()
                assert connected == []

    trio.run(scenario)


@pytest.mark.parametrize("protocol_id", [AES_NOISE, "/noise", "/tls/1.0.0"])
@pytest.mark.parametrize(
    "junk",
    [bytes(range(256)), b"\x16\x03\x01\x02\x00" + bytes(512), b"\x00\x20" + bytes(32), b""],
    ids=["bytes", "TLS record", "Noise message", "end"],
)
def test_a_handshake_of_junk_ends_and_the_host_goes_on(
    protocol_id: str, junk: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_aes(monkeypatch, quicker=True)

    async def scenario() -> None:
        with trio.fail_after(DEADLINE):
            async with open_host() as host, open_host() as other:
                port = int(Multiaddr(host.addresses[0]).value_for_protocol("tcp") or 0)
                stream = await trio.open_tcp_stream("127.0.0.1", port)
                async with stream:
                    await stream.send_all(
                        multistream("/multistream/1.0.0") + multistream(protocol_id) + junk
                    )
                    await stream.send_eof()
                    try:
                        while await stream.receive_some():
                            pass
                    except trio.BrokenResourceError:
                        pass  # it hung up before it had read all: as good an end
                assert await other.connect(host.addresses[0]) == host.peer_id

    trio.run(scenario)


def test_a_server_whose_tls_fails_is_unreachable() -> None:
    async def scenario() -> None:
        async def answer(stream: trio.SocketStream) -> None:
            """Agree to TLS, then speak something else."""
            async with stream:
                received = b""
                accepted = multistream("/multistream/1.0.0")
                await stream.send_all(accepted)
                while multistream("/tls/1.0.0") not in received:
                    received += await stream.receive_some()
                    for refused in (multistream(AES_NOISE), multistream("/noise")):
                        if refused in received:
                            received = received.replace(refused, b"")
                            await stream.send_all(multistream("na"))
                await stream.send_all(multistream("/tls/1.0.0") + bytes(range(256)))
                while await stream.receive_some():
                    pass

        with trio.fail_after(DEADLINE):
            async with open_host() as host, trio.open_nursery() as nursery:
                listeners = await nursery.start(trio.serve_tcp, answer, 0)
                port = listeners[0].socket.getsockname()[1]
                peer_id = Identity.generate().peer_id
                with pytest.raises(PeerUnreachableError, match="handshake"):
                    await host.connect(f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_id}")
                nursery.cancel_scope.cancel()

    trio.run(scenario)
