"""Groups on networks that are not whole: a link between two members that is cut, and a member behind a NAT."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.averaging_processes import Crowd, crowd
from tests.e2e.namespaces.nat import home, why_no_nat
from tests.e2e.namespaces.netns import network, why_no_namespaces
from tests.e2e.nat_process import Peer

GRACE, ATTEMPT = 2.0, 3.0
ARGS = ("--grace", str(GRACE), "--attempt-timeout", str(ATTEMPT))


def begin_all(members: Crowd) -> None:
    for peer in list(members.all):
        peer.hear("ready")
        members.begin(peer)
    members.settle()


def test_two_that_cannot_hear_each_other_still_average(tmp_path: Path) -> None:
    """Others aggregate for them, when one attempt was in vain."""
    if reason := why_no_namespaces():
        pytest.skip(reason)
    with network() as net, crowd(tmp_path, *ARGS, num_elements=1 << 18) as members:
        lan = net.lan(4)
        for machine in lan.machines:
            members.start("--listen", f"/ip4/{machine.address}/tcp/4001", machine=machine)
        begin_all(members)
        one, other = lan.machines[2:]
        one.ip("route", "add", "blackhole", f"{other.address}/32")
        other.ip("route", "add", "blackhole", f"{one.address}/32")
        cut_at = time.monotonic()
        members.settle(cut_at + 1.0)
        for member in members.members:
            waited = [o["seconds"] for o in member.outcomes if o["at"] > cut_at]
            assert max(waited) < 2 * (ATTEMPT + GRACE)
        members.check()


def test_a_member_behind_a_nat_takes_part_by_a_relay(tmp_path: Path) -> None:
    """It aggregates nothing, as nobody can dial it; the others reach it through the relay."""
    if reason := why_no_nat():
        pytest.skip(reason)
    args = (*ARGS, "--min-members", "3")
    with network() as net, crowd(tmp_path, *args, num_elements=1 << 18) as members:
        internet = net.lan(4)
        inside = home(net, internet, 1)
        relay = Peer(internet.machines[3], tmp_path / "relay.log", "relay")
        (address,) = relay.hear("addresses")["addresses"]
        for machine in internet.machines[:2]:
            members.start("--listen", f"/ip4/{machine.address}/tcp/4001", machine=machine)
        hidden = members.start(
            *("--listen", f"/ip4/{inside.address}/tcp/4001"),
            *("--relay", address, "--bandwidth", "0"),
            machine=inside,
        )
        begin_all(members)
        # One that comes later, and that the hidden one does not know of.
        machine = internet.machines[2]
        newcomer = members.start("--listen", f"/ip4/{machine.address}/tcp/4001", machine=machine)
        newcomer.hear("ready")
        members.settle(members.begin(newcomer))
        assert hidden.outcomes[-1]["has_contributed"]
        members.check()
