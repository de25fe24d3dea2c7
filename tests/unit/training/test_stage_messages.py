"""Messages of stages: bounds that are too long for vectors, whatever may be said, and tensors on a real stream."""

from __future__ import annotations

import struct
import sys
from itertools import accumulate, pairwise

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import LocalProtocolError, RemoteProtocolError
from neurogrid.p2p import TensorMessage
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.memory import open_memory_network
from neurogrid.p2p.wire import ErrorCode, TensorEnvelope
from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.training.wire.runs import (
    MAX_CHAIN_MEMBERS,
    MAX_CHAIN_STAGES,
    MAX_MICRO_BATCHES,
    MAX_STATE_PIECES,
    STAGE_STATES,
    Applied,
    Apply,
    Average,
    Averaged,
    Commit,
    Committed,
    RunMessage,
    StageOrder,
    StageReport,
    StageTensor,
    Step,
    StepDone,
    run_table,
    session_of,
)

RUN = bytes(range(16))
U32, U64 = 2**32 - 1, 2**64 - 1
LARGEST = sys.float_info.max
# As long as they may be, and no two the same.
NAMES = tuple(f"{number:~<64}" for number in range(MAX_STATE_PIECES))
BLOBS = (bytes(32),) * MAX_STATE_PIECES
PEERS = tuple(f"{number:é<128}" for number in range(MAX_CHAIN_MEMBERS))

LONGEST = {
    RunMessage.STAGE: StageOrder(
        RUN,
        U64,
        U64,
        MAX_CHAIN_MEMBERS - 1,
        PEERS,
        ("é" * 512,) * MAX_CHAIN_MEMBERS,
        (0, *range(65_536 - MAX_CHAIN_STAGES + 1, 65_537)),
        NAMES,
        BLOBS,
        PEERS[:MAX_CHAIN_STAGES],
        widths=(MAX_CHAIN_MEMBERS // MAX_CHAIN_STAGES,) * MAX_CHAIN_STAGES,
    ),
    RunMessage.STAGE_REPORT: StageReport(
        *(RUN, U64, "working", U64, "€" * 1024, U64, PEERS[0], NAMES, BLOBS, True),
        *(MAX_MICRO_BATCHES, 0, MAX_MICRO_BATCHES),
    ),
    RunMessage.STEP: Step(
        RUN, U64, U64, MAX_MICRO_BATCHES, U64, True, bytes(MAX_MICRO_BATCHES * MAX_CHAIN_STAGES)
    ),
    RunMessage.STEP_DONE: StepDone(
        RUN, U64, U64, 0.0, "€" * 1024, LARGEST, 86_400.0, 86_400.0, bytes(32)
    ),
    RunMessage.APPLIED: Applied(RUN, U64, U64, U64, NAMES, BLOBS),
    RunMessage.AVERAGE: Average(
        RUN,
        U64,
        U64,
        U64,
        PEERS,
        ("é" * 512,) * MAX_CHAIN_MEMBERS,
        (1,) * MAX_CHAIN_MEMBERS,
        (0, 65_536) * MAX_CHAIN_MEMBERS,
        (1e30 / 3,) * MAX_CHAIN_MEMBERS,
    ),
    RunMessage.AVERAGED: Averaged(RUN, U64, U64, reason="€" * 1024, lost=PEERS[0]),
    RunMessage.COMMIT: Commit(RUN, U64, U64, U64, True),
    RunMessage.COMMITTED: Committed(RUN, U64, U64, U64, NAMES, BLOBS),
}


@pytest.mark.parametrize("code", LONGEST, ids=lambda code: code.name)
def test_the_longest_fits_its_message(code: RunMessage) -> None:
    longest = LONGEST[code]
    data = longest.encode()
    assert type(longest).decode(data) == longest
    assert len(data) < run_table().max_data(code)


def order(**changes: object) -> StageOrder:
    given = {"index": 0, "peers": ("a", "b"), "addresses": ("", ""), "bounds": (0, 1, 2), **changes}
    return StageOrder(RUN, 1, 0, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        order(names=(*NAMES, "x"), blobs=(*BLOBS, bytes(32))),
        order(names=("couche.é",), blobs=BLOBS[:1]),
        order(names=("a", "a"), blobs=BLOBS[:2]),
        order(names=NAMES[:2], blobs=BLOBS[:1]),
        order(peers=("a", "a")),
        order(addresses=("",)),
        order(bounds=(0, 2, 2)),
        order(bounds=(0, 1)),
        order(index=2),
        order(widths=(1, 2)),
        order(widths=(2,)),
        order(widths=(0, 2)),
        Step(RUN, 1, 0, 2, 1, routes=bytes(3)),
        StepDone(RUN, 1, 0, 1.0, digest=bytes(31)),
        StageReport(RUN, 1, "failed", 0),
        StageReport(RUN, 1, "training", 0),
        StageReport(RUN, 0, "ready", 0),
        StageReport(RUN, 1, "working", 0, micro_batches=8, done=6, under_way=3),
        StageReport(RUN, 1, "working", 0, micro_batches=MAX_MICRO_BATCHES + 1),
        Step(RUN, 1, 0, MAX_MICRO_BATCHES + 1, 1),
        Step(RUN, 1, 0, 1, 0),
        StepDone(RUN, 1, 0, float("nan")),
        StepDone(RUN, 1, 0, 1.0, "the loss is NaN"),
        StepDone(RUN, 1, 0, 1.0, loss=float("inf")),
        Apply(RUN, 1, 0, float("inf"), is_applied=True),
        Applied(RUN, 1, 0, names=NAMES[:1]),
    ],
    ids=lambda wrong: type(wrong).__name__,
)
def test_what_would_be_refused_is_not_sent(wrong: ControlPayload) -> None:
    with pytest.raises(LocalProtocolError):
        wrong.encode()


