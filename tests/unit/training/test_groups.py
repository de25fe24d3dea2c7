"""Groups of real members, on a network in memory: vectors in, the same bits out, whoever goes.

In one file, since each test needs the same members and what they are given.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import trio
import trio.testing
from torch import Tensor

from neurogrid.errors import (
    ConfigurationError,
    LocalProtocolError,
    PeerRefusedError,
    TransportError,
)
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.memory import Link, MemoryHost, MemoryNetwork, open_memory_network
from neurogrid.training.averaging.codecs import ErrorFeedback, parse_codec
from neurogrid.training.averaging.groups import (
    Group,
    GroupError,
    NotAMemberError,
    Outcome,
    RoundTimeout,
    State,
    open_group,
)
from neurogrid.training.averaging.groups.group import _block
from neurogrid.training.averaging.parts import Layout
from neurogrid.training.averaging.reductions import Result
from neurogrid.training.averaging.rounds import Action, Fetch, Message, Reduce
from neurogrid.training.averaging.rounds.plans import _shares
from neurogrid.training.wire import Decision, GroupSettings, Status

DEADLINE = 60
TIMEOUT = 30
SHAPES = {"a.weight": (40, 30), "b": (7,), "c": (3, 1, 5)}
LAYOUT = Layout.of({name: torch.empty(shape) for name, shape in SHAPES.items()})
SIZE = LAYOUT.num_elements


def settings(**changed: object) -> GroupSettings:
    return GroupSettings(**{"grace": 1.0, "attempt_timeout": 10.0, **changed})  # type: ignore[arg-type]


@dataclass
class Peer:
    """A member, and what ends it without a word."""

    host: MemoryHost
    group: Group
    scope: trio.CancelScope

    def kill(self) -> None:
        self.scope.cancel()


async def _run(
    network: MemoryNetwork,
    join: list[str],
    chosen: GroupSettings | None,
    identity: Identity | None,
    task_status: trio.TaskStatus[Peer],
) -> None:
    with trio.CancelScope() as scope:
        async with (
            network.open_host(identity=identity) as host,
            open_group(host, LAYOUT, join=join, settings=chosen) as group,
        ):
            task_status.started(Peer(host, group, scope))
            await trio.sleep_forever()


class Peers:
    """Members that are there, the founder first."""

    def __init__(self, network: MemoryNetwork, nursery: trio.Nursery) -> None:
        self.network, self.nursery = network, nursery
        self.all: list[Peer] = []

    async def add(
        self, chosen: GroupSettings | None = None, identity: Identity | None = None
    ) -> Peer:
        join = list(self.all[0].host.addresses) if self.all else []
        peer: Peer = await self.nursery.start(_run, self.network, join, chosen, identity)
        self.all.append(peer)
        return peer

    async def average(
        self, vectors: list[Tensor], weights: list[float] | None = None
    ) -> list[Outcome]:
        outcomes: list[Outcome | None] = [None] * len(vectors)

        async def one(number: int) -> None:
            weight = weights[number] if weights else 1.0
            outcomes[number] = await self.all[number].group.average(
                vectors[number], weight=weight, timeout=TIMEOUT
            )

        async with trio.open_nursery() as nursery:
            for number in range(len(vectors)):
                nursery.start_soon(one, number)
        return [outcome for outcome in outcomes if outcome is not None]


@asynccontextmanager
async def a_group(number: int, **changed: object) -> AsyncIterator[Peers]:
    chosen = settings(min_members=number, **changed)
    with trio.fail_after(DEADLINE):
        async with open_memory_network() as network, trio.open_nursery() as nursery:
            peers = Peers(network, nursery)
            for _ in range(number):
                await peers.add(chosen)
            await peers.all[0].group.wait_members(number, timeout=TIMEOUT)
            yield peers
            nursery.cancel_scope.cancel()


def vectors(number: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SIZE, generator=generator) for _ in range(number)]


@pytest.mark.parametrize("way", ["butterfly", "server", "everybody", "grid"])
@pytest.mark.parametrize("number", [1, 2, 4])
async def test_all_get_the_same_mean(number: int, way: str) -> None:
    async with a_group(number, way=way) as peers:
        for round_ in (1, 2, 3):
            given = vectors(number, round_)
            weights = [1.0 + index for index in range(number)]
            outcomes = await peers.average(given, weights)
            expected = sum(w * v for w, v in zip(weights, given, strict=True)) / sum(weights)
            for outcome in outcomes:
                assert outcome.round == round_
                assert outcome.has_contributed
                assert set(outcome.contributors) == {peer.group.peer_id for peer in peers.all}
                assert torch.equal(outcome.values, outcomes[0].values)
                torch.testing.assert_close(outcome.values, expected)


@pytest.mark.parametrize("codec", ["f16", "bf16", "int8", "int4"])
async def test_what_is_applied_is_the_decoded_form_for_all(codec: str) -> None:
    async with a_group(3, codec=codec, result_codec="f16") as peers:
        outcomes = await peers.average(vectors(3))
        for outcome in outcomes:
            assert torch.equal(outcome.values, outcomes[0].values)
            assert torch.equal(outcome.values, outcome.values.half().float())


@pytest.mark.parametrize("codec", ["int4", "topk:64"])
async def test_what_a_form_loses_is_in_the_next_rounds_with_error_feedback(codec: str) -> None:
    """What members are told in all, and what they have not sent yet, is what they had to say."""
    given, rounds = vectors(3), 20
    async with a_group(3, codec=codec) as peers:
        kept = [ErrorFeedback(parse_codec(codec), torch.zeros(SIZE)) for _ in given]
        told = torch.zeros(SIZE)
        for _ in range(rounds):
            due = [each.due(vector) for each, vector in zip(kept, given, strict=True)]
            outcomes = await peers.average(due)
            assert all(outcome.has_contributed for outcome in outcomes)
            told += outcomes[0].values
            for each in kept:
                each.commit()
    left = sum(each.state for each in kept) / 3
    torch.testing.assert_close(told + left, rounds * sum(given) / 3, rtol=1e-4, atol=1e-4)


async def test_a_result_that_all_have_computed_is_not_held_when_the_next_is_decided() -> None:
    async with a_group(3) as peers:
        for round_ in range(3):
            await peers.average(vectors(3, round_))
        for peer in peers.all:
            assert len(peer.group._reductions._held) == 1
        # Of rounds without the third they hold some: it may come for them.
        for round_ in range(3, 5):
            await peers.average(vectors(2, round_))
        assert [len(peer.group._reductions._held) for peer in peers.all[:2]] == [2, 2]


async def test_of_a_result_that_was_delivered_the_encoded_form_is_held() -> None:
    """It is for others; whoever is to get the same once more, as one that looks on, has it decoded anew."""
    async with a_group(3, codec="int8", result_codec="int8", grace=20.0) as peers:
        given = vectors(3)
        await peers.average(given)
        observer = peers.all.pop()
        for _ in range(2):
            seen: list[Outcome] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_look_on, observer.group, seen)
                outcomes = await peers.average(given[:2])
            assert torch.equal(seen[0].values, outcomes[0].values)
            values = [weakref.ref(outcome.values) for outcome in (*seen, *outcomes)]
            del seen, outcomes
            gc.collect()
            assert [each() for each in values] == [None] * 3
            assert observer.group._reductions._held


async def test_tensors_of_a_model_are_replaced_by_their_means() -> None:
    async with a_group(2) as peers:
        models = [
            {
                name: torch.full(shape, float(number), dtype=torch.bfloat16)
                for name, shape in SHAPES.items()
            }
            for number in (1, 3)
        ]
        async with trio.open_nursery() as nursery:
            for peer, model in zip(peers.all, models, strict=True):
                nursery.start_soon(_all_reduce, peer.group, model)
        for model in models:
            assert all(torch.equal(t, torch.full_like(t, 2.0)) for t in model.values())


async def test_tensors_of_inference_mode_are_replaced_as_parameters_are() -> None:
    """The loop of a blocking group is in another thread than the one that is in that mode."""
    async with a_group(2) as peers, trio.open_nursery() as nursery:
        with torch.inference_mode():
            results = {name: torch.full(shape, 1.0) for name, shape in SHAPES.items()}
        model = {name: torch.full(shape, 3.0).requires_grad_() for name, shape in SHAPES.items()}
        for peer, tensors in zip(peers.all, (results, model), strict=True):
            nursery.start_soon(_all_reduce, peer.group, tensors)
    for tensor in (*results.values(), *model.values()):
        assert bool((tensor == 2.0).all())
    assert all(tensor.is_leaf and tensor.requires_grad for tensor in model.values())


async def _all_reduce(group: Group, tensors: dict[str, Tensor]) -> None:
    await group.all_reduce(tensors, timeout=TIMEOUT)


async def test_a_member_that_is_late_gets_the_outcome_without_its_vector() -> None:
    async with a_group(3) as peers:
        given = vectors(3)
        first = await peers.average(given[:2])
        assert all(len(outcome.contributors) == 2 for outcome in first)
        late = await peers.all[2].group.average(given[2], timeout=TIMEOUT)
        assert not late.has_contributed
        assert late.round == 1
        assert torch.equal(late.values, first[0].values)
        assert all(o.has_contributed for o in await peers.average(given))


async def test_a_vector_that_comes_while_an_outcome_is_on_its_way_is_in_no_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its call comes to that outcome: of a later round that has the vector its owner would not know."""
    async with a_group(3) as peers:
        late = peers.all[2].group
        fetch, may_fetch = late._fetch, trio.Event()

        async def fetch_late(decision: Decision, holders: Sequence[str]) -> Result:
            await may_fetch.wait()
            return await fetch(decision, holders)

        async def comes_late() -> None:
            outcome = await late.average(given[2], timeout=TIMEOUT)
            assert (outcome.round, outcome.has_contributed) == (1, False)

        monkeypatch.setattr(late, "_fetch", fetch_late)
        given = vectors(3)
        await peers.average(given[:2])
        while not late.round:
            await trio.sleep(0.02)
        with pytest.raises(RoundTimeout):
            await late.average(given[2], timeout=0.1)
        assert not late.may_have_contributed
        async with trio.open_nursery() as nursery:
            nursery.start_soon(comes_late)
            outcomes = await peers.average(given[:2])
            assert all(late.peer_id not in outcome.contributors for outcome in outcomes)
            may_fetch.set()
        outcome = await late.average(given[2], timeout=TIMEOUT)
        assert (outcome.round, outcome.has_contributed) == (2, False)
        assert all(o.has_contributed for o in await peers.average(given))


