"""The leader of a witnessed run: what it takes of what members tell, and what it tells them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from neurogrid.p2p import TensorMessage
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.memory import MemoryHost, open_memory_network
from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.training.leading.facts import RunFacts
from neurogrid.training.leading.witnessed import round_events
from neurogrid.training.leading.witnessed.leader import WitnessedLeader
from neurogrid.training.runs.machine import Rules
from neurogrid.training.runs.run_file import parse_run_file
from neurogrid.training.runs.state import RunState
from neurogrid.training.runs.witnessed_machine import WitnessedMachine, begun_epochs
from neurogrid.training.wire.runs import (
    Epoch,
    EpochReport,
    EpochSeat,
    Report,
    RoundCommitment,
    RoundEvidence,
    RoundHealth,
    RoundProof,
    RunMessage,
    run_table,
)
from neurogrid.training.witnessed import (
    Committed,
    EpochRules,
    Event,
    Health,
    Joined,
    Left,
    Unhealthy,
    Warm,
    Witnessed,
    parts_of,
)

RUN = bytes(range(16))
FILE = '[model]\nconfig = "x"\n[data]\npath = "x"\n[outer]\nmethod = "distro"\n[stop]\nrounds = 9\n'
EPOCHS = EpochRules(
    min_members=2, max_members=8, rounds=50, batches=0, warmup=9, train=9, witness=9, cooldown=9
)
PEERS = sorted(Identity.generate().peer_id for _ in range(3))
D_OLD, D_NEW = b"o" * 32, b"n" * 32


@dataclass
class Led:
    """A leader that nobody runs: what comes to it is called up by a test."""

    leader: WitnessedLeader
    machine: WitnessedMachine

    def tick(self, *events: Event) -> None:
        self.machine.tick(1.0, events, bytes(32), lambda peer: peer)

    def hear(self, code: RunMessage, said: ControlPayload, peer: str) -> None:
        message = TensorMessage(code, data=said.encode(), from_peer=peer)
        if code is RunMessage.EPOCH_REPORT:
            self.leader._on_report(message)
        else:
            self.leader._members._on_report(message)

    def tell_weights(self, peer: str, step: int, digest: bytes, **other: Any) -> None:
        said = EpochReport(RUN, 1, "warm", has_weights=True, step=step, digest=digest)
        self.hear(RunMessage.EPOCH_REPORT, replace(said, **other), peer)


@asynccontextmanager
async def led() -> AsyncIterator[Led]:
    """A run with three members, which warm up after the third round."""
    machine = WitnessedMachine(
        Rules(2, 8, 4, 1, 1, False, None, None), EPOCHS, RunState((4000,), seed=7), begun_epochs()
    )
    machine.epoch = replace(machine.epoch, round=3)
    weights = SimpleNamespace(round=3, digest=D_NEW, names=("a",), blobs=(bytes(32),))
    quiet = SimpleNamespace(say=lambda text: None, warn=lambda text: None)
    async with open_memory_network() as network, network.open_host() as host:
        yield Led(make_leader(host, machine, weights, quiet), machine)


def make_leader(
    host: MemoryHost, machine: WitnessedMachine, weights: Any, progress: Any
) -> WitnessedLeader:
    facts = RunFacts(RUN, parse_run_file(FILE), FILE, "{}", bytes(32), 10, 0)
    nothing: Any = SimpleNamespace(addresses=())
    leader = WitnessedLeader(
        host, Exchange(host, run_table(), role="coordinator"), nothing, facts, machine, weights,
        nothing, nothing, nothing, progress, Path("pause"), total_steps=0, wait=1.0, clock=lambda: 1.0,
    )  # fmt: skip
    for peer in PEERS:
        leader._members._on_opened(peer, SimpleNamespace(role="worker", name=""))  # type: ignore[arg-type]
    machine.tick(1.0, [Joined(peer, 1) for peer in PEERS], bytes(32), lambda peer: peer)
    return leader


# Words about weights


async def test_words_of_before_the_leader_came_back_are_none_about_its_weights() -> None:
    async with led() as run:
        assert [each.peer for each in run.machine.epoch.members] == PEERS
        for peer in PEERS:  # they have two rounds that were taken back, which are made once more
            run.tell_weights(peer, 5, D_OLD, state="waiting")
            run.tell_weights(peer, 5, D_OLD, state="loading")
            run.tell_weights(peer, 3, D_NEW)
        assert run.leader._digest_after(3) == D_NEW
        run.machine.epoch = replace(run.machine.epoch, round=5)
        run.tell_weights(PEERS[0], 5, D_OLD, state="waiting")
        for peer in PEERS:
            run.tell_weights(peer, 5, D_NEW, state="training")
        assert run.leader._digest_after(5) == D_NEW
        assert run.leader._agreement.apart(PEERS) == []


async def test_strangers_and_rounds_to_come_take_no_room_of_members() -> None:
    async with led() as run:
        stranger = Identity.generate().peer_id
        for number in range(40):
            run.tell_weights(stranger, 2**64 - 1 - number, D_OLD)
            run.tell_weights(PEERS[2], 2**64 - 1 - number, D_OLD)
        # Another process of it is no member.
        run.tell_weights(PEERS[2], 3, D_OLD, incarnation=2)
        for peer in PEERS[:2]:
            run.tell_weights(peer, 3, D_NEW)
        assert run.leader._digest_after(3) == D_NEW
        assert run.leader._agreement.apart(PEERS) == []


async def test_what_a_member_says_of_others_takes_no_room_of_what_is_said_once() -> None:
    """However often it says so, of whatever round and of whatever seats: it is one event."""
    async with led() as run:
        seat, events = run.machine.epoch.members[0].seat, run.leader._events
        epoch, number = run.machine.epoch.epoch, run.machine.epoch.round
        for other in range(5000):
            for said in (
                RoundHealth(RUN, seat, epoch, number + 1 + other, (1,)),
                RoundHealth(RUN, seat, epoch, number, (1 + other,)),
            ):
                message = TensorMessage(RunMessage.HEALTH, data=said.encode(), from_peer=PEERS[0])
                events._on_health(message)
        events.add(Left(2))
        assert events.take() == [Unhealthy(seat, (1,), epoch, number), Left(2)]
        assert events.take() == []


async def test_what_a_member_signs_takes_no_room_of_what_others_sign(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However often it commits to something else: two show that it lies, and of who is out nothing is an event."""
    monkeypatch.setattr(round_events, "check_signature", lambda *told: None)
    async with led() as run:
        events = run.leader._events
        run.tick(*(Warm(seat, 0) for seat in run.machine.epoch.healthy))
        epoch, works = run.machine.epoch, parts_of(EPOCHS, run.machine.epoch).works

        def flood(num: int) -> None:
            for number in range(num):
                result = number.to_bytes(32)
                committed = RoundCommitment(RUN, 0, 0, epoch.round, *works[0], result)
                proof = RoundProof(RUN, 0, 0, epoch.round, bytes(128), bytes(128), result)
                message = TensorMessage(
                    RunMessage.COMMITMENT, data=committed.encode(), from_peer=PEERS[0]
                )
                events._on_commitment(message)
                message = TensorMessage(RunMessage.WITNESS, data=proof.encode(), from_peer=PEERS[0])
                events._on_witness(message)

        flood(3000)
        events.add(Left(2))
        taken = events.take()
        assert [type(each) for each in taken] == [Committed, Witnessed, Committed, Left]
        run.tick(*taken)
        assert run.machine.epoch.members[0].health is Health.EJECTED
        flood(3)
        assert events.take() == []


