"""TXT records to addresses and back, and which of a stranger's addresses are believed."""

from __future__ import annotations

from ipaddress import IPv4Interface, IPv6Interface, ip_address

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from neurogrid.p2p.discovery.mdns.addresses import decode_text, encode_text, read_addresses
from neurogrid.p2p.discovery.mdns.interfaces import Interface
from neurogrid.p2p.discovery.mdns.limits import MAX_ADDRESSES, MAX_TEXT_BYTES
from tests.unit.wire_strategies import UNHURRIED

PEER = "12D3KooWDgEoZReqrtYxB12zCLLUbGiuJRVgbnyJrd5NRp2aQMNi"
OTHER = "12D3KooWBFJiJuzPME5bKSzc4wfjJswnceKjBxNtVxvmJYggbCU6"
OLD = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"  # of an RSA key
LINK = Interface(
    "eth0",
    2,
    (IPv4Interface("10.1.0.1/24"), IPv6Interface("fd00::1/64"), IPv6Interface("fe80::1/64")),
)


def full(place: str, peer_id: str = PEER) -> str:
    return f"{place}/p2p/{peer_id}"


def test_text_is_what_the_specification_says() -> None:
    address = full("/ip4/10.1.0.2/tcp/4001")
    string = f"dnsaddr={address}".encode()
    assert encode_text([address]) == bytes([len(string)]) + string
    assert encode_text([]) == b"\0"


@UNHURRIED
@given(st.lists(st.text("/abc0123456789.:", max_size=300), max_size=20))
def test_what_is_encoded_is_decoded(addresses: list[str]) -> None:
    text = encode_text(addresses)
    assert len(text) <= MAX_TEXT_BYTES
    decoded = decode_text(text)
    remaining = iter(addresses)
    assert all(address in remaining for address in decoded)  # in their order
    if sum(len(address) + 9 for address in addresses) <= MAX_TEXT_BYTES:
        assert decoded == [address for address in addresses if len(address) <= 247]


@UNHURRIED
@given(st.binary(max_size=2000))
@example(b"\xffdnsaddr=/ip4")
@example(b"\x0cdnsaddr=\x1b[2J")
@example(b"\x09DNSADDR=/\x03a=b")
def test_any_bytes_are_decoded_to_what_can_be_printed(text: bytes) -> None:
    assert all(value.isprintable() and value.isascii() for value in decode_text(text))


@pytest.mark.parametrize(
    ("announced", "believed"),
    [
        (full("/ip4/10.1.0.2/tcp/4001"), full("/ip4/10.1.0.2/tcp/4001")),
        (full("/ip4/10.1.0.2/udp/4001/quic-v1"), full("/ip4/10.1.0.2/udp/4001/quic-v1")),
        (full("/ip6/fd00:0::2/tcp/1"), full("/ip6/fd00::2/tcp/1")),
        (full("/ip4/10.1.0.2/tcp/4001", OLD), full("/ip4/10.1.0.2/tcp/4001", OLD)),
    ],
)
def test_addresses_on_the_link_are_believed(announced: str, believed: str) -> None:
    found = read_addresses(
        [announced, full("/ip4/127.0.0.1/tcp/4001", found_peer(announced))], LINK
    )
    assert (found.addresses, found.reason) == ((believed,), "")


def found_peer(address: str) -> str:
    return address.rpartition("/")[2]


@pytest.mark.parametrize(
    "place",
    [
        "/ip4/127.0.0.1/tcp/4001",
        "/ip4/0.0.0.0/tcp/4001",
        "/ip4/10.2.0.2/tcp/4001",
        "/ip4/8.8.8.8/tcp/53",
        "/ip4/224.0.0.251/udp/5353/quic-v1",
        "/ip6/::1/tcp/4001",
        "/ip6/2001:db8::1/tcp/4001",
        "/ip6/fe80::2/tcp/4001",
        "/ip6/10.1.0.2/tcp/4001",
        "/ip4/10.1.0.256/tcp/4001",
        "/dns4/example.org/tcp/4001",
        "/ip4/10.1.0.2",
        "",
        "nonsense",
    ],
)
def test_addresses_elsewhere_are_not(place: str) -> None:
    found = read_addresses([full(place)], LINK)
    assert found.addresses == ()
    assert found.reason == ("no route: none of its addresses is on eth0 (10.1.0.1, fd00::1)")


@pytest.mark.parametrize(
    "place",
    [
        "/ip4/10.1.0.2/tcp/4001/ws",
        "/ip4/10.1.0.2/udp/4001/webrtc-direct",
        "/ip4/10.1.0.2/udp/4001/quic",
        "/ip4/10.1.0.2/sctp/4001",
        f"/ip4/10.1.0.2/tcp/4001/p2p/{OTHER}/p2p-circuit",
        "/ip4/10.1.0.2/tcp/0",
        "/ip4/10.1.0.2/tcp/65536",
        "/ip4/10.1.0.2/tcp/-1",
        "/ip4/10.1.0.2/tcp/²",
    ],
)
def test_what_we_cannot_dial_is_said(place: str) -> None:
    found = read_addresses([full(place)], LINK)
    assert (found.peer_id, found.addresses) == (PEER, ())
    assert found.reason == f"no common transport: it announces {place}"


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        ([], "it announces no address"),
        (["/ip4/10.1.0.2/tcp/4001"], "it announces an address without a peer id"),
        ([full("/ip4/10.1.0.2/tcp/4001", "l0OI")], "it announces an address without a peer id"),
        ([full("/ip4/10.1.0.2/tcp/4001", PEER[:-3])], "it announces an address without a peer id"),
        ([full("/ip4/10.1.0.2/tcp/4001", "")], "it announces an address without a peer id"),
        (
            [full("/ip4/10.1.0.2/tcp/4001"), full("/ip4/10.1.0.2/tcp/4002", OTHER)],
            "it announces 2 peers under one name",
        ),
    ],
)
def test_what_names_no_peer_is_nobody(texts: list[str], reason: str) -> None:
    found = read_addresses(texts, LINK)
    assert (found.peer_id, found.addresses, found.reason) == ("", (), reason)


def test_only_so_many_addresses_are_read() -> None:
    texts = [full(f"/ip4/10.1.0.2/tcp/{port}") for port in range(1, 100)]
    assert read_addresses(texts, LINK).addresses == tuple(texts[:MAX_ADDRESSES])


_PARTS = st.sampled_from(
    ["ip4", "ip6", "tcp", "udp", "p2p", "quic-v1", "10.1.0.2", "fd00::2", "4001", PEER, OTHER, ""]
) | st.text(max_size=8)


@UNHURRIED
@given(st.lists(st.lists(_PARTS, max_size=10).map("/".join), max_size=4))
def test_any_text_is_read(texts: list[str]) -> None:
    found = read_addresses(texts, LINK)
    assert bool(found.addresses) != bool(found.reason)
    for address in found.addresses:
        parts = address.split("/")
        assert LINK.is_on_link(ip_address(parts[2]))
        assert parts[-2:] == ["p2p", found.peer_id]
