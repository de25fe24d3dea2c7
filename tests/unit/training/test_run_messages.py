"""Messages of runs: bounds that are too long for vectors, and a stream that carries requests, orders and blobs."""

from __future__ import annotations

from random import Random

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import LocalProtocolError, RemoteProtocolError
from neurogrid.p2p import TensorMessage, new_request_id
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.memory import open_memory_network
from neurogrid.p2p.transfer import BlobInfo, BlobSource, BytesSource, TransferPolicy, Transfers
from neurogrid.p2p.wire import ErrorCode
from neurogrid.p2p.wire.limits import MAX_PEER_ID_CHARS
from neurogrid.training.wire import MAX_GROUP_MEMBERS
from neurogrid.training.wire.runs import (
    MAX_CONFIG_BYTES,
    MAX_HELD_SLICES,
    MAX_RANGES,
    MAX_RUN_FILE_BYTES,
    MAX_RUN_SOURCES,
    MAX_WORKS,
    Ask,
    Offer,
    Order,
    Report,
    RunMessage,
    SampleRange,
    Start,
    Work,
    run_table,
)

RUN = bytes(range(16))
U32, U64 = 2**32 - 1, 2**64 - 1
LONG = (SampleRange(U32, U32 - 1, U32),) * MAX_RANGES


def start(run_file: str = "x", config: str = "{}") -> Start:
    return Start(RUN, 1, 0, run_file, config, "causal-lm", bytes(32), 1)


def code_of(kind: type[Order | Report | Start | Work], data: bytes) -> ErrorCode:
    with pytest.raises(RemoteProtocolError) as caught:
        kind.decode(data)
    return ErrorCode(caught.value.code)


def test_the_longest_start_fits_its_message() -> None:
    longest = start("é" * (MAX_RUN_FILE_BYTES // 2), "{" * MAX_CONFIG_BYTES)
    data = longest.encode()
    assert Start.decode(data) == longest
    assert len(data) < run_table().max_data(RunMessage.START)
    for wrong in (
        start("x" * (MAX_RUN_FILE_BYTES + 1)),
        start(config="{" * (MAX_CONFIG_BYTES + 1)),
        start("\ud800"),
    ):
        with pytest.raises(LocalProtocolError):
            wrong.encode()


def test_the_longest_order_fits_its_message() -> None:
    longest = Order(
        RUN,
        U64,
        U64,
        works=tuple(
            Work(U64 - n, 1e30, 1e30, U32, 2**53, LONG) for n in range(MAX_WORKS - 1, -1, -1)
        ),
        sources=("~" * 512,) * MAX_RUN_SOURCES,
        ends=True,
        expects=("~" * MAX_PEER_ID_CHARS,) * MAX_GROUP_MEMBERS,
    )
    data = longest.encode()
    assert Order.decode(data) == longest
    assert len(data) < run_table().max_data(RunMessage.ORDER)


def test_the_longest_report_fits_its_message() -> None:
    longest = Report(
        RUN,
        U32,
        "training",
        reason="€" * 1024,
        held=tuple(range(U32 - MAX_HELD_SLICES, U32)),
        group_addresses=("~" * 512,) * 16,
    )
    data = longest.encode()
    assert Report.decode(data) == longest
    assert len(data) < run_table().max_data(RunMessage.REPORT)


def test_what_is_too_long_is_not_sent() -> None:
    for wrong in (
        Work(1, 0.0, 1.0, 1, MAX_RANGES + 1, (*LONG, LONG[0])),
        Work(1, 0.0, float("nan"), 1, 1, LONG[:1]),
        Work(1, 0.0, 1.0, 1, 2**53 + 1, LONG[:1]),
        Order(RUN, 1, 1, (Work(1, 0.0, 1.0, 1, 1, (SampleRange(0, 1, 1),)),)),
        Order(RUN, 1, 1, (Work(1, 0.0, 1.0, 1, 1),) * 2),
        Report(RUN, 0, "ready", held=tuple(range(MAX_HELD_SLICES + 1))),
        Report(RUN, 0, "training", loss_sum=float("nan")),
        Report(RUN, 0, "training", group_addresses=("/dns4/é/tcp/1/p2p/a",)),
        Report(RUN, 0, "training", cosine=float("inf")),
    ):
        with pytest.raises(LocalProtocolError):
            wrong.encode()


ranges = st.lists(
    st.tuples(st.integers(0, U32), st.integers(0, U32 - 1), st.integers(1, 1000)).map(
        lambda drawn: SampleRange(drawn[0], drawn[1], min(U32, drawn[1] + drawn[2]))
    ),
    max_size=8,
).map(tuple)


@given(ranges, st.integers(1, U64), st.floats(0, 1e30), st.data())
def test_orders_and_reports_are_read_as_they_were_written(
    drawn: tuple[SampleRange, ...], number: int, position: float, data: st.DataObject
) -> None:
    work = Work(number, position, 1.5, 8, 1 + sum(each.num_samples for each in drawn), drawn)
    order = Order(RUN, number, number, (work,), ends=True)
    report = Report(RUN, 1, "ready", incarnation=number, done=number, batch_seconds=0.5)
    for kind, payload in ((Order, order), (Report, report)):
        written = payload.encode()
        assert kind.decode(written) == payload
        cut = data.draw(st.integers(0, len(written) - 1))
        assert code_of(kind, written[:cut]) is ErrorCode.PROTOCOL_VIOLATION


class Giving(TransferPolicy):
    def __init__(self, source: BlobSource, blob_id: bytes) -> None:
        self.blobs = {blob_id: source}

    async def provide(self, peer_id: str, blob_id: bytes) -> BlobSource | None:
        return self.blobs.get(blob_id)


async def test_a_stream_carries_requests_orders_and_blobs() -> None:
    slice_ = Random(3).randbytes(1_500_000)
    source = BytesSource(slice_)
    info = BlobInfo.of_digests(source.digests(), len(slice_))
    with trio.fail_after(30):
        async with (
            open_memory_network() as network,
            network.open_host() as leader,
            network.open_host() as worker,
        ):
            leading, working = Exchange(leader, run_table()), Exchange(worker, run_table())
            Transfers(leading, Giving(source, info.blob_id))
            orders, told = trio.open_memory_channel[Order](1)

            async def on_ask(message: TensorMessage) -> None:
                assert Ask.decode(message.data).cores == 2
                data = Offer(7, 0.5, cores=4, versions=(("torch", "2.9"),)).encode()
                await working.send(
                    leader.peer_id,
                    TensorMessage(
                        msg_type=RunMessage.OFFER, request_id=message.request_id, data=data
                    ),
                )

            working.on_message(RunMessage.ASK, on_ask)
            working.on_message(
                RunMessage.ORDER, lambda message: orders.send_nowait(Order.decode(message.data))
            )
            await leader.connect(worker.addresses[0])
            ask = TensorMessage(
                msg_type=RunMessage.ASK,
                request_id=new_request_id(),
                data=Ask(RUN, cores=2, price=1.5).encode(),
            )
            reply = await leading.request(worker.peer_id, ask, RunMessage.OFFER, timeout=10)
            assert dict(Offer.decode(reply.data).versions) == {"torch": "2.9"}
            order = Order(RUN, 1, 7, (Work(1, 0.0, 1.0, 2, 2, (SampleRange(0, 3, 5),)),))
            await leading.send(
                worker.peer_id, TensorMessage(msg_type=RunMessage.ORDER, data=order.encode())
            )
            assert await told.receive() == order
            fetched = await Transfers(working).fetch_blob(leader.peer_id, info.blob_id)
            assert bytes(fetched.blob.data) == slice_
