"""How fast do weights come to workers, against what the encrypted transport carries? And how often does each byte go?

Everything on this machine, loopback, one torch thread in every process. A model of 1 GB, its hashes known. Each
figure is taken several times, and the transport's in the same rounds, so that a machine that drifts drifts for all.
"""

from __future__ import annotations

import mmap
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import trio
from report import Spread, spread, table, write_report
from transformers import AutoModelForCausalLM, LlamaConfig
from transport_load import Usage

from neurogrid import CoordinatorSettings, open_coordinator
from neurogrid.fleet.placing import delivery_v11
from neurogrid.fleet.placing.placer import open_placer
from neurogrid.fleet.remote_worker import Timeouts, TransferReports
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.inference.pipeline import remote_v11
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.hash_cache import HashCache
from neurogrid.node.cache_directory import CacheSettings
from neurogrid.p2p import MessageType, Protocol, TensorMessage, open_host
from neurogrid.p2p.exchange.counters import Direction
from neurogrid.p2p.transfer import send_blob

MIB = 1024 * 1024
NUM_LAYERS = 16
TRANSPORT_BYTES = 512 * MIB
SHARE = 0.6  # of the transport's throughput, and
EXTRA = 0.5  # seconds on top: the target
PROMPT = list(range(2, 18))


def make_model(directory: Path) -> int:
    """A Llama of 16 layers of 63 MB; the bytes of its layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1000,
        max_position_embeddings=256,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    checkpoint = Checkpoint.open(directory)
    return sum(checkpoint.layer_blob(layer).num_bytes for layer in range(NUM_LAYERS))


def keep_hashes(model: Path, directory: Path) -> float:
    """Hash the model for the runs to come; the bytes a second."""
    directory.mkdir(exist_ok=True)
    time.sleep(3)  # files that were just written are not noted
    checkpoint = Checkpoint.open(model)
    hashes = HashCache.open(directory, checkpoint)
    started = time.perf_counter()
    num_bytes = 0
    for layer in range(NUM_LAYERS):
        blob = checkpoint.layer_blob(layer)
        blob.digests()
        num_bytes += blob.num_bytes
    rate = num_bytes / (time.perf_counter() - started)
    hashes.save()
    return rate


# Processes


@contextlib.contextmanager
def processes(commands: list[list[str]]) -> Iterator[list[str]]:
    """Start them all; the first line that each prints is its address."""
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    try:
        addresses = []
        for process in running:
            assert process.stdout is not None
            addresses.append(process.stdout.readline().strip())
        yield addresses
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def worker_command(*args: str) -> list[str]:
    arguments = ["--port", "0", "--log-level", "warning", *args]
    return [sys.executable, "-m", "neurogrid.cli.commands.worker", *arguments]


async def sink() -> None:
    """The other end of the transport: takes weights and drops them."""
    async with open_host() as host:
        protocol = Protocol(host, role="worker")
        taken = 0

        def take(message: TensorMessage) -> Awaitable[None] | None:
            nonlocal taken
            taken += len(message.data) - 8
            return answer(message) if taken >= TRANSPORT_BYTES else None

        async def answer(message: TensorMessage) -> None:
            nonlocal taken
            taken = 0
            assert message.from_peer is not None
            await protocol.send_weights_ack(message.from_peer, 0)

        protocol.on_message(MessageType.WEIGHTS, take)
        print(host.addresses[0], flush=True)
        await trio.sleep_forever()


async def transport_rate(address: str) -> float:
    """Bytes a second of 1 MiB messages through Protocol to one process, acknowledged at the end."""
    async with open_host() as host:
        peer_id = await host.connect(address)
        protocol = Protocol(host, role="coordinator")
        data = memoryview(os.urandom(64 * MIB))
        for _ in range(2):  # the first warms up
            started = time.perf_counter()
            for _ in range(TRANSPORT_BYTES // len(data)):
                await protocol.send_weights(peer_id, 0, data)
            await protocol.wait_for_weights_ack(peer_id, 0, timeout=60)
            seconds = time.perf_counter() - started
        return TRANSPORT_BYTES / seconds


# What is measured


def take_memory(num_bytes: int) -> float:
    """Take so much fresh memory and give it back; the seconds that it took.

    The host of a virtual machine may take back what has been free for some seconds. Whoever asks for it next waits for
    it, here 2 s a GB, where memory that is there costs 0.4.
    """
    started = time.perf_counter()
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, num_bytes, mmap.PAGESIZE):
        memory[at] = 1
    memory.close()
    return time.perf_counter() - started


@dataclass
class Run:
    """One start: seconds from the first offer to Ready and to the first token, CPU seconds of all processes until
    then, and bytes of weights sent.
    """

    ready: float
    first_token: float
    cpu: float
    num_bytes: int


class _Offers:
    """Notes when the first blob is offered."""

    def __init__(self) -> None:
        self.began = 0.0
        self.cpu = 0.0  # seconds that all processes had taken until then
        self.usage = Usage([os.getpid()])
        self._send_blob: Callable[..., Awaitable[Any]] = send_blob
        # Put around the real one, which it calls: the package tells nobody when an offer goes out.
        delivery_v11.send_blob = self.send_blob  # type: ignore[attr-defined]

    async def send_blob(self, *args: Any, **kwargs: Any) -> Any:
        if not self.began:
            self.cpu, self.began = self.usage.cpu_seconds(), time.perf_counter()
        return await self._send_blob(*args, **kwargs)


async def start(model: Path, addresses: list[str], cache: Path, offers: _Offers) -> Run:
    settings = CoordinatorSettings(
        model=model,
        peers=tuple(addresses),
        stages=len(addresses),
        max_seq_len=128,
        cache=CacheSettings(cache),
    )
    offers.began = 0.0
    async with open_coordinator(settings) as coordinator:
        ready = time.perf_counter()
        async for _ in coordinator.generate(PROMPT, max_tokens=1):
            pass
        first, cpu = time.perf_counter(), offers.usage.cpu_seconds()
        sent = coordinator.counters.total(Direction.SENT, msg_type=MessageType.WEIGHTS).num_bytes
    return Run(ready - offers.began, first - offers.began, cpu - offers.cpu, sent)


async def share(model: Path, addresses: list[str], cache: Path) -> tuple[int, float]:
    """Give each half of the layers to half of the workers; the bytes that the coordinator sent, and seconds."""
    loaded = await trio.to_thread.run_sync(
        lambda: LoadedModel.load(model, name=None, max_seq_len=128, dtype=None)
    )
    num_sent = 0

    def begun() -> None:
        """A layer is about to go."""

    def sent(num_bytes: int) -> None:
        nonlocal num_sent
        num_sent += num_bytes

    def other(num_bytes: int) -> None:
        """Ignore bytes that the coordinator has not sent."""

    async with open_host() as host:
        protocol = Protocol(host, role="coordinator")
        placer = await open_placer(
            loaded,
            host,
            max_sessions=1,
            skip_weight_transfer=False,
            cache=CacheSettings(cache),
        )

        async def place(number: int, address: str) -> None:
            begin = number % 2 * NUM_LAYERS // 2
            worker = remote_v11.RemoteWorkerV11(protocol, await host.connect(address), Timeouts())
            await placer.place(
                worker,
                range(begin, begin + NUM_LAYERS // 2),
                TransferReports(begun=begun, sent=sent, held=other, passed_on=other),
                is_configured=False,
            )

        started = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for number, address in enumerate(addresses):
                nursery.start_soon(place, number, address)
    return num_sent, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sink", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--no-cache-on-workers", action="store_true", help="write nothing to disk")
    parser.add_argument("--no-report", action="store_true", help="print the rounds alone")
    options = parser.parse_args()
    if options.sink:
        trio.run(sink)
        return
    torch.set_num_threads(1)
    offers = _Offers()
    rates, fetched, first, again, ratios = [], [], [], [], []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model, cache = directory / "model", directory / "coordinator"
        num_bytes = make_model(model)
        cache.mkdir()
        hash_rate = keep_hashes(model, cache / "hashes")
        for number in range(options.rounds):
            with processes([[sys.executable, __file__, "--sink"]]) as (address,):
                rates.append(trio.run(transport_rate, address))
            caches = [directory / f"cache-{number}-{worker}" for worker in range(2)]
            kept = [
                worker_command("--no-cache")
                if options.no_cache_on_workers
                else worker_command("--cache-dir", str(path))
                for path in caches
            ]
            with processes(kept) as addresses:
                fetched.append(take_memory(2 * num_bytes))
                first.append(trio.run(start, model, addresses, cache, offers))
                while (
                    not options.no_cache_on_workers
                    and sum(len(list(path.glob("blobs/*.blob"))) for path in caches) < NUM_LAYERS
                ):
                    time.sleep(0.1)
            print(number, f"{rates[-1] / 1e6:.0f} MB/s", first[-1], file=sys.stderr)
            if options.no_cache_on_workers:
                continue
            with processes(kept) as addresses:
                again.append(trio.run(start, model, addresses, cache, offers))
            print(number, again[-1], file=sys.stderr)
            if number == 0:
                with processes([worker_command("--no-cache") for _ in range(4)]) as addresses:
                    sent, seconds = trio.run(share, model, addresses, cache)
                ratios.append(sent / num_bytes)
                print(number, ratios, f"{seconds:.2f} s", file=sys.stderr)
    allowed = [num_bytes / (SHARE * rate) + EXTRA for rate in rates]
    if options.no_report or options.no_cache_on_workers:
        print(
            *(
                f"{run.first_token:.2f} s of {most:.2f} s"
                for run, most in zip(first, allowed, strict=True)
            )
        )
        return

    def show(values: list[float], digits: int = 2) -> str:
        found: Spread = spread(values)
        return found.show(digits)

    rows = [
        ["encrypted transport, 1 MiB messages, MB/s", show([rate / 1e6 for rate in rates], 0), ""],
        ["first offer to every worker ready, s", show([run.ready for run in first]), ""],
        [
            "first offer to first token, s",
            show([run.first_token for run in first]),
            show(allowed),
        ],
        [
            "the same, as a share of what is allowed",
            show([run.first_token / most for run, most in zip(first, allowed, strict=True)]),
            "at most 1",
        ],
        [
            f"CPU seconds of all processes until then, of {os.cpu_count()} cores",
            show([run.cpu for run in first]),
            "",
        ],
        ["weight bytes sent / model", show([run.num_bytes / num_bytes for run in first]), ""],
        [
            "second start, from the workers' disks: first offer to first token, s",
            show([run.first_token for run in again]),
            "",
        ],
        ["second start: weight bytes sent", show([run.num_bytes for run in again], 0), "0"],
        [
            "4 workers, each half wanted by 2: bytes sent / model",
            show(ratios),
            "at most 1.2",
        ],
        ["hashing, one thread, MB/s", f"{hash_rate / 1e6:.0f}", ""],
        ["twice as much fresh memory, taken and given back before, s", show(fetched), ""],
    ]
    write_report(
        "weights",
        f"Weights of a model with {num_bytes / 1e6:,.0f} MB in {NUM_LAYERS} layers (float32) to 2 workers on this "
        "machine over encrypted libp2p, hashes cached with the model; what came goes to the workers' disks "
        f"when nothing more comes. Median (minimum to maximum) of {options.rounds} rounds. Allowed is bytes / ({SHARE} "
        f"x the transport's throughput of the same round) + {EXTRA} s. Before each first start, memory is taken and "
        "given back, so that the host of a virtual machine has it there.",
        table(["figure", "measured", "target"], rows),
    )


if __name__ == "__main__":
    main()
