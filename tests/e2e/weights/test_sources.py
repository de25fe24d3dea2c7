"""Layers from worker to worker: the coordinator sends each about once, and what another fails to give as well."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

from neurogrid import Worker, WorkerSettings, open_worker
from neurogrid.errors import PeerRefusedError
from neurogrid.fleet.placing.placer import open_placer
from neurogrid.fleet.remote_worker import RemoteWorker, Timeouts, TransferReports
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.inference.pipeline.remote_v11 import RemoteWorkerV11
from neurogrid.p2p import Protocol, open_host
from neurogrid.p2p.exchange.counters import Direction
from neurogrid.p2p.transfer import BlobSource, TransferPolicy, Transfers
from neurogrid.p2p.wire import ErrorCode
from tests.e2e.support import DEADLINE
from tests.families import FAMILIES, save_checkpoint

HALVES = (range(3), range(3, 6))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("llama")
    save_checkpoint(FAMILIES[0], path)
    return LoadedModel.load(path, name=None, max_seq_len=64, dtype=None)


@dataclass
class Told:
    """What the coordinator told, in bytes."""

    sent: int = 0
    passed: int = 0
    held: int = 0

    def add_sent(self, num_bytes: int) -> None:
        self.sent += num_bytes

    def add_passed(self, num_bytes: int) -> None:
        self.passed += num_bytes

    def add_held(self, num_bytes: int) -> None:
        self.held += num_bytes

    @property
    def reports(self) -> TransferReports:
        return TransferReports(
            begun=lambda: None, sent=self.add_sent, held=self.add_held, passed_on=self.add_passed
        )


@asynccontextmanager
async def some_workers(count: int) -> AsyncIterator[list[Worker]]:
    with trio.fail_after(DEADLINE):
        async with AsyncExitStack() as stack:
            yield [
                await stack.enter_async_context(open_worker(WorkerSettings())) for _ in range(count)
            ]


async def place(
    model: LoadedModel, workers: Sequence[Worker], layers: Sequence[range], *, in_turn: bool = False
) -> Told:
    """Bring a range of layers to each of the workers; `in_turn`, when the one before is known to hold its own."""
    told = Told()
    async with open_host() as host:
        protocol = Protocol(host, role="coordinator")
        placer = await open_placer(
            model, host, max_sessions=1, skip_weight_transfer=False, cache=None
        )

        async def place_one(worker: RemoteWorker, wanted: range) -> None:
            await placer.place(worker, wanted, told.reports, is_configured=False)

        async with trio.open_nursery() as nursery:
            for worker, wanted in zip(workers, layers, strict=True):
                peer_id = await host.connect(worker.addresses[0])
                remote = RemoteWorkerV11(protocol, peer_id, Timeouts())
                if in_turn:
                    await place_one(remote, wanted)
                else:
                    nursery.start_soon(place_one, remote, wanted)
        assert protocol.counters.total(Direction.SENT).num_bytes > told.sent
    for worker, wanted in zip(workers, layers, strict=True):
        assert worker.held_layers == tuple(wanted)
    return told


def num_bytes(model: LoadedModel, layers: Sequence[int] = range(6)) -> int:
    return sum(model.checkpoint.layer_blob(layer).num_bytes for layer in layers)


def test_four_workers_and_two_halves_take_the_model_once(model: LoadedModel) -> None:
    async def main() -> None:
        async with some_workers(4) as workers:
            told = await place(model, workers, [HALVES[0], HALVES[1]] * 2)
            assert told.sent == num_bytes(model)
            assert told.passed == num_bytes(model)
            # Three keep theirs in memory, and the fourth gets other layers, but for those that it was sent before
            # they had said so, from them.
            told = await place(model, workers, [HALVES[0], HALVES[1], HALVES[0], HALVES[0]])
            assert told.sent + told.passed == num_bytes(model, HALVES[0])
            assert told.passed >= num_bytes(model, HALVES[0][:1])
            assert told.held == num_bytes(model) + num_bytes(model, HALVES[0])

    trio.run(main)


class _Lying:
    """Says that it has a blob, and sends something else."""

    def __init__(self, true: BlobSource) -> None:
        self._true = true

    @property
    def num_bytes(self) -> int:
        return self._true.num_bytes

    def digests(self) -> bytes:
        return self._true.digests()

    def chunk(self, index: int) -> bytes:
        data = bytearray(self._true.chunk(index))
        data[-1] ^= 1
        return bytes(data)


def test_a_worker_that_lies_is_named_and_asked_once(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with some_workers(2) as (liar, other):
            await place(model, [liar], [range(6)])
            blobs = liar._state.blobs
            true_source = blobs.source
            asked: list[bytes] = []

            def source(blob_id: bytes) -> Any:
                asked.append(blob_id)
                found = true_source(blob_id)
                assert found is not None
                return _Lying(found)

            monkeypatch.setattr(blobs, "source", source)
            # The liar has said what it has before the other is given anything.
            told = await place(model, [liar, other], [range(6), range(6)], in_turn=True)
            assert told.sent == num_bytes(model)
            assert told.held == num_bytes(model)
            assert 1 <= len(asked) <= 2  # two layers are under way at once
            assert "is not asked again" in caplog.text
            assert f"chunk 0 from {liar.peer_id} has another hash" in caplog.text

    trio.run(main)


def test_a_worker_that_cannot_be_reached_is_left_alone(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with some_workers(2) as (first, other):
            await place(model, [first], [range(6)])

            async def connect_any(addresses: Sequence[str]) -> str:
                return await other.protocol.host.connect(
                    f"/ip4/127.0.0.1/tcp/1/p2p/{first.peer_id}"
                )

            monkeypatch.setattr(other.protocol.host, "connect_any", connect_any)
            told = await place(model, [first, other], [range(6), range(6)], in_turn=True)
            assert told.sent == num_bytes(model)
            assert "it is not asked for 60 s" in caplog.text
            assert "refused" in caplog.text

    trio.run(main)


def test_a_worker_that_lost_a_layer_is_no_source_and_no_liar(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with some_workers(2) as (first, other):
            await place(model, [first], [range(6)])
            monkeypatch.setattr(first._state.blobs, "source", lambda blob_id: None)
            told = await place(model, [first, other], [range(6), range(6)], in_turn=True)
            assert told.sent == num_bytes(model)
            assert "asked" not in caplog.text

    trio.run(main)


def test_a_stranger_may_not_offer_what_a_worker_may_ask_for(
    model: LoadedModel, tmp_path: Path
) -> None:
    """Serving others opens nothing else: who is no coordinator that is served may offer nothing."""
    from neurogrid.errors import PeerRefusedError
    from neurogrid.p2p.transfer import Transfers, send_blob
    from neurogrid.p2p.wire import ErrorCode

    async def main() -> None:
        async with some_workers(1) as (worker,), open_host() as host, open_host() as stranger:
            protocol = Protocol(host, role="coordinator")
            peer_id = await host.connect(worker.addresses[0])
            placer = await open_placer(
                model, host, max_sessions=1, skip_weight_transfer=False, cache=None
            )
            remote = RemoteWorkerV11(protocol, peer_id, Timeouts())
            await placer.place(remote, range(6), Told().reports, is_configured=False)
            await stranger.connect(worker.addresses[0])
            other = Protocol(stranger, role="worker")
            blob = model.checkpoint.layer_blob(0)
            fetched = await Transfers(other).fetch_blob(peer_id, blob.blob_id())
            assert bytes(fetched.blob.data) == b"".join(map(bytes, blob.chunks()))
            with pytest.raises(PeerRefusedError) as caught:
                await send_blob(other, peer_id, b"weights of mine", layer_id=0)
            assert caught.value.code == ErrorCode.CONFIG_REQUIRED

    trio.run(main)


def test_who_comes_too_late_for_a_layer_is_told_so_and_nobody_else_is_bothered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with some_workers(1) as (worker,), open_host() as host:
            protocol = Protocol(host, role="worker")
            transfers = Transfers(protocol, TransferPolicy())
            peer_id = await host.connect(worker.addresses[0])
            await protocol.open(peer_id)
            with pytest.raises(
                PeerRefusedError, match=f"blob {bytes(32).hex()} is not here"
            ) as caught:
                await transfers.fetch_blob(peer_id, bytes(32))
            assert caught.value.code == ErrorCode.BLOB_UNKNOWN

    trio.run(main)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
