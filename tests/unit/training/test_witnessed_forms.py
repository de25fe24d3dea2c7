"""Selection, filters, trees and results of witnessed runs, for all sizes."""

from __future__ import annotations

import hashlib
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.training.witnessed import (
    BloomFilter,
    MerklePath,
    ResultPlan,
    assign,
    committee,
    filter_salt,
    merkle_path,
    merkle_root,
    order,
    quorum,
    seat_item,
    witnesses,
)
from neurogrid.training.witnessed.phases import MAX_MEMBERS
from tests.unit.training import witnessed_by_the_book as book

SEED = bytes(range(32))


def digests(number: int) -> list[bytes]:
    return [hashlib.sha256(b"%d" % each).digest() for each in range(number)]


def test_each_seat_comes_first_as_often_as_another() -> None:
    counts = [0] * 4
    for number in range(2000):
        seed = hashlib.sha256(b"%d" % number).digest()
        found = order(seed, "committee", range(4))
        assert sorted(found) == [0, 1, 2, 3]
        counts[found[0]] += 1
    assert all(400 < count < 600 for count in counts)


def test_a_selection_of_nobody_is_nobody() -> None:
    assert committee(SEED, (), 3) == ((), ())
    assert witnesses(SEED, (), 3) == ()
    assert assign((), 0, 5) == {}
    assert quorum(0) == 0


@given(
    seats=st.sets(st.integers(0, 300), min_size=1, max_size=20),
    auditors=st.integers(0, 25),
    first=st.integers(0, 2**40),
    num=st.integers(0, 100),
)
def test_batches_are_each_assigned_once(
    seats: set[int], auditors: int, first: int, num: int
) -> None:
    trainers, others = committee(SEED, seats, auditors)
    assert sorted(trainers + others) == sorted(seats)
    assert len(others) == min(auditors, len(seats) - 1)
    works = assign(trainers, first, num)
    assert list(works) == list(trainers)[: len(works)]
    numbers = [number for _, number in works.values()]
    assert [b for start, n in works.values() for b in range(start, start + n)] == list(
        range(first, first + num)
    )
    assert not numbers or max(numbers) - min(numbers) <= 1


def test_a_quorum_is_a_majority_where_there_are_three_and_more() -> None:
    for number in range(1, MAX_MEMBERS + 1):
        assert 1 <= quorum(number) <= number
        # Two quorums have a witness in common.
        assert 2 * quorum(number) > number or number == 4
    assert quorum(4) == 2


@given(st.sets(st.binary(max_size=40), max_size=128), st.binary(max_size=36))
def test_a_filter_has_all_that_was_put_in(items: set[bytes], salt: bytes) -> None:
    made = BloomFilter.of(salt, items)
    assert all(item in made for item in items)
    assert made.num_set <= 8 * len(items)
    again = BloomFilter(salt, bytes(made))
    assert bytes(again) == bytes(made)
    assert all(item in again for item in items)


def test_a_full_filter_is_wrong_as_seldom_as_its_bits_let_expect() -> None:
    seats = range(MAX_MEMBERS)
    wrong = []
    for witness in range(20):
        made = BloomFilter.of(filter_salt(SEED, witness), map(seat_item, seats))
        wrong.append({other for other in range(1000, 2000) if seat_item(other) in made})
    # One in forty, and for each witness others.
    assert 10 < sum(map(len, wrong)) / 20 < 45
    assert not set.intersection(*wrong)


@pytest.mark.parametrize("number", [*range(1, 20), 64, 65])
def test_a_path_shows_its_digest_and_no_other(number: int) -> None:
    all_digests = digests(number)
    root = merkle_root(reversed(all_digests))
    assert root == book.root(all_digests)
    other = digests(number + 1)[-1]
    for digest in all_digests:
        path = merkle_path(all_digests, digest)
        assert path.shows(root, digest)
        assert not path.shows(root, other)
        assert not path.shows(merkle_root([*all_digests, other]), digest)
        for wrong in (
            MerklePath(path.place, path.num_leaves, (*path.digests, other)),
            MerklePath(path.place, path.num_leaves, path.digests[:-1]),
            MerklePath(path.place, path.num_leaves, (*path.digests[:-1], bytes(31))),
            MerklePath(path.place ^ 1, path.num_leaves, path.digests),
            MerklePath(-1, path.num_leaves, path.digests),
            MerklePath(path.place, 10**9, path.digests),
            MerklePath(path.place, 0, path.digests),
        ):
            assert wrong == path or number == 1 or not wrong.shows(root, digest)
        assert not path.shows(root, b"short")


