"""Which interfaces multicast DNS uses, and what is announced on each."""

from __future__ import annotations

from ipaddress import IPv4Interface, IPv6Interface, ip_address

import pytest

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.discovery.mdns.interfaces import (
    Interface,
    check_interfaces,
    choose_interfaces,
    list_interfaces,
)

LO = Interface("lo", 1, (IPv4Interface("127.0.0.1/8"), IPv6Interface("::1/128")))
ETH0 = Interface("eth0", 2, (IPv4Interface("10.1.0.1/24"), IPv6Interface("fe80::1/64")))
ETH1 = Interface("eth1", 3, (IPv4Interface("192.168.7.1/16"), IPv6Interface("fd00::1/64")))
ALL = [LO, ETH0, ETH1]


def address(ip: str) -> str:
    return f"/{'ip6' if ':' in ip else 'ip4'}/{ip}/tcp/4001/p2p/x"


EVERYWHERE = [
    address(ip) for ip in ("127.0.0.1", "10.1.0.1", "192.168.7.1", "::1", "fe80::1", "fd00::1")
]


def test_each_has_its_own_addresses() -> None:
    choice = choose_interfaces(ALL, EVERYWHERE)
    assert choice.used == (
        (ETH0, (address("10.1.0.1"),)),
        (ETH1, (address("192.168.7.1"), address("fd00::1"))),
    )
    assert choice.unused == ()


@pytest.mark.parametrize("named", ["eth1", "192.168.7.1", "fd00::1"])
def test_one_is_named_by_its_name_or_an_address(named: str) -> None:
    choice = choose_interfaces(ALL, EVERYWHERE, [named])
    assert [interface for interface, _ in choice.used] == [ETH1]
    assert choice.unused == ()


def test_loopback_alone_is_nothing() -> None:
    assert choose_interfaces(ALL, [address("127.0.0.1")]).used == ()
    choice = choose_interfaces(ALL, EVERYWHERE, ["lo"])
    assert (choice.used, choice.unused) == ((), (("lo", "nobody else is on loopback"),))


def test_one_that_the_host_does_not_listen_on_is_not_used() -> None:
    choice = choose_interfaces(ALL, [address("10.1.0.1")], ["eth0", "eth1", "eth9"])
    assert [interface for interface, _ in choice.used] == [ETH0]
    assert choice.unused == (
        ("eth1", "the host does not listen on eth1 (192.168.7.1, fd00::1)"),
        ("eth9", "there is no such interface now"),
    )


def test_other_addresses_do_not_matter() -> None:
    others = ["/memory/7/p2p/x", "/dns4/a.b/tcp/1/p2p/x", "/p2p/y/p2p-circuit/p2p/x"]
    assert choose_interfaces(ALL, others).used == ()


def test_a_name_that_is_wrong_is_an_error_that_lists_those_there_are() -> None:
    check_interfaces(ALL, ["eth0", "192.168.7.1"])
    with pytest.raises(ConfigurationError, match=r"'eth9'.*eth0 \(10\.1\.0\.1\)"):
        check_interfaces(ALL, ["eth0", "eth9"])


@pytest.mark.parametrize(
    ("ip", "is_neighbour"),
    [
        ("192.168.200.9", True),
        ("192.169.0.1", False),
        ("fd00::9", True),
        ("fd01::9", False),
        ("fe80::9", True),
        ("127.0.0.1", False),
        ("224.0.0.1", False),
        ("0.0.0.0", False),
    ],
)
def test_who_is_a_neighbour(ip: str, is_neighbour: bool) -> None:
    assert ETH1.is_on_link(ip_address(ip)) is is_neighbour


def test_this_machine_has_loopback() -> None:
    assert any(interface.is_loopback and interface.index > 0 for interface in list_interfaces())
