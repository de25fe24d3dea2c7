"""The digest by which members say that they have the same weights."""

from __future__ import annotations

import struct

import torch
from blake3 import blake3

from neurogrid.training.averaging.parts import Layout
from neurogrid.training.runs.outer_state import OuterState

LAYOUT = Layout(("a", "b"), ((2,), (2, 2)))


def state(values: list[float]) -> OuterState:
    return OuterState(LAYOUT, torch.tensor(values), lr=0.7, momentum=0.9)


def test_the_digest_is_that_of_the_common_weights() -> None:
    values = [1.0, -2.0, 0.5, 0.0, 3.0, 4.0]
    digest = blake3(struct.pack("<6f", *values)).digest()
    assert state(values).digest() == digest
    assert state([*values[:5], 4.5]).digest() != digest


def test_what_a_member_learned_on_its_own_is_not_in_it() -> None:
    member = state([1.0] * 6)
    before = member.digest()
    member.weights.add_(1.0)
    assert member.digest() == before
