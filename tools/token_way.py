"""Count the modules that one token passes: python -m tools.token_way

A coordinator with an HTTP server and two workers run in this process, over TCP on loopback. While ten tokens of one
stream are generated, each call of a function of ours is noted. Prints the rooms and their modules, and the number of
modules; what only happens for other tokens (opening, prefill, recovery) is not among them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import httpx
import trio

PACKAGE = Path(__file__).parents[1] / "neurogrid"
NUM_WORKERS = 2
# Of those that are counted.
FIRST_TOKEN, LAST_TOKEN = 12, 22


class Trace:
    """The modules whose functions were called while it was on."""

    def __init__(self) -> None:
        self.is_on = False
        self.modules: set[Path] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.is_on and event == "call":
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(PACKAGE):
                self.modules.add(file.relative_to(PACKAGE))


async def generate(trace: Trace) -> None:
    """Have a stream of tokens generated, and trace some of them."""
    # Imported when the trace is set for the threads that they start.
    from neurogrid import CoordinatorSettings, WorkerSettings, open_coordinator, open_worker
    from neurogrid.model.embedded import embedded_model_path
    from neurogrid.server.app import make_app
    from neurogrid.server.backend import Backend
    from neurogrid.server.http.http_server import open_http
    from neurogrid.server.openai.routes import openai_routes

    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(open_worker(WorkerSettings(device="cpu")))
            for _ in range(NUM_WORKERS)
        ]
        settings = CoordinatorSettings(
            model=embedded_model_path(),
            peers=tuple(worker.addresses[0] for worker in workers),
            stages=NUM_WORKERS,
        )
        coordinator = await stack.enter_async_context(open_coordinator(settings))
        backend = Backend()
        stack.enter_context(backend.serving(coordinator))
        app = make_app(openai_routes(backend, request_timeout=60))
        url = await stack.enter_async_context(open_http(app, host="127.0.0.1", port=0))
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=60))
        body = {"prompt": "A function", "max_tokens": 40, "temperature": 0, "stream": True}
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            num_events = 0
            async for line in response.aiter_lines():
                num_events += line.startswith("data")
                trace.is_on = FIRST_TOKEN <= num_events < LAST_TOKEN


def main() -> None:
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    trio.run(generate, trace)
    sys.setprofile(None)
    rooms: dict[str, list[str]] = defaultdict(list)
    for file in sorted(trace.modules):
        rooms[str(file.parent)].append(file.stem)
    for room, modules in rooms.items():
        print(f"{room}/: {', '.join(modules)}")
    print(f"{len(trace.modules)} modules")


if __name__ == "__main__":
    main()
