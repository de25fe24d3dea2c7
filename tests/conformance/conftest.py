"""Fixtures: the network, in memory, on libp2p over TCP, and over QUIC; the version; the kind of handler; a cluster
and two peers."""

from __future__ import annotations

from pathlib import Path

import pytest

from neurogrid.p2p import Identity
from neurogrid.p2p.trust import Cluster
from tests.conformance.admission import Scene
from tests.conformance.networks import Runner


@pytest.fixture(params=["memory", "libp2p", "libp2p-quic"])
def over(request: pytest.FixtureRequest) -> Runner:
    return Runner(request.param)


@pytest.fixture(params=["v11", "v10"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(Cluster.create(tmp_path / "cluster"))


@pytest.fixture
def ours() -> Identity:
    return Identity.generate()


@pytest.fixture
def theirs() -> Identity:
    return Identity.generate()