def test_a_node_is_no_leaf() -> None:
    two = sorted(digests(2))
    leaves = [hashlib.sha256(b"neurogrid leaf 1\0" + each).digest() for each in two]
    assert merkle_root(two) != merkle_root([hashlib.sha256(b"".join(leaves)).digest()])


def test_trees_refuse_what_is_no_digest() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        merkle_root([b"short"])
    with pytest.raises(ValueError, match="not in the tree"):
        merkle_path(digests(3), bytes(32))
    with pytest.raises(ValueError, match="at most"):
        merkle_root(number.to_bytes(32, "big") for number in range(65_537))
    with pytest.raises(ValueError, match="128 bytes"):
        BloomFilter(b"", bytes(127))


PLANS = st.builds(
    ResultPlan,
    st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 3, 8, 9, 64, 100, 4096])), max_size=4
    ).map(tuple),
    st.sampled_from([1, 2, 8, 100]),
    st.booleans(),
)


@settings(max_examples=150)
@given(plan=PLANS, seed=st.integers(0, 2**32))
def test_a_result_reads_as_it_was_written(plan: ResultPlan, seed: int) -> None:
    random = Random(seed)
    offsets = [
        sorted(random.sample(range(size), min(plan.top_k, size)))
        for chunks, size in plan.tensors
        for _ in range(chunks)
    ]
    sizes = [size for chunks, size in plan.tensors for _ in range(chunks)]
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    positions = [start + o for start, of in zip(starts, offsets, strict=True) for o in of]
    signs = [random.choice([1.0, -1.0]) for _ in positions]
    values = signs if plan.one_bit else [sign * random.random() for sign in signs]
    if plan.one_bit:  # of a third of the chunks nothing is sent
        at = 0
        for start, of in zip(starts, offsets, strict=True):
            if random.random() < 1 / 3:
                of[:] = range(len(of))
                positions[at : at + len(of)] = range(start, start + len(of))
                values[at : at + len(of)] = [0.0] * len(of)
            at += len(of)
    data = plan.encode(np.array(positions, np.int64), np.array(values, np.float32))
    tensors = [list(each) for each in plan.tensors]
    assert data == book.result(tensors, plan.top_k, plan.one_bit, offsets, values)
    assert len(data) == plan.num_bytes
    found, numbers = plan.decode(data)
    assert found.tolist() == positions
    assert numbers.tolist() == np.array(values, np.float32).tolist()


@settings(max_examples=200)
@given(plan=PLANS, data=st.binary(max_size=200), seed=st.integers(0, 2**32))
def test_what_is_no_result_is_refused_or_is_one(plan: ResultPlan, data: bytes, seed: int) -> None:
    head = bytes([2, plan.one_bit, 0, 0]) + plan.num_coefficients.to_bytes(4, "little")
    body = Random(seed).randbytes(plan.num_bytes - 8)
    for each in (data, head + data, head + body):
        try:
            positions, values = plan.decode(each)
        except ValueError:
            continue
        assert plan.encode(positions, values) == each


def test_a_result_of_something_else_is_not_written() -> None:
    plan = ResultPlan(((2, 8),), 2, one_bit=True)
    right = np.array([0, 3, 8, 15]), np.array([1, -1, 1, 1])
    assert len(plan.encode(*right)) == plan.num_bytes == 8 + 2 + 1 + 1
    for positions, values, what in [
        ([0, 3, 8], [1, 1, 1], "4 coefficients"),
        ([0, 3, 8, 15], [1, 1, 1], "4 coefficients"),
        ([0, 3, 3, 15], [1, 1, 1, 1], "outside"),
        ([0, 3, 8, 16], [1, 1, 1, 1], "outside"),
        ([3, 0, 8, 15], [1, 1, 1, 1], "ascend"),
        ([0, 3, 8, 15], [1, 1, 1, 0.5], "neither"),
        ([0, 3, 8, 15], [1, 1, 1, 0], "neither"),
        ([0, 3, 8, 15], [1, 1, 0, 0], "first"),
        ([0, 3, 8, 15], [1, 1, 1, np.nan], "infinite"),
    ]:
        with pytest.raises(ValueError, match=what):
            plan.encode(np.array(positions), np.array(values))
    for tensors, top_k in [(((0, 8),), 2), (((2, 0),), 2), (((2, 8),), 0), (((2**31, 8),), 2)]:
        with pytest.raises(ValueError, match=r"at least|at most"):
            ResultPlan(tensors, top_k, one_bit=True)
