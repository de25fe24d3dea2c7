"""What a worker process of the coordinator's own says becomes a line of the coordinator's log."""

from __future__ import annotations

import json
import logging

import pytest

from neurogrid.fleet.local_workers import _log_line


def words(caplog: pytest.LogCaptureFixture, line: bytes) -> tuple[int, str]:
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "neurogrid.fleet.local_workers"):
        _log_line(line, 2)
    (record,) = caplog.records
    assert vars(record)["local_worker"] == 2
    return record.levelno, record.getMessage()


def test_a_line_keeps_its_level(caplog: pytest.LogCaptureFixture) -> None:
    told = {"level": "error", "message": "torn", "exception": "Traceback:\n  there"}
    assert words(caplog, json.dumps(told).encode()) == (
        logging.ERROR,
        "local worker 2: torn\nTraceback:\n  there",
    )


@pytest.mark.parametrize(
    "line", [b"Segmentation fault", b"\xff", b"[]", b"{}", b'{"level": "loud", "message": 1}', b"7"]
)
def test_whatever_else_comes_is_a_warning(caplog: pytest.LogCaptureFixture, line: bytes) -> None:
    level, text = words(caplog, line)
    assert level == logging.WARNING
    assert text == f"local worker 2: {line.decode(errors='replace')}"
