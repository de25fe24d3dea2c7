"""The packets of multicast DNS: what ours say, what others' do, and that no bytes do harm."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

from hypothesis import given
from hypothesis import strategies as st
from zeroconf import (  # type: ignore[attr-defined]
    DNSIncoming,
    DNSOutgoing,
    DNSPointer,
    DNSText,
)

from neurogrid.p2p.discovery.mdns.limits import MAX_PACKET_BYTES
from neurogrid.p2p.discovery.mdns.packets import (
    SERVICES,
    Announcement,
    Query,
    decode_packet,
    encode_announcement,
    encode_directory,
    encode_goodbye,
    encode_query,
    host_name,
    instance_name,
)
from tests.unit.wire_strategies import BRIEF

P2P, NEUROGRID = SERVICES
NAME = "k2x" * 10 + "ab"
ONE_FRAME = 1472  # bytes: Ethernet, less the headers of IPv4 and UDP
PTR, TXT, SRV, A, AAAA = 12, 16, 33, 1, 28

ips = st.lists(st.ip_addresses(), max_size=20)
addresses = st.lists(
    st.builds(
        "/ip4/{}/tcp/{}/p2p/{}".format,
        st.ip_addresses(v=4),
        st.integers(1, 65535),
        st.just("x" * 52),
    ),
    min_size=1,
    max_size=20,
)


@BRIEF
@given(st.sampled_from(SERVICES), addresses, ips, st.integers(1, 4500))
def test_an_announcement_is_one_frame_and_is_read_again(
    service: str, texts: list[str], places: list[IPv4Address | IPv6Address], lifetime: int
) -> None:
    data = encode_announcement(service, NAME, texts, places, lifetime)
    assert len(data) <= ONE_FRAME
    packet = decode_packet(data)
    assert isinstance(packet, dict)
    ((name, announcement),) = packet.items()
    assert name == instance_name(NAME, service)
    assert (announcement.service, announcement.lifetime) == (service, lifetime)
    assert announcement.addresses
    remaining = iter(texts)
    assert all(text in remaining for text in announcement.addresses)  # in their order


def test_an_announcement_has_the_records_of_the_specification() -> None:
    data = encode_announcement(
        P2P,
        NAME,
        ["/ip4/10.1.0.2/tcp/4001/p2p/x"],
        [ip_address("10.1.0.2"), ip_address("fd00::2")],
        120,
    )
    incoming = DNSIncoming(data)
    assert (incoming.num_answers, incoming.num_additionals) == (1, 4)
    pointer, text, service, *hosts = incoming.answers()
    assert (pointer.name, pointer.type, pointer.alias) == (P2P, PTR, f"{NAME}.{P2P}")
    assert (text.name, text.type, text.unique) == (f"{NAME}.{P2P}", TXT, True)
    assert (service.type, service.port, service.server) == (SRV, 4001, host_name(NAME))
    assert [(host.name, host.type) for host in hosts] == [
        (host_name(NAME), A),
        (host_name(NAME), AAAA),
    ]


def test_a_goodbye_is_a_pointer_alone() -> None:
    data = encode_goodbye(P2P, NAME)
    assert [record.type for record in DNSIncoming(data).answers()] == [PTR]
    assert decode_packet(data) == {f"{NAME}.{P2P}": Announcement(P2P, 0)}


names = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=63)
known = st.lists(
    st.tuples(st.sampled_from(SERVICES), names | st.text(max_size=80), st.integers(0, 4500)),
    max_size=30,
)


@BRIEF
@given(known)
def test_a_query_is_one_frame_and_is_read_again(items: list[tuple[str, str, int]]) -> None:
    """Names that cannot be written as they were read are not listed as known."""
    listed = [(service, f"{name}.{service}", lifetime) for service, name, lifetime in items]
    data = encode_query(SERVICES, listed)
    assert len(data) <= ONE_FRAME
    assert DNSIncoming(data).questions[0].name == P2P
    packet = decode_packet(data)
    assert isinstance(packet, Query)
    assert packet.services == frozenset(SERVICES)
    assert set(packet.known.items()) <= {(name, lifetime) for _, name, lifetime in listed}


def test_who_asks_for_names_or_for_all_service_types_is_understood() -> None:
    directory = decode_packet(_question("_services._dns-sd._udp.local.", PTR))
    assert directory == Query(is_for_directory=True)
    name = f"{NAME}.{P2P}"
    assert decode_packet(_question(name.upper(), TXT)) == Query(names=frozenset({name}))
    assert [record.alias for record in DNSIncoming(encode_directory(120)).answers()] == list(
        SERVICES
    )


def _question(name: str, kind: int) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.strip(".").split("."))
    head = bytes([0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0])
    return head + labels + b"\0" + bytes([0, kind, 0, 1])


def test_several_records_and_instances_in_one_packet() -> None:
    """As js-libp2p does, a TXT record for each address, all among the answers."""
    out = DNSOutgoing(0x8400)
    for name in ("One", "two"):
        out.add_answer_at_time(DNSPointer(P2P, PTR, 1, 120, f"{name}.{P2P}"), 0)
        for address in ("/ip4/1", "/ip4/2"):
            string = b"dnsaddr=" + address.encode()
            text = DNSText(f"{name}.{P2P}", TXT, 1, 60, bytes([len(string)]) + string)
            out.add_answer_at_time(text, 0)
    assert decode_packet(out.packets()[0]) == {
        f"one.{P2P}": Announcement(P2P, 60, ["/ip4/1", "/ip4/2"]),
        f"two.{P2P}": Announcement(P2P, 60, ["/ip4/1", "/ip4/2"]),
    }


def test_what_is_not_ours_is_not_read() -> None:
    out = DNSOutgoing(0x8400)
    out.add_answer_at_time(
        DNSPointer("_ipp._tcp.local.", PTR, 1, 120, "Printer._ipp._tcp.local."), 0
    )
    assert decode_packet(out.packets()[0]) is None
    # A pointer from one type to an instance of another.
    out = DNSOutgoing(0x8400)
    out.add_answer_at_time(DNSPointer(NEUROGRID, PTR, 1, 120, f"{NAME}.{P2P}"), 0)
    assert decode_packet(out.packets()[0]) is None
    long = encode_goodbye(P2P, NAME)
    assert decode_packet(long + bytes(MAX_PACKET_BYTES)) is None


_WHOLE = [
    encode_announcement(P2P, NAME, ["/ip4/10.1.0.2/tcp/4001/p2p/x"], [ip_address("10.1.0.2")], 120),
    encode_query(SERVICES, [(P2P, f"{NAME}.{P2P}", 100)]),
    encode_goodbye(NEUROGRID, NAME),
    encode_directory(120),
]
_CHANGES = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), max_size=8)


@BRIEF
@given(st.sampled_from(_WHOLE), _CHANGES, st.integers(0, 400), st.binary(max_size=64))
def test_packets_that_are_changed_cut_or_longer_do_no_harm(
    whole: bytes, changes: list[tuple[int, int]], cut: int, more: bytes
) -> None:
    data = bytearray(whole)
    for position, value in changes:
        if position < len(data):
            data[position] = value
    for packet in (bytes(data), bytes(data[:cut]), bytes(data) + more, more):
        decoded = decode_packet(packet)
        if isinstance(decoded, dict):
            assert all(name == name.lower() for name in decoded)
