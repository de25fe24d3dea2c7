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
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from inspect import iscoroutinefunction

import pytest
import trio
from hypothesis import HealthCheck, settings
from trio.abc import Clock
from trio.testing import MockClock

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


@pytest.fixture
def autojump_clock() -> MockClock:
    """A clock for tests that are coroutines: when everybody waits for time to pass, it has."""
    return MockClock(autojump_threshold=0)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests that are coroutines, by the clock among their fixtures if there is one.

    What a fixture gives is entered first if it is an asynchronous context manager.
    """
    test = pyfuncitem.obj
    if not iscoroutinefunction(test):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    clocks = [value for value in pyfuncitem.funcargs.values() if isinstance(value, Clock)]

    async def main() -> None:
        async with AsyncExitStack() as stack:
            for name, value in arguments.items():
                if isinstance(value, AbstractAsyncContextManager):
                    arguments[name] = await stack.enter_async_context(value)
            await test(**arguments)

    trio.run(main, clock=clocks[0] if clocks else None)
    return True


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