runs = st.binary(min_size=16, max_size=16)
chain_numbers, step_numbers = st.integers(1, U64), st.integers(0, U64)
peer_ids = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
norms = st.floats(0, LARGEST)
reasons = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=12)
names_of_pieces = st.text(
    st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=64
)
seconds = st.floats(0, 86_400)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[tuple[str, ...], tuple[bytes, ...]]:
    names = draw(st.lists(names_of_pieces, max_size=5, unique=True))
    blob = st.binary(min_size=32, max_size=32)
    blobs = draw(st.lists(blob, min_size=len(names), max_size=len(names)))
    return tuple(names), tuple(blobs)


@st.composite
def orders(draw: st.DrawFn) -> StageOrder:
    peers = draw(st.lists(peer_ids, min_size=1, max_size=6, unique=True))
    addresses = [draw(st.text(st.characters(codec="utf-8"), max_size=20)) for _ in peers]
    cuts = sorted(draw(st.sets(st.integers(1, len(peers) - 1)))) if len(peers) > 1 else []
    widths = [stop - start for start, stop in pairwise([0, *cuts, len(peers)])]
    if len(widths) == len(peers) and draw(st.booleans()):
        widths = []
    num_layers = [draw(st.integers(1, 1000)) for _ in widths or peers]
    return StageOrder(
        draw(runs),
        draw(chain_numbers),
        draw(step_numbers),
        draw(st.integers(0, len(peers) - 1)),
        tuple(peers),
        tuple(addresses),
        (0, *accumulate(num_layers)),
        *draw(pieces()),
        tuple(draw(st.lists(peer_ids, max_size=3, unique=True))),
        widths=tuple(widths),
    )


@st.composite
def reports(draw: st.DrawFn) -> StageReport:
    state = draw(st.sampled_from(sorted(STAGE_STATES)))
    reason = draw(reasons)
    micro_batches = draw(st.integers(0, MAX_MICRO_BATCHES))
    done = draw(st.integers(0, micro_batches))
    return StageReport(
        draw(runs),
        draw(chain_numbers),
        state,
        draw(step_numbers),
        reason or "x" if state == "failed" else reason,
        draw(st.integers(0, U64)),
        draw(st.just("") | peer_ids),
        *draw(pieces()),
        draw(st.booleans()),
        micro_batches,
        done,
        draw(st.integers(0, micro_batches - done)),
    )


