"""States that grow by a token where they are: the values that `torch.cat` gives, and nobody else's memory."""

from __future__ import annotations

import pytest
import torch

from neurogrid.model.caches.state_room import StateRoom

HEADS, SIZE = 3, 4


def states(num_tokens: int) -> torch.Tensor:
    return torch.randn(1, HEADS, num_tokens, SIZE)


@pytest.mark.parametrize("begun", [1, 5, 300])
def test_it_gives_what_cat_gives(begun: int) -> None:
    room, mine = StateRoom(), states(begun)
    expected = mine
    for _ in range(150):
        token = states(1)
        mine = room.append(mine, token, max_length=None)
        expected = torch.cat([expected, token], dim=-2)
        assert torch.equal(mine, expected)


def test_what_is_there_stays_where_it_is() -> None:
    room = StateRoom()
    first = room.append(states(100), states(1), max_length=None)
    second = room.append(first, states(1), max_length=None)
    assert second.data_ptr() == first.data_ptr()
    assert torch.equal(second[:, :, :101], first)


def test_what_was_given_is_not_written_to() -> None:
    larger = states(10)
    kept = larger.clone()
    room = StateRoom()
    room.append(larger[:, :, :6], states(1), max_length=None)  # there is something behind these
    assert torch.equal(larger, kept)


def test_a_part_of_what_was_made_here_is_not_its_to_write_behind() -> None:
    room = StateRoom()
    made = room.append(states(10), states(1), max_length=None)
    kept = made.clone()
    longer = room.append(made[:, :, :4], states(1), max_length=None)
    assert torch.equal(made, kept)
    assert torch.equal(longer[:, :, :4], kept[:, :, :4])


@pytest.mark.parametrize(("begun", "max_length", "capacity"), [(100, 110, 110), (100, 90, 101)])
def test_there_is_memory_for_no_more_than_may_come(
    begun: int, max_length: int, capacity: int
) -> None:
    made = StateRoom().append(states(begun), states(1), max_length=max_length)
    assert made.untyped_storage().nbytes() == HEADS * SIZE * 4 * capacity


def test_room_is_a_part_of_what_is_there() -> None:
    made = StateRoom().append(states(800), states(1), max_length=None)
    assert made.untyped_storage().nbytes() == HEADS * SIZE * 4 * 900


def test_what_does_not_fit_is_converted_or_refused_as_by_cat() -> None:
    room = StateRoom()
    made = room.append(states(10).bfloat16(), states(1).bfloat16(), max_length=None)
    token = states(1)
    assert torch.equal(room.append(made, token, max_length=None), torch.cat([made, token], dim=-2))
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        room.append(made, token[:, :1].bfloat16(), max_length=None)
