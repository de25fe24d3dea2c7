"""The leader of a chain: what it makes of what members tell, however odd, and how it comes to the run's end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import trio

from neurogrid.errors import NoRouteError, PeerRefusedError, TooLargeForPeerError
from neurogrid.p2p import ErrorCode, TensorMessage
from neurogrid.training.data.evaluating import HeldOut
from neurogrid.training.leading.chains import members as members_module
from neurogrid.training.leading.chains import step_deadline
from neurogrid.training.leading.chains.chain import Chain
from neurogrid.training.leading.chains.leader import CHAIN_LEADER_TAKES
from neurogrid.training.leading.chains.members import ChainWorker
from neurogrid.training.leading.chains.step_deadline import StepDeadlines
from neurogrid.training.leading.witnessed.leader import WITNESSED_LEADER_TAKES
from neurogrid.training.trainer import FileRange
from neurogrid.training.trainer.batches import Batch
from neurogrid.training.wire.runs import (
    Apply,
    Follow,
    Report,
    RunMessage,
    StageReport,
    Started,
    Step,
    StepDone,
)
from tests.unit.training.scripted_chain import RUN, Member, open_chain, state_piece

if TYPE_CHECKING:
    from neurogrid.p2p.wire import Hello, MessageCode


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


@pytest.mark.parametrize("wrong", ["../../out", "layer.3", "first", "x"])
async def test_a_stage_gives_no_piece_but_its_own(tmp_path: Path, wrong: str) -> None:
    """Once: the state is fetched when it gives what is its own. Of the two it has the later layers."""
    has_lied: list[int] = []

    def begin(member: Member) -> None:
        right = member.pieces

        def pieces(step: int) -> dict[str, bytes]:
            index = 0 if wrong == "layer.3" else 1
            if has_lied or member.index != index:
                return right(step)
            has_lied.append(step)
            return {**right(step), wrong: state_piece("odd")}

        member.pieces = pieces  # type: ignore[method-assign]

    async with open_chain(tmp_path, begin=begin) as chain:
        await chain.leader.run()
        assert has_lied == [4]
        (warning,) = chain.progress.warned
        assert f"gives a piece of state {wrong!r}, which its stage does not have" in warning
        assert not (tmp_path / "out.safetensors").exists()
        assert (chain.state.step, len(chain.state.files)) == (8, 6)


@pytest.mark.parametrize("missing", ["layer.3", "first", "last"])
async def test_a_stage_gives_all_of_its_state(tmp_path: Path, missing: str) -> None:
    """Once: else the state that is kept would be one that nobody can go on from, in the place of a whole one."""
    has_kept: list[int] = []

    def begin(member: Member) -> None:
        right = member.pieces

        def pieces(step: int) -> dict[str, bytes]:
            found = right(step)
            if step == 8 and missing in found and not has_kept:
                has_kept.append(step)
                del found[missing]
            return found

        member.pieces = pieces  # type: ignore[method-assign]

    async with open_chain(tmp_path, begin=begin) as chain:
        await chain.leader.run()
        assert has_kept == [8]
        (warning,) = chain.progress.warned
        assert f"gives no piece of state {missing!r}, which its stage has" in warning
        assert (chain.state.step, len(chain.state.files)) == (8, 6)


@pytest.mark.parametrize("step", [8, 3])
async def test_a_stage_that_cannot_save_its_state_makes_the_step_again(
    tmp_path: Path, step: int
) -> None:
    """After the last one there is no step more to go on with: those since the state that is kept are made again."""
    has_failed: list[int] = []

    def begin(member: Member) -> None:
        def fault(apply: Apply) -> str:
            if member.index or has_failed or apply.step + 1 != step:
                return ""
            has_failed.append(apply.chain)
            return "no room is left on the disk"

        member.fault = fault  # type: ignore[method-assign]

    async with open_chain(tmp_path, begin=begin) as chain:
        await chain.leader.run()
        assert len(has_failed) == 1
        (warning,) = chain.progress.warned
        assert "has failed: no room is left on the disk" in warning
        assert (chain.state.step, chain.keeper.checkpoints) == (8, [8])
        assert [line["round"] for line in chain.keeper.lines] == list(range(1, 9))
        begun = [order.step for order in chain.members[0].orders]
        assert begun == [0, 4 if step == 8 else step]


async def test_a_member_whose_failures_are_far_apart_stays_one(tmp_path: Path) -> None:
    """Whatever its neighbour's line was the cause of: between any two a state was kept."""
    failed: list[int] = []

    def begin(member: Member) -> None:
        def fault(apply: Apply) -> str:
            if member.index or apply.step % 2:
                return ""
            failed.append(apply.step)
            return "a stage cannot be reached"

        member.fault = fault  # type: ignore[method-assign]

    async with open_chain(tmp_path, steps=14, state_every=1, begin=begin) as chain:
        await chain.leader.run()
        assert failed == [0, 2, 4, 6, 8, 10, 12]
        assert all("has failed: a stage cannot" in text for text in chain.progress.warned)
        assert chain.state.step == 14


