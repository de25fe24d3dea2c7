"""What a trainer is told, and how: settings and frames that come back as they went, and what is refused."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import ConfigurationError
from neurogrid.training.trainer import FileRange, InnerSettings, TrainerSettings
from neurogrid.training.trainer.frames import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    pack,
    parse_length,
    unpack,
)

SETTINGS = TrainerSettings("causal-lm", "{}")

inner_settings = st.builds(
    InnerSettings,
    optimizer=st.sampled_from(("adamw", "sgd")),
    lr=st.floats(1e-9, 10),
    betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
    weight_decay=st.floats(0, 1),
    momentum=st.floats(0, 0.99),
    schedule=st.sampled_from(("cosine", "linear", "constant")),
    warmup=st.integers(0, 1000),
    precision=st.sampled_from(("float32", "bfloat16")),
    clip=st.floats(0, 10),
    micro_batch=st.integers(0, 4096),
)


@given(inner_settings, st.integers(0, 2**63 - 1), st.text(min_size=1, max_size=50))
def test_settings_come_back_as_they_went(inner: InnerSettings, seed: int, config: str) -> None:
    settings = TrainerSettings("causal-lm", config, seed, inner, total_steps=1000)
    assert TrainerSettings.parse(settings.text()) == settings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "adam"}, "optimizer is 'adamw' or 'sgd', not 'adam'"),
        ({"lr": 0.0}, "lr is a number above 0, not '0.0'"),
        ({"lr": float("nan")}, "lr is"),
        ({"lr": True}, "lr is"),
        ({"lr": "fast"}, "lr is a number above 0, not 'fast'"),
        ({"betas": (0.9, 1.0)}, "betas is two numbers from 0 to less than 1"),
        ({"betas": (0.9,)}, "betas is"),
        ({"eps": 0}, "eps is"),
        ({"weight_decay": -0.1}, "weight_decay is a number of at least 0"),
        ({"clip": float("inf")}, "clip is"),
        ({"momentum": 1}, "momentum is from 0 to less than 1"),
        ({"schedule": "step"}, "schedule is 'cosine' or"),
        ({"precision": "float16"}, "precision is 'float32' or 'bfloat16'"),
        ({"warmup": 1.5}, "warmup is a whole number from 0"),
        ({"micro_batch": -1}, "micro_batch is a whole number from 0"),
    ],
)
def test_what_an_inner_optimiser_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{words}"):
        replace(InnerSettings(), **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "audio"}, "kind is 'causal-lm' or 'image-classification', not 'audio'"),
        ({"config": ""}, "config is a config.json of at most 1 MiB"),
        ({"config": " " * 2**21}, "config is a config.json"),
        ({"total_steps": 0}, "total_steps is a whole number from 1"),
        ({"inner": InnerSettings(warmup=2000)}, "2000 steps of warm-up and 0 of decay do not fit"),
        ({"inner": InnerSettings(decay=10)}, "decay is 10 and the schedule 'cosine'"),
        ({"inner": InnerSettings(schedule="wsd")}, "decay is 0 and the schedule 'wsd'"),
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
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), plain, max_size=4))
def test_frames_come_back_as_they_went(told: dict[str, Any]) -> None:
    frame = pack(told)
    assert parse_length(frame[:LENGTH_BYTES]) == len(frame) - LENGTH_BYTES
    assert unpack(frame[LENGTH_BYTES:]) == told


@given(st.binary(max_size=64))
def test_other_bytes_are_told_from_frames(data: bytes) -> None:
    try:
        told = unpack(data)
    except ValueError:
        return
    assert isinstance(told, dict)


def test_frames_have_a_bound() -> None:
    with pytest.raises(ValueError, match="at most"):
        pack({"data": bytes(MAX_FRAME_BYTES)})
    with pytest.raises(ValueError, match="a frame of 4294967295 bytes"):
        parse_length(struct.pack("!I", 2**32 - 1))
