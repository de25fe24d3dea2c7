"""Count the modules that one token passes: python -m tools.token_way

A coordinator with an HTTP server and two workers run in this process, over TCP on loopback. While ten tokens of one
stream are generated, each call of a function of ours is noted; what only happens for other tokens (opening, prefill,
recovery) is not among them. A module is on the way if the token, its hidden state or the message that it travels in is
handed to it, and comes out of it to the next. Beside the way is what is asked on it, or told: `BESIDE` says of each
what it does there.
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

BESIDE = {
    # Told.
    "inference/board/generation_log.py": "counts tokens",
    "inference/board/status_board.py": "counts tokens",
    "inference/generation/generation_spans.py": "spans",
    "inference/sessions/spans.py": "spans",
    "inference/sessions/statistics.py": "counts passes",
    "node/histogram.py": "counts seconds",
    "node/rates.py": "counts tokens",
    "fleet/step_times.py": "notes what stages took",
    "p2p/exchange/counters.py": "counts messages",
    "p2p/streams/tracing.py": "spans",
    # Asked.
    "fleet/member.py": "who it is",
    "fleet/roster.py": "whether a member is there",
    "inference/generation/micro_batches.py": "who leaves together",
    "inference/pipeline/pipeline_stage.py": "which layers",
    "inference/pipeline/selection.py": "whether to leave a member",
    "inference/pipeline/slow_watch.py": "watches the clock",
    "inference/sessions/steps.py": "which steps run together",
    "inference/sessions/table.py": "which session",
    "node/activity.py": "who came of late",
    "node/roles.py": "whether its sender may",
    "p2p/exchange/deadlines.py": "watches the clock",
    "p2p/exchange/routes.py": "who is next",
    "p2p/hosts/host.py": "the role of a peer",
    "p2p/libp2p/libp2p_host.py": "starts a task",
    "p2p/link/keepalive.py": "hears that the peer is there",
    "p2p/link/limits.py": "bounds",
    "p2p/link/stream_state.py": "what is left to send of a stream",
    "p2p/link/windows.py": "windows",
    "p2p/streams/credit.py": "credit",
    "p2p/streams/outbox.py": "whether anything waits",
    "p2p/wire/codes.py": "how large a message may be",
    "p2p/wire/route.py": "which layers are next",
    "worker/held_model.py": "sizes",
    # Prepares the next step when this one has left.
    "model/stages/weight_loading.py": "prepares",
    "model/stages/skeleton.py": "prepares",
    # Of other peers, or of the request, and awake.
    "inference/sessions/worker_v10.py": "looks for transfers that stopped",
    "server/http/guard.py": "has let the request in",
    "server/http/trace_parents.py": "has let the request in",
    "server/openai/routes.py": "has read the request",
}


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
    passed = sorted(file for file in trace.modules if str(file) not in BESIDE)
    for file in passed:
        rooms[str(file.parent)].append(file.stem)
    for room, modules in rooms.items():
        print(f"{room}/: {', '.join(modules)}")
    print(f"{len(passed)} modules on the way, {len(trace.modules) - len(passed)} beside it")


if __name__ == "__main__":
    main()