async def test_a_member_that_never_does_what_it_is_told_is_asked_no_more_and_that_is_said(
    tmp_path: Path,
) -> None:
    def begin(member: Member) -> None:
        member.fault = lambda apply: "a stage cannot be reached"  # type: ignore[method-assign]

    async with open_chain(tmp_path, members=1, stages=1, wait=1.0, begin=begin) as chain:
        with pytest.raises(NoRouteError, match="take no part: member 1: a stage cannot be reached"):
            await chain.leader.run()
        said = "member 1 has failed 5 times, and is not asked again: a stage cannot be reached"
        assert chain.progress.warned.count(said) == 1
        known = chain.leader._members
        assert known.refusals() == ["member 1: a stage cannot be reached"]
        await known._host.disconnect(chain.members[0].peer_id)
        assert known.refusals() == []  # it is not here


async def test_a_member_that_cannot_take_part_is_asked_five_times(tmp_path: Path) -> None:
    """It says so at once, and more than once each time."""

    def begin(member: Member) -> None:
        async def start(message: TensorMessage) -> None:
            member.num_started += 1
            told = Started(until=60.0).encode()
            await member.tell(RunMessage.STARTED, told, message.request_id)
            report = Report(RUN, 1, state="failed", reason="no room is left").encode()
            for _ in range(3):
                await member.tell(RunMessage.REPORT, report)

        member.start = start  # type: ignore[method-assign]

    async with (
        open_chain(tmp_path, members=1, stages=1, begin=begin) as chain,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(chain.leader.run)
        await chain.progress.has_warned.wait()
        said = "member 1 has failed 5 times, and is not asked again: no room is left"
        assert chain.progress.warned == [said]
        assert chain.members[0].num_started == 5
        nursery.cancel_scope.cancel()


async def test_a_step_that_takes_long_is_made_while_members_come_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of it takes longer than it may stand still, and the whole takes longer than the second try may."""

    def begin(member: Member) -> None:
        at_once = member.compute

        async def compute(step: Step) -> None:
            await at_once(step)
            for done in range(4 if step.step == member.index == 0 else 0):
                if step.chain == member.order.chain:
                    await member.report("working", step.step, micro_batches=4, done=done)
                    await trio.sleep(1.0)

        member.compute = compute  # type: ignore[method-assign]

    async with open_chain(tmp_path, begin=begin) as chain:
        monkeypatch.setattr(chain.leader, "_deadlines", StepDeadlines(least=0.8))
        await chain.leader.run()
        assert chain.state.step == 8
    (warned,) = chain.progress.warned
    assert "step 1 has stood still for 1 s" in warned
    assert warned.endswith("did not end it. The stages are arranged anew")


async def test_a_deputy_is_told_that_a_run_in_stages_has_none(tmp_path: Path) -> None:
    """Else it would ask again for ever."""
    assert RunMessage.FOLLOW in CHAIN_LEADER_TAKES
    assert RunMessage.FOLLOW in WITNESSED_LEADER_TAKES
    async with open_chain(tmp_path) as chain:
        leader = chain.leader._host.peer_id
        request = TensorMessage(RunMessage.FOLLOW, request_id=1, data=Follow().encode())
        exchange = chain.members[0].exchange
        with pytest.raises(PeerRefusedError, match="a run in stages has no deputy") as refused:
            await exchange.request(leader, request, RunMessage.FOLLOWED, timeout=10.0)
        assert refused.value.code == ErrorCode.NOT_SUPPORTED


@pytest.mark.parametrize(
    ("odd", "fault"),
    [
        ({"squared_norm": 1.7e308}, "the norm of all gradients"),
        ({"squared_norm": 1.0, "loss": None}, "the loss"),
    ],
)
async def test_a_step_whose_sums_are_no_numbers_is_not_made(
    tmp_path: Path, odd: dict[str, Any], fault: str
) -> None:
    """Each number is one that may be told. What is written of the step is numbers, too."""

    applied: list[bool] = []

    def begin(member: Member) -> None:
        right = member.done
        member.done = lambda step: {**right(step), **(odd if step == 2 else {})}  # type: ignore[method-assign]

        def note(apply: Apply) -> str:
            if member.index == 0:
                applied.append(apply.is_applied)
            return ""

        member.fault = note  # type: ignore[method-assign]

    async with open_chain(tmp_path, steps=4, begin=begin) as chain:
        await chain.leader.run()
        assert chain.progress.warned == [
            f"step 3: {fault} is not finite, so no step was made of it"
        ]
        assert applied == [True, True, False, True]
        assert [line["round"] for line in chain.keeper.lines] == [1, 2, 3, 4]
        json.dumps(chain.keeper.lines, allow_nan=False)


MOST_ONE = "[members]\nmax = 1\nmemory = 1000"


async def test_a_worker_that_does_not_do_keeps_no_place_of_another(tmp_path: Path) -> None:
    """Whoever came first is asked first; the next one is where that one lends too little."""

    def begin(member: Member) -> None:
        member.is_lent = member.name != "member 1"

    async with open_chain(tmp_path, stages=1, more=MOST_ONE, begin=begin) as chain:
        await chain.leader.run()
        assert [member.num_started for member in chain.members] == [0, 1]
        (warning,) = chain.progress.warned
        assert warning.startswith("member 1 takes no part yet: ")


async def test_no_more_members_are_taken_than_there_may_be(tmp_path: Path) -> None:
    more = "[members]\nmax = 3"
    async with open_chain(tmp_path, members=5, steps=12, more=more) as chain:
        await chain.leader.run()
        assert sum(member.num_started for member in chain.members) == 3
        # Two are stages, and one stands by.
        assert sum(bool(member.orders) for member in chain.members) == 2


async def test_the_place_of_a_member_that_is_given_up_is_anothers(tmp_path: Path) -> None:
    def begin(member: Member) -> None:
        if member.name == "member 1":
            member.fault = lambda apply: "a stage cannot be reached"  # type: ignore[method-assign]

    async with open_chain(tmp_path, stages=1, more=MOST_ONE, begin=begin) as chain:
        await chain.leader.run()
        assert [member.num_started for member in chain.members] == [1, 1]
        assert chain.state.step == 8


def who_lost(pair: set[str], *, fails: int = 99, is_tied: bool = True) -> Callable[[Member], None]:
    """Have the first two members of the first chain not reach each other, where they are neighbours, so often.

    Args:
        is_tied: whether the first and the last stage are neighbours, too.
    """
    left = [fails]

    def begin(member: Member) -> None:
        def lost() -> str:
            if not pair:
                pair.update(member.order.peers[:2])
            ring = (*member.order.peers, *member.order.peers[: int(is_tied)])
            if member.peer_id not in pair or pair not in map(set, pairwise(ring)) or not left[0]:
                return ""
            left[0] -= 1
            (other,) = pair - {member.peer_id}
            return other

        member.lost = lost

    return begin


@pytest.mark.parametrize(("members", "stages"), [(3, 2), (4, 4)])
async def test_two_that_cannot_reach_each_other_are_put_apart(
    tmp_path: Path, members: int, stages: int
) -> None:
    """A spare comes in the place of one, or others change places: nobody fails so often that it is not asked again."""
    pair: set[str] = set()
    begin = who_lost(pair)
    async with open_chain(tmp_path, members=members, stages=stages, begin=begin) as chain:
        await chain.leader.run()
        assert chain.state.step == 8
        assert len(chain.progress.warned) == 1
        names = " and ".join(each.name for each in chain.members if each.peer_id in pair)
        said = f"{names} cannot reach each other: they are put where they need not"
        assert [text for text in chain.progress.said if "cannot reach" in text] == [said]
        assert all(each.num_failures < 2 for each in chain.leader._members._workers.values())


async def test_two_that_cannot_reach_each_other_are_the_ends_where_nothing_is_tied(
    tmp_path: Path,
) -> None:
    """Of three stages of three members there is no other way; no number of the model's is at both ends."""
    pair: set[str] = set()
    begin = who_lost(pair, is_tied=False)
    async with open_chain(tmp_path, members=3, stages=3, begin=begin) as chain:
        await chain.leader.run()
        assert chain.state.step == 8
        assert len(chain.progress.warned) == 1
        first, _, last = chain.members[0].order.peers
        assert {first, last} == pair


async def test_two_that_could_not_reach_each_other_are_neighbours_where_there_is_no_other_way(
    tmp_path: Path,
) -> None:
    begin = who_lost(set(), fails=2)
    async with open_chain(tmp_path, begin=begin) as chain:
        await chain.leader.run()
        assert chain.state.step == 8
        assert not [text for text in chain.progress.said if "cannot reach" in text]


async def test_a_member_that_has_not_told_of_an_arrangement_that_broke_has_its_state_still(
    tmp_path: Path,
) -> None:
    """As where one that was killed is taken for one that is here: its neighbours fail before all have told."""
    others: list[Member] = []

    def begin(member: Member) -> None:
        async def load() -> None:
            if len(member.orders) == 2 and member.index == 0:
                await trio.sleep(2)

        async def compute(step: Step) -> None:
            await member.report("working", step.step)
            if step.step == 5 and member.index == 0 and len(member.orders) == 1:
                await member.report("failed", step.step, reason="it has lost somebody")
                await trio.sleep_forever()

        def lost() -> str:
            is_second = len(member.orders) == 2 and member.index == 1
            return next(each.peer_id for each in others if each is not member) if is_second else ""

        others.append(member)
        member.load, member.compute, member.lost = load, compute, lost  # type: ignore[method-assign]

    async with open_chain(tmp_path, begin=begin) as chain:
        await chain.leader.run()
        assert chain.state.step == 8
        assert len(chain.members[0].orders) == 3
        assert not [text for text in chain.progress.said if "computed again" in text]


async def test_whose_neighbour_has_gone_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But who says so of one that is here, of another chain, or of a stranger."""
    async with open_chain(tmp_path) as chain:
        one, other = chain.members
        known = chain.leader._members
        while len(known._workers) < 2:
            await trio.sleep(0.01)
        worker = known.get(one.peer_id)
        known.get(other.peer_id).stage = StageReport(RUN, 7, "working", 0)

        def told(lost: str, number: int = 7) -> int:
            worker.num_failures = 0
            report = StageReport(RUN, number, "failed", 0, reason="it is lost", lost=lost)
            worker.stage = report
            assert known.note_failed(one.peer_id, number) == "it is lost"
            return worker.num_failures

        assert told(other.peer_id) == 1
        monkeypatch.setattr(known._host, "is_connected", lambda peer: peer != other.peer_id)
        assert told(other.peer_id) == 0
        assert told(other.peer_id, number=8) == told("a stranger") == told("") == 1


async def test_who_comes_anew_may_be_reached(tmp_path: Path) -> None:
    async with open_chain(tmp_path) as chain:
        one, other = chain.members
        known = chain.leader._members
        while len(known._workers) < 2:
            await trio.sleep(0.01)
        report = StageReport(RUN, 1, "failed", 0, reason="it is lost", lost=other.peer_id)
        for lost in (other.peer_id, one.peer_id, "a stranger"):
            message = TensorMessage(
                RunMessage.STAGE_REPORT,
                data=replace(report, lost=lost).encode(),
                from_peer=one.peer_id,
            )
            known._on_stage_report(message)
        assert known.are_apart(one.peer_id, other.peer_id)
        assert known.are_apart(other.peer_id, one.peer_id)
        assert len(known._apart) == 1
        hello = cast("Hello", SimpleNamespace(role="worker", name=""))
        known._on_opened(other.peer_id, hello)
        assert not known.are_apart(one.peer_id, other.peer_id)


async def test_who_comes_anew_is_no_stage_before_it_has_told_where_it_is(tmp_path: Path) -> None:
    """Others would dial where the process before listened, and say that they cannot reach it."""
    async with open_chain(tmp_path) as chain:
        known, peer = chain.leader._members, chain.members[0].peer_id
        while peer not in known._workers:
            await trio.sleep(0.01)
        told = Report(run=RUN, seat=1, state="ready", group_addresses=("/ip4/127.0.0.1/tcp/1",))
        known._workers[peer].report = told
        known._on_opened(peer, cast("Hello", SimpleNamespace(role="worker", name="")))
        # As once its lease has begun.
        known._workers[peer].is_started, known._workers[peer].heard_at = True, trio.current_time()
        assert peer not in known.usable()
        assert known.address_of(peer) == ""
        known._workers[peer].report = told
        assert peer in known.usable()


async def test_a_member_that_takes_too_little_at_once_loses_its_place(tmp_path: Path) -> None:
    """And no run ends by it: how much it takes is its own word."""
    async with open_chain(tmp_path, members=3) as chain:
        send, small = chain.leader._exchange.send, list[str]()

        async def send_little(peer_id: str, message: TensorMessage, *more: Any) -> None:
            if message.msg_type is RunMessage.TOKENS:
                # Any of the three may be given the first layers.
                small[:] = small or [peer_id]
                if peer_id in small:
                    raise TooLargeForPeerError("32 B are more than it accepts in one message")
            await send(peer_id, message, *more)

        chain.leader._exchange.send = send_little  # type: ignore[method-assign]
        await chain.leader.run()
        assert chain.state.step == 8
        called = chain.leader._members.called(small[0])
        assert any(f"{called} takes too little at once" in text for text in chain.progress.warned)
        refused = f"{called} has failed 5 times, and is not asked again"
        assert any(refused in text for text in chain.progress.warned)


async def test_a_full_memory_asks_for_no_more_micro_batches_than_a_step_may_have(
    tmp_path: Path,
) -> None:
    async with open_chain(tmp_path) as chain:
        leader, machine = chain.leader, chain.machine
        machine.rules = replace(machine.rules, batch_samples=4096)
        leader._arranger.last = Chain(1, (("a",), ("b",)), (0, 2, 4), 0)
        leader._num_micro_batches = 1000
        assert leader._take_smaller(ChainWorker())
        assert leader._num_micro_batches == 1024
        assert not leader._take_smaller(ChainWorker())


async def test_workers_that_went_long_ago_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has a ticket may come under another name each time."""
    monkeypatch.setattr(members_module, "_MAX_AWAY", 2)
    async with open_chain(tmp_path) as chain:
        known = chain.leader._members
        here = {member.peer_id for member in chain.members}
        while len(known._workers) < 2:
            await trio.sleep(0.01)
        for number in range(5):
            known._on_opened(
                f"peer {number}", cast("Hello", SimpleNamespace(role="worker", name=""))
            )
            known._workers[f"peer {number}"].heard_at = float(number)
            known._apart.add(frozenset((f"peer {number}", chain.members[0].peer_id)))
        known._on_lost("peer 0", NoRouteError("it went"))
        assert known._workers.keys() == here | {"peer 3", "peer 4"}
        assert len(known._apart) == 2
        assert known.called("peer 0") == "peer 0"


async def test_what_comes_late_of_a_step_that_was_given_up_is_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_deadline, "_LONGEST_STEPS", 0.0)
    late: list[StepDone] = []

    def begin(member: Member) -> None:
        right = member.tell

        async def tell(code: MessageCode, data: bytes, request_id: int = 0) -> None:
            if code is RunMessage.STEP_DONE and member.is_last:
                done = StepDone.decode(data)
                if not late and done.step == 3:
                    late.append(done)
                    return
                for each in late:
                    await right(code, replace(each, loss=99.0).encode())
            await right(code, data, request_id)

        member.tell = tell  # type: ignore[method-assign]

    async with open_chain(tmp_path, begin=begin) as chain:
        monkeypatch.setattr(chain.leader, "_deadlines", StepDeadlines(least=0.5))
        await chain.leader.run()
        (warning,) = chain.progress.warned
        assert "step 4 has stood still for 0 s: member" in warning
        assert "did not end it. The stages are arranged anew" in warning
        assert late[0].chain < chain.members[0].order.chain
        assert [line["loss"] for line in chain.keeper.lines] == [2.0] * 8