async def test_a_round_does_not_wait_for_those_that_cannot_make_it() -> None:
    """And waits for those that can, for those of which nothing is known, and longer for one that was passed over."""
    async with a_group(3, grace=20.0) as peers:
        founder, _, slow = peers.all

        def foresee(seconds: float) -> None:
            founder.group.foresee({slow.group.peer_id: trio.current_time() + seconds})

        async def is_late(number: int) -> None:
            with pytest.raises(RoundTimeout):
                await peers.all[number].group.average(given[number], timeout=2.0)

        async def waits() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(is_late, 0)
                nursery.start_soon(is_late, 1)

        given = vectors(3)
        await peers.average(given)  # it has been there
        began = trio.current_time()
        foresee(30.0)
        outcomes = await peers.average(given[:2])
        assert all(len(outcome.contributors) == 2 for outcome in outcomes)
        assert trio.current_time() - began < 15.0
        foresee(30.0)
        await waits()
        foresee(45.0)
        outcomes = await peers.average(given[:2])
        assert all(len(outcome.contributors) == 2 for outcome in outcomes)
        for _ in range(2):
            assert not (await slow.group.average(given[2], timeout=TIMEOUT)).has_contributed
        assert all(o.has_contributed for o in await peers.average(given))
        foresee(15.0)
        await waits()
        founder.group.foresee({})
        await waits()
        assert all(o.has_contributed for o in await peers.average(given))


