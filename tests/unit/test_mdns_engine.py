"""The protocol of multicast DNS on a LAN without sockets, by a clock that the test turns."""

from __future__ import annotations

from ipaddress import ip_address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

# It exports both, and does not name them in its `__all__`.
from zeroconf import DNSOutgoing, DNSPointer  # type: ignore[attr-defined]

from neurogrid.p2p.discovery.mdns.limits import MAX_ENTRIES, MAX_ENTRIES_FROM_SOURCE
from neurogrid.p2p.discovery.mdns.packets import (
    SERVICES,
    Query,
    decode_packet,
    encode_announcement,
    encode_goodbye,
    encode_query,
    instance_name,
)
from neurogrid.p2p.hosts.identity import Identity
from tests.unit.mdns_lan import INDEX, Lan, Node, interface


def all_know_all(lan: Lan) -> bool:
    return all(
        node.known == {other.peer_id: other.addresses for other in lan.nodes if other is not node}
        for node in lan.nodes
    )


def announcement(node: Node, *, name: str = "stranger", service: str = SERVICES[0]) -> bytes:
    return encode_announcement(service, name, node.addresses, [ip_address(node.ip)], 120)


def test_hosts_find_each_other_at_once() -> None:
    lan = Lan()
    for _ in range(4):
        lan.add()
    lan.run(1.0)
    assert all_know_all(lan)
    assert lan.nodes[0].outcomes["ask on eth0 (10.0.0.1)"] == "3 peers there"


def test_a_host_that_comes_later_is_found_and_finds() -> None:
    lan = Lan()
    lan.add()
    lan.run(500.0)
    lan.add()
    lan.run(1.0)
    assert all_know_all(lan)


def test_one_that_leaves_is_lost_at_once() -> None:
    lan = Lan()
    there, leaver = lan.add(), lan.add()
    lan.run(10.0)
    lan.remove(leaver, says_goodbye=True)
    lan.run(0.01)
    assert there.known == {}
    assert there.sightings[-1].is_lost
    assert there.outcomes[f"peer {leaver.peer_id} at 10.0.0.2"] == "said goodbye"


def test_one_that_is_killed_is_lost_when_it_expires() -> None:
    lan = Lan()
    there, killed = lan.add(), lan.add()
    lan.run(200.0)
    lan.remove(killed)
    lan.run(20.0)
    assert killed.peer_id in there.known
    lan.run(101.0)
    assert there.known == {}
    assert "expired" in there.outcomes[f"peer {killed.peer_id} at 10.0.0.2"]


def test_a_shorter_time_counts_though_the_address_is_not_said_again() -> None:
    lan = Lan()
    there, sayer = lan.add(), lan.add()
    lan.remove(sayer)
    lan.inject(there, sayer.ip, announcement(sayer))
    lan.run(1.0)
    out = DNSOutgoing(0x8400)
    name = instance_name("stranger", SERVICES[0])
    out.add_answer_at_time(DNSPointer(SERVICES[0], 12, 1, 5, name), 0)
    lan.inject(there, sayer.ip, out.packets()[0])
    lan.run(4.9)
    assert set(there.known) == {sayer.peer_id}
    lan.run(0.2)
    assert there.known == {}


@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_nobody_is_lost_who_is_there(loss: float) -> None:
    """An hour, also where every fifth packet gets lost."""
    lan = Lan(loss=loss)
    for _ in range(4):
        lan.add()
    lan.run(60.0)
    assert all_know_all(lan)
    lan.run(3600.0)
    assert all_know_all(lan)
    assert not any(sighting.is_lost for node in lan.nodes for sighting in node.sightings)


def test_at_rest_the_network_is_quiet() -> None:
    """One host asks for all, and only whom it is about to forget answers."""
    lan = Lan()
    for _ in range(12):
        lan.add()
    lan.run(300.0)
    lan.sent.clear()
    lan.run(300.0)
    num_bytes = sum(len(data) for _, _, data in lan.sent)
    assert all_know_all(lan)
    assert num_bytes / 5 < 12 * 1000, f"{num_bytes / 5:.0f} B a minute of 12 hosts"
    assert max(len(data) for _, _, data in lan.sent) < 1460


def test_an_unplugged_host_comes_back() -> None:
    lan = Lan()
    there, away = lan.add(), lan.add()
    lan.run(30.0)
    away.is_plugged = False
    lan.run(130.0)
    assert not there.known
    assert not away.known
    away.is_plugged = True
    lan.run(61.0 * 1.1)
    assert all_know_all(lan)


def test_what_a_restarted_host_said_before_is_forgotten() -> None:
    lan = Lan()
    there, killed = lan.add(), lan.add(port=4001)
    lan.run(5.0)
    lan.remove(killed)
    again = lan.add(peer_id=killed.peer_id, host=2, port=4002)
    lan.run(1.0)
    assert there.known == {again.peer_id: again.addresses}


def test_an_interface_that_goes_takes_its_peers_along() -> None:
    lan = Lan()
    here, other = lan.add(), lan.add()
    lan.run(5.0)
    here.engine.drop_link(INDEX)
    assert here.known == {}
    assert "gone" in here.outcomes[f"peer {other.peer_id} at 10.0.0.2"]
    here.engine.set_link(here.interface, here.addresses, lan.now)
    lan.run(1.0)
    assert all_know_all(lan)


