"""How long does it take members on one machine to make their vectors one, against gloo and hivemind?

    python benchmarks/averaging.py [--sizes 1 16 64] [--members 2 4] [--rounds 15] [--no-hivemind]

All-reduce of float32 over TCP on loopback; each member is a process of its own with one torch thread. Ours are
encrypted (Noise), gloo's are in the clear. The ways take turns within a round, so that they meet the same machine; a
round takes as long as its slowest member. "Transport alone" sends the same bytes in the same messages through the same
connections, and adds nothing: what is above it is the reduction's own. Memory is used again from round to round by all.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import trio
from report import table, write_report

MIB_ELEMENTS = 1 << 18
WARM_UP = 2
CHUNK_ELEMENTS = 2 * MIB_ELEMENTS
GIVEN_UP = 120.0  # seconds

Round = Callable[[int], Awaitable[float]]


def main() -> None:
    if sys.argv[1:2] == ["--member"]:
        rank, num, directory = sys.argv[3:]
        CHILDREN[sys.argv[2]](int(rank), int(num), Path(directory))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 64], help="MiB")
    parser.add_argument("--members", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-hivemind", action="store_true")
    parser.add_argument("--no-file", action="store_true")
    options = parser.parse_args()
    has_hivemind = not options.no_hivemind and _can_import("hivemind")
    rows = []
    for num in options.members:
        rows += _measure(num, options.sizes, options.rounds, has_hivemind)
    header = ("members", "MiB", "way", "ms, median", "ms, best", "times gloo", "times transport")
    if options.no_file:
        print(table(header, rows))
    else:
        write_report("averaging", (__doc__ or "").partition("\n")[0], table(header, rows))


def _can_import(name: str) -> bool:
    """Whether a library is here with all that it needs."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], capture_output=True, check=False
    )
    return done.returncode == 0


def _measure(
    num: int, sizes: list[int], num_rounds: int, has_hivemind: bool
) -> list[tuple[str, ...]]:
    """The rows of the table for so many members."""
    with ExitStack() as stack:
        ways: dict[str, Callable[[int], float]] = {}
        gloo = stack.enter_context(_group("gloo", num))
        ours = stack.enter_context(_group("ours", num))
        ways["gloo, in the clear"] = lambda mib: _turn(gloo, f"reduce {mib}")
        ways["ours"] = lambda mib: _turn(ours, f"reduce {mib}")
        ways["transport alone"] = lambda mib: _turn(ours, f"transport {mib}")
        if has_hivemind:
            hivemind = stack.enter_context(_group("hivemind", num))
            ways["hivemind, all-reduce alone"] = lambda mib: _turn(hivemind, f"reduce {mib}")
        rows = []
        for mib in sizes:
            times: dict[str, list[float]] = {way: [] for way in ways}
            for number in range(WARM_UP + num_rounds):
                for way, turn in ways.items():
                    # hivemind takes seconds to form a group.
                    if way.startswith("hivemind") and number >= WARM_UP + num_rounds // 3:
                        continue
                    seconds = turn(mib)
                    if number >= WARM_UP and not math.isnan(seconds):
                        times[way].append(1e3 * seconds)
            anchor = times["gloo, in the clear"]
            floor = times["transport alone"]
            rows += [
                (
                    str(num),
                    str(mib),
                    way,
                    f"{median(found):.1f}",
                    f"{min(found):.1f}",
                    f"{median(found) / median(anchor):.2f}",
                    f"{median(found) / median(floor):.2f}",
                )
                for way, found in times.items()
                if found
            ]
    return rows


# Processes


