"""Whatever a peer does is no error of ours: none may be logged as one."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_error_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    errors = [
        record.getMessage()
        for record in caplog.get_records("call")
        if record.name.startswith("neurogrid") and record.levelno >= logging.ERROR
    ]
    assert errors == []
