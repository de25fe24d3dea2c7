"""Two LANs and a router without multicast: who is found through one bootstrap peer, by real processes."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from neurogrid.cli.options.discovery import DEFAULT_NAMESPACE
from neurogrid.p2p.trust import COORDINATOR as COORDINATOR_ROLE
from neurogrid.p2p.trust import WORKER as WORKER_ROLE
from neurogrid.p2p.trust import Cluster
from tests.e2e.commands import patiently
from tests.e2e.members import make_member
from tests.e2e.namespaces.commands import COORDINATOR, PROMPT, diagnose, run_in, workers_on
from tests.e2e.namespaces.netns import Lan, Machine, Network, needs_namespaces
from tests.e2e.namespaces.peer_process import PeerProcess, start_peer
from tests.e2e.support import WorkerProcess

__all__ = ["needs_namespaces"]

pytestmark = pytest.mark.usefixtures("needs_namespaces")


def two_lans(net: Network, near: int, far: int) -> tuple[Lan, Lan]:
    lans = net.lan(near), net.lan(far)
    net.router(*lans)
    return lans


def address_on(machine: Machine, worker: WorkerProcess) -> str:
    """Where a worker is that listens on all addresses of its machine."""
    port = worker.address.split("/")[4]
    return f"/ip4/{machine.address}/tcp/{port}/p2p/{worker.peer_id}"


def test_a_cluster_generates_over_two_lans_through_a_worker_of_another(
    net: Network, tmp_path: Path
) -> None:
    near, far = two_lans(net, 2, 2)
    ours, theirs = Cluster.create(tmp_path / "ours"), Cluster.create(tmp_path / "theirs")
    make_member(theirs, tmp_path / "outsider")
    with ExitStack() as stack:
        (outsider,) = workers_on(
            stack, near.machines[1:], tmp_path, "--cluster", str(tmp_path / "outsider"), "--dht"
        )
        (tmp_path / "peers").write_text(f"{address_on(near.machines[1], outsider)}  # known\n")
        dht = ("--dht", "--bootstrap", f"@{tmp_path / 'peers'}")
        workers = []
        for number, machine in enumerate(far.machines):
            make_member(ours, tmp_path / f"member {number}")
            member = ("--cluster", str(tmp_path / f"member {number}"))
            workers += workers_on(stack, [machine], tmp_path, *member, *dht)
        cluster = ("--cluster", str(tmp_path / "ours"), "--min-peers", "2", *dht)
        ended = run_in(near.machines[0], *COORDINATOR, *PROMPT, *cluster)
        assert ended.returncode == 0, ended.stderr + workers[0].log
        alone = run_in(near.machines[0], *COORDINATOR, *PROMPT, "--local-workers", "1")
        assert ended.stdout == alone.stdout

        listed = diagnose(near.machines[0], *cluster)
        assert listed.returncode == 0, listed.stdout + listed.stderr
        assert "2 workers found" in listed.stdout
        table, _, found = listed.stdout.partition("2 workers found")
        assert outsider.peer_id in table
        assert outsider.peer_id not in found
        for worker in workers:
            assert f"record of {worker.peer_id}" in table
            assert worker.peer_id in found
        # The outsider served its DHT to everybody, and nothing else to anybody.
        assert "serves" not in outsider.log


def test_why_a_peer_is_not_used_is_said(net: Network) -> None:
    near, far = net.lan(2).machines
    options = json.dumps({"listen": f"/ip4/{far.address}/tcp/0", "namespace": DEFAULT_NAMESPACE})
    liars = PeerProcess(far, [sys.executable, "-m", "tests.e2e.namespaces.dht_liars", options])
    members = liars.wait_ready()["members"]
    flags = ("--diagnose", "--insecure", "--dht", "--bootstrap", liars.addresses[0])
    ended = patiently(
        lambda wait: run_in(near, *COORDINATOR, *flags, "--wait", wait),
        lambda ended: all(f"record of {peer_id}" in ended.stdout for peer_id in members.values()),
    )
    assert ended.returncode == 1, ended.stderr
    assert "0 workers found" in ended.stdout
    rows = {
        reason: next(row for row in ended.stdout.splitlines() if f"record of {peer_id}" in row)
        for reason, peer_id in members.items()
    }
    for reason in ("wrong key", "no route", "no common transport"):
        assert f"-  {reason}: " in rows[reason], ended.stdout
    assert "-  refused: " in rows["connection refused"], ended.stdout
    assert "-  refused: expired: it was valid until" in rows["expired"], ended.stdout
    # Forged, expired and replayed records are named where the log goes, too.
    assert f"refused the record of {members['expired']}: expired: " in ended.stderr


def test_hosts_find_their_cluster_and_none_of_the_other(net: Network, tmp_path: Path) -> None:
    """Four and four; twenty in one process are in test_dht.py."""
    near, far = two_lans(net, 5, 4)
    bootstrap = start_peer(near.machines.pop(), mdns=False, bootstrap=[])
    options = {
        "mdns": False,
        "bootstrap": [a for a in bootstrap.addresses if near.address(5) in a],
    }
    members: list[list[PeerProcess]] = []
    for number in range(2):
        cluster = Cluster.create(tmp_path / f"cluster {number}")
        members.append([])
        machines = [*near.machines[number::2], *far.machines[number::2]]
        for machine in machines:
            role = WORKER_ROLE if members[number] else COORDINATOR_ROLE
            directory = tmp_path / machine.name
            make_member(cluster, directory, role)
            peer = start_peer(machine, cluster=str(directory), role=role, **options)
            members[number].append(peer)
    for cluster_members in members:
        everybody = {peer.peer_id for peer in cluster_members}
        assert len(everybody) == 4
        for peer in cluster_members:
            peer.wait_until(lambda peer=peer: len(peer.found) >= 3)
            assert peer.found.keys() == everybody - {peer.peer_id}
            assert set(map(tuple, peer.sources.values())) == {("dht",)}
