"""Which elements: parts by bandwidth cover the vector and are quickest, layouts are told apart, all have their turn."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from neurogrid.errors import ConfigurationError
from neurogrid.training.averaging.parts import (
    AllOfIt,
    Fragments,
    Layout,
    RandomPartitions,
    Turns,
    gather,
    parse_turns,
    scatter,
    split,
)

bandwidths = st.lists(
    st.one_of(st.sampled_from((0, 1, 1000)), st.integers(0, 2**70)), min_size=1, max_size=12
)


def lengths(spans: list[tuple[int, int]]) -> list[int]:
    return [stop - start for start, stop in spans]


@given(st.integers(0, 10**12), bandwidths, st.sampled_from((1, 256, 4096, 1_048_576)))
def test_parts_cover_the_vector_in_order_and_end_with_blocks(
    num_elements: int, rates: list[int], block: int
) -> None:
    assume(any(rates))
    spans = split(num_elements, rates, block)
    assert len(spans) == len(rates)
    ends = [0, *(stop for _, stop in spans)]
    assert [start for start, _ in spans] == ends[:-1]
    assert ends == sorted(ends)
    assert ends[-1] == num_elements
    assert all(end % block == 0 or end == num_elements for end in ends)
    for rate, length in zip(rates, lengths(spans), strict=True):
        assert rate or not length


@given(st.lists(st.integers(1, 10**6), min_size=3, max_size=9))
def test_no_other_parts_are_quicker(rates: list[int]) -> None:
    """All that reduce take as long, and who does not would take longer for its own elements alone."""
    size = 10**30
    sizes, others = lengths(split(size, rates, 1)), len(rates) - 2
    times = [
        (1 + others * Fraction(length, size)) / rate
        for length, rate in zip(sizes, rates, strict=True)
    ]
    reducing = [time for time, length in zip(times, sizes, strict=True) if length]
    slowest = max(reducing)
    assert slowest - min(reducing) < Fraction(1, 10**20)
    assert all(
        Fraction(1, rate) >= slowest * (1 - Fraction(1, 10**20))
        for rate, length in zip(rates, sizes, strict=True)
        if not length
    )


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([1, 1, 1, 1], [25, 25, 25, 25]),
        ([5, 5], [50, 50]),
        ([3, 1], [75, 25]),
        ([3], [100]),
        # Nobody can dial the second.
        ([1, 0, 1], [50, 0, 50]),
        # Two of twice the bandwidth: the others have enough to do with their own elements.
        ([2, 2, 1, 1], [50, 50, 0, 0]),
        ([4, 4, 3, 3], [36, 35, 15, 14]),
        ([0, 7, 0, 0], [0, 100, 0, 0]),
    ],
)
def test_parts_by_bandwidth(rates: list[int], expected: list[int]) -> None:
    assert lengths(split(100, rates, 1)) == expected


def test_without_a_reducer_there_are_no_parts() -> None:
    with pytest.raises(ConfigurationError, match="nobody reduces"):
        split(100, [0, 0], 1)
    with pytest.raises(ValueError, match="-1"):
        split(100, [1, -1], 1)


TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.tensor(7.0, dtype=torch.float64),
    "c": torch.zeros(0, 4),
    "d": torch.arange(4).to(torch.bfloat16).view(2, 2).t(),
}


def test_tensors_are_one_vector_and_come_back_as_views() -> None:
    layout = Layout.of(TENSORS)
    assert layout.num_elements == 11
    assert layout.spans == ((0, 6), (6, 7), (7, 7), (7, 11))
    vector = torch.empty(11)
    layout.flatten(TENSORS, vector)
    assert vector.tolist() == [0, 1, 2, 3, 4, 5, 7, 0, 2, 1, 3]
    views = layout.views(vector)
    assert {name: view.tolist() for name, view in views.items()} == {
        name: tensor.tolist() for name, tensor in TENSORS.items()
    }
    views["b"].fill_(9)
    assert vector[6] == 9


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_what_is_no_float_is_refused_by_name(dtype: torch.dtype) -> None:
    """Half of a complex number would be lost, and an integer would be cut off."""
    tensors = {"a": torch.zeros(2), "b": torch.zeros(3, dtype=dtype)}
    with pytest.raises(ConfigurationError, match=r"b is .*, and what is averaged are floats"):
        Layout.of(tensors)


def test_parameters_that_want_gradients_are_flattened_too() -> None:
    module = torch.nn.Linear(3, 2)
    layout = Layout.of(dict(module.named_parameters()))
    vector = torch.empty(layout.num_elements)
    layout.flatten(dict(module.named_parameters()), vector)
    assert torch.equal(layout.views(vector)["weight"], module.weight)


def test_names_shapes_and_order_have_one_digest() -> None:
    layout = Layout(("a", "b"), ((2, 3), (6,)))
    assert layout.digest == Layout(("a", "b"), ((2, 3), (6,))).digest
    others = [
        Layout(("b", "a"), ((6,), (2, 3))),
        Layout(("a", "c"), ((2, 3), (6,))),
        Layout(("a", "b"), ((3, 2), (6,))),
        Layout(("a", "b"), ((2, 3), (6, 1))),
        Layout(("a",), ((2, 3),)),
        Layout(("a", "b", "c"), ((2, 3), (6,), ())),
        Layout(("ab", ""), ((2, 3), (6,))),
    ]
    assert len({layout.digest, *(each.digest for each in others)}) == len(others) + 1


def test_another_layout_is_named() -> None:
    layout = Layout(("a", "b"), ((2, 3), (6,)))
    with pytest.raises(ConfigurationError, match=r"tensor 1 is b \[5\], and was b \[6\]"):
        layout.flatten({"a": torch.zeros(2, 3), "b": torch.zeros(5)}, torch.empty(12))
    with pytest.raises(ConfigurationError, match="there are 1 tensors, and were 2"):
        layout.flatten({"a": torch.zeros(2, 3)}, torch.empty(12))
    with pytest.raises(ValueError, match="12 float32"):
        layout.views(torch.empty(11))
    with pytest.raises(ValueError, match="name of its own"):
        Layout(("a", "a"), ((1,), (1,)))


def of_sizes(*sizes: int) -> Layout:
    return Layout(tuple(f"t{i}" for i in range(len(sizes))), tuple((size,) for size in sizes))


def check_turns(turns: Turns, num_elements: int) -> None:
    touched = torch.zeros(num_elements, dtype=torch.int64)
    for number in range(turns.num_turns):
        spans = turns.spans(number)
        assert all(start < stop for start, stop in spans)
        assert all(spans[i][1] < spans[i + 1][0] for i in range(len(spans) - 1))
        for start, stop in spans:
            touched[start:stop] += 1
        assert turns.num_elements(number) == sum(stop - start for start, stop in spans)
        assert turns.spans(number + turns.num_turns) == spans
    assert (touched == 1).all()


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=20), st.binary(max_size=64), st.data())
def test_each_element_has_its_turn_once(sizes: list[int], seed: bytes, data: st.DataObject) -> None:
    layout = of_sizes(*sizes)
    check_turns(AllOfIt(layout), layout.num_elements)
    number = data.draw(st.integers(1, len(sizes)))
    check_turns(Fragments(layout, number), layout.num_elements)
    if num_units := -(-layout.num_elements // 1024):
        number = data.draw(st.integers(1, num_units))
        check_turns(RandomPartitions(layout, number, seed=seed), layout.num_elements)


def test_twenty_rounds_of_random_partitions_touch_each_element_once() -> None:
    layout = of_sizes(100_000, 1_000_001)
    turns = RandomPartitions(layout, seed=b"run")
    assert turns.num_turns == 20
    check_turns(turns, layout.num_elements)
    sizes = [turns.num_elements(number) for number in range(20)]
    assert max(sizes) - min(sizes) < 2 * 1024
    # By chance: hardly two of a partition are neighbours.
    assert len(turns.spans(0)) > 40
    again = RandomPartitions(layout, seed=b"run")
    other = RandomPartitions(layout, seed=b"Run")
    assert again.spans(3) == turns.spans(3)
    assert other.spans(3) != turns.spans(3)


def test_fragments_are_whole_tensors_the_largest_dealt_first() -> None:
    turns = Fragments(of_sizes(1, 2, 5, 0, 4), 2)
    assert turns.spans(0) == ((0, 1), (3, 8))
    assert turns.spans(1) == ((1, 3), (8, 12))
    alike = Fragments(of_sizes(3, 3, 3, 3, 3), 2)
    assert alike.spans(0) == ((0, 3), (6, 9), (12, 15))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.data())
def test_no_fragment_has_a_tensor_more_than_another(sizes: list[int], data: st.DataObject) -> None:
    number = data.draw(st.integers(1, len(sizes)))
    turns = Fragments(of_sizes(*sizes), number)
    lengths_ = [turns.num_elements(turn) for turn in range(number)]
    assert max(lengths_) - min(lengths_) <= max(sizes)


def test_large_embeddings_make_one_fragment_hardly_larger() -> None:
    # Qwen3 0.6B: embeddings, and of each of 28 layers attention and its feed-forward network.
    layer = (2048 * 1024, 1024 * 1024, 1024 * 1024, 1024 * 2048, *(3072 * 1024,) * 3, 1024, 1024)
    layout = of_sizes(151_936 * 1024, *layer * 28, 1024)
    turns = Fragments(layout, 4)
    longest = max(turns.num_elements(turn) for turn in range(4))
    assert 4 * longest < 1.05 * layout.num_elements


@given(st.lists(st.integers(0, 50), min_size=1, max_size=10), st.integers(1, 4))
def test_what_is_gathered_is_scattered_where_it_was(sizes: list[int], number: int) -> None:
    assume(number <= len(sizes))
    layout = of_sizes(*sizes)
    vector = torch.arange(float(layout.num_elements))
    back = torch.full_like(vector, -1)
    turns = Fragments(layout, number)
    for turn in range(number):
        part = gather(vector, turns.spans(turn))
        assert len(part) == turns.num_elements(turn)
        scatter(part, back, turns.spans(turn))
    assert torch.equal(back, vector)


def test_parts_by_name() -> None:
    layout = of_sizes(20_000, 20_000, 20_000)
    for name in ("all", "fragments:3", "partitions:7"):
        assert parse_turns(name, layout, seed=b"").name == name
    assert parse_turns("partitions", layout, seed=b"").num_turns == 20
    for name in (
        "",
        "fragments",
        "fragments:x",
        "partitions:",
        "fragments:4",
        "partitions:60",
        "all:1",
    ):
        with pytest.raises(ConfigurationError, match=r"there are|at most"):
            parse_turns(name, layout, seed=b"")
    with pytest.raises(ConfigurationError, match="at least 1"):
        parse_turns("fragments:0", layout, seed=b"")
    with pytest.raises(ValueError, match="64 are enough"):
        RandomPartitions(layout, seed=bytes(65))
