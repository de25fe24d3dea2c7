"""Weights in pieces, and which of them most members have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from neurogrid.errors import CheckpointError
from neurogrid.training.data.blob_files import OfferedFiles
from neurogrid.training.leading.witnessed.agreement import WeightAgreement, providers_of
from neurogrid.training.leading.witnessed.common_weights import CommonWeights
from neurogrid.training.runs.weight_pieces import (
    check_pieces,
    cut_pieces,
    read_piece,
    write_pieces,
)
from neurogrid.training.wire.runs import EpochReport
from tests.unit.full_disk import full_disk


@pytest.mark.parametrize("num_elements", [1, 4095, 4096, 4097, 65_536, 65_537, 200_000])
def test_pieces_are_the_whole_vector(num_elements: int, tmp_path: Path) -> None:
    weights = torch.arange(num_elements, dtype=torch.float32)
    files = write_pieces(weights, tmp_path / "pieces")
    check_pieces(list(files), num_elements)
    again = torch.full_like(weights, -1.0)
    for name, path in reversed(files.items()):
        read_piece(name, path, again)
    assert torch.equal(again, weights)
    assert len(files) <= 17


async def test_a_full_disk_is_said_where_weights_are_offered(tmp_path: Path) -> None:
    weights = CommonWeights(torch.ones(5000), 3, OfferedFiles(), tmp_path)
    await weights.offer()
    with (
        full_disk(),
        pytest.raises(CheckpointError, match=r"files for others cannot be written: .*; make"),
    ):
        await weights.offer()
    assert weights.names == weights.blobs == ()
    await weights.offer()
    assert len(weights.names) == len(weights.blobs) == 2


def test_pieces_are_named_by_their_elements() -> None:
    assert cut_pieces(5000) == ("elements.0.4096", "elements.4096.5000")
    assert len(cut_pieces(2**34)) == 1024
    for wrong in ([], ["elements.0.5000"], ["elements.0.4096", "elements.4096.5001"], ["x"]):
        with pytest.raises(CheckpointError, match="these are not the pieces of 5000 elements"):
            check_pieces(wrong, 5000)


def test_a_piece_of_another_length_is_refused(tmp_path: Path) -> None:
    weights = torch.ones(5000)
    files = write_pieces(weights, tmp_path)
    name, path = next(iter(files.items()))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"piece elements\.0\.4096 has 16380 bytes"):
        read_piece(name, path, weights)


def test_more_than_half_have_to_have_the_same() -> None:
    agreement, members = WeightAgreement(), ["a", "b", "c"]
    agreement.told("a", 4, b"1")
    assert agreement.digest(4, members) == b""
    agreement.told("b", 4, b"1")
    assert agreement.digest(4, members) == b"1"
    agreement.told("c", 4, b"2")
    assert agreement.apart(members) == [(4, "c")]
    assert agreement.apart(members) == []
    assert agreement.take() == (2, 1)
    assert agreement.take() == (0, 0)


def test_members_that_do_not_count_make_no_majority() -> None:
    agreement = WeightAgreement()
    for peer, digest in (("a", b"1"), ("b", b"1"), ("x", b"2"), ("y", b"2"), ("z", b"2")):
        agreement.told(peer, 4, digest)
    assert sorted(agreement.apart(["a", "b"], ["a", "b", "x", "y"])) == [(4, "x"), (4, "y")]


def test_what_is_told_twice_counts_as_it_was_told_first() -> None:
    agreement = WeightAgreement()
    agreement.told("a", 1, b"1")
    agreement.told("a", 1, b"2")
    assert agreement.digest(1, ["a"]) == b"1"
    for step in range(2, 30):
        agreement.told("a", step, b"1")
    assert agreement.digest(1, ["a"]) == b""


def test_those_that_are_no_members_do_not_count() -> None:
    agreement = WeightAgreement()
    for peer in "abcd":
        agreement.told(peer, 1, b"1" if peer in "ab" else b"2")
    assert agreement.digest(1, ["a", "b", "c", "d"]) == b""
    assert agreement.digest(1, ["a", "b", "c"]) == b"1"
    assert agreement.apart(["a", "b", "c"]) == [(1, "c")]


NAMES = cut_pieces(5000)
HERE = EpochReport(
    bytes(16), 1, "kept", has_weights=True, step=4, digest=bytes(32), names=NAMES,
    blobs=(b"1" * 32, b"2" * 32),
)  # fmt: skip


def test_pieces_come_of_those_that_say_the_same_of_them() -> None:
    odd = replace(HERE, blobs=(b"3" * 32, b"4" * 32))
    reports = {"a": odd, "b": HERE, "c": HERE, "d": replace(HERE, step=3)}
    found = [providers_of(reports, 4, bytes(32), NAMES, attempt) for attempt in range(3)]
    assert found == [(HERE.blobs, ["b", "c"]), (odd.blobs, ["a"]), (HERE.blobs, ["b", "c"])]
    assert providers_of(reports, 5, bytes(32), NAMES, 0) == ((), [])


def test_who_cuts_weights_otherwise_gives_none() -> None:
    reports = {"a": replace(HERE, names=NAMES[::-1]), "b": replace(HERE, names=(), blobs=())}
    assert providers_of(reports, 4, bytes(32), NAMES, 0) == ((), [])
    assert providers_of({**reports, "c": HERE}, 4, bytes(32), NAMES, 1) == (HERE.blobs, ["c"])


class _Peer(str):
    """A peer id that counts how often it is compared with others."""

    num_compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        _Peer.num_compared += 1
        return str.__eq__(self, other)


def test_members_are_not_looked_up_one_for_another() -> None:
    """A leader looks whenever one says something: what that takes grows with the members, and not with their square."""
    num_members, num_steps = 300, 4
    agreement = WeightAgreement()
    # Ids that are equal, but not the same objects, as those of messages are.
    told, members = ([_Peer(f"member {number}") for number in range(num_members)] for _ in range(2))
    for step in range(num_steps):
        for number, peer in enumerate(told):
            agreement.told(peer, step, number.to_bytes(32) if number % 3 else bytes(32))
    _Peer.num_compared = 0
    assert agreement.apart(members) == []
    assert agreement.digest(3, members) == b""
    assert _Peer.num_compared < 10 * num_steps * num_members
