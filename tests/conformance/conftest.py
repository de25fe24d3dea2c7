"""Fixtures: the network, in memory, on libp2p over TCP, and over QUIC; the version; the kind of handler; a cluster
and two peers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from trio.abc import Clock
from trio.testing import MockClock

from neurogrid.p2p import Identity
from neurogrid.p2p.trust import Cluster
from tests.conformance.admission import Scene
from tests.conformance.networks import Network, open_network
from tests.conformance.protocols import Pair, open_pair


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What knows nothing of the network below is tried once, in memory: kinds of handlers, and 1.0.0.

    What 1.0.0 is over TCP, the peers in other languages show (tests/e2e/interop).
    """

    def is_new(item: pytest.Item) -> bool:
        case = item.callspec.params if hasattr(item, "callspec") else {}
        over = case.get("over", "memory")
        return over == "memory" or (case.get("kind") != "async" and case.get("version") != "v10")

    items[:] = filter(is_new, items)


@pytest.fixture(params=["memory", "libp2p", "libp2p-quic"])
def over(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def clock(over: str) -> Clock | None:
    return MockClock(autojump_threshold=0) if over == "memory" else None


@pytest.fixture
def network(over: str, clock: Clock | None) -> AbstractAsyncContextManager[Network]:
    return open_network(over)


@pytest.fixture(params=["v11", "v10"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
@asynccontextmanager
async def pair(network: AbstractAsyncContextManager[Network], version: str) -> AsyncIterator[Pair]:
    async with network as opened, open_pair(opened, version) as pair:
        yield pair


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