@st.composite
def done_steps(draw: st.DrawFn) -> StepDone:
    not_finite = draw(reasons)
    return StepDone(
        draw(runs),
        draw(chain_numbers),
        draw(step_numbers),
        0.0 if not_finite else draw(norms),
        not_finite,
        draw(st.none() | st.floats(-LARGEST, LARGEST)),
        draw(seconds),
        draw(seconds),
        draw(st.just(b"") | st.binary(min_size=32, max_size=32)),
    )


@st.composite
def steps(draw: st.DrawFn) -> Step:
    num = draw(st.integers(1, MAX_MICRO_BATCHES))
    return Step(
        draw(runs),
        draw(chain_numbers),
        draw(step_numbers),
        num,
        draw(st.integers(1, U64)),
        draw(st.booleans()),
        bytes(num * draw(st.integers(0, 3))),
    )


payloads = st.one_of(
    orders(),
    reports(),
    done_steps(),
    steps(),
    st.builds(Apply, runs, chain_numbers, step_numbers, norms, st.booleans(), st.booleans()),
    st.builds(
        lambda run, chain, step, memory, state: Applied(run, chain, step, memory, *state),
        runs,
        chain_numbers,
        step_numbers,
        st.integers(0, U64),
        pieces(),
    ),
)


@given(payloads, st.data())
def test_what_may_be_said_is_read_as_it_was_written(
    payload: ControlPayload, data: st.DataObject
) -> None:
    written = payload.encode()
    assert type(payload).decode(written) == payload
    cut = data.draw(st.integers(0, len(written) - 1))
    with pytest.raises(RemoteProtocolError) as caught:
        type(payload).decode(written[:cut])
    assert caught.value.code is ErrorCode.PROTOCOL_VIOLATION


@given(payloads, st.data())
def test_whatever_comes_is_read_or_refused(payload: ControlPayload, data: st.DataObject) -> None:
    written = bytearray(payload.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        written[data.draw(st.integers(0, len(written) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = type(payload).decode(bytes(written))
    except RemoteProtocolError as error:
        refused = error
    else:
        assert type(payload).decode(read.encode()) == read
        return
    assert refused.code in {ErrorCode.PROTOCOL_VIOLATION, ErrorCode.LIMIT_EXCEEDED}
    assert "\n" not in str(refused)


# Of each kind of tensor one that is right.
RIGHT = {
    RunMessage.TOKENS: ("I32", (2, 3)),
    RunMessage.LABELS: ("I32", (2, 3)),
    RunMessage.HIDDEN: ("BF16", (2, 3, 4)),
    RunMessage.GRADIENT: ("F32", (2, 3, 4)),
    RunMessage.TIED: ("F32", (5, 4)),
}
SIZES = {"I32": 4, "F32": 4, "BF16": 2, "F16": 2, "I64": 8}


def tensor(code: RunMessage, **changes: object) -> StageTensor:
    dtype, shape = RIGHT[code]
    right = StageTensor(code, session_of(RUN), 1, 7, 3, dtype, shape, b"")
    changed = right._replace(**changes)  # type: ignore[arg-type]
    num_bytes = SIZES[changed.dtype]
    for size in changed.shape:
        num_bytes *= size
    return changed._replace(data=bytes(range(num_bytes)))


def received(tensor: StageTensor) -> TensorMessage:
    """The message as the exchange gives it, whether it might be sent or not."""
    return TensorMessage(
        tensor.code,
        tensor.number,
        tensor.step,
        tensor.chain,
        tensor.data,
        from_peer="peer",
        envelope=TensorEnvelope(
            tensor.session, 9, 8, 10, tensor.dtype, tensor.shape, tensor.data, (1,)
        ),
    )


@pytest.mark.parametrize("code", RIGHT, ids=lambda code: code.name)
def test_a_tensor_is_read_as_it_was_written(code: RunMessage) -> None:
    """What else the envelope says is ignored."""
    given = tensor(code, number=MAX_MICRO_BATCHES - 1, step=U64, chain=U64)
    assert StageTensor.of(given.message()) == given
    assert StageTensor.of(received(given)) == given
    assert given.session == 0x0001020304050607


@pytest.mark.parametrize("code", RIGHT, ids=lambda code: code.name)
@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"chain": 0}, ErrorCode.PROTOCOL_VIOLATION),
        ({"dtype": "F16"}, ErrorCode.PROTOCOL_VIOLATION),
        ({"dtype": "I64"}, ErrorCode.PROTOCOL_VIOLATION),
        ({"shape": (2,)}, ErrorCode.SHAPE_MISMATCH),
        ({"shape": (1, 2, 3, 4)}, ErrorCode.SHAPE_MISMATCH),
        ({"shape": ()}, ErrorCode.SHAPE_MISMATCH),
    ],
)
def test_a_tensor_of_another_kind_is_refused(
    code: RunMessage, changes: dict[str, object], error: ErrorCode
) -> None:
    wrong = tensor(code, **changes)
    with pytest.raises(RemoteProtocolError) as caught:
        StageTensor.of(received(wrong))
    assert caught.value.code is error
    with pytest.raises(LocalProtocolError):
        wrong.message()


