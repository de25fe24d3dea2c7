"""What does a hop from worker to worker add to a step, when nothing is computed?

    python benchmarks/hop.py

A token's hidden state of 16 KiB goes through one worker, and through three in a chain, each in a process of its own,
whose layers give back what they get: half of the difference is a hop. The same for raw trio TCP, a ring of as many
processes, in turn within each round; and for three workers in a star, where each hop leads through the coordinator.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import torch
import transformers
import trio
from report import Spread, spread, table, write_report

from neurogrid import CoordinatorSettings, open_coordinator
from neurogrid.assembly.worker import WorkerSettings, open_worker
from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.inference.pipeline.routing import Routing, RoutingMode
from neurogrid.inference.pipeline.session import open_session
from neurogrid.inference.sessions import passes
from neurogrid.worker.held_model import HeldModel

HIDDEN = 4096  # of float32: 16 KiB a token
NUM_BYTES = 4 * HIDDEN
STEPS = 400
WARM_UP = 50
ROUNDS = 7
AT_MOST = 400.0  # us

Step = Callable[[], Awaitable[object]]


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        trio.run(_worker)
    elif sys.argv[1:2] == ["--ring"]:
        trio.run(_ring_member, int(sys.argv[2]))
    else:
        _measure()


def _measure() -> None:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        _save_model(Path(name))
        addresses = [stack.enter_context(_child("--worker")) for _ in range(4)]
        results = trio.run(_rounds, Path(name), addresses)
    steps = {what: spread([1e6 * t for t in times]) for what, times in results.items()}
    hops = {
        "raw trio TCP": _hop(results["raw TCP, 1"], results["raw TCP, 3"]),
        "chain": _hop(results["chain, 1"], results["chain, 3"]),
        "star": _hop(results["chain, 1"], results["star, 3"]),
    }
    body = table(
        ("a step through", "p50 us (least to most of the rounds)"),
        [(what, value.show(0)) for what, value in steps.items()],
    )
    body += "\n\n" + table(
        ("a hop of 16 KiB", "us", "times raw"),
        [
            (what, value.show(0), f"{value.middle / hops['raw trio TCP'].middle:.1f}")
            for what, value in hops.items()
        ],
    )
    verdict = "holds" if hops["chain"].middle <= AT_MOST else "is missed"
    body += f"\n\nA hop in a chain is to add at most {AT_MOST:g} us: that {verdict} here."
    write_report("hop", (__doc__ or "").partition("\n")[0], body)


def _hop(one: list[float], three: list[float]) -> Spread:
    return spread([5e5 * (b - a) for a, b in zip(one, three, strict=True)])


async def _rounds(model: Path, addresses: list[str]) -> dict[str, list[float]]:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(_coordinator(model, addresses[:1]))
        three = await stack.enter_async_context(_coordinator(model, addresses[1:]))
        ring_of_one = await stack.enter_async_context(_ring(1))
        ring_of_three = await stack.enter_async_context(_ring(3))
        ways: dict[str, Callable[[], Awaitable[float]]] = {
            "raw TCP, 1": partial(_p50, ring_of_one),
            "raw TCP, 3": partial(_p50, ring_of_three),
            "chain, 1": partial(_session_p50, one, "chain"),
            "chain, 3": partial(_session_p50, three, "chain"),
            "star, 3": partial(_session_p50, three, "star"),
        }
        results: dict[str, list[float]] = {what: [] for what in ways}
        for _ in range(ROUNDS):
            for what, way in ways.items():
                results[what].append(await way())
    return results


async def _p50(step: Step) -> float:
    times = []
    for _ in range(WARM_UP + STEPS):
        started = time.perf_counter()
        await step()
        times.append(time.perf_counter() - started)
    return median(times[WARM_UP:])


# Workers


def _save_model(path: Path) -> None:
    """Three layers that are wide and otherwise next to nothing."""
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=HIDDEN,
        intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=2 * (WARM_UP + STEPS),
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)


async def _worker() -> None:
    torch.set_num_threads(1)

    def give_back(model: HeldModel, hidden_BTD: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return hidden_BTD

    # To remove the computation is the question of this benchmark; nothing in the package offers that, nor should it.
    passes.forward = give_back
    async with open_worker(WorkerSettings(device="cpu")) as worker:
        print(worker.addresses[0], flush=True)
        await trio.sleep_forever()


@asynccontextmanager
async def _coordinator(model: Path, addresses: list[str]) -> AsyncIterator[Coordinator]:
    settings = CoordinatorSettings(
        model=model, peers=tuple(addresses), stages=len(addresses), max_seq_len=WARM_UP + STEPS
    )
    async with open_coordinator(settings) as coordinator:
        yield coordinator


async def _session_p50(coordinator: Coordinator, mode: RoutingMode) -> float:
    hidden_BTD = torch.rand(1, 1, HIDDEN)
    routing = Routing(coordinator._protocol, mode)
    with await coordinator.selector.select(timeout=60) as selection:
        stages = selection.stages
    async with await open_session(stages, routing, max_length=WARM_UP + STEPS) as session:
        return await _p50(partial(session.forward, hidden_BTD))


# The ring


@asynccontextmanager
async def _ring(count: int) -> AsyncIterator[Step]:
    """Processes that hand on to each other, the last to us."""
    data = os.urandom(NUM_BYTES)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    with ExitStack() as stack:
        port = listener.socket.getsockname()[1]
        for _ in range(count):
            port = int(stack.enter_context(_child("--ring", str(port))))
        first = await trio.open_tcp_stream("127.0.0.1", port)
        last = await listener.accept()

        async def step() -> None:
            await first.send_all(data)
            await _receive(last)

        async with first, last, listener:
            yield step


async def _ring_member(next_port: int) -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    behind = await trio.open_tcp_stream("127.0.0.1", next_port)
    print(listener.socket.getsockname()[1], flush=True)
    before = await listener.accept()
    while data := await _receive(before):
        await behind.send_all(data)


async def _receive(stream: trio.SocketStream) -> bytes:
    data = b""
    while len(data) < NUM_BYTES:
        more = await stream.receive_some(NUM_BYTES - len(data))
        if not more:
            return b""
        data += more
    return data


@contextmanager
def _child(*args: str) -> Iterator[str]:
    """A process of this program; the line that it prints when it is ready."""
    process = subprocess.Popen(
        [sys.executable, __file__, *args],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


if __name__ == "__main__":
    main()