@contextmanager
def _group(kind: str, num: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Members of one kind, ready."""
    with tempfile.TemporaryDirectory() as directory:
        members = [
            subprocess.Popen(
                [sys.executable, __file__, "--member", kind, str(rank), str(num), directory],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if kind == "hivemind" else None,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            for rank in range(num)
        ]
        try:
            for member in members:
                _answer(member)
            yield members
        finally:
            for member in members:
                os.killpg(member.pid, signal.SIGKILL)
                member.wait()


def _turn(members: list[subprocess.Popen[str]], command: str) -> float:
    """Let them do something at once; the seconds of the slowest."""
    for member in members:
        assert member.stdin is not None
        member.stdin.write(command + "\n")
        member.stdin.flush()
    return max(float(_answer(member)["seconds"]) for member in members)


def _answer(member: subprocess.Popen[str]) -> dict[str, Any]:
    assert member.stdout is not None
    for line in member.stdout:
        if line.startswith("{"):
            answer: dict[str, Any] = json.loads(line)
            return answer
    raise SystemExit("a member of the benchmark has ended")


def _say(seconds: float = 0.0) -> None:
    print(json.dumps({"seconds": seconds}), flush=True)


def _commands() -> Iterator[tuple[str, int]]:
    for line in sys.stdin:
        what, mib = line.split()
        yield what, int(mib)


# gloo


def _gloo(rank: int, num: int, directory: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/gloo", rank=rank, world_size=num
    )
    _say()
    values = torch.empty(0)
    for _, mib in _commands():
        if len(values) != mib * MIB_ELEMENTS:
            values = torch.empty(mib * MIB_ELEMENTS)
        values.fill_(rank + 1.0)
        dist.barrier()
        begun = time.perf_counter()
        dist.all_reduce(values)
        values /= num
        seconds = time.perf_counter() - begun
        assert values[-1].item() == (num + 1) / 2
        _say(seconds)


# hivemind


def _hivemind(rank: int, num: int, directory: Path) -> None:
    import hivemind
    import torch
    from hivemind.averaging.control import AveragingStage

    torch.set_num_threads(1)
    local = {
        "host_maddrs": ["/ip4/127.0.0.1/tcp/0"],
        "nat_port_map": False,
        "auto_nat": False,
        "use_relay": False,
        "use_auto_relay": False,
    }
    place = directory / "first"
    while rank and not place.exists():
        time.sleep(0.05)
    peers = json.loads(place.read_text()) if rank else None
    dht = hivemind.DHT(initial_peers=peers, start=True, **local)
    if not rank:
        partial = directory / "partial"
        partial.write_text(json.dumps([str(address) for address in dht.get_visible_maddrs()]))
        partial.rename(place)
    averagers: dict[int, Any] = {}
    _say()
    for _, mib in _commands():
        if mib not in averagers:
            averagers[mib] = hivemind.DecentralizedAverager(
                [torch.full((mib * MIB_ELEMENTS,), rank + 1.0)],
                dht,
                prefix=f"of{mib}",
                target_group_size=num,
                min_matchmaking_time=1.0,
                request_timeout=3.0,
                start=True,
                allow_state_sharing=False,
            )
        averager = averagers[mib]
        control = averager.step(wait=False, timeout=60, allow_retries=False)
        while not control.done() and control.stage not in (
            AveragingStage.RUNNING_ALLREDUCE,
            AveragingStage.FINISHED,
        ):
            time.sleep(0.0005)
        begun = time.perf_counter()
        is_averaged = control.exception() is None  # a group is not always found
        _say(time.perf_counter() - begun if is_averaged else math.nan)


# Ours


def _ours(rank: int, num: int, directory: Path) -> None:
    trio.run(_run_ours, rank, num, directory)


async def _run_ours(rank: int, num: int, directory: Path) -> None:
    import torch

    from neurogrid.p2p import open_host
    from neurogrid.p2p.exchange.exchange import Exchange
    from neurogrid.p2p.wire import OF_THE_STREAM, MessageTable
    from neurogrid.training.averaging.reductions import Reductions
    from neurogrid.training.wire.types import (
        DEFAULT_TRAINING_LIMITS,
        TrainingMessage,
        training_table,
    )

    torch.set_num_threads(1)
    codes = (*TrainingMessage, *OF_THE_STREAM)
    async with open_host() as host:
        exchange = Exchange(host, training_table())
        reductions = Reductions(exchange, admit=lambda peer_id: True)
        bare = Exchange(host, MessageTable("/bare/1.0.0", codes, DEFAULT_TRAINING_LIMITS))
        peers = await _meet(host, rank, num, directory)
        transport = _Transport(bare, peers)
        _say()
        values = out = torch.empty(0)
        async for what, mib in _async_commands():
            if len(values) != mib * MIB_ELEMENTS:
                values = torch.full((mib * MIB_ELEMENTS,), rank + 1.0)
                out = torch.zeros(mib * MIB_ELEMENTS)
            if what == "transport":
                seconds = await transport.round(values)
            else:
                plan = _plan(peers, values.numel(), transport.num_rounds)
                await transport.barrier()
                begun = time.perf_counter()
                result = await reductions.reduce(plan, values, timeout=60, out=out)
                seconds = time.perf_counter() - begun
                assert result is not None
                assert result.values[-1].item() == (num + 1) / 2
            _say(seconds)


async def _async_commands() -> Any:
    lines = _commands()
    while (line := await trio.to_thread.run_sync(next, lines, None)) is not None:
        yield line


async def _meet(host: Any, rank: int, num: int, directory: Path) -> list[str]:
    """Connect with all; their peer ids, by rank."""
    partial = directory / f"{rank}.partial"
    partial.write_text(json.dumps([host.peer_id, host.addresses[0]]))
    partial.rename(directory / f"{rank}.json")
    while len(list(directory.glob("*.json"))) < num:
        await trio.sleep(0.05)
    found = [json.loads((directory / f"{one}.json").read_text()) for one in range(num)]
    for _, address in found[:rank]:
        await host.connect(address)
    while len(host.connected_peers) < num - 1:
        await trio.sleep(0.01)
    return [peer_id for peer_id, _ in found]


def _plan(peers: list[str], num_elements: int, number: int) -> Any:
    from neurogrid.training.averaging.plan import ReductionPlan

    chunk_elements = min(CHUNK_ELEMENTS, -(-num_elements // len(peers)))
    num_chunks = -(-num_elements // chunk_elements)
    return ReductionPlan(
        reduction=number,
        members=tuple(peers),
        weights=(1.0,) * len(peers),
        reducers=tuple(peers),
        cuts=tuple(num_chunks * index // len(peers) for index in range(len(peers) + 1)),
        num_elements=num_elements,
        chunk_elements=chunk_elements,
    )


class _Transport:
    """The messages of a reduction, without the reduction."""

    def __init__(self, exchange: Any, peers: list[str]) -> None:
        from neurogrid.training.wire.types import TrainingMessage

        self.num_rounds = 0
        self._exchange = exchange
        self._peers = peers
        self._own = exchange.host.peer_id
        self._codes = TrainingMessage
        self._values: Any = None
        self._there: list[Any] = []
        exchange.on_message(TrainingMessage.CHUNK, self._take)
        exchange.on_message(TrainingMessage.JOIN, self._join)

    async def barrier(self) -> None:
        """Return when all have come here."""
        from neurogrid.p2p import TensorMessage, new_request_id

        self.num_rounds += 1
        message = TensorMessage(self._codes.JOIN, request_id=new_request_id())
        await self._exchange.request(self._peers[0], message, self._codes.JOINED, timeout=GIVEN_UP)

    async def _join(self, message: Any) -> None:
        from neurogrid.p2p import TensorMessage

        self._there.append(message)
        if len(self._there) == len(self._peers):
            there, self._there = self._there, []
            for one in there:
                answer = TensorMessage(self._codes.JOINED, request_id=one.request_id)
                await self._exchange.send(one.from_peer, answer)

    async def _take(self, message: Any) -> None:
        from neurogrid.p2p import TensorMessage

        answer = TensorMessage(
            self._codes.MEAN, message.layer_id, 0, message.request_id, message.data
        )
        await self._exchange.send(message.from_peer, answer)

    async def round(self, values: Any) -> float:
        """Send every other member its part, and get as much back."""
        plan = _plan(self._peers, values.numel(), 0)
        data = values.numpy().data.cast("B")
        await self.barrier()
        begun = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for peer_id in self._peers:
                if peer_id != self._own:
                    chunks = iter(plan.chunks_of(peer_id))
                    for _ in range(8):
                        nursery.start_soon(self._ask, peer_id, plan, chunks, data)
        return time.perf_counter() - begun

    async def _ask(self, peer_id: str, plan: Any, chunks: Iterator[int], data: memoryview) -> None:
        from neurogrid.p2p import TensorMessage, new_request_id

        for chunk in chunks:
            start, stop = plan.chunk_span(chunk)
            message = TensorMessage(
                self._codes.CHUNK, chunk, 0, new_request_id(), data[4 * start : 4 * stop]
            )
            await self._exchange.request(peer_id, message, self._codes.MEAN, timeout=GIVEN_UP)


CHILDREN = {"gloo": _gloo, "hivemind": _hivemind, "ours": _ours}

if __name__ == "__main__":
    main()
