"""Who dials, what secures the connection, and the processes of peers in other languages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack

import pytest

from tests.e2e.interop.foreign_peer import ForeignProcess
from tests.e2e.interop.suite import Processes, Way


@pytest.fixture(params=["we", "they"], ids=["we-dial", "they-dial"])
def dialler(request: pytest.FixtureRequest) -> str:
    """Which side opens the connection: "we" or "they"."""
    return str(request.param)


@pytest.fixture(params=["noise", "tls"])
def security(request: pytest.FixtureRequest) -> str:
    """The one channel security that the foreign peer offers."""
    return str(request.param)


@pytest.fixture(params=[("noise", "we"), ("tls", "they")], ids=["noise-we-dial", "tls-they-dial"])
def way(request: pytest.FixtureRequest) -> Way:
    """Both, for what depends on neither."""
    security, dialler = request.param
    return security, dialler


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    """Started when they are asked for."""
    running: dict[str, ForeignProcess] = {}
    with ExitStack() as stack:

        def get(
            security: str, start: Callable[[str], AbstractContextManager[ForeignProcess]]
        ) -> ForeignProcess:
            if security not in running:
                running[security] = stack.enter_context(start(security))
            return running[security]

        yield get
