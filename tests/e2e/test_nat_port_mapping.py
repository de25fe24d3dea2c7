"""A host behind a NAT asks the router to let peers in: UPnP against a real miniupnpd, and AutoNAT says what it did."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.namespaces.netns import Machine, Network, needs_namespaces, network
from tests.e2e.nat_process import Peer

__all__ = ["needs_namespaces"]

MISSING = [tool for tool in ("nft", "miniupnpd") if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.usefixtures("needs_namespaces"),
    pytest.mark.skipif(
        bool(MISSING), reason=f"no {' and no '.join(MISSING)}: install nftables and miniupnpd"
    ),
]

# miniupnpd maps nothing on an address that is private; nobody outside of the namespaces hears of these.
ROUTER, OUTSIDE = "44.0.0.1", "44.0.0.2"
CONFIGURATION = f"""
ext_ifname=eth1
ext_ip={ROUTER}
listening_ip=eth0
port=0
enable_upnp=yes
enable_natpmp=no
secure_mode=yes
uuid=6e1b1f9c-0000-4000-8000-000000000001
upnp_table_name=filter
upnp_nat_table_name=filter
upnp_forward_chain=miniupnpd
upnp_nat_chain=prerouting_miniupnpd
upnp_nat_postrouting_chain=postrouting_miniupnpd
allow 1024-65535 0.0.0.0/0 1024-65535
"""
RULES = """
table inet filter {
    chain input {
        type filter hook input priority filter; policy accept;
        iifname "eth1" ct state established,related accept
        iifname "eth1" meta l4proto tcp reject with tcp reset
    }
    chain forward {
        type filter hook forward priority filter; policy accept;
        jump miniupnpd
        iifname "eth1" ct state established,related accept
        iifname "eth1" meta l4proto tcp reject with tcp reset
    }
    chain prerouting {
        type nat hook prerouting priority dstnat;
        jump prerouting_miniupnpd
    }
    chain postrouting {
        type nat hook postrouting priority srcnat;
        jump postrouting_miniupnpd
        oifname "eth1" masquerade
    }
    chain miniupnpd { }
    chain prerouting_miniupnpd { }
    chain postrouting_miniupnpd { }
}
"""


def make(net: Network, directory: Path) -> tuple[Machine, Machine, Machine]:
    """A machine at home, its router, and a machine outside."""
    internet, lan = net.lan(1), net.lan(1)
    router = net.machine()
    lan.plug(router, 254)
    internet.plug(router, 100)
    router.set_system_control("net.ipv4.ip_forward", "1")
    router.ip("address", "add", f"{ROUTER}/24", "dev", "eth1")
    (outside,), (inside,) = internet.machines, lan.machines
    outside.ip("address", "add", f"{OUTSIDE}/24", "dev", "eth0")
    inside.ip("route", "add", "default", "via", lan.address(254))
    subprocess.run(router.command(["nft", "-f", "-"]), input=RULES, text=True, check=True)
    configuration = directory / "miniupnpd.conf"
    configuration.write_text(CONFIGURATION)
    with (directory / "miniupnpd.log").open("w") as log:
        command = ["miniupnpd", "-d", "-f", str(configuration), "-P", str(directory / "pid")]
        router.popen(command, stdout=log, stderr=log)
    return inside, router, outside


def test_the_router_lets_peers_in_when_it_is_asked_to(tmp_path: Path) -> None:
    with network() as net:
        inside, router, outside = make(net, tmp_path)
        outsider = Peer(outside, tmp_path / "outsider", "outsider")
        addresses = outsider.hear("addresses")["addresses"]
        (address,) = [a for a in addresses if a.startswith(f"/ip4/{OUTSIDE}/")]

        alone = Peer(inside, tmp_path / "alone", "insider", address, "plain")
        found = alone.hear("reachability")
        assert found["reachability"] == "private", found
        alone.end()

        insider = Peer(inside, tmp_path / "insider", "insider", address, "maps")
        found = insider.hear("reachability")
        assert found["reachability"] == "public", found
        assert found["reached_at"] == f"/ip4/{ROUTER}/tcp/4001"
        (mapped,) = [a for a in found["addresses"] if a.startswith(f"/ip4/{ROUTER}/")]
        outsider.tell(mapped)
        assert outsider.hear("reached")["reached"] == mapped.rpartition("/")[2]

        insider.end()
        # The mapping goes with the host.
        assert "dnat" not in router.run(["nft", "list", "ruleset"]).stdout
        outsider.tell(mapped)
        assert outsider.hear("reached")["reached"] is None
