"""A coordinator that ends and starts again: its clients hear of it, and its workers have kept their weights."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server_process import ServerProcess, start_server
from tests.e2e.support import DEADLINE, WorkerProcess, start_worker

# After so many events of a stream its worker stops, so that the answer cannot be finished meanwhile.
NUM_EVENTS = 3


def complete(server: ServerProcess) -> str:
    body = {"prompt": "A function definition", "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=DEADLINE)
    answer.raise_for_status()
    return answer.json()["choices"][0]["text"]


def stream(server: ServerProcess, worker: WorkerProcess, end: Callable[[], None]) -> list[Any]:
    """The events of an answer in the midst of which `end` is called."""
    body = {"prompt": "A class", "max_tokens": 900, "ignore_eos": True, "stream": True}
    events: list[Any] = []
    try:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body, timeout=DEADLINE
        ) as answer:
            for line in answer.iter_lines():
                if not line:
                    continue
                events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == NUM_EVENTS:
                    worker.process.send_signal(signal.SIGSTOP)
                    end()
    finally:
        worker.process.send_signal(signal.SIGCONT)
    return events


def test_answers_end_with_an_error_and_the_next_start_sends_no_weights(tmp_path: Path) -> None:
    """The worker has no disk cache: it keeps what it holds."""

    def started(server: ServerProcess) -> str:
        """What it said of the weights."""
        server.wait_status(lambda status: status["phase"] == "ready")
        (said,) = [s for s in server.log_file.read_text().splitlines() if s.startswith("weights: ")]
        return said

    with start_worker(tmp_path) as worker:
        with start_server(tmp_path, "--peer", worker.address) as server:
            assert "MB sent in" in started(server)
            text = complete(server)
            events = stream(server, worker, server.process.terminate)
            assert events[-1]["error"]["code"] == "server_ended"
            assert "was told to end before this answer was finished" in str(events[-1])
            assert server.process.wait(DEADLINE) == 0
        with start_server(tmp_path, "--peer", worker.address) as server:
            assert started(server).startswith("weights: nothing to send, ")
            assert complete(server) == text
            # Nobody can say anything then; it is not taken for the end of the answer all the same.
            with pytest.raises(httpx.RemoteProtocolError):
                stream(server, worker, server.kill)
        with start_server(tmp_path, "--peer", worker.address) as server:
            assert started(server).startswith("weights: nothing to send, ")
            assert complete(server) == text
        assert worker.log.count("its layers are kept") >= 2
