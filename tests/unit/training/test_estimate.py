"""What a run takes: numbers against those that are known another way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.training.averaging.codecs import parse_codec
from neurogrid.training.runs.estimate import (
    BASE_BYTES,
    activation_bytes,
    codec_bytes,
    estimate,
    leader_bytes,
    member_bytes,
)
from neurogrid.training.runs.run_file import OuterSection, RunFile, StopSection, parse_run_file

MILLION = 1_000_000
RUN = parse_run_file(
    """
[model]
config = "embedded"
[data]
path = "data/"
[stop]
tokens = 2_000_000
[outer]
method = "diloco"
codec = "f32"
"""
)


def with_outer(run: RunFile, **values: object) -> RunFile:
    return replace(run, outer=replace(run.outer, **values))


def test_the_memory_of_a_member_is_counted_by_vectors() -> None:
    told = estimate(RUN, MILLION, sample_activation_bytes=7)
    # Weights, gradients, two moments of AdamW, and the weights that both processes see.
    assert told.trainer_bytes == 5 * 4 * MILLION
    # Common weights, outer momentum, difference, aggregate; and the forms of the last two.
    assert told.outer_bytes == 6 * 4 * MILLION
    assert told.activation_bytes == 7
    assert told.memory_bytes == BASE_BYTES + 44 * MILLION + 7
    sgd = replace(RUN, inner=replace(RUN.inner, optimizer="sgd", micro_batch=4))
    assert estimate(sgd, MILLION).trainer_bytes == 3 * 4 * MILLION
    assert estimate(sgd, MILLION, sample_activation_bytes=7).activation_bytes == 28
    momentum = replace(sgd, inner=replace(sgd.inner, momentum=0.9, precision="bfloat16"))
    assert estimate(momentum, MILLION).trainer_bytes == (4 * 4 + 2) * MILLION
    average = replace(RUN, outer=OuterSection.of("averaging", codec="f32"))
    assert estimate(average, MILLION).outer_bytes == 5 * 4 * MILLION


def test_what_is_needed_at_least_is_less_than_what_it_takes() -> None:
    told = estimate(RUN, MILLION)
    assert member_bytes(RUN.inner, MILLION) == 4 * 4 * MILLION < told.trainer_bytes
    assert member_bytes(replace(RUN.inner, optimizer="sgd"), MILLION) == 2 * 4 * MILLION
    assert leader_bytes(RUN, MILLION) == 5 * 4 * MILLION
    average = replace(RUN, outer=OuterSection.of("averaging"))
    assert leader_bytes(average, MILLION) == 4 * 4 * MILLION


@pytest.mark.parametrize(
    ("way", "members", "sent", "received"),
    [
        ("butterfly", 1, 4, 0),
        ("butterfly", 2, 2 + 4, 4),
        ("butterfly", 4, 3 + 4, 6),
        ("server", 4, 4, 4),
        ("everybody", 4, 16, 12),
        # In two rows: half to the other of the row, and what each row gave of that in quarters, there and back.
        ("grid", 4, 2 + 4 + 2, 2 + 2 + 2),
        ("grid", 3, 8 / 3 + 4, 16 / 3),
    ],
)
def test_bytes_of_a_round(way: str, members: int, sent: float, received: float) -> None:
    told = estimate(with_outer(RUN, way=way), MILLION, num_members=members)
    assert told.sent_bytes == pytest.approx(sent * MILLION, abs=2)
    assert told.received_bytes == pytest.approx(received * MILLION, abs=2)


@pytest.mark.parametrize(
    ("way", "codec", "sent", "received"),
    [
        ("butterfly", "int4", 0.75 + 1, 0.75 + 0.75),
        ("server", "int4", 1, 1),
    ],
)
def test_the_aggregate_comes_in_the_form_in_which_members_send(
    way: str, codec: str, sent: float, received: float
) -> None:
    told = estimate(with_outer(RUN, way=way, codec=codec), MILLION, num_members=4)
    form = codec_bytes(codec, MILLION)
    assert (told.sent_bytes, told.received_bytes) == (int(sent * form), int(received * form))


def test_the_aggregate_of_a_form_that_has_no_room_for_it_comes_in_half_floats() -> None:
    for codec in ("sign", "topk", "topk:16"):
        told = estimate(with_outer(RUN, way="server", codec=codec), MILLION, num_members=4)
        assert told.sent_bytes == codec_bytes(codec, MILLION)
        assert told.received_bytes == 2 * MILLION


@given(
    st.sampled_from(["f32", "f16", "bf16", "int8", "int4", "sign", "topk", "topk:1", "topk:4096"]),
    st.integers(1, 10_000_000),
)
def test_forms_are_as_large_as_they_are(codec: str, num_elements: int) -> None:
    exact = parse_codec(codec).num_bytes(num_elements)
    told = codec_bytes(codec, num_elements)
    assert exact <= told <= exact + 12_000
    whole = num_elements * 4096
    assert codec_bytes(codec, whole) == parse_codec(codec).num_bytes(whole)


def test_a_form_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="no form"):
        codec_bytes("zip", 1)


def test_uneven_members_finish_together_when_their_work_is_projected() -> None:
    speeds = (1.0, 1.0, 0.5, 0.2)
    a_member = 20 * 16
    told = estimate(RUN, MILLION, num_members=4, speeds=speeds)
    assert told.compute_seconds == pytest.approx(4 * a_member / 2.7)
    slow = estimate(with_outer(RUN, projected=False), MILLION, num_members=4, speeds=speeds)
    assert slow.compute_seconds == pytest.approx(a_member / 0.2)
    assert told.round_seconds is None
    assert estimate(RUN, MILLION).compute_seconds is None


def test_time_of_a_round_with_bandwidth() -> None:
    told = estimate(RUN, MILLION, num_members=4, speeds=(10,), bytes_per_second=MILLION)
    assert told.compute_seconds == pytest.approx(32)
    assert told.exchange_seconds == pytest.approx(7)
    assert told.round_seconds == pytest.approx(39)
    streaming = with_outer(RUN, method="streaming", fragments=4, overlap=True)
    both = estimate(streaming, MILLION, num_members=4, speeds=(10,), bytes_per_second=MILLION)
    assert both.compute_seconds is not None
    assert both.exchange_seconds is not None
    assert both.round_seconds == max(both.compute_seconds, both.exchange_seconds)


@pytest.mark.parametrize(
    ("stop", "rounds"),
    [
        (StopSection(tokens=2_000_000), 13),  # 2 members, 20 steps of 4,096 tokens
        (StopSection(steps=300), 15),
        (StopSection(steps=301), 16),
        (StopSection(rounds=7, steps=300), 7),
        (StopSection(epochs=2), 2),
        (StopSection(hours=1), 100),
        (StopSection(hours=1, rounds=3), 3),
    ],
)
def test_rounds_until_it_stops(stop: StopSection, rounds: int) -> None:
    told = estimate(
        replace(RUN, stop=stop, inner=replace(RUN.inner, schedule="constant")),
        MILLION,
        num_samples=600,
        speeds=(320 / 30,),
        bytes_per_second=MILLION,
    )
    assert told.round_samples == 640
    assert told.round_seconds == pytest.approx(36)
    assert told.num_rounds == rounds


def test_what_cannot_be_told_is_not() -> None:
    run = replace(RUN, inner=replace(RUN.inner, schedule="constant"))
    for stop in (StopSection(hours=1), StopSection(epochs=1)):
        assert estimate(replace(run, stop=stop), MILLION).num_rounds is None


def test_a_round_of_streaming_is_about_a_fragment() -> None:
    whole = estimate(RUN, MILLION)
    run = replace(RUN, outer=OuterSection(codec="f32", fragments=4, every=20))
    told = estimate(run, MILLION)
    assert (told.round_samples, whole.round_samples) == (2 * 5 * 16, 2 * 20 * 16)
    assert told.sent_bytes == whole.sent_bytes / 4
    assert (told.num_rounds, whole.num_rounds) == (49, 13)


def test_activations_grow_with_the_model_and_halve_in_bfloat16() -> None:
    sizes = {"hidden_size": 192, "num_layers": 8, "vocab_size": 4096}
    full = activation_bytes(RUN, **sizes)
    half = activation_bytes(replace(RUN, inner=replace(RUN.inner, precision="bfloat16")), **sizes)
    assert full - half == 256 * 34 * 192 * 8
    # What torch keeps of this shape, one sample, was 33 MB.
    assert 0.5 < full / 33_231_884 < 2


@pytest.mark.parametrize(
    ("members", "speeds"), [(0, ()), (3, (1.0, 2.0)), (1, (0.0,)), (2, (1.0, -1.0))]
)
def test_speeds_are_those_of_the_members(members: int, speeds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="members with speeds"):
        estimate(RUN, MILLION, num_members=members, speeds=speeds)