# Addresses


async def test_members_are_told_of_each_other_what_is_their_own() -> None:
    async with led() as run:
        own = f"/ip4/127.0.0.1/tcp/9/p2p/{PEERS[0]}"
        relayed = f"/ip4/127.0.0.1/tcp/9/p2p/{PEERS[2]}/p2p-circuit/p2p/{PEERS[0]}"
        others = f"/ip4/127.0.0.1/tcp/9/p2p/{PEERS[1]}", "~" * 512, "/ip4/127.0.0.1/tcp/9"
        said = Report(RUN, 0, "ready", group_addresses=(*others, own, relayed))
        run.hear(RunMessage.REPORT, said, PEERS[0])
        told = Epoch.decode(run.leader._message().encode())
        seats: dict[str, EpochSeat] = {each.peer: each for each in told.members}
        assert seats[PEERS[0]].addresses == (own, relayed)


# Members that take nothing


@pytest.mark.usefixtures("autojump_clock")
async def test_one_that_takes_nothing_is_waited_for_by_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer that reads nothing holds up what is told to it, and nothing that others are told."""
    async with led() as run, trio.open_nursery() as nursery:
        told: dict[str, list[TensorMessage]] = {peer: [] for peer in PEERS}

        async def tell(peer: str, code: RunMessage, data: bytes) -> None:
            told[peer].append(TensorMessage(code, data=data))
            if peer == PEERS[0]:
                await trio.sleep(10)

        def numbers(peer: str) -> list[int]:
            epochs = [each for each in told[peer] if each.msg_type is RunMessage.EPOCH]
            return [Epoch.decode(each.data).number for each in epochs]

        for peer in PEERS:
            run.tell_weights(peer, 3, D_NEW)
        evidence = RoundEvidence(RUN, 0, 4, 1, 2)
        audits = SimpleNamespace(to_judge=lambda: [(p, evidence) for p in PEERS], watched=())
        monkeypatch.setattr(run.leader, "_audits", audits)
        monkeypatch.setattr(run.leader._members, "tell", tell)
        monkeypatch.setattr(run.leader, "_is_here", lambda peer: True)
        nursery.start_soon(run.leader._tell_epochs)
        nursery.start_soon(run.leader._tell_evidence)
        await trio.sleep(9.5)
        assert len(numbers(PEERS[1])) == len(numbers(PEERS[2])) >= 9
        assert all(len(told[peer]) - len(numbers(peer)) >= 5 for peer in PEERS[1:])
        assert len(told[PEERS[0]]) == 2
        await trio.sleep(1)  # it has the newest of what it has missed
        assert numbers(PEERS[0])[1] in numbers(PEERS[1])[-2:]
        nursery.cancel_scope.cancel()


@pytest.mark.usefixtures("autojump_clock")
async def test_rounds_do_not_wait_for_one_that_is_refused() -> None:
    async with led() as run, trio.open_nursery() as nursery:
        gone: list[str] = []

        async def dismiss(peer: str, reason: str) -> None:
            await trio.sleep(10)
            gone.append(peer)

        def nothing(*told: object) -> None: ...

        figures = SimpleNamespace(keep=nothing, heard=nothing, decided=nothing)
        leader: Any = run.leader
        leader._trials, leader._changes = SimpleNamespace(look=list), SimpleNamespace(take=bool)
        leader._keeper = SimpleNamespace(write=nothing, figures=figures, noted=nothing)
        leader._members.dismiss, leader._goodbyes = dismiss, [(PEERS[0], "it is banned")]
        with trio.fail_after(2):
            await leader._step(nursery)
        await trio.sleep(11)
        assert gone == [PEERS[0]]


# The end


async def test_members_may_go_while_others_are_told_that_the_run_is_over() -> None:
    async with led() as run:
        for peer in PEERS:
            run.tell_weights(peer, 3, D_NEW)
        told: list[str] = []

        async def tell(peer: str, code: RunMessage, data: bytes) -> None:
            told.append(peer)
            run.leader._reports.pop(PEERS[1], None)

        run.leader._members.tell = tell  # type: ignore[assignment]
        run.leader._is_here = lambda peer: peer in run.leader._reports  # type: ignore[method-assign]
        await run.leader._say_goodbye()
        assert told == [PEERS[0], PEERS[2]]
