"""What a trainer is told, and how: settings and frames that come back as they went, and what is refused."""

from __future__ import annotations

import struct
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgpack import ExtType, packb

from neurogrid.errors import ConfigurationError
from neurogrid.training.runs.run_file import InnerSection
from neurogrid.training.trainer import FileRange, TrainerSettings
from neurogrid.training.trainer.frames import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    pack,
    parse_length,
    unpack,
)

SETTINGS = TrainerSettings("causal-lm", "{}")

inner_sections = st.builds(
    InnerSection,
    optimizer=st.just("sgd"),
    lr=st.floats(1e-9, 10),
    betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
    weight_decay=st.floats(0, 1),
    momentum=st.floats(0, 0.99),
    schedule=st.sampled_from(("cosine", "linear", "constant")),
    warmup=st.integers(0, 1000) | st.floats(0, 1),
    precision=st.sampled_from(("float32", "bfloat16")),
    clip=st.floats(0, 10),
    micro_batch=st.integers(0, 4096),
)


@given(inner_sections, st.integers(0, 2**63 - 1), st.text(min_size=1, max_size=50))
def test_settings_come_back_as_they_went(inner: InnerSection, seed: int, config: str) -> None:
    settings = TrainerSettings("causal-lm", config, seed, inner, total_steps=1000)
    assert TrainerSettings.parse(settings.text()) == settings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "audio"}, "kind is 'causal-lm' or 'image-classification', not 'audio'"),
        ({"config": ""}, "config is a config.json of at most 1 MiB"),
        ({"config": " " * 2**21}, "config is a config.json"),
        ({"total_steps": 0}, "total_steps is a whole number from 1"),
    ],
)
def test_what_a_trainer_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{words}"):
        replace(SETTINGS, **changes)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"inner": 5}', SETTINGS.text()[:-1] + ', "x": 1}']
)
def test_what_are_no_settings(text: str) -> None:
    with pytest.raises(ConfigurationError, match="no settings of a trainer"):
        TrainerSettings.parse(text)


def test_ranges_have_samples() -> None:
    assert FileRange(Path("a"), 2, 5).num_samples == 3
    for start, stop in ((2, 2), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="are none"):
            FileRange(Path("a"), start, stop)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from([0, 1, 4095, 4096, 5000]).map(bytes),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), plain, max_size=4))
def test_frames_come_back_as_they_went(told: dict[str, Any]) -> None:
    assert received(pack(told)) == told


def received(frame: list[bytes | memoryview]) -> dict[str, Any]:
    """A frame as it is read."""
    pipe = BytesIO(b"".join(frame))
    told, long = unpack(pipe.read(parse_length(pipe.read(LENGTH_BYTES))))
    for each in long:
        assert pipe.readinto(each) == len(each)
    assert not pipe.read()
    return told


def test_what_is_long_is_copied_nowhere() -> None:
    data = bytearray(100_000)
    _, part = pack({"tensor": {"data": data}, "shape": [100_000]})
    data[7] = 5
    assert part[7] == 5


@pytest.mark.parametrize(
    ("code", "lengths"), [(2, [5000]), (1, [MAX_FRAME_BYTES]), (1, [MAX_FRAME_BYTES // 3] * 3)]
)
def test_no_more_may_follow_than_a_frame_may_have(code: int, lengths: list[int]) -> None:
    told = {str(n): ExtType(code, struct.pack("!I", each)) for n, each in enumerate(lengths)}
    with pytest.raises(ValueError, match="no msgpack"):
        unpack(packb(told))


@given(st.binary(max_size=64))
def test_other_bytes_are_told_from_frames(data: bytes) -> None:
    try:
        told, _ = unpack(data)
    except ValueError:
        return
    assert isinstance(told, dict)


def test_frames_have_a_bound() -> None:
    with pytest.raises(ValueError, match="at most"):
        pack({"data": bytes(MAX_FRAME_BYTES)})
    with pytest.raises(ValueError, match="a frame of 4294967295 bytes"):
        parse_length(struct.pack("!I", 2**32 - 1))
