"""Multicast DNS with real processes, each in a network namespace of its own, on LANs that exist for one test."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from neurogrid.p2p.hosts.identity import Identity
from tests.e2e.namespaces.netns import Machine, Network, needs_namespaces, network
from tests.e2e.namespaces.peer_process import PeerProcess, start_peer

__all__ = ["needs_namespaces"]

pytestmark = pytest.mark.usefixtures("needs_namespaces")

HERE = Path(__file__).parent
JS = HERE / "interop" / "js"
# Seconds after which a killed peer is lost, in tests that wait for it.
EXPIRY = 5
# Seconds between the last host being ready and all knowing all: what the project promises.
PROMISED = 3.0
NUM_TRIES = 3


def place(address: str) -> str:
    return address.partition("/p2p/")[0]


def test_four_hosts_on_one_lan_find_each_other(net: Network) -> None:
    """One that leaves is lost at once, one that is killed when it expires, and the others stay."""
    peers = find_each_other_in_time(net)
    for peer in peers:
        for other in peers:
            # All of its real addresses, and neither loopback nor 0.0.0.0.
            if other is not peer:
                assert sorted(peer.found[other.peer_id]) == sorted(other.addresses)
    watcher, dialler, leaver, killed = peers
    assert not any("/127.0.0.1/" in address for peer in peers for address in peer.addresses)
    for address in dialler.found[watcher.peer_id]:
        assert dialler.ask(f"dial {address}") == {"dialled": True}

    leaver.leave()
    watcher.wait_lost(leaver)
    assert "said goodbye" in line_about(watcher, leaver)
    killed.kill()
    watcher.wait_lost(killed)
    assert "expired" in line_about(watcher, killed)
    watcher.wait_until(lambda: watcher.found.keys() == {dialler.peer_id})
    tcp = next(address for address in killed.addresses if "/tcp/" in address)
    assert dialler.ask(f"dial {tcp}") == {"dialled": False}
    assert "refused: " in dialler.explain()


def find_each_other_in_time(net: Network) -> list[PeerProcess]:
    """Of several tries one has to keep the promise: this machine does other things too."""
    seconds = []
    for _ in range(NUM_TRIES):
        listen = ("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1")
        peers = [start_peer(item, *listen, expiry=EXPIRY) for item in net.lan(4).machines]
        for peer in peers:
            peer.wait_found(*(other for other in peers if other is not peer))
        found_at = max(at for peer in peers for at in peer.times.values())
        seconds.append(found_at - max(peer.ready_at for peer in peers))
        if seconds[-1] < PROMISED:
            return peers
        for peer in peers:
            peer.kill()
    pytest.fail(f"found each other after {seconds} s")


def line_about(peer: PeerProcess, other: PeerProcess) -> str:
    lines = peer.explain().splitlines()
    return next(line for line in lines if f"peer {other.peer_id}" in line)


def test_a_partition_that_heals(net: Network) -> None:
    """Both sides lose each other, and find each other again without a restart."""
    lan = net.lan(2)
    away, there = (start_peer(machine, expiry=4) for machine in lan.machines)
    away.wait_found(there)
    there.wait_found(away)
    lan.unplug_cable(lan.machines[0])
    away.wait_lost(there)
    there.wait_lost(away)
    lan.plug_cable(lan.machines[0])
    away.wait_found(there)
    there.wait_found(away)


def test_an_interface_that_is_not_selected_stays_silent(net: Network) -> None:
    """So does one that the host does not listen on: loopback alone is no network, and it says what to do."""
    here, there = net.lan(2), net.lan(2)
    machine = here.machines[0]
    assert there.plug(machine, 9) == "eth1"
    heard = listen_to_group(there.machines[1], there.address(2))
    seer = start_peer(here.machines[1])
    peer = start_peer(machine, interfaces=["eth0"])
    lonely = start_peer(machine, "/ip4/127.0.0.1/tcp/0")
    seer.wait_found(peer)
    # It listens on both, and says so on one alone: there neither its packets nor that address are seen.
    assert any(there.address(9) in address for address in peer.addresses)
    assert [place(address) for address in seer.found[peer.peer_id]] == [
        place(address) for address in peer.addresses if here.address(1) in address
    ]
    table = lonely.explain()
    assert "loopback alone" in table
    assert "/ip4/0.0.0.0/tcp/0" in table
    assert lonely.peer_id not in seer.found
    peer.leave()
    lonely.leave()
    # Then somebody is heard there, for the first time.
    start_peer(there.machines[0])
    _, line = heard.next_line()
    assert line["from"] == there.address(1)


def listen_to_group(machine: Machine, address: str) -> PeerProcess:
    script = str(HERE / "namespaces" / "group_listener.py")
    listener = PeerProcess(machine, [sys.executable, script, address])
    listener.wait_ready()
    return listener


def test_all_interfaces_that_the_host_listens_on_are_used(net: Network) -> None:
    here, there = net.lan(2), net.lan(2)
    here_and_there = here.machines[0]
    there.plug(here_and_there, 9)
    peer = start_peer(here_and_there)
    near, far = start_peer(here.machines[1]), start_peer(there.machines[0])
    peer.wait_found(near, far)
    far.wait_found(peer)
    assert [place(address).split("/")[2] for address in far.found[peer.peer_id]] == [
        there.address(9)
    ]
    assert near.peer_id not in far.found


def test_over_ipv6_alone(net: Network) -> None:
    lan = net.lan(2)
    for number, machine in enumerate(lan.machines, 1):
        machine.ip("address", "flush", "dev", "eth0", "scope", "global")
        machine.ip("address", "add", f"fd00::{number}/64", "dev", "eth0", "nodad")
    one, other = (start_peer(machine, "/ip6/::/tcp/0") for machine in lan.machines)
    one.wait_found(other)
    other.wait_found(one)
    assert [place(address).split("/")[2] for address in one.found[other.peer_id]] == ["fd00::2"]
    assert one.ask(f"dial {one.found[other.peer_id][0]}") == {"dialled": True}


def start_js_peer(machine: Machine) -> PeerProcess:
    node = shutil.which("node")
    if node is None or not (JS / "node_modules" / "@libp2p" / "mdns").is_dir():
        pytest.fail("the JavaScript peer is missing: run `.ci/setup peers`", pytrace=False)
    return PeerProcess(machine, [node, str(JS / "mdns_peer.mjs"), machine.address])


def start_stock_peer(machine: Machine) -> PeerProcess:
    script = str(HERE / "namespaces" / "zeroconf_peer.py")
    peer_id = Identity.generate().peer_id
    return PeerProcess(machine, [sys.executable, script, machine.address, peer_id])


def test_peers_of_others_see_us_and_we_see_them(net: Network) -> None:
    """Js-libp2p; and a stock responder, as go-libp2p's is one: it sees what tools for DNS-SD in general do.

    They are on other machines and on the same one, with which they share the port.
    """
    lan = net.lan(2)
    one, other = lan.machines
    ours, neighbour = (start_peer(machine, expiry=EXPIRY) for machine in lan.machines)
    stock, js = start_stock_peer(one), start_js_peer(other)
    ours.wait_found(js, stock, neighbour)
    neighbour.wait_found(js, stock, ours)
    js.wait_found(ours, neighbour)

    assert ours.found[js.peer_id] == js.addresses
    assert js.found[ours.peer_id] == ours.addresses
    assert ours.ask(f"dial {js.addresses[0]}") == {"dialled": True}

    assert [place(address) for address in ours.found[stock.peer_id]] == [
        "/ip4/10.1.0.1/tcp/4001",
        "/ip4/10.1.0.1/udp/4001/quic-v1",
    ]
    seen = {line["ips"][0]: line for _, line in (stock.next_line(), stock.next_line())}
    for peer, machine in ((ours, one), (neighbour, other)):
        line = seen[machine.address]
        assert line["text"] == [f"dnsaddr={address}" for address in peer.addresses]
        assert line["port"] == int(peer.addresses[0].split("/")[4])

    # One says goodbye by the book. The other says none, and its records hold for minutes: they end when ours do.
    stock.leave()
    ours.wait_lost(stock)
    assert "said goodbye" in line_about(ours, stock)
    js.kill()
    ours.wait_lost(js)
    assert "expired" in line_about(ours, js)


def test_a_peer_of_two_sources_is_one_peer(net: Network) -> None:
    lan = net.lan(2)
    first = start_peer(lan.machines[0], bootstrap=[])
    other = start_peer(lan.machines[1], bootstrap=first.addresses)
    other.wait_until(lambda: other.sources.get(first.peer_id) == ["dht", "mdns"])
    first.wait_until(lambda: first.sources.get(other.peer_id) == ["dht", "mdns"])
    assert other.found == {first.peer_id: first.addresses}
    assert first.found == {other.peer_id: other.addresses}


def test_no_other_test_is_left_with_namespaces() -> None:
    """Whatever the tests above made is gone."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    with network() as made:
        ours = made.machine().name.rpartition("-")[0]
    assert not [line for line in listed.stdout.splitlines() if line.startswith(f"{ours}-")]