@pytest.mark.parametrize("looks_on", [0, 2], ids=["leader", "member"])
async def test_a_member_that_looks_on_gets_each_outcome_and_is_not_waited_for(
    looks_on: int,
) -> None:
    async with a_group(3, grace=20.0) as peers:
        given = vectors(3)
        await peers.average(given)
        observer = peers.all.pop(looks_on)
        for round_ in (2, 3):
            seen: list[Outcome] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_look_on, observer.group, seen)
                outcomes = await peers.average(given[:2])
            assert (seen[0].round, seen[0].has_contributed) == (round_, False)
            assert torch.equal(seen[0].values, outcomes[0].values)
            assert set(seen[0].contributors) == {peer.group.peer_id for peer in peers.all}
        with pytest.raises(RoundTimeout):
            await observer.group.next_outcome(timeout=0.1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_look_on, observer.group, [])
            await trio.testing.wait_all_tasks_blocked(0.01)
            with pytest.raises(LocalProtocolError, match="one vector at a time"):
                await observer.group.next_outcome(timeout=TIMEOUT)
            nursery.cancel_scope.cancel()
        # When it averages it is one as all are.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_average, observer.group, given[2])
            await trio.testing.wait_all_tasks_blocked(0.05)
            outcomes = await peers.average(given[:2])
        assert all(len(outcome.contributors) == 3 for outcome in outcomes)