def test_new_addresses_are_announced_at_once() -> None:
    lan = Lan()
    there, here = lan.add(), lan.add()
    lan.run(100.0)
    addresses = (f"/ip4/10.0.0.2/tcp/5000/p2p/{here.peer_id}",)
    here.engine.set_link(here.interface, addresses, lan.now)
    lan.run(0.1)
    assert there.known == {here.peer_id: addresses}


# What others may do to us


def test_nobody_says_goodbye_for_another() -> None:
    lan = Lan()
    there, victim, _ = lan.add(), lan.add(), lan.add()
    lan.run(5.0)
    name = victim.engine.goodbye()[0].data
    lan.inject(there, "10.0.0.3", name)
    lan.run(1.0)
    assert victim.peer_id in there.known


def test_a_packet_from_elsewhere_is_ignored() -> None:
    lan = Lan()
    there = lan.add()
    stranger = Lan().add(host=77)
    lan.inject(there, "192.168.1.77", announcement(stranger))
    lan.run(1.0)
    assert there.known == {}
    assert "it is not on eth0" in there.outcomes["packets on eth0"]


def test_our_own_peer_id_is_nobody_else() -> None:
    lan = Lan()
    there = lan.add()
    lan.inject(there, "10.0.0.9", announcement(there))
    lan.run(1.0)
    assert there.sightings == []


def test_a_peer_that_nobody_can_dial_is_named() -> None:
    lan = Lan()
    there = lan.add()
    peer_id = Identity.generate().peer_id
    data = encode_announcement(
        SERVICES[0], "other", [f"/ip4/10.0.0.9/tcp/80/ws/p2p/{peer_id}"], [], 120
    )
    lan.inject(there, "10.0.0.9", data)
    lan.run(1.0)
    assert there.known == {}
    assert there.outcomes[f"peer {peer_id} at 10.0.0.9"] == (
        "no common transport: it announces /ip4/10.0.0.9/tcp/80/ws"
    )


def test_one_machine_cannot_fill_the_table() -> None:
    lan = Lan()
    there = lan.add()
    flooder = Lan().add(host=200)
    for number in range(MAX_ENTRIES_FROM_SOURCE + 50):
        peer_id = Identity.generate().peer_id
        address = f"/ip4/{flooder.ip}/tcp/4001/p2p/{peer_id}"
        data = encode_announcement(SERVICES[0], f"n{number}", [address], [], 120)
        there.engine.receive(data, flooder.ip, INDEX, lan.now)
    assert len(there.known) == MAX_ENTRIES_FROM_SOURCE < MAX_ENTRIES
    assert "too many peers" in there.outcomes["packets on eth0"]
    friend = lan.add()
    lan.run(1.0)
    assert friend.peer_id in there.known


def test_a_flood_of_questions_is_answered_once_a_second() -> None:
    lan = Lan()
    there = lan.add()
    lan.run(100.0)
    lan.sent.clear()
    for _ in range(1000):
        lan.inject(there, "10.0.0.9", encode_query(SERVICES))
        lan.run(0.01)
    assert len(lan.sent) <= 2 * (10 + 2)


def test_who_is_known_need_not_answer() -> None:
    lan = Lan()
    there = lan.add()
    lan.run(100.0)
    lan.sent.clear()
    goodbye = decode_packet(there.engine.goodbye()[0].data)
    assert isinstance(goodbye, dict)
    (name,) = goodbye
    lan.inject(there, "10.0.0.9", encode_query(SERVICES[:1], [(SERVICES[0], name, 100)]))
    lan.run(0.5)
    assert not [1 for _, _, data in lan.sent if not isinstance(decode_packet(data), Query)]
    lan.inject(there, "10.0.0.9", encode_query(SERVICES[:1], [(SERVICES[0], name, 10)]))
    lan.run(0.5)
    assert [1 for _, _, data in lan.sent if not isinstance(decode_packet(data), Query)]


_NODE = Lan().add(host=9)
_PACKETS = [
    announcement(_NODE),
    announcement(_NODE, service=SERVICES[1]),
    encode_query(SERVICES, [(SERVICES[0], f"stranger.{SERVICES[0]}", 100)]),
    encode_goodbye(SERVICES[0], "stranger"),
]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_whatever_comes_the_engine_goes_on(data: st.DataObject) -> None:
    """Packets that are whole, changed or cut, from anywhere, in any order."""
    lan = Lan()
    there = lan.add()
    for _ in range(data.draw(st.integers(1, 8))):
        packet = bytearray(data.draw(st.sampled_from(_PACKETS) | st.binary(max_size=64)))
        changes = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4)
        for position, value in data.draw(changes):
            if position < len(packet):
                packet[position] = value
        cut = data.draw(st.integers(0, len(packet)))
        source = data.draw(st.sampled_from(["10.0.0.9", "10.0.0.8", "8.8.8.8", "fe80::1"]))
        lan.inject(there, source, bytes(packet[:cut] if data.draw(st.booleans()) else packet))
        lan.run(data.draw(st.floats(0.0, 150.0)))
    for addresses in there.known.values():
        for address in addresses:
            assert interface(1).is_on_link(ip_address(address.split("/")[2]))
    friend = lan.add(host=5)
    lan.run(130.0)
    assert there.known[friend.peer_id] == friend.addresses
