"""Many vectors to one: equal to the plain sum, to numpy, and to methods on the vectors themselves; what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from neurogrid.errors import ConfigurationError, NotFiniteError, RemoteProtocolError
from neurogrid.p2p.wire import ErrorCode
from neurogrid.training.averaging.aggregators import (
    DistanceAggregator,
    Mean,
    parse_aggregator,
)
from neurogrid.training.averaging.aggregators.distances import Krum, MultiKrum
from neurogrid.training.averaging.aggregators.mean import MeanOfSigns
from neurogrid.training.averaging.aggregators.order import TrimmedMean

NAMES = (
    "mean",
    "trimmed_mean",
    "median",
    "krum",
    "multi_krum",
    "geometric_median",
    "mean_of_signs",
)
BY_ELEMENT = ("mean", "trimmed_mean", "median", "mean_of_signs")
QUICK = settings(max_examples=60, deadline=None)


def normal(num_rows: int, num_elements: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(num_rows, num_elements, generator=generator))


@st.composite
def members(draw: st.DrawFn, max_rows: int = 12) -> tuple[list[torch.Tensor], list[float]]:
    """Rows with few different values, so that there are ties and zeros of both signs, and weights."""
    shape = (draw(st.integers(1, max_rows)), draw(st.integers(1, 40)))
    elements = st.one_of(st.sampled_from((0.0, -0.0, 1.0, -1.0)), st.floats(-1e4, 1e4, width=16))
    rows = list(torch.from_numpy(draw(arrays(np.float32, shape, elements=elements))))
    weights = draw(
        st.lists(
            st.one_of(st.sampled_from((0.0, 1.0, 3.0)), st.floats(0.001, 1e6)),
            min_size=len(rows),
            max_size=len(rows),
        )
    )
    assume(sum(weights) > 0)
    return rows, weights


def bits(values: torch.Tensor) -> bytes:
    return values.numpy().tobytes()


def mean_of_numpy(rows: Sequence[torch.Tensor], weights: Sequence[float]) -> np.ndarray:
    """As protocol_spec/training/forms.md has it, with scalars of numpy that no library can fuse."""
    first = next(weight for weight in weights if weight)
    total: np.ndarray | None = None
    divisor = 0.0
    for row, weight in zip(rows, weights, strict=True):
        if weight:
            ratio = np.float32(weight / first)
            product = np.array([x * ratio for x in row.numpy()], np.float32)
            total = product if total is None else total + product
            divisor += float(ratio)
    assert total is not None
    return np.array([x / np.float32(divisor) for x in total], np.float32)


@QUICK
@given(members())
def test_the_mean_is_that_of_the_specification(
    given_members: tuple[list[torch.Tensor], list[float]],
) -> None:
    rows, weights = given_members
    expected = mean_of_numpy(rows, weights)
    assert bits(Mean().aggregate(rows, weights)) == expected.tobytes()


@QUICK
@given(members(), st.floats(0.001, 1e6))
def test_with_equal_weights_the_mean_is_the_plain_sum_over_the_number(
    given_members: tuple[list[torch.Tensor], list[float]], weight: float
) -> None:
    rows, _ = given_members
    plain = rows[0].clone()
    for row in rows[1:]:
        plain = plain + row
    expected = torch.from_numpy(plain.numpy() / np.float32(len(rows)))
    assert bits(Mean().aggregate(rows, [weight] * len(rows))) == bits(expected)


def test_a_row_that_came_is_added_before_the_next_and_not_kept() -> None:
    rows, weights = normal(5, 70_001), [3.0, 1.0, 0.0, 7.0, 3.0]
    accumulator = Mean().begin(70_001)
    buffer = torch.empty(70_001)
    for row, weight in zip(rows, weights, strict=True):
        accumulator.add(buffer.copy_(row), weight)
    assert bits(accumulator.finish()) == bits(Mean().aggregate(rows, weights))
    assert torch.equal(buffer, rows[-1])


@pytest.mark.parametrize("aggregator", [Mean(), MeanOfSigns()], ids=["mean", "signs"])
@pytest.mark.parametrize("cuts", [[], [1], [65_536], [20_000, 20_000, 69_999]])
def test_a_row_in_pieces_is_added_as_the_whole(aggregator: Mean, cuts: list[int]) -> None:
    rows, weights = normal(4, 70_001), [0.0, 3.0, 1.0, 3.0]
    accumulator = aggregator.begin(70_001)
    buffer = torch.empty(70_001)
    for row, weight in zip(rows, weights, strict=True):
        spans = pairwise([0, *cuts, len(row)])
        pieces = (buffer[: stop - start].copy_(row[start:stop]) for start, stop in spans)
        accumulator.add_pieces(pieces, weight)
    assert bits(accumulator.finish()) == bits(aggregator.aggregate(rows, weights))


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_pieces_that_are_no_row_are_refused(weight: float) -> None:
    for pieces in ([torch.ones(3)], [torch.ones(3), torch.ones(3)], []):
        accumulator = Mean().begin(4)
        accumulator.add(torch.ones(4), 1.0)
        with pytest.raises(ValueError, match="elements"):
            accumulator.add_pieces(pieces, weight)


def test_a_mean_by_samples() -> None:
    rows = [torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([6.0])]
    assert Mean().aggregate(rows, [10, 20, 10]).item() == 2.75


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_parts_by_themselves_are_those_of_the_whole(name: str) -> None:
    rows, weights = normal(7, 140_000), [1.0, 2.0, 1.5, 0.0, 3.0, 1.0, 1.0]
    aggregator = parse_aggregator(name)
    whole = aggregator.aggregate(rows, weights)
    cuts = [0, 1, 65_536, 100_000, 140_000]
    parts = [
        aggregator.aggregate([row[start:stop] for row in rows], weights)
        for start, stop in pairwise(cuts)
    ]
    assert bits(torch.cat(parts)) == bits(whole)


@pytest.mark.parametrize("name", NAMES)
def test_no_row_is_written_to_and_none_of_weight_zero_counts(name: str) -> None:
    rows = normal(6, 100)
    before = [row.clone() for row in rows]
    aggregator = parse_aggregator(name)
    result = aggregator.aggregate(rows, [1.0, 0.0, 2.0, 2.0, 0.0, 1.0])
    assert all(torch.equal(row, old) for row, old in zip(rows, before, strict=True))
    assert all(result.data_ptr() != row.data_ptr() for row in rows)
    others = [rows[index] for index in (0, 2, 3, 5)]
    assert bits(result) == bits(aggregator.aggregate(others, [1.0, 2.0, 2.0, 1.0]))


@pytest.mark.parametrize("name", NAMES)
def test_of_one_member_it_is_its_row(name: str) -> None:
    (row,) = normal(1, 50)
    result = parse_aggregator(name).aggregate([row], [0.25])
    assert torch.equal(result, row.sign() if name == "mean_of_signs" else row)


@QUICK
@given(members(max_rows=40))
def test_trimmed_mean_and_median_are_those_of_numpy(
    given_members: tuple[list[torch.Tensor], list[float]],
) -> None:
    rows, _ = given_members
    alike = [1.0] * len(rows)
    ordered = np.sort(torch.stack(rows).numpy(), axis=0)
    for share in (0.1, 0.3):
        cut = int(share * len(rows))
        kept = ordered[cut : len(rows) - cut]
        total = kept[0]
        for row in kept[1:]:
            total = total + row
        expected = total / np.float32(len(kept)) + np.float32(0)
        assert bits(TrimmedMean(share).aggregate(rows, alike)) == expected.tobytes()
    median = parse_aggregator("median").aggregate(rows, alike)
    np.testing.assert_array_equal(median.numpy(), np.median(ordered, axis=0))
    assert not (median.signbit() & (median == 0)).any()


@pytest.mark.parametrize(
    ("num_rows", "num_trimmed"), [(1, 0), (9, 0), (10, 1), (19, 1), (20, 2), (30, 3)]
)
def test_a_tenth_is_trimmed_at_each_side_and_never_all(num_rows: int, num_trimmed: int) -> None:
    assert TrimmedMean().num_trimmed(num_rows) == num_trimmed
    assert all(2 * TrimmedMean(0.4999).num_trimmed(n) < n for n in range(1, 50))


def test_order_does_not_matter_where_members_count_alike() -> None:
    rows = normal(11, 200)
    rows[3][:50] = 0.0
    rows[4][:50] = -0.0
    for name in ("trimmed_mean:0.2", "median"):
        aggregator = parse_aggregator(name)
        forward = aggregator.aggregate(rows, [1.0] * 11)
        assert bits(forward) == bits(aggregator.aggregate(rows[::-1], [1.0] * 11))


def test_a_vote_counts_by_weights() -> None:
    rows = [torch.tensor([5.0, -0.1, 0.0]), torch.tensor([-1.0, -9.0, -0.0])]
    mean = parse_aggregator("mean_of_signs").aggregate(rows, [3.0, 1.0])
    assert mean.tolist() == pytest.approx([0.5, -1.0, 0.0])


def attacked(num_rows: int = 10, num_bad: int = 3, distance: float = 50.0) -> list[torch.Tensor]:
    rows = normal(num_rows, 300)
    for row in rows[-num_bad:]:
        row += distance
    return rows


def test_krum_takes_one_of_those_that_are_near_one_another() -> None:
    rows = attacked()
    result = Krum(3).aggregate(rows, [1.0] * 10)
    scores = [
        sum(sorted(float((row - other).double().square().sum()) for other in rows)[1:6])
        for row in rows
    ]
    assert torch.equal(result, rows[min(range(10), key=scores.__getitem__)])
    chosen = sorted(range(10), key=scores.__getitem__)[:5]
    weights = MultiKrum(3).weights_from(MultiKrum(3).partial_distances(rows))
    assert [index for index, weight in enumerate(weights) if weight] == sorted(chosen)
    several = MultiKrum(3).aggregate(rows, [1.0] * 10)
    torch.testing.assert_close(several, torch.stack([rows[i] for i in chosen]).mean(0))


@pytest.mark.parametrize(
    ("num_faulty", "num_members", "expected"),
    [
        (None, 5, 2),  # 5 allow 1
        (None, 10, 5),  # 10 allow 3
        (2, 10, 6),
        (0, 10, 8),
        (4, 5, 2),  # more than 5 allow
        (None, 4, 2),
        (None, 3, 1),
        (None, 2, 1),
        (None, 1, 1),
    ],
)
def test_neighbours_of_krum(num_faulty: int | None, num_members: int, expected: int) -> None:
    assert Krum(num_faulty).num_neighbours(num_members) == expected
    assert MultiKrum(num_faulty).num_chosen(num_members) == expected


def test_of_equal_members_krum_takes_the_first() -> None:
    weights = Krum().weights_from(torch.zeros(5, 5, dtype=torch.float64))
    assert weights == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("name", ["krum", "multi_krum", "geometric_median"])
def test_distances_of_parts_add_up_to_those_of_the_whole(name: str) -> None:
    rows, aggregator = attacked(num_rows=6, num_bad=1), parse_aggregator(name)
    assert isinstance(aggregator, DistanceAggregator)
    parts = [
        aggregator.partial_distances([row[start:stop] for row in rows])
        for start, stop in ((0, 7), (7, 7), (7, 300))
    ]
    whole = aggregator.partial_distances(rows)
    expected = torch.cdist(torch.stack(rows).double(), torch.stack(rows).double()).square()
    torch.testing.assert_close(whole, expected)
    torch.testing.assert_close(torch.stack(parts).sum(0), whole)
    weights = aggregator.weights_from(torch.stack(parts).sum(0), [1.0] * 6)
    assert sum(weights) == pytest.approx(1)
    by_parts = [Mean().aggregate([r[a:b] for r in rows], weights) for a, b in ((0, 7), (7, 300))]
    torch.testing.assert_close(torch.cat(by_parts), aggregator.aggregate(rows, [1.0] * 6))


def weiszfeld(rows: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """On the vectors themselves, from their median, until it stands."""
    stacked = torch.stack(list(rows)).double()
    weight = torch.tensor(weights, dtype=torch.float64)
    point = stacked.median(0).values
    for _ in range(1000):
        pull = weight / (stacked - point).norm(dim=1).clamp_min(1e-12)
        point = (pull[:, None] * stacked).sum(0) / pull.sum()
    return point


@pytest.mark.parametrize("distance", [0.0, 3.0, 1e3, 1e6])
@pytest.mark.parametrize(("num_rows", "num_bad"), [(5, 1), (5, 2), (10, 2), (10, 4)])
def test_weiszfeld_on_distances_is_weiszfeld_on_vectors(
    num_rows: int, num_bad: int, distance: float
) -> None:
    rows = attacked(num_rows, num_bad, distance)
    weights = [1.0 + 0.01 * index for index in range(num_rows)]
    result = parse_aggregator("geometric_median").aggregate(rows, weights)
    expected = weiszfeld(rows, weights)
    # Of what members are apart.
    assert float((result - expected).norm() / expected.norm().clamp_min(20)) < 1e-4


def test_weiszfeld_ends_at_the_one_where_most_are() -> None:
    rows = [*[torch.ones(20)] * 3, torch.full((20,), 1e30), torch.zeros(20)]
    result = parse_aggregator("geometric_median").aggregate(rows, [1.0] * 5)
    torch.testing.assert_close(result, torch.ones(20))


@pytest.mark.parametrize("name", ["median", "krum", "multi_krum", "geometric_median"])
@pytest.mark.parametrize("distance", [10.0, 1e6])
def test_a_minority_that_is_far_away_is_held_off(name: str, distance: float) -> None:
    rows = attacked(10, 2, distance)
    honest = torch.stack(rows[:8]).mean(0)
    result = parse_aggregator(name).aggregate(rows, [1.0] * 10)
    assert float((result - honest).norm()) < 20
    assert float((Mean().aggregate(rows, [1.0] * 10) - honest).norm()) > distance


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_a_row_that_is_not_finite_is_refused_by_its_index(
    name: str, bad: float, weight: float
) -> None:
    rows = normal(5, 70_000)
    rows[3][66_000] = bad
    with pytest.raises(NotFiniteError, match="row 3 has NaN or infinity") as caught:
        parse_aggregator(name).aggregate(rows, [1.0, 1.0, 1.0, weight, 1.0])
    assert caught.value.index == 3


@pytest.mark.parametrize("name", ["mean", "trimmed_mean"])
def test_finite_rows_whose_sum_is_not_are_refused_by_the_largest(name: str) -> None:
    rows = [torch.full((10,), value) for value in (1e38, 3e38, 2e38, 1.0)]
    with pytest.raises(NotFiniteError, match="row 1 ") as caught:
        parse_aggregator(name).aggregate(rows, [1.0] * 4)
    assert caught.value.index == 1
    result = parse_aggregator("median").aggregate(rows, [1.0] * 4)
    torch.testing.assert_close(result, torch.full((10,), 1.5e38))


@pytest.mark.parametrize(
    ("matrix", "code"),
    [
        ([[0.0, math.nan], [math.nan, 0.0]], ErrorCode.NOT_FINITE),
        ([[0.0, math.inf], [math.inf, 0.0]], ErrorCode.NOT_FINITE),
        ([[0.0, -1.0], [-1.0, 0.0]], ErrorCode.PROTOCOL_VIOLATION),
        ([[0.0, 1.0], [2.0, 0.0]], ErrorCode.PROTOCOL_VIOLATION),
        ([[1.0, 1.0], [1.0, 0.0]], ErrorCode.PROTOCOL_VIOLATION),
    ],
)
def test_what_can_be_no_distances_is_refused(matrix: list[list[float]], code: ErrorCode) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        Krum().weights_from(torch.tensor(matrix, dtype=torch.float64))
    assert caught.value.code == code


@given(st.integers(1, 8), st.sampled_from(("krum", "multi_krum", "geometric_median")), st.data())
def test_any_distances_give_weights(size: int, name: str, data: st.DataObject) -> None:
    values = data.draw(arrays(np.float64, (size, size), elements=st.floats(0, 1e300)))
    lower = np.tril(values, -1)
    aggregator = parse_aggregator(name)
    assert isinstance(aggregator, DistanceAggregator)
    weights = aggregator.weights_from(torch.from_numpy(lower + lower.T))
    assert sum(weights) == pytest.approx(1)
    assert all(0 <= weight <= 1 for weight in weights)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_round_is_refused(name: str) -> None:
    aggregator = parse_aggregator(name)
    with pytest.raises(ValueError, match="weight"):
        aggregator.aggregate([], [])
    with pytest.raises(ValueError, match=r"no .* has a weight above zero"):
        aggregator.aggregate([torch.zeros(1)], [0.0])
    with pytest.raises(ValueError, match="row 1 is"):
        aggregator.aggregate([torch.zeros(1), torch.zeros(2)], [1.0, 1.0])
    for weight in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="a weight of"):
            aggregator.aggregate([torch.zeros(1), torch.zeros(1)], [1.0, weight])


@pytest.mark.parametrize("name", ["", "average", "trimmed_mean:0.5", "trimmed_mean:1", "krum:-1"])
def test_an_unknown_name_is_told_those_that_are_known(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"there are mean, trimmed_mean|less than 0\.5"):
        parse_aggregator(name)


def test_a_name_is_taken_again() -> None:
    for name in (*NAMES, "krum:2", "multi_krum:1", "trimmed_mean:0.25"):
        again = parse_aggregator(parse_aggregator(name).name)
        assert again.name == parse_aggregator(name).name
