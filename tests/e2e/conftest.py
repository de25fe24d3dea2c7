"""Fixtures of the end-to-end tests: workers that live for a whole session, since starting costs seconds; and networks
of namespaces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.e2e.namespaces.netns import Network, network
from tests.e2e.support import WorkerProcess, start_worker


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[WorkerProcess]]:
    """Three stateless workers with nothing on disk, of uneven memory."""
    directory = tmp_path_factory.mktemp("workers")
    with ExitStack() as stack:
        yield [
            stack.enter_context(start_worker(directory, "--memory-limit", limit))
            for limit in ("1GiB", "512MiB", "256MiB")
        ]


@pytest.fixture
def net() -> Iterator[Network]:
    """Machines and LANs of namespaces, for one test. Where there can be none: `needs_namespaces` first."""
    with network() as made:
        yield made
