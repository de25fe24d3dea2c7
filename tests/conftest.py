"""For all tests: one torch thread, since several on contended cores are many times slower; a cache of their own; no
property that fails because the machine is slow; and nothing left open by a test that is over."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported by anybody.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Nor in the cache of whoever runs the tests, nor out of it.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="neurogrid-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

settings.register_profile(
    "shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared machine")

# A shell ignores Ctrl-C for what it starts in the background, and so would everything that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


# What is imported stays: looking for garbage among it takes 3 s.
gc.disable()


def pytest_collection_finish() -> None:
    """Take what was imported out of the garbage collector's sight: looking at torch takes it 0.4 s each time.

    From here on it looks by itself less often than usual, since each test ends with a look (below).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    """A socket, file or process that nobody closed fails the test that left it, not one that comes much later.

    Objects that were older when they were left are found when the module ends.
    """
    yield
    gc.collect(1)


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left_open_by_fixtures() -> Iterator[None]:
    """The same for what a module shares. What is left now was imported, or is for all: see above."""
    yield
    gc.collect()
    gc.freeze()