async def _average(group: Group, vector: Tensor) -> None:
    await group.average(vector, timeout=TIMEOUT)


async def _look_on(group: Group, seen: list[Outcome]) -> None:
    seen.append(await group.next_outcome(timeout=TIMEOUT))


async def test_a_member_that_looks_on_from_far_away_gets_the_outcomes_of_short_rounds() -> None:
    """Several are decided while it fetches the first of them."""
    async with a_group(3, grace=20.0) as peers:
        await peers.average(vectors(3))
        observer = peers.all.pop()
        observer.group.observe(True)
        await trio.testing.wait_all_tasks_blocked(0.05)
        for member in peers.all:
            peers.network.set_link(Link(delay=0.1), between=(observer.host, member.host))
        decided = [(await peers.average(vectors(2, round_)))[0] for round_ in range(8)]
        for outcome in decided:
            seen = await observer.group.next_outcome(timeout=TIMEOUT)
            assert seen.round == outcome.round
            assert torch.equal(seen.values, outcome.values)


async def test_whoever_comes_is_told_who_contributed_to_the_last_rounds() -> None:
    async with a_group(2) as peers:
        outcomes = [
            (await peers.average(vectors(2), weights=[1.0, round_]))[0] for round_ in (1.0, 2.0)
        ]
        newcomer = await peers.add()
        for peer in (*peers.all, newcomer):
            told = peer.group.decisions
            assert [(d.round, d.contributors, d.weights) for d in told] == [
                (o.round, o.contributors, o.weights) for o in outcomes
            ]


@pytest.mark.parametrize("lost", [0, 2], ids=["leader", "member"])
async def test_the_others_go_on_when_one_dies(lost: int) -> None:
    async with a_group(4) as peers:
        await peers.average(vectors(4))
        peers.all[lost].kill()
        del peers.all[lost]
        for round_ in (2, 3):
            given = vectors(3, round_)
            outcomes = await peers.average(given)
            for outcome in outcomes:
                assert outcome.round == round_
                assert torch.equal(outcome.values, outcomes[0].values)
                torch.testing.assert_close(outcome.values, sum(given) / 3)


async def test_a_newcomer_takes_part_in_the_next_round() -> None:
    async with a_group(2) as peers:
        await peers.average(vectors(2))
        newcomer = await peers.add()
        assert newcomer.group.round == 1
        assert newcomer.group.settings == peers.all[0].group.settings
        outcomes = await peers.average(vectors(3))
        assert all(len(outcome.contributors) == 3 for outcome in outcomes)


