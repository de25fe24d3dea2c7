"""Handshakes of QUIC, without sockets: who is let in, and who is not."""

from __future__ import annotations

from typing import Any

import pytest
from libp2p.peer.id import ID
from qh3 import tls

from neurogrid.p2p import Identity
from neurogrid.p2p.quic.core import Configurations, Core
from neurogrid.p2p.quic.retry import RetryTokens
from tests.unit.quic_pair import LIMITS, Pair


def test_both_sides_learn_who_is_there() -> None:
    pair = Pair()
    pair.run(20)
    assert pair.client.is_confirmed
    assert pair.server.is_confirmed
    assert pair.client.peer_id == ID.from_base58(pair.far.peer_id)
    assert pair.server.peer_id == ID.from_base58(pair.near.peer_id)


def test_the_first_flight_fits_one_datagram() -> None:
    pair = Pair()
    assert len(pair.client.produce(0.0)) == 1


def test_another_peer_than_the_one_dialled_is_refused() -> None:
    pair = Pair(expected=ID.from_base58(Identity.generate().peer_id))
    pair.run(20)
    assert "pubkey" in pair.client.reason
    assert not pair.client.is_confirmed
    assert pair.server.is_over
    assert not pair.server.is_confirmed


def test_what_a_peer_says_at_the_end_is_one_line_that_is_safe_to_print() -> None:
    pair = Pair()
    pair.run(20)
    pair.client.close(reason_phrase="gone\n\x1b[2Jadmitted" + "x" * 1000)
    pair.run(20)
    assert pair.server.is_over
    assert pair.server.reason.startswith("gone ")
    assert pair.server.reason.isprintable()
    assert len(pair.server.reason) == 200


class WithoutCertificate(Core):
    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        self.tls.certificate = None
        self.tls.certificate_private_key = None


class WithTwoCertificates(Core):
    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        self.tls.certificate_chain = [self.tls.certificate]


class WithStolenCertificate(Core):
    """It shows the certificate of somebody else, whose key it does not have."""

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        other = Configurations(Identity.generate().key_pair, LIMITS)
        self.tls.certificate = other.get(is_client=True, address="127.0.0.1").certificate


class SkipsItsProof(Core):
    """It shows a certificate, and leaves out that it has its key."""

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        self.tls.certificate_private_key = None


class OtherProtocol(Core):
    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        self.tls._alpn_protocols = ["h3"]


@pytest.mark.parametrize(
    ("client", "reason"),
    [
        (WithoutCertificate, "0 certificates"),
        (WithTwoCertificates, "2 certificates"),
        (WithStolenCertificate, "signature is wrong"),
        (SkipsItsProof, "in place of"),
        (OtherProtocol, "ALPN"),
    ],
)
def test_who_does_not_prove_who_it_is_is_refused(client: type[Core], reason: str) -> None:
    pair = Pair(core=client)
    pair.run(20)
    assert reason in pair.server.reason
    assert not pair.server.is_confirmed
    assert not pair.client.is_confirmed
    assert pair.client.is_over


def test_a_message_that_is_too_long_is_refused_before_it_is_gathered() -> None:
    pair = Pair()
    pair.run(5)
    context: Any = pair.server.tls
    context.state = tls.State.SERVER_EXPECT_FINISHED
    with pytest.raises(tls.AlertDecodeError, match="too long"):
        context.handle_message(b"\x0b\xff\xff\xff", {}, tls.Epoch.HANDSHAKE)


def test_garbage_ends_nothing_but_itself() -> None:
    pair = Pair()
    pair.run(20)
    for datagram in (b"", b"\x00", b"\x40" + bytes(60), b"\xc0" + bytes(1300), bytes(range(256))):
        pair.server.take([datagram], ("127.0.0.1", 3), pair.now)
        pair.client.take([datagram], ("127.0.0.1", 3), pair.now)
    pair.run(20)
    assert not pair.server.is_over
    assert not pair.client.is_over


# Retry


ADDRESS = ("192.0.2.1", 4001)


def test_a_token_is_taken_back() -> None:
    tokens = RetryTokens(10.0)
    token = tokens.make(ADDRESS, b"original", b"retry123", 5.0)
    assert tokens.take(token, ADDRESS, 5.0) == (b"original", b"retry123")
    assert tokens.take(token, ADDRESS, 15.0) == (b"original", b"retry123")


@pytest.mark.parametrize(
    ("address", "now"), [(("192.0.2.2", 4001), 5.0), (("192.0.2.1", 4002), 5.0), (ADDRESS, 15.1)]
)
def test_a_token_for_another_or_of_another_time_is_not(
    address: tuple[str, int], now: float
) -> None:
    tokens = RetryTokens(10.0)
    assert tokens.take(tokens.make(ADDRESS, b"original", b"retry123", 5.0), address, now) is None


@pytest.mark.parametrize("token", [b"", b"x", bytes(40), bytes(41), bytes(200)])
def test_a_token_that_is_not_ours_is_not_taken(token: bytes) -> None:
    tokens = RetryTokens(10.0)
    assert tokens.take(token, ADDRESS, 0.0) is None
    good = tokens.make(ADDRESS, b"original", b"retry123", 0.0)
    for at in range(len(good)):
        changed = bytearray(good)
        changed[at] ^= 1
        assert tokens.take(bytes(changed), ADDRESS, 0.0) is None
    assert RetryTokens(10.0).take(good, ADDRESS, 0.0) is None
