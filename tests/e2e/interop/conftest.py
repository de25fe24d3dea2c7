"""Who dials: both ways for every test that asks."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["we", "they"], ids=["we-dial", "they-dial"])
def dialler(request: pytest.FixtureRequest) -> str:
    """Which side opens the connection: "we" or "they"."""
    return str(request.param)


@pytest.fixture(params=["noise", "tls"])
def security(request: pytest.FixtureRequest) -> str:
    """The one channel security that the foreign peer offers."""
    return str(request.param)