@pytest.mark.parametrize("lost", [0, 2], ids=["leader", "member"])
async def test_a_member_that_is_started_again_is_in_the_next_round(lost: int) -> None:
    """The one before is a member still, as its grace is not over; nobody waits for it."""
    async with a_group(3, grace=50.0) as peers:
        await peers.average(vectors(3))
        before = peers.all.pop(lost)
        before.kill()
        await trio.testing.wait_all_tasks_blocked(0.02)
        again = await peers.add(identity=before.host.identity)
        assert again.group.peer_id == before.group.peer_id
        outcomes = await peers.average(vectors(3, 2))
        assert all(len(outcome.contributors) == 3 for outcome in outcomes)
        assert all(torch.equal(outcome.values, outcomes[0].values) for outcome in outcomes)
        assert {peer.group.members for peer in peers.all} == {again.group.members}


async def test_one_may_join_at_any_member() -> None:
    async with a_group(3) as peers:
        peers.all.reverse()
        newcomer = await peers.add()
        assert len(newcomer.group.members) == 4


async def test_one_joins_a_group_that_has_more_addresses_than_a_message_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As hundreds of members have, each with many interfaces."""
    async with a_group(1) as peers:
        founder = peers.all[0].group
        name = "x" * 400
        many = [f"/dns4/{name}{n}/tcp/1/p2p/{founder.peer_id}" for n in range(3000)]
        addresses = (*founder.addresses, *many)
        monkeypatch.setattr(founder, "_addresses_of", lambda peer_id: addresses)
        await peers.add()
        await founder.wait_members(2, timeout=TIMEOUT)


async def test_one_that_is_to_join_itself_refuses_nobody_for_good() -> None:
    """Members that are started together, each with the addresses of all others."""
    async with (
        a_group(1) as peers,
        peers.network.open_host() as host,
        peers.network.open_host() as gone,
    ):
        nowhere = gone.addresses[0]
        peers.network.set_link(Link(is_reachable=False), between=(host, gone))

        async def join() -> None:
            async with open_group(host, LAYOUT, join=[nowhere], timeout=TIMEOUT):
                pass

        async with trio.open_nursery() as nursery:
            nursery.start_soon(join)
            await trio.testing.wait_all_tasks_blocked(0.02)
            join_at = [host.addresses[0], *peers.all[0].host.addresses]
            async with (
                peers.network.open_host() as another,
                open_group(another, LAYOUT, join=join_at, timeout=TIMEOUT) as group,
            ):
                assert len(group.members) == 2
            nursery.cancel_scope.cancel()


async def test_other_tensors_are_refused_by_name() -> None:
    async with a_group(1) as peers, peers.network.open_host() as host:
        other = Layout.of({"a.weight": torch.empty(30, 40)})
        with pytest.raises(PeerRefusedError, match="names, shapes or their order differ"):
            async with open_group(host, other, join=peers.all[0].host.addresses):
                pass


async def test_vectors_that_all_weigh_nothing_have_no_mean() -> None:
    async with a_group(1) as peers:
        group, (vector,) = peers.all[0].group, vectors(1)
        with pytest.raises(RoundTimeout, match="whose vector weighs more than 0"):
            await group.average(vector, weight=0.0, timeout=0.5)
        assert (await group.average(vector, weight=1.0, timeout=TIMEOUT)).round == 1


async def test_a_round_that_is_not_decided_says_for_whom_it_waits() -> None:
    async with a_group(2, grace=20.0) as peers:
        one, other = peers.all
        with pytest.raises(RoundTimeout, match=other.group.peer_id):
            await one.group.average(vectors(1)[0], timeout=1.0)
        assert not one.group.may_have_contributed
        # The vector was withdrawn; the next is another.
        outcomes = await peers.average(vectors(2, 5))
        torch.testing.assert_close(outcomes[0].values, sum(vectors(2, 5)) / 2)


async def test_a_vector_that_is_withdrawn_before_its_reduction_has_a_turn_is_in_no_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its owner writes to it from there on."""
    async with a_group(2) as peers:
        group = peers.all[1].group
        do = group._do

        def end_in_the_same_turn(action: Action) -> None:
            do(action)
            if isinstance(action, Reduce):
                group._withdraw()

        monkeypatch.setattr(group, "_do", end_in_the_same_turn)
        outcomes = await peers.average(vectors(2))
        assert [outcome.has_contributed for outcome in outcomes] == [True, False]
        assert all(outcome.contributors == (peers.all[0].group.peer_id,) for outcome in outcomes)


