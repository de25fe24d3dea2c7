"""All workers die in the middle of requests: clients are told within the patience, and it goes on when they return."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.server_process import ServerProcess, start_server
from tests.e2e.support import DEADLINE, WorkerProcess, start_worker

PROMPT = "A function definition"
# As long as sessions are: nobody is done before the workers are gone.
LONG = {"prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True, "temperature": 0}


class Workers:
    """Two workers that come back as who they were, where they were."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self._places = ["/ip4/127.0.0.1/tcp/0"] * 2
        self.running: list[WorkerProcess] = []

    def start(self) -> None:
        with ThreadPoolExecutor(2) as pool:
            self.running = list(pool.map(self._start, range(2)))
        self._places = [worker.address.partition("/p2p/")[0] for worker in self.running]

    def _start(self, number: int) -> WorkerProcess:
        directory = self._directory / str(number)
        directory.mkdir(exist_ok=True)
        key = str(self._directory / f"{number}.key")
        args = ("--listen", self._places[number], "--identity", key, "--memory-limit", "1GiB")
        return self._stack.enter_context(start_worker(directory, *args))

    def kill(self) -> None:
        for worker in self.running:
            worker.kill()

    @property
    def peers(self) -> list[str]:
        return [word for worker in self.running for word in ("--peer", worker.address)]


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=DEADLINE
    )


def events(answer: httpx.Response) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in answer.iter_lines() if line)


def test_clients_are_told_and_it_recovers(tmp_path: Path) -> None:
    with ExitStack() as stack:
        workers = Workers(tmp_path, stack)
        workers.start()
        server = stack.enter_context(
            start_server(
                tmp_path,
                *workers.peers,
                *("--stages", "2", "--local-layers", "none", "--patience", "2"),
                *("--max-sessions", "8", "--max-seq-len", "1024"),
            )
        )
        short = {**LONG, "max_tokens": 12}
        expected = httpx.post(f"{server.url}/v1/completions", json=short, timeout=DEADLINE).json()
        pool = stack.enter_context(ThreadPoolExecutor(2))
        client = stack.enter_context(client_of(server))
        whole = pool.submit(
            client.completions.create,
            model="embedded",
            prompt=PROMPT,
            max_tokens=1000,
            n=6,
            extra_body={"ignore_eos": True},
        )
        streamed = stack.enter_context(
            httpx.stream(
                "POST",
                f"{server.url}/v1/completions",
                json={**LONG, "stream": True},
                timeout=DEADLINE,
            )
        )
        told = events(streamed)
        first = [json.loads(next(told)) for _ in range(5)]
        assert all(event["choices"] for event in first)
        server.wait_status(lambda status: status["num_running"] == 7)
        workers.kill()

        # Streamed: an event in OpenAI's shape, the last of all, and no [DONE].
        *_, last = told
        error = json.loads(last)["error"]
        assert (error["type"], error["code"]) == ("server_error", "no_route")
        assert "layers" in error["message"]
        # Not streamed: a status.
        with pytest.raises(openai.InternalServerError) as refused:
            whole.result(DEADLINE)
        assert (refused.value.status_code, refused.value.code) == (503, "no_route")
        assert int(refused.value.response.headers["retry-after"]) > 0
        # The official client makes an exception of such an event, too: here of one that never began.
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(model="embedded", prompt=PROMPT, max_tokens=12, stream=True)
        assert refused.value.status_code == 503
        ready = httpx.get(f"{server.url}/ready", timeout=DEADLINE)
        assert ready.status_code == 503, ready.text
        assert server.process.poll() is None

        workers.start()
        server.wait_status(lambda status: status["phase"] == "ready")
        assert httpx.get(f"{server.url}/ready", timeout=DEADLINE).status_code == 200
        again = httpx.post(f"{server.url}/v1/completions", json=short, timeout=DEADLINE).json()
        assert again["choices"] == expected["choices"]
        status = server.status()
        assert (status["num_running"], status["num_waiting"]) == (0, 0)
        assert "Traceback" not in server.log_file.read_text()