async def test_a_slice_is_held_no_longer_than_its_steps(tmp_path: Path) -> None:
    """From a web server there may be more than the disk has room for, and each is a file that is open."""
    async with open_chain(tmp_path, sizes=(2,) * 8) as chain:
        slices: Any = chain.leader._slices
        await chain.leader.run()
        assert sorted(slices.fetched) == list(range(8))
        assert slices.held == {slices.fetched[-1]}


async def test_few_micro_batches_are_evaluated_at_once(tmp_path: Path) -> None:
    """A slow stage would have all that the one before it gives in its memory: of a large batch that is gigabytes."""
    async with open_chain(tmp_path) as scripted:
        leader = scripted.leader
        chain = Chain(1, (("a",), ("b",)), (0, 2, 4), 0, counts={"a": 1, "b": 1})
        leader._machine.rules = replace(leader._machine.rules, batch_samples=64)
        leader._num_micro_batches = 32  # of two samples each
        steps: list[int] = []

        async def tell(peer_id: str, code: RunMessage, data: bytes) -> None:
            if peer_id == "b":
                told = Step.decode(data)
                assert told.is_evaluation
                steps.append(told.micro_batches)
                done = StepDone(run=RUN, chain=1, step=3, loss=1.0, squared_norm=0.0)
                chain.done.update({(3, peer): done for peer in chain.peers})

        async def at_once(*given: object) -> None:
            pass

        class Reader:
            def read(self, files: list[FileRange]) -> Batch:
                ids = torch.zeros(files[0].stop - files[0].start, 4, dtype=torch.int64)
                return Batch(ids, ids, ids.numel(), "")

        stands_in: tuple[tuple[object, str, object], ...] = (
            (leader, "_tell", tell),
            (leader, "_send_tensors", at_once),
            (leader, "_reader", Reader()),
            (leader._members, "wait", at_once),
        )
        for owner, name, stand_in in stands_in:
            setattr(owner, name, stand_in)
        info = leader._manifest.slices[0]
        assert await leader._sum_losses(chain, 3, HeldOut("", ((info, 37),))) == (3.0, 37 * 4)
        # Four of each of both members, of two samples: 16, 16 and 5.
        assert steps == [8, 8, 3]