async def test_an_outcome_with_the_vector_of_an_earlier_call_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The round had it before that call gave up; the next one comes with another before the round is decided."""
    async with a_group(2, grace=20.0) as peers, trio.open_nursery() as nursery:
        one, other = (peer.group for peer in peers.all)
        given = vectors(3)
        post = other._messenger.post
        is_late = True

        def post_late(peer_id: str, message: Message) -> None:
            if not (is_late and isinstance(message, Status) and message.accepted):
                post(peer_id, message)

        monkeypatch.setattr(other._messenger, "post", post_late)
        nursery.start_soon(_average, one, given[0])
        with pytest.raises(RoundTimeout):
            await other.average(given[1], timeout=1.0)
        call, has_lent = other.num_calls, other.may_have_contributed
        assert has_lent
        with pytest.raises(RoundTimeout):
            await other.average(given[2], timeout=0.5)
        assert not other.may_have_contributed
        is_late = False
        outcome = await other.average(given[2], timeout=TIMEOUT)
        assert (outcome.round, outcome.has_contributed) == (1, True)
        torch.testing.assert_close(outcome.values, (given[0] + given[1]) / 2)
        assert outcome.is_of_withdrawn
        assert outcome.call == call
        outcomes = await peers.average(given[:2])
        assert not any(outcome.is_of_withdrawn for outcome in outcomes)


async def test_a_call_that_gives_up_ends_nothing_that_does_without_its_vector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group whose members call for a short time each would never have what is to be fetched."""
    async with a_group(2, grace=20.0) as peers:
        group = peers.all[0].group

        async def fetch(*args: object) -> Result:
            await trio.sleep_forever()
            raise AssertionError

        monkeypatch.setattr(group, "_fetch", fetch)
        group._do(Fetch(7, group.history[-1], ()))
        with pytest.raises(RoundTimeout):
            await group.average(vectors(1)[0], timeout=0.1)
        assert not group._scopes[7].cancel_called


async def test_a_vector_that_is_not_finite_costs_its_sender_the_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with a_group(3) as peers:
        given = vectors(3)
        given[1][5] = float("nan")
        outcomes = await peers.average(given)
        sender = peers.all[1].group.peer_id
        assert all(sender not in outcome.contributors for outcome in outcomes)
        assert [outcome.has_contributed for outcome in outcomes] == [True, False, True]
        assert all(outcome.values.isfinite().all() for outcome in outcomes)
        assert f"lost {sender}: chunk 0: element 5 is nan" in caplog.text


async def test_those_who_leave_are_not_waited_for() -> None:
    async with a_group(3, grace=20.0) as peers:
        await peers.average(vectors(3))
        await peers.all[0].group.leave()  # the leader
        with pytest.raises(NotAMemberError, match="it has left"):
            await peers.all[0].group.average(vectors(1)[0], timeout=TIMEOUT)
        del peers.all[0]
        outcomes = await peers.average(vectors(2))
        assert all(len(outcome.contributors) == 2 for outcome in outcomes)


async def test_a_member_that_goes_for_a_long_reason_is_not_waited_for() -> None:
    """Each of those that could not give it what it missed is in the reason."""
    async with a_group(3, grace=20.0) as peers:
        await peers.average(vectors(3))
        lost = peers.all.pop().group
        lost._drop_out(NotAMemberError("no member has it: " + 2000 * "x"))
        with trio.fail_after(5):
            while lost.peer_id in peers.all[1].group.members:
                await trio.sleep(0.02)


