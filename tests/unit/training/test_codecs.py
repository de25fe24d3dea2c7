"""The forms of a vector on the wire: sizes, bounds, the same bytes however a vector is cut, and what is refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from neurogrid.errors import ConfigurationError, NotFiniteError, RemoteProtocolError
from neurogrid.p2p.wire import ErrorCode
from neurogrid.training.averaging.codecs import Codec, ErrorFeedback, parse_codec

NAMES = ("f32", "f16", "bf16", "int8", "int4", "topk:64", "topk:1", "topk:7", "topk:4096", "sign")
QUICK = settings(max_examples=60, deadline=None)

codecs = st.sampled_from(NAMES).map(parse_codec)
sizes = st.one_of(st.integers(0, 9000), st.sampled_from((4095, 4096, 4097, 65_536, 70_001)))


def normal(num_elements: int, seed: int = 0, scale: float = 1e-3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_elements, generator=generator) * scale


def vectors(
    limit: float = 6e4, max_size: int = 600, min_size: int = 0
) -> st.SearchStrategy[torch.Tensor]:
    """Of any finite float32 up to `limit`, subnormal ones and zeros of both signs among them."""
    elements = st.floats(-limit, limit, width=32)
    return arrays(np.float32, st.integers(min_size, max_size), elements=elements).map(
        torch.from_numpy
    )


def bits(values: torch.Tensor) -> bytes:
    return values.numpy().tobytes()


@QUICK
@given(codecs, sizes, st.integers(0, 2**32))
def test_sizes_are_exact_and_what_is_decoded_is_finite(codec: Codec, size: int, seed: int) -> None:
    data = codec.encode(normal(size, seed))
    assert data.nbytes == codec.num_bytes(size)
    decoded = codec.decode(data, size)
    assert decoded.shape == (size,)
    assert decoded.dtype == torch.float32
    assert torch.isfinite(decoded).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [0, 1, 65_536, 70_001, 200_000])
def test_pieces_are_those_of_the_whole(name: str, size: int) -> None:
    codec = parse_codec(name)
    data = codec.encode(normal(size))
    pieces = [piece.clone() for piece in codec.decode_in_pieces(data, size)]
    assert all(len(piece) <= codec.tile for piece in pieces)
    assert bits(torch.cat([torch.empty(0), *pieces])) == bits(codec.decode(data, size))
    with pytest.raises(RemoteProtocolError):
        next(codec.decode_in_pieces(data, size + 5000))


@pytest.mark.parametrize("name", NAMES)
def test_a_program_may_have_another_default_dtype(name: str) -> None:
    codec, values = parse_codec(name), normal(5000)
    expected = bits(codec.decode(codec.encode(values), 5000))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert bits(codec.decode(codec.encode(values), 5000)) == expected
        assert bits(next(codec.decode_in_pieces(codec.encode(values), 5000))) == expected
    finally:
        torch.set_default_dtype(before)


@QUICK
@given(codecs, st.lists(st.integers(1, 20), max_size=4), st.integers(0, 5000), st.data())
def test_the_bytes_of_pieces_are_those_of_the_whole(
    codec: Codec, cuts: list[int], rest: int, data: st.DataObject
) -> None:
    lengths = [cut * codec.block for cut in cuts] + [rest]
    values = normal(sum(lengths), data.draw(st.integers(0, 99)))
    pieces = [bytes(codec.encode(piece)) for piece in values.split(lengths)]
    assert b"".join(pieces) == bytes(codec.encode(values))
    whole = codec.decode(b"".join(pieces), len(values))
    decoded = [codec.decode(p, n) for p, n in zip(pieces, lengths, strict=True)]
    assert bits(torch.cat(decoded)) == bits(whole)


@QUICK
@given(codecs, vectors())
def test_the_same_numbers_give_the_same_bytes(codec: Codec, values: torch.Tensor) -> None:
    assert bytes(codec.encode(values)) == bytes(codec.encode(values.clone()))
    out = torch.empty(len(values))
    data = codec.encode(values)
    assert codec.decode(bytes(data), len(values), out=out) is out
    assert bits(out) == bits(codec.decode(bytearray(data), len(values)))


@given(vectors(limit=2.0**126))
def test_f32_is_exact(values: torch.Tensor) -> None:
    codec = parse_codec("f32")
    assert bits(codec.decode(codec.encode(values), len(values))) == bits(values)


@given(vectors())
def test_halves_are_the_nearest(values: torch.Tensor) -> None:
    for name, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        codec = parse_codec(name)
        decoded = codec.decode(codec.encode(values), len(values))
        assert bits(decoded) == bits(values.to(dtype).float())


@given(vectors(limit=2.0**126, min_size=1))
def test_integers_are_off_by_half_a_scale_at_most(values: torch.Tensor) -> None:
    for name, largest in (("int8", 127), ("int4", 7)):
        codec = parse_codec(name)
        decoded = codec.decode(codec.encode(values), len(values))
        for group, back in zip(values.split(256), decoded.split(256), strict=True):
            step = group.abs().max().double() / largest
            # A group whose scale is no normal number is zeros.
            allowed = max(step * 0.5001, 2.0**-126 * largest)
            assert ((group.double() - back.double()).abs() <= allowed).all()


@QUICK
@given(st.integers(1, 5000), st.integers(1, 200), st.integers(0, 99), st.booleans())
def test_the_largest_are_sent_of_equal_ones_the_first(
    size: int, num_sent: int, seed: int, few_values: bool
) -> None:
    values = normal(size, seed)
    if few_values:
        values = (values * 1e3).round() * 0.25
    codec = parse_codec(f"topk:{num_sent}")
    data = codec.encode(values)
    decoded = codec.decode(data, size)
    for block, back, start in zip(
        values.split(4096), decoded.split(4096), range(0, size, 4096), strict=False
    ):
        by_rank = sorted(range(len(block)), key=lambda i: (-abs(float(block[i])), i))
        sent = sorted(by_rank[:num_sent])
        others = np.setdiff1d(np.arange(len(block)), sent)
        assert not back[others].any()
        assert torch.equal(back[sent].sign(), block[sent].sign())
        assert len(back[sent].abs().unique()) <= 2
        kept = block[sent].abs()
        assert (back[sent].abs() <= kept.max() * 1.0001).all()
        begin = codec.num_bytes(start) + 8
        packed = bytes(data[begin : begin + (3 * len(sent) + 1) // 2])
        number = int.from_bytes(packed, "little")
        assert [number >> 12 * i & 0xFFF for i in range(len(sent))] == sent


@given(vectors(limit=2.0**126, max_size=5000))
def test_a_sign_is_the_mean_magnitude_with_a_sign(values: torch.Tensor) -> None:
    codec = parse_codec("sign")
    decoded = codec.decode(codec.encode(values), len(values))
    for block, back in zip(values.split(4096), decoded.split(4096), strict=True):
        assert torch.equal(back.signbit(), block < 0)
        if len(block):
            torch.testing.assert_close(
                back.abs().double(), block.double().abs().mean().expand(len(block))
            )


@given(codecs, st.binary(max_size=600), st.integers(0, 600))
def test_garbage_is_an_error_of_the_peer_or_finite_numbers(
    codec: Codec, data: bytes, size: int
) -> None:
    fitting = (data * (codec.num_bytes(size) // max(1, len(data)) + 1))[: codec.num_bytes(size)]
    for given_bytes in (data, fitting):
        decoded = error = None
        try:
            decoded = codec.decode(given_bytes, size)
        except RemoteProtocolError as exc:
            error = exc
        if len(given_bytes) != codec.num_bytes(size):
            assert error is not None
            assert error.code == ErrorCode.SHAPE_MISMATCH
        elif decoded is None:
            assert error is not None
            assert error.code in {ErrorCode.NOT_FINITE, ErrorCode.PROTOCOL_VIOLATION}
        else:
            assert torch.isfinite(decoded).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("index", [0, 4100, 70_000])
def test_what_is_not_finite_is_refused_by_its_index(name: str, bad: float, index: int) -> None:
    values = normal(70_001)
    values[index] = bad
    with pytest.raises(NotFiniteError, match=f"element {index} is") as caught:
        parse_codec(name).encode(values)
    assert caught.value.index == index


def test_a_sum_that_overflows_is_no_proof_of_infinity() -> None:
    values = torch.full((1000,), 1e38)
    for name in ("f32", "int8", "int4", "topk:4096", "sign"):
        codec = parse_codec(name)
        torch.testing.assert_close(codec.decode(codec.encode(values), 1000), values)


@pytest.mark.parametrize(
    ("name", "largest", "too_large"),
    [("f16", 65519.996, 65520.0), ("bf16", 3.396177e38, (2 - 2**-8) * 2.0**127)],
)
def test_a_value_that_halves_have_no_number_for_is_refused(
    name: str, largest: float, too_large: float
) -> None:
    codec = parse_codec(name)
    values = torch.tensor([0.0, largest, -largest])
    assert torch.isfinite(codec.decode(codec.encode(values), 3)).all()
    for bad in (too_large, -too_large):
        with pytest.raises(NotFiniteError, match=r"element 1 is .* send it as f32"):
            codec.encode(torch.tensor([0.0, bad]))


@pytest.mark.parametrize(
    ("name", "size", "data", "code"),
    [
        ("f32", 1, struct.pack("<f", float("nan")), ErrorCode.NOT_FINITE),
        ("f16", 1, b"\x00\x7c", ErrorCode.NOT_FINITE),
        ("bf16", 1, b"\x80\xff", ErrorCode.NOT_FINITE),
        ("f16", 1, b"\x00", ErrorCode.SHAPE_MISMATCH),
        ("int8", 2, struct.pack("<fbb", float("inf"), 0, 0), ErrorCode.NOT_FINITE),
        ("int8", 2, struct.pack("<fbb", 3e37, 0, 0), ErrorCode.NOT_FINITE),
        ("int8", 2, struct.pack("<fbb", -1.0, 0, 0), ErrorCode.PROTOCOL_VIOLATION),
        ("int8", 2, struct.pack("<fb", 1.0, 0), ErrorCode.SHAPE_MISMATCH),
        ("int4", 1, struct.pack("<fB", 1.0, 0x88), ErrorCode.PROTOCOL_VIOLATION),
        ("sign", 3, struct.pack("<fB", 1.0, 0b1000), ErrorCode.PROTOCOL_VIOLATION),
        ("sign", 3, struct.pack("<fB", float("nan"), 0), ErrorCode.NOT_FINITE),
        # One of two, with an index behind the end; two of three, not ascending; bits of no index, of no value.
        ("topk:1", 2, struct.pack("<ffHB", 1.0, 1.0, 2, 0), ErrorCode.PROTOCOL_VIOLATION),
        ("topk:2", 3, struct.pack("<ff3sB", 1.0, 1.0, b"\1\0\0", 0), ErrorCode.PROTOCOL_VIOLATION),
        (
            "topk:2",
            3,
            struct.pack("<ff3sB", 1.0, 1.0, b"\1\x10\0", 0),
            ErrorCode.PROTOCOL_VIOLATION,
        ),
        ("topk:1", 2, struct.pack("<ffHB", 1.0, 1.0, 0x1001, 0), ErrorCode.PROTOCOL_VIOLATION),
        ("topk:1", 2, struct.pack("<ffHB", 1.0, 1.0, 1, 4), ErrorCode.PROTOCOL_VIOLATION),
        ("topk:1", 2, struct.pack("<ffHB", 1.0, float("inf"), 1, 0), ErrorCode.NOT_FINITE),
    ],
)
def test_what_a_peer_may_not_send(name: str, size: int, data: bytes, code: ErrorCode) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        parse_codec(name).decode(data, size)
    assert caught.value.code == code


def test_integers_whose_products_overflow_are_refused() -> None:
    for name in ("int8", "int4"):
        with pytest.raises(NotFiniteError, match=r"element 300 is .* too large"):
            parse_codec(name).encode(torch.cat((torch.zeros(300), torch.tensor([3e38]))))


def test_what_a_reader_takes_and_no_sender_writes() -> None:
    taken = parse_codec("int8").decode(struct.pack("<fbb", 2.0, -128, 1), 2)
    assert taken.tolist() == [-256, 2]
    assert parse_codec("int4").decode(struct.pack("<fB", 2.0, 0x10), 2).tolist() == [-16, -14]


@pytest.mark.parametrize("name", ["", "F32", "int2", "topk:0", "topk:4097", "topk:x", "topk:٣"])
def test_an_unknown_name_is_told_those_that_are_known(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"there are f32, f16|1 to 4096"):
        parse_codec(name)


def test_a_codec_has_one_name() -> None:
    assert [parse_codec(name).name for name in NAMES] == list(NAMES)
    assert parse_codec("topk").name == "topk:64"


def test_a_vector_of_another_kind_is_refused() -> None:
    codec = parse_codec("int8")
    for values in (torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2), torch.zeros(8)[::2]):
        with pytest.raises(ValueError, match="contiguous vector of float32"):
            codec.encode(values)
    with pytest.raises(ValueError, match="are due"):
        codec.decode(codec.encode(torch.zeros(4)), 4, out=torch.zeros(5))


@pytest.mark.parametrize("name", ["int8", "int4", "topk:64", "sign"])
def test_what_is_lost_in_a_round_is_sent_in_the_next(name: str) -> None:
    codec = parse_codec(name)
    feedback = ErrorFeedback(codec, torch.zeros(8192))
    values, sent = normal(8192), torch.zeros(8192)
    for _ in range(20):
        sent += codec.decode(feedback.encode(values), 8192)
        feedback.commit()
    torch.testing.assert_close(sent + feedback.state, 20 * values, rtol=1e-4, atol=1e-6)


def test_a_round_that_is_tried_again_gives_the_same_bytes_and_one_that_failed_leaves_nothing() -> (
    None
):
    feedback = ErrorFeedback(parse_codec("int4"), torch.zeros(1024), decay=0.5)
    values = normal(1024)
    first = bytes(feedback.encode(values[:512])), bytes(feedback.encode(values[512:], 512))
    assert not feedback.state.any()
    again = bytes(feedback.encode(values[:512])), bytes(feedback.encode(values[512:], 512))
    assert again == first
    feedback.roll_back()
    feedback.commit()
    assert not feedback.state.any()
    data = b"".join((feedback.encode(values[:512]), feedback.encode(values[512:], 512)))
    feedback.commit()
    lost = values - parse_codec("int4").decode(data, 1024)
    assert bits(feedback.state) == bits(lost * 0.5)
    assert bytes(feedback.encode(values[:512])) != first[0]


def test_a_decay_of_more_than_all_is_refused() -> None:
    with pytest.raises(ValueError, match="decay"):
        ErrorFeedback(parse_codec("int4"), torch.zeros(1), decay=1.5)
