"""Slices with too few samples for what members are to train on: people are told."""

from __future__ import annotations

from neurogrid.training.data.manifest import Manifest, SliceInfo
from neurogrid.training.leading.opening import cut_works


def manifest(num_slices: int, samples: int) -> Manifest:
    slices = tuple(
        SliceInfo(number.to_bytes(32, "big"), samples, 32 * samples + 8)
        for number in range(num_slices)
    )
    return Manifest("text", slices, sequence_length=8, vocab_size=500)


def test_works_of_more_pieces_of_slices_than_there_may_be_are_told_of() -> None:
    assert cut_works(manifest(9000, 1), 4096) == ""
    told = cut_works(manifest(9000, 1), 6000)
    assert told.startswith("members train on about 4,096 samples in a round, and not on 6,000: ")
    assert "[data] slice_samples" in told
    # Few slices, which come again and again.
    assert cut_works(manifest(16, 10), 40_960) == ""
    assert "40,960 samples" in cut_works(manifest(16, 10), 51_200)