async def test_of_a_group_that_has_ended_a_host_keeps_no_vectors() -> None:
    """A worker's host is there for days, and takes part in one run after another."""
    async with open_memory_network() as network, network.open_host() as host:
        gone: list[weakref.ref[Tensor]] = []
        for _ in range(2):
            async with open_group(host, LAYOUT, settings=settings(min_members=1)) as group:
                weights = torch.ones(SIZE)
                group.show_state(State(0, (weights,)))
                await group._states._copy()
                outcome = await group.average(weights, timeout=TIMEOUT)
                copies = [result.values for kept in group._states._kept for result in kept.results]
                gone += map(weakref.ref, (weights, outcome.values, *copies))
            del group, weights, outcome, copies
        gc.collect()
        assert [each() for each in gone] == [None] * len(gone)


def test_the_documentation_names_aggregators_that_groups_have() -> None:
    document = (Path(__file__).parents[3] / "docs/averaging.md").read_text()
    row = next(line for line in document.splitlines() if line.startswith("| `aggregator` |"))
    names = re.findall(r"`(\w+)`", row.split("|")[3])
    assert names[0] == "mean"
    for name in names:
        _block(settings(aggregator=name))


async def test_a_group_of_no_tensors_is_refused() -> None:
    async with open_memory_network() as network, network.open_host() as host:
        with pytest.raises(ConfigurationError, match="there is nothing to average"):
            async with open_group(host, Layout.of({"a": torch.empty(0, 3)})):
                pass


async def test_what_is_wrong_with_a_vector_is_said() -> None:
    async with a_group(1) as peers:
        group = peers.all[0].group
        for wrong in (torch.zeros(3), torch.zeros(SIZE, dtype=torch.float64)):
            with pytest.raises(ConfigurationError, match=f"averages float32 \\[{SIZE}\\]"):
                await group.average(wrong, timeout=1)
        for weight in (float("nan"), float("inf"), -1.0, 2e30):
            with pytest.raises(ConfigurationError, match="weight"):
                await group.average(torch.zeros(SIZE), weight=weight, timeout=1)


async def test_nobody_there_is_an_error_in_time() -> None:
    async with open_memory_network() as network, network.open_host() as host:
        async with network.open_host() as gone:
            address = gone.addresses[0]
        said = rf"no group was joined within 1 s at {address}: cannot connect to .*: nobody is"
        with pytest.raises(GroupError, match=said):
            async with open_group(host, LAYOUT, join=[address], timeout=1.0):
                pass


async def test_a_slow_member_reduces_less_than_the_others() -> None:
    layout = Layout.of({"x": torch.empty(600_000)})
    slow = Link(bandwidth=2e6)
    # On a busy machine an estimate may have to be forgotten first.
    with trio.fail_after(4 * DEADLINE):
        async with open_memory_network() as network, AsyncExitStack() as stack:
            network.set_link(Link(bandwidth=20e6))
            hosts = [await stack.enter_async_context(network.open_host()) for _ in range(4)]
            for host in hosts[:3]:
                network.set_link(slow, between=(host, hosts[3]))
            groups: list[Group] = []
            for host in hosts:
                join = list(hosts[0].addresses) if groups else []
                opened = open_group(host, layout, join=join, settings=settings(min_members=4))
                groups.append(await stack.enter_async_context(opened))

            async def average(group: Group) -> None:
                await group.average(torch.ones(600_000), timeout=TIMEOUT)

            shares: dict[str, float] = {}
            slow_one, others = groups[3].peer_id, [group.peer_id for group in groups[:3]]
            # Most rounds have a moment in which two fast ones show what they can; on a busy machine some have none.
            while not shares.get(slow_one, 0.0) < min(shares.get(each, 0.0) for each in others):
                async with trio.open_nursery() as nursery:
                    for group in groups:
                        nursery.start_soon(average, group)
                speeds = {group.peer_id: group._machine.status().bandwidth for group in groups}
                if min(speeds.values()) > 0:
                    shares = _shares(list(speeds), speeds)
                await trio.sleep(0.037)  # or all rounds lie the same way over the moments


