"""The leader of a chain: what it makes of what members tell, however odd, and how it comes to the run's end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.training.scripted_chain import Member, open_chain, state_piece


async def test_a_chain_comes_to_its_end(tmp_path: Path) -> None:
    async with open_chain(tmp_path) as chain:
        await chain.leader.run()
        assert chain.state.step == 8
        assert sorted(chain.state.files) == [
            "first",
            "last",
            *(f"layer.{number}" for number in range(4)),
        ]
        assert chain.keeper.checkpoints == [8]
        assert [line["loss"] for line in chain.keeper.lines] == [2.0] * 8
        assert chain.progress.warned == []


@pytest.mark.parametrize("wrong", ["../../out", "{folder}/out", "layer.3", "first", "x"])
async def test_a_stage_gives_no_piece_but_its_own(tmp_path: Path, wrong: str) -> None:
    """Once: the state is fetched when it gives what is its own. Of the two it has the later layers."""
    name = wrong.format(folder=tmp_path)
    has_lied: list[int] = []

    def begin(member: Member) -> None:
        right = member.pieces

        def pieces(step: int) -> dict[str, bytes]:
            index = 0 if wrong == "layer.3" else 1
            if has_lied or member.index != index:
                return right(step)
            has_lied.append(step)
            return {**right(step), name: state_piece("odd")}

        member.pieces = pieces  # type: ignore[method-assign]

    async with open_chain(tmp_path, begin=begin) as chain:
        await chain.leader.run()
        assert has_lied == [4]
        (warning,) = chain.progress.warned
        assert f"gives a piece of state {name!r}, which its stage does not have" in warning
        assert not (tmp_path / "out.safetensors").exists()
        assert (chain.state.step, len(chain.state.files)) == (8, 6)
