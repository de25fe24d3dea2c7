"""NATs of namespaces: nftables' masquerade.

It keeps the port of a connection where it can, whatever the destination, and lets nobody in who was not called first,
as most routers at home do; `fully-random` gives each connection another port, as symmetric NATs do.
"""

from __future__ import annotations

import shutil
import subprocess

from tests.e2e.namespaces.netns import Lan, Machine, Network, why_no_namespaces

__all__ = ["home", "why_no_nat"]

RULES = """
table ip nat {
    chain postrouting {
        type nat hook postrouting priority srcnat;
        oifname "eth1" masquerade%s
    }
}
table ip filter {
    chain input {
        type filter hook input priority filter; policy accept;
        iifname "eth1" ct state established,related accept
        iifname "eth1" drop
    }
    chain forward {
        type filter hook forward priority filter; policy accept;
        iifname "eth1" ct state established,related accept
        iifname "eth1" drop
    }
}
"""


def why_no_nat() -> str:
    """Why this process cannot make NATs; empty where it can."""
    if shutil.which("nft") is None:
        return "NATs are made with `nft`: install nftables"
    return why_no_namespaces()


def home(net: Network, internet: Lan, number: int, *, is_symmetric: bool = False) -> Machine:
    """A machine behind a NAT of its own, whose address outside is `internet.address(100 + number)`."""
    lan = net.lan(1)
    router = net.machine()
    lan.plug(router, 254)
    internet.plug(router, 100 + number)
    router.set_system_control("net.ipv4.ip_forward", "1")
    rules = RULES % (" fully-random" if is_symmetric else "")
    subprocess.run(router.command(["nft", "-f", "-"]), input=rules, text=True, check=True)
    (machine,) = lan.machines
    machine.ip("route", "add", "default", "via", lan.address(254))
    return machine
