"""Verification without sockets: who is named, who is suspected, what is recorded, and what counts as a difference."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.assembly.verification import require_room
from neurogrid.cli.commands.coordinator import build_parser
from neurogrid.errors import ConfigurationError
from neurogrid.inference.board.progress import Progress
from neurogrid.inference.pipeline.pipeline_stage import PipelineStage
from neurogrid.inference.pipeline.routing import Routing
from neurogrid.inference.pipeline.session_worker import Prior
from neurogrid.inference.verification.bands import band, differing_rows, row_differences
from neurogrid.inference.verification.judging import (
    OWN,
    Findings,
    Need,
    OwnFindings,
    Verdict,
    judge,
)
from neurogrid.inference.verification.records import RecordRoom, SegmentRecord
from neurogrid.inference.verification.suspicion import MAX_PROOF_STEPS, PROOF_STEPS, Suspicion
from neurogrid.inference.verification.verifier import Verification
from neurogrid.model.stages.cost import LayerCost
from neurogrid.planner import PlannedStage

if TYPE_CHECKING:
    from neurogrid.fleet.placing.fleet import Fleet
    from neurogrid.inference.generation.loaded_model import LoadedModel
    from neurogrid.inference.pipeline.session import PipelineSession
    from neurogrid.inference.pipeline.session_worker import SessionWorker
    from neurogrid.p2p.exchange.exchange import Exchange

HIDDEN_SIZE = 4
ROW_BYTES = 2 * HIDDEN_SIZE * 4  # what goes in and what comes out


# ------------------------------------------------------------------ judging


@dataclass(frozen=True)
class World:
    """Workers that compute a number each, some of them another one than they should."""

    stages: tuple[str, ...]
    verifiers: tuple[str, ...]
    liars: frozenset[str]
    honest_again: frozenset[str]  # liars that answer right when they are asked again

    def compute(self, peer_id: str, index: int, value: int) -> int:
        right = 7 * value + index + 1
        return (
            right + 1000 * (self.stages + self.verifiers).index(peer_id) + 1
            if (peer_id in self.liars)
            else right
        )

    def verdict(self) -> Verdict:
        """What the machine comes to with what it asks for."""
        seen, others, own = 1, [1], [1]
        for index, (peer_id, verifier) in enumerate(zip(self.stages, self.verifiers, strict=True)):
            seen = self.compute(peer_id, index, seen)
            others.append(self.compute(verifier, index, others[-1]))
            own.append(7 * own[-1] + index + 1)
        findings = Findings(self.stages, self.verifiers, agrees=seen == others[-1])
        while isinstance(outcome := judge(findings), Need):
            if outcome is Need.OWN:
                right: list[bool | None] = []
                for index, verifier in enumerate(self.verifiers):
                    is_known = verifier != OWN and False not in right
                    right.append(others[index + 1] == own[index + 1] if is_known else None)
                findings = replace(findings, own=OwnFindings(seen == own[-1], tuple(right)))
            else:
                again = tuple(
                    peer_id not in self.liars or peer_id in self.honest_again
                    for peer_id in self.stages
                )
                findings = replace(findings, again=again)
        return outcome


@st.composite
def worlds(draw: st.DrawFn) -> World:
    num_stages = draw(st.integers(1, 4))
    stages = tuple(f"w{i}" for i in range(num_stages))
    verifiers = tuple(draw(st.sampled_from([OWN, f"v{i}"])) for i in range(num_stages))
    everybody = sorted({*stages, *verifiers} - {OWN})
    liars = frozenset(draw(st.sets(st.sampled_from(everybody))))
    honest = frozenset(draw(st.sets(st.sampled_from(sorted(liars))))) if liars else frozenset()
    return World(stages, verifiers, liars, honest)


@given(worlds())
def test_nobody_is_named_but_who_is_wrong(world: World) -> None:
    verdict = world.verdict()
    assert verdict.wrong <= world.liars
    if not world.liars:
        assert verdict == Verdict()
    assert not verdict.wrong & verdict.suspects


@given(worlds())
def test_a_record_that_is_wrong_has_somebody_to_blame(world: World) -> None:
    """Whoever verified it, and unless a verifier was wrong in the very same way."""
    guilty = world.liars & set(world.stages)
    if not guilty:
        return
    verdict = world.verdict()
    blamed = verdict.wrong | verdict.suspects
    assert blamed & guilty
    if len(world.stages) == 1 or guilty - world.honest_again:
        assert verdict.wrong & guilty
    elif not verdict.wrong & set(world.stages):
        assert verdict.suspects >= guilty


@given(worlds())
def test_a_verifier_that_is_wrong_first_is_named(world: World) -> None:
    wrong = [v for v in world.verifiers if v in world.liars]
    if wrong:
        assert wrong[0] in world.verdict().wrong


def test_the_coordinator_is_asked_only_where_two_differ() -> None:
    assert judge(Findings(("a",), ("b",), agrees=True)) == Verdict()
    assert judge(Findings(("a",), ("b",), agrees=False)) is Need.OWN


# ------------------------------------------------------------------ suspicion


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 1.0])
def test_the_share_is_drawn(share: float) -> None:
    suspicion, chance = Suspicion(share), random.Random(1)
    drawn = sum(suspicion.draws(chance.random()) for _ in range(20_000))
    assert drawn / 20_000 == pytest.approx(share, abs=0.01)


def test_all_is_verified_while_there_are_suspects() -> None:
    suspicion = Suspicion(0.0)
    assert suspicion.suspect(["a", "b"]) == {"a", "b"}
    assert suspicion.draws(0.999)
    suspicion.found_wrong("a")
    assert suspicion.suspects == frozenset()  # b was one because of a
    assert not suspicion.draws(0.0)
    assert suspicion.suspect(["a", "b"]) == {"b"}


def test_a_suspect_that_is_right_for_long_is_none_and_then_longer() -> None:
    suspicion = Suspicion(0.0)
    for num_steps in (PROOF_STEPS, 2 * PROOF_STEPS):
        suspicion.suspect(["a"])
        assert not suspicion.found_right("a", num_steps - 1)
        assert suspicion.found_right("a", 1)
        assert not suspicion.suspects
    assert not suspicion.found_right("a", 1)


@given(st.lists(st.tuples(st.sampled_from("swr"), st.sampled_from("abcd"), st.integers(1, 500))))
def test_no_wrong_worker_is_a_suspect_and_proofs_are_bounded(
    events: list[tuple[str, str, int]],
) -> None:
    suspicion = Suspicion(0.05)
    for kind, peer_id, number in events:
        if kind == "s":
            suspicion.suspect([peer_id, "a"])
        elif kind == "w":
            suspicion.found_wrong(peer_id)
        else:
            suspicion.found_right(peer_id, number)
        assert not suspicion.suspects & suspicion.wrong
    for peer_id in suspicion.suspects:
        assert suspicion.found_right(peer_id, MAX_PROOF_STEPS)


# ------------------------------------------------------------------ records


def rows(start: int, stop: int, mark: int) -> torch.Tensor:
    """Hidden states that tell position and mark."""
    numbers = torch.arange(start, stop, dtype=torch.float32).view(1, -1, 1) + 1000 * mark
    return numbers.expand(1, stop - start, HIDDEN_SIZE)


def segment(limit: int = 1 << 20) -> SegmentRecord:
    return SegmentRecord(cast("list[PipelineStage]", []), RecordRoom(limit))


class Steps(list[tuple[int, int, bool]]):
    """Position, tokens, and whether an answer came."""


steps = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.booleans()), max_size=12)


@given(steps, st.integers(0, 20))
def test_a_record_has_what_is_in_the_caches(moves: list[tuple[int, int, bool]], cut: int) -> None:
    """Steps begin at the end, or a little before it, as where tokens that were guessed are taken back."""
    record, room = segment(), RecordRoom()
    record._room = room
    marks: list[int] = []
    answered: list[bool] = []
    for mark, (back, num_tokens, comes) in enumerate(moves, 1):
        position = max(len(marks) - back, 0)
        came = record.sent(position, rows(position, position + num_tokens, mark))
        if comes:
            came(-rows(position, position + num_tokens, mark))
        del marks[position:], answered[position:]
        marks += [mark] * num_tokens
        answered += [comes] * num_tokens
    assert record.length == len(marks)
    assert record.is_complete
    known = answered.index(False) if False in answered else len(answered)
    bounds = record.bounds()
    assert bounds == [] or (bounds[0][0], bounds[-1][1]) == (0, known)
    assert [stop for _, stop in bounds[:-1]] == [start for start, _ in bounds[1:]]
    if bounds:
        inputs_BTD, outputs_BTD = record.rows()
        expected = [1000 * mark + i for i, mark in enumerate(marks[:known])]
        assert inputs_BTD[0, :, 0].tolist() == expected
        assert torch.equal(outputs_BTD, -inputs_BTD)
    assert room.taken == len(marks) * ROW_BYTES
    other = record.beginning(cut)
    assert other.length == min(cut, len(marks))
    assert other.is_complete == (cut <= len(marks))
    for each in (record, other):
        each.close()
    assert room.taken == 0


def test_what_has_no_room_is_left_out_and_what_was_before_stays() -> None:
    record = segment(limit=3 * ROW_BYTES)
    for position in range(5):
        record.sent(position, rows(position, position + 1, 1))(rows(position, position + 1, 2))
    assert record.bounds() == [(0, 1), (1, 2), (2, 3)]
    assert not record.is_complete


def test_a_session_that_begins_further_on_is_not_recorded() -> None:
    record = segment()
    record.sent(3, rows(3, 4, 1))(rows(3, 4, 1))
    assert not record.bounds()
    assert not record.is_complete


def test_hidden_states_are_copied() -> None:
    record, hidden_BTD = segment(), rows(0, 2, 1).clone()
    came = record.sent(0, hidden_BTD)
    came(hidden_BTD)
    hidden_BTD.zero_()
    assert all(part.abs().sum() for part in record.rows())


def pipeline(session_id: int, *peers: str) -> PipelineSession:
    """A session with a layer on each of these, in chains of one."""
    stages = [
        PipelineStage(
            PlannedStage(peer, index, index + 1, 0),
            cast("SessionWorker", SimpleNamespace(peer_id=peer)),
        )
        for index, peer in enumerate(peers)
    ]
    chains = [SimpleNamespace(stages=(stage,), observe=None) for stage in stages]
    return cast("PipelineSession", SimpleNamespace(session_id=session_id, chains=chains))


def verification(progress: Progress | None = None) -> Verification:
    """One that never comes to verify anything."""
    routing = Routing(cast("Exchange", SimpleNamespace()), "star")
    return Verification(
        *cast("tuple[Fleet, Any, Any, Any]", (None, routing, None, None)),
        coordinator_id="own",
        max_piece=None,
        greatest=lambda wire: 0.0,
        suspicion=Suspicion(1.0),
        progress=progress,
    )


class Unverified(Progress):
    """Counts the steps that are told of as not verified."""

    num_steps = 0

    def steps_unverified(self, num_steps: int) -> None:
        self.num_steps += num_steps


@pytest.mark.parametrize("room", [0, 3, 7, 20])
async def test_steps_that_have_no_room_are_told_of(room: int) -> None:
    """Of two stages and five steps, room for so many rows: the first stage is given its row first."""
    progress = Unverified()
    verifying = verification(progress)
    verifying._room = RecordRoom(room * ROW_BYTES)
    session = pipeline(1, "a", "b")
    record = verifying.new_record(session, None, None)
    assert record is not None
    for position in range(5):
        row = rows(position, position + 1, 1)
        for chain in session.chains:
            assert chain.observe is not None
            chain.observe(position, row)(row)
    verifying.hand_in(record, is_kept=False)
    assert progress.num_steps == max(5 - room // 2, 0)


def test_a_session_goes_on_from_another_beside_layers_of_the_coordinator() -> None:
    verifying = verification()
    for number in range(3):
        prior = Prior(number, 4 * number, stays_open=False) if number else None
        session = pipeline(number + 1, "own", "a", "b")
        record = verifying.new_record(session, prior, None)
        assert record is not None
        assert [item.peer_id for each in record.segments for item in each.stages] == ["a", "b"]
        own, *others = session.chains
        assert own.observe is None
        for chain in others:
            assert chain.observe is not None
            step = rows(4 * number, 4 * number + 4, number)
            chain.observe(4 * number, step)(step)
        verifying.hand_in(record, is_kept=True)
        assert verifying.num_waiting == number + 1
        assert [each.length for each in record.segments] == [4 * number + 4] * 2


def test_a_session_that_goes_on_elsewhere_takes_no_room_of_records() -> None:
    verifying = verification()
    session = pipeline(1, "a", "b")
    record = verifying.new_record(session, None, None)
    assert record is not None
    for chain in session.chains:
        assert chain.observe is not None
        chain.observe(0, rows(0, 4, 1))(rows(0, 4, 1))
    verifying.hand_in(record, is_kept=True)
    before = verifying._room.taken
    assert before == 2 * 4 * ROW_BYTES
    elsewhere = pipeline(2, "a", "c")
    assert verifying.new_record(elsewhere, Prior(1, 4, stays_open=True), None) is None
    assert verifying._room.taken == before
    assert all(chain.observe is None for chain in elsewhere.chains)


# ------------------------------------------------------------------ what is asked for


@pytest.mark.parametrize(
    ("text", "share"), [("0", 0.0), ("5%", 0.05), ("0.05", 0.05), ("1", 1.0), ("100%", 1.0)]
)
def test_a_share_is_a_number_or_in_percent(text: str, share: float) -> None:
    assert build_parser().parse_args(["--verify", text]).verify == pytest.approx(share)


@pytest.mark.parametrize("text", ["5", "101%", "-1%", "nan", "some", "%"])
def test_what_is_no_share_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args([f"--verify={text}"])
    assert "--verify" in capsys.readouterr().err


def test_a_machine_that_has_no_room_for_a_layer_says_so_at_once() -> None:
    model = SimpleNamespace(costs=(LayerCost(1 << 60, 0),), max_seq_len=16)
    with pytest.raises(ConfigurationError, match="--verify computes layers on this machine"):
        require_room(cast("LoadedModel", model))


# ------------------------------------------------------------------ bands


@given(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), st.booleans())
def test_rounding_is_no_difference_and_a_sign_is(dtype: torch.dtype, is_mixture: bool) -> None:
    right_BTD = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(3))
    greatest = band(dtype, "", is_quantized=False, is_mixture=is_mixture)
    assert not differing_rows(right_BTD.to(dtype), right_BTD, greatest=greatest)
    seen_BTD = right_BTD.clone()
    seen_BTD[:, 1] *= -1
    assert differing_rows(seen_BTD, right_BTD, greatest=greatest) == {1}
    seen_BTD[:, 2, 0] = float("nan")
    assert differing_rows(seen_BTD, right_BTD, greatest=greatest) == {1, 2}


def test_a_difference_is_a_part_of_the_row() -> None:
    right_BTD = torch.tensor([[[3.0, 4.0], [0.0, 0.0]]])
    seen_BTD = torch.tensor([[[3.0, 4.5], [0.0, 0.0]]])
    assert row_differences(seen_BTD, right_BTD).tolist() == pytest.approx([0.1, 0.0])
