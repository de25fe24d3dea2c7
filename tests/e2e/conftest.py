"""Fixtures of the end-to-end tests: workers that live for a whole session, since starting costs seconds; and networks
of namespaces."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from neurogrid.fork_server import start_fork_server
from tests.e2e.namespaces.netns import Network, network
from tests.e2e.preloaded import proofs_directory

if TYPE_CHECKING:
    from tests.e2e.support import WorkerProcess

# Files that take a minute or more of a core, the longest first. What begins last is to be short: where processes share
# the files (`make test-e2e`), the others have nothing to do while the last one of them goes on.
LONGEST = (
    "training/test_runs.py",
    "training/test_replicas.py",
    "training/test_chains.py",
    "training/test_audits.py",
    "test_packaging.py",
    "training/test_testnet.py",
    "training/test_witnessed_runs.py",
    "training/test_deputies.py",
    "training/test_wide_chains.py",
    "training/test_changes.py",
    "training/test_open_runs.py",
    "training/test_adapter_memory.py",
    "training/test_demo.py",
    "kernels/test_kernel_levels.py",
    "test_page.py",
    "test_by_name.py",
    "test_drift.py",
    "test_recovery.py",
    "test_docs_run.py",
    "test_examples.py",
    "test_interrupted.py",
    "test_reach_commands.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    places = {here / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="session", autouse=True)
def _proofs_are_forked_from_here() -> None:
    """As the commands do, before there are threads: a Python of its own for it imports torch for seconds."""
    if "torch" in sys.modules:
        # Here, since this file is read by those, too, who only say what is to be tested.
        from tests.e2e.shared_proofs import share_proofs

        share_proofs(proofs_directory())
        start_fork_server(in_any_thread=True)


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[WorkerProcess]]:
    """Three stateless workers with nothing on disk, of uneven memory."""
    from tests.e2e.support import start_worker  # here, as above

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
