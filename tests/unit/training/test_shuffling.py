"""The order of samples by a seed: that of the specification, each sample once, and the same blobs for everybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.training.data.preparing import prepare
from neurogrid.training.data.preparing.shuffling import in_order, samples_at
from tests.unit.vectors import in_turn

SEEDS = st.integers(0, 2**64 - 1)


@in_turn("training_order")
def test_the_order_is_that_of_the_vector(name: str, case: Any) -> None:
    first, samples = int(case["first_place"]), case["samples"]
    found = in_order(int(case["seed"]), int(case["num_samples"]), first, first + len(samples))
    assert found.tolist() == samples


@given(seed=SEEDS, num_samples=st.integers(1, 3000))
def test_each_sample_has_one_place(seed: int, num_samples: int) -> None:
    order = in_order(seed, num_samples, 0, num_samples)
    assert sorted(order.tolist()) == list(range(num_samples))


@given(seed=SEEDS, num_samples=st.integers(1, 10**15), data=st.data())
def test_places_are_asked_for_in_any_order(seed: int, num_samples: int, data: Any) -> None:
    places = data.draw(st.lists(st.integers(0, num_samples - 1), max_size=20))
    found = samples_at(seed, num_samples, np.array(places, np.int64)).tolist()
    assert found == [int(in_order(seed, num_samples, each, each + 1)[0]) for each in places]
    assert len(set(found)) == len(set(places))


@pytest.mark.parametrize("num_samples", [1000, 4096, 5000])
def test_neighbours_come_apart(num_samples: int) -> None:
    """Two samples that follow one another are as far apart as any two, and no seed gives the order of another."""
    orders = [in_order(seed, num_samples, 0, num_samples) for seed in range(20)]
    for order in orders:
        places = np.argsort(order)
        distance = np.abs(np.diff(places)).mean() / num_samples
        assert 0.3 < distance < 0.37  # a third
        assert abs(np.corrcoef(places, np.arange(num_samples))[0, 1]) < 0.1
    firsts = [tuple(order[:5].tolist()) for order in orders]
    assert len(set(firsts)) == len(firsts)


def test_the_blobs_are_those_that_they_were(tmp_path: Path) -> None:
    """Pinned: the same samples and seed are the same data set on every machine, and next year."""
    np.arange(64, dtype="<u2").tofile(tmp_path / "ids.bin")
    manifest = prepare(
        tmp_path / "ids.bin",
        tmp_path / "data",
        vocab_size=64,
        sequence_length=4,
        slice_samples=8,
        held_out=0,
        seed=7,
    )
    assert [info.blob_id.hex() for info in manifest.slices] == PINNED


PINNED = [
    "e70dac86d6fd208a5789546dcb1714eca93351ac7d216bdd65cff7712d6694a5",
    "3c2e4f3bf9ce347611aa08a6b368d30a878178c43aaffce9ac1e3499b5b4f2b0",
]
