"""Hosts that are hard to reach, in network namespaces: two behind two NATs, and two that a partition keeps apart.

Those behind NATs are reached through a relay, then directly where the NATs let them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.namespaces.nat import home, why_no_nat
from tests.e2e.namespaces.netns import Lan, Machine, network
from tests.e2e.nat_process import Peer


class Pair:
    """A server and a client, each behind a NAT of its own."""

    def __init__(
        self, directory: Path, homes: Sequence[Machine], relay_address: str, *hasty: str
    ) -> None:
        directory.mkdir()
        self.server = Peer(homes[0], directory / "server", "server", relay_address, *hasty)
        said = self.server.hear("addresses")
        self.observed = said["observed"]
        address = said["addresses"][0]
        self.client = Peer(homes[1], directory / "client", "client", address, *hasty)


@dataclass
class Scene:
    """What the tests look at: it plays once for all of them, since most of it is waiting."""

    internet: Lan
    friendly: Pair
    symmetric: Pair
    keeper: Peer


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    if reason := why_no_nat():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("nat")
    with network() as net:
        internet = net.lan(3)
        homes = [home(net, internet, n, is_symmetric=n == 2) for n in range(4)]
        relay = Peer(internet.machines[0], directory / "relay", "relay")
        target = Peer(internet.machines[1], directory / "target", "target")
        (relay_address,) = relay.hear("addresses")["addresses"]
        (target_address,) = target.hear("addresses")["addresses"]
        keeper = Peer(internet.machines[2], directory / "keeper", "keeper", target_address)
        assert keeper.hear("connected")["echo"] == "hello"
        internet.unplug_cable(internet.machines[1])
        friendly = Pair(directory / "friendly", homes[:2], relay_address)
        symmetric = Pair(directory / "symmetric", homes[2:], relay_address, "hasty")
        yield Scene(internet, friendly, symmetric, keeper)


def test_two_hosts_behind_nats_meet_at_the_relay_and_go_direct(scene: Scene) -> None:
    assert scene.friendly.observed == [f"/ip4/{scene.internet.address(100)}/tcp/4001"]
    client = scene.friendly.client
    assert client.hear("first_stream")["first_stream"] == "relayed"
    after = client.hear("path")
    assert after["path"] == "direct", after
    # What ran over the relay has gone on, and what is new goes directly.
    assert after["first_stream"] == "relayed"
    assert after["new_stream"] == "direct"
    assert client.hear("last_stream") == {"num_relayed": 0, "last_stream": "direct"}
    assert client.hear("done")["connected"]


def test_behind_a_symmetric_nat_it_stays_relayed_and_says_so(scene: Scene) -> None:
    assert scene.symmetric.observed != [f"/ip4/{scene.internet.address(102)}/tcp/4001"]
    client, server = scene.symmetric.client, scene.symmetric.server
    after = client.hear("path")
    assert after["path"] == "relayed"
    assert "the NAT on one side gives each peer another port" in after["reason"]
    assert after["first_stream"] == after["new_stream"] == "relayed"
    assert client.hear("done")["connected"]
    paths = server.hear("paths")["paths"]
    while not paths or paths[0][1] == "punching":
        paths = server.hear("paths")["paths"]
    assert paths[0][1] == "relayed"


def test_a_peer_comes_back_after_a_partition(scene: Scene) -> None:
    come_back(scene)


@pytest.mark.long
def test_a_peer_comes_back_after_a_partition_of_30_s(scene: Scene) -> None:
    scene.internet.unplug_cable(scene.internet.machines[1])
    time.sleep(30)
    come_back(scene)


def come_back(scene: Scene) -> None:
    """Plug the cable in again: neither process is started again."""
    lost = scene.keeper.hear("lost")
    assert lost["num_failures"] >= 1
    assert lost["last_error"]
    scene.internet.plug_cable(scene.internet.machines[1])
    assert scene.keeper.hear("connected")["echo"] == "hello"