def test_a_tensor_of_no_micro_batch_or_without_elements_is_refused() -> None:
    for code, (_, shape) in RIGHT.items():
        with pytest.raises(RemoteProtocolError) as caught:
            StageTensor.of(received(tensor(code, shape=(*shape[:-1], 0))))
        assert caught.value.code is ErrorCode.SHAPE_MISMATCH
        if code is not RunMessage.TIED:
            with pytest.raises(RemoteProtocolError) as caught:
                StageTensor.of(received(tensor(code, number=MAX_MICRO_BATCHES)))
            assert caught.value.code is ErrorCode.PROTOCOL_VIOLATION
    # Rows of an embedding are more than micro-batches.
    last = tensor(RunMessage.TIED, number=U32)
    assert StageTensor.of(last.message()) == last


def test_a_map_is_no_tensor() -> None:
    with pytest.raises(LocalProtocolError, match="no tensor"):
        StageTensor.of(TensorMessage(RunMessage.STEP))


async def test_a_stream_carries_a_step() -> None:
    """Maps and tensors between two hosts, as the exchange gives them to handlers."""
    hidden = StageTensor(
        RunMessage.HIDDEN, session_of(RUN), 2, 9, 1, "F32", (1, 2, 3), struct.pack("<6f", *range(6))
    )
    with trio.fail_after(30):
        async with (
            open_memory_network() as network,
            network.open_host() as first,
            network.open_host() as second,
        ):
            sending, taking = Exchange(first, run_table()), Exchange(second, run_table())
            steps, told_steps = trio.open_memory_channel[Step](1)
            tensors, told_tensors = trio.open_memory_channel[StageTensor](1)

            async def on_hidden(message: TensorMessage) -> None:
                await tensors.send(StageTensor.of(message))

            taking.on_message(
                RunMessage.STEP, lambda message: steps.send_nowait(Step.decode(message.data))
            )
            taking.on_message(RunMessage.HIDDEN, on_hidden)
            await first.connect(second.addresses[0])
            step = Step(RUN, 2, 9, micro_batches=2, labels=4)
            await sending.send(second.peer_id, TensorMessage(RunMessage.STEP, data=step.encode()))
            assert await told_steps.receive() == step
            await sending.send(second.peer_id, hidden.message())
            arrived = await told_tensors.receive()
            assert struct.unpack("<6f", arrived.data) == tuple(range(6))
            assert arrived._replace(data=hidden.data) == hidden
