"""Messages of witnessed runs: bounds that are too long for vectors, whatever may be said, and what is not sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.training.wire.runs import (
    MAX_EPOCH_PIECES,
    MAX_EPOCH_SEATS,
    AgreedResult,
    Epoch,
    EpochReport,
    EpochSeat,
    RoundCommitment,
    RoundHealth,
    RoundProof,
    RoundWork,
    RunMessage,
    SampleRange,
    run_table,
)

RUN = bytes(range(16))
U32, U64 = 2**32 - 1, 2**64 - 1
NAMES = tuple(f"{number:~<64}" for number in range(MAX_EPOCH_PIECES))
BLOBS = (bytes(32),) * MAX_EPOCH_PIECES
SEATS = tuple(range(U32 - MAX_EPOCH_SEATS + 1, U32 + 1))
RANGES = tuple(SampleRange(U32, 0, U32) for _ in range(4000))

LONGEST = {
    RunMessage.EPOCH: Epoch(
        run=RUN,
        number=U64,
        phase="waiting_for_members",
        epoch=U32,
        round=U32,
        step=U64,
        left=604_800.0,
        seed=bytes(32),
        seats=SEATS,
        batch_samples=U32,
        members=tuple(
            EpochSeat(seat, f"{seat:é<128}", U64, ("~" * 512,) * 4, "withdrawn", True)
            for seat in SEATS
        ),
        works=tuple(RoundWork(seat, U64, U32, RANGES) for seat in SEATS),
        agreed=tuple(AgreedResult(seat, U64, U32, bytes(32)) for seat in SEATS),
        pieces_step=U64,
        pieces_digest=bytes(32),
        names=NAMES,
        blobs=BLOBS,
        sources=("~" * 512,) * 64,
        ends=True,
    ),
    RunMessage.COMMITMENT: RoundCommitment(RUN, U32, U32, U32, U64, U32, bytes(32), bytes(64)),
    RunMessage.WITNESS: RoundProof(
        RUN, U32, U32, U32, bytes(128), bytes(128), bytes(32), bytes(64)
    ),
    RunMessage.HEALTH: RoundHealth(RUN, U32, U32, U32, SEATS),
    RunMessage.EPOCH_REPORT: EpochReport(
        RUN, U64, "training", "€" * 1024, U64, True, U64, bytes(32), NAMES, BLOBS
    ),
}


@pytest.mark.parametrize("code", LONGEST, ids=lambda code: code.name)
def test_the_longest_fits_its_message(code: RunMessage) -> None:
    longest = LONGEST[code]
    data = longest.encode()
    assert type(longest).decode(data) == longest
    assert len(data) < run_table().max_data(code)


SEAT = EpochSeat(0, "a", 1)
WORK = RoundWork(0, 0, 1, (SampleRange(0, 0, 1),))
AGREED = AgreedResult(0, 0, 1, bytes(32))


@pytest.mark.parametrize(
    "wrong",
    [
        Epoch(RUN, 0, "warmup"),
        Epoch(RUN, 1, "training"),
        Epoch(RUN, 1, "warmup", members=(SEAT, SEAT)),
        Epoch(RUN, 1, "warmup", members=(EpochSeat(1, "b", 1), SEAT)),
        Epoch(RUN, 1, "warmup", works=(WORK,)),
        Epoch(RUN, 1, "warmup", works=(WORK, WORK), batch_samples=1),
        Epoch(RUN, 1, "warmup", agreed=(AGREED, AGREED)),
        Epoch(RUN, 1, "warmup", names=("a",), blobs=BLOBS[:1]),
        Epoch(RUN, 1, "warmup", pieces_digest=bytes(32)),
        Epoch(RUN, 1, "warmup", seats=(2, 1)),
        Epoch(RUN, 1, "warmup", seed=bytes(8)),
        Epoch(RUN, 1, "warmup", left=float("inf")),
        RoundWork(0, 0, 1, ()),
        RoundWork(0, 0, 0, (SampleRange(0, 0, 1),)),
        EpochSeat(0, "a", 0),
        EpochSeat(0, "a", 1, health="tired"),
        EpochSeat(0, "a", 1, ("/dns4/é/tcp/1/p2p/a",)),
        RoundCommitment(RUN, 0, 0, 0, 0, 0, bytes(32)),
        RoundCommitment(RUN, 0, 0, 1, 0, 0, bytes(31)),
        RoundProof(RUN, 0, 0, 1, bytes(127), bytes(128), bytes(32)),
        RoundHealth(RUN, 0, 0, 0, (1, 0)),
        EpochReport(RUN, 0, "warm"),
        EpochReport(RUN, 1, "failed"),
        EpochReport(RUN, 1, "warm", names=("a",), blobs=BLOBS[:1]),
    ],
    ids=lambda wrong: type(wrong).__name__,
)
def test_what_would_be_refused_is_not_sent(wrong: ControlPayload) -> None:
    with pytest.raises(LocalProtocolError):
        wrong.encode()


@given(st.sampled_from([type(each) for each in LONGEST.values()]), st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(kind: type[ControlPayload], data: bytes) -> None:
    try:
        read = kind.decode(data)
    except RemoteProtocolError:
        return
    assert kind.decode(read.encode()) == read


@given(st.sampled_from(list(LONGEST)), st.data())
def test_a_message_that_is_altered_is_read_or_refused(
    code: RunMessage, data: st.DataObject
) -> None:
    if code is RunMessage.EPOCH:
        sent = Epoch(
            RUN,
            1,
            "round_train",
            seed=bytes(32),
            batch_samples=4,
            members=(SEAT,),
            works=(WORK,),
            agreed=(AGREED,),
        ).encode()
    else:
        sent = LONGEST[code].encode()[:2000]
    at = data.draw(st.integers(0, len(sent) - 1))
    altered = sent[:at] + data.draw(st.binary(min_size=1, max_size=1)) + sent[at + 1 :]
    told = ""
    try:
        type(LONGEST[code]).decode(altered)
    except RemoteProtocolError as exc:
        told = str(exc)
    assert "\n" not in told