async def test_decisions_that_are_made_meanwhile_are_followed_without_another_one() -> None:
    async with a_group(2) as peers:
        group = peers.all[1].group
        followed = [await group.decision_after(0)]
        for _ in range(3):  # while whoever follows is busy with the first
            await peers.average(vectors(2))
        while followed[-1].round < 3:
            followed.append(await group.decision_after(followed[-1].index))
        assert tuple(followed) == group.history[-len(followed) :]
        assert [each.round for each in followed if each.is_round] == [1, 2, 3]


@pytest.mark.parametrize("aggregator", ["krum", "multi_krum:1", "geometric_median"])
async def test_what_needs_whole_vectors_is_refused(aggregator: str) -> None:
    async with open_memory_network() as network, network.open_host() as host:
        with pytest.raises(ConfigurationError, match="needs the distances of whole vectors"):
            async with open_group(host, LAYOUT, settings=settings(aggregator=aggregator)):
                pass


async def test_a_member_that_is_too_far_behind_is_not_waited_for() -> None:
    async with a_group(3) as peers:
        behind = peers.all.pop()
        given = vectors(2)
        for _ in range(6):
            await peers.average(given)
        for round_ in (1, 2, 3, 4):  # what is kept for it
            kept = await behind.group.average(vectors(1)[0], timeout=TIMEOUT)
            assert (kept.round, kept.has_contributed) == (round_, False)
        with pytest.raises(NotAMemberError, match="since this member averaged last"):
            await behind.group.average(vectors(1)[0], timeout=TIMEOUT)
        while behind.group.peer_id in peers.all[0].group.members:
            await trio.sleep(0.05)


async def test_a_newcomer_has_the_whole_state_although_rounds_go_on() -> None:
    """Behind a line so slow that several rounds are decided before it has it."""
    async with a_group(2) as peers:
        buffers = [torch.zeros(SIZE) for _ in peers.all]

        async def go_on() -> None:
            outcomes = await peers.average([torch.ones(SIZE)] * 2)
            for peer, buffer, outcome in zip(peers.all, buffers, outcomes, strict=True):
                peer.group.take_state_back()
                buffer += outcome.values
                peer.group.show_state(State(outcome.round, (buffer,)))

        await go_on()
        members = peers.all[:2]
        newcomer = await peers.add()
        peers.all.remove(newcomer)
        newcomer.group.observe(True)
        for member in members:
            peers.network.set_link(Link(delay=0.2), between=(newcomer.host, member.host))
        async with trio.open_nursery() as nursery:
            fetched: list[State | None] = []

            async def fetch() -> None:
                fetched.append(await newcomer.group.fetch_state([SIZE], timeout=TIMEOUT))

            nursery.start_soon(fetch)
            while not fetched:
                await go_on()
                await trio.sleep(0.4)  # of training
        (state,) = fetched
        assert state is not None
        assert state.round < members[0].group.round
        assert torch.equal(state.vectors[0], torch.full((SIZE,), float(state.round)))
        following = await newcomer.group.next_outcome(timeout=TIMEOUT)
        assert following.round == state.round + 1


async def test_a_loss_after_the_end_of_a_group_is_nobodys_to_answer() -> None:
    """Its tasks end before its streams do, whose host goes on."""
    async with a_group(1) as peers, peers.network.open_host() as host:
        founder = peers.all[0].host
        with trio.CancelScope() as scope:
            async with open_group(host, LAYOUT, join=list(founder.addresses)) as group:
                scope.cancel()
                await trio.sleep_forever()
        assert founder.peer_id in group.members
        group._lose(founder.peer_id, TransportError("it is gone"))
