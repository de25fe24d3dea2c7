"""Which held-out samples are evaluated on, and what is told of them."""

from __future__ import annotations

import pytest

from neurogrid.training.data.evaluating import HeldOut, eval_figures, held_out_samples
from neurogrid.training.data.manifest import Manifest, PartInfo, SliceInfo


def slices(first: int, *sizes: int) -> tuple[SliceInfo, ...]:
    return tuple(
        SliceInfo(bytes([first + number]) * 32, size, size * 32 + 88)
        for number, size in enumerate(sizes)
    )


TRAINING, HELD = slices(1, 60, 40), slices(11, 8, 2, 30, 1)


def manifest(*parts: PartInfo) -> Manifest:
    return Manifest("text", TRAINING, HELD, sequence_length=8, vocab_size=500, parts=parts)


def counted(held_out: HeldOut) -> list[tuple[int, int]]:
    return [(HELD.index(info), num) for info, num in held_out.samples]


@pytest.mark.parametrize(
    ("limit", "taken"),
    [
        (1, [(0, 1)]),
        (8, [(0, 8)]),
        (9, [(0, 8), (1, 1)]),
        (99, [(0, 8), (1, 2), (2, 30), (3, 1)]),
    ],
)
def test_the_first_samples_are_taken(limit: int, taken: list[tuple[int, int]]) -> None:
    (found,) = held_out_samples(manifest(), limit)
    assert (found.figure, counted(found)) == ("", taken)
    assert eval_figures([(found, 2.34567891, 7)]) == {"eval_loss": 2.345679}


def test_each_part_of_a_mixture_has_its_share() -> None:
    """Whatever it is called, and however little it has."""
    mixed = manifest(
        PartInfo("a b", "", 75, 75, 2),
        PartInfo("a:b", "", 24, 24, 2),
        PartInfo("none", "", 1, 1, 0),
    )
    first, second = held_out_samples(mixed, 8)
    assert (first.figure, counted(first)) == ("eval_loss/a-b", [(0, 6)])
    assert (second.figure, counted(second)) == ("eval_loss/a-b-2", [(2, 2)])
    assert [counted(each) for each in held_out_samples(mixed, 1)] == [[(0, 1)], [(2, 1)]]
    figures = eval_figures([(first, 2.0, 30), (second, 4.0, 10)])
    assert figures == {"eval_loss": 2.5, "eval_loss/a-b": 2.0, "eval_loss/a-b-2": 4.0}


def test_no_two_parts_have_one_figure() -> None:
    """Whatever they are called: the name that one gets may be that of another."""
    mixed = Manifest(
        "text",
        TRAINING,
        HELD[:3],
        sequence_length=8,
        vocab_size=500,
        parts=tuple(
            PartInfo(name, "", num, num, 1)
            for name, num in (("a-b-3", 50), ("a b", 30), ("a:b", 20))
        ),
    )
    figures = [each.figure for each in held_out_samples(mixed, 8)]
    assert figures == ["eval_loss/a-b-3", "eval_loss/a-b", "eval_loss/a-b-3-3"]
