"""Fixtures: the network, in memory, on libp2p over TCP, and over QUIC; the version; the kind of handler."""

from __future__ import annotations

import pytest

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
