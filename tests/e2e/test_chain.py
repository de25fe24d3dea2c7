"""Activations from worker to worker: equal tokens, one message a stage and step, and who is named when it breaks."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from neurogrid import CoordinatorSettings, open_coordinator
from neurogrid.assembly.worker import Worker, WorkerSettings, open_worker
from neurogrid.errors import NeuroGridError, NoRouteError, PeerUnreachableError
from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.inference.pipeline.routing import Routing
from neurogrid.inference.pipeline.session import open_session
from neurogrid.p2p.exchange.counters import Direction
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.wire import MessageType
from tests.e2e.coordinator_process import LOOPBACK, start_coordinator, ticket_of
from tests.e2e.support import (
    DEADLINE,
    Outcome,
    WorkerProcess,
    generate,
    reference_tokens,
    run_coordinator,
    start_worker,
)
from tests.families import FAMILIES, save_checkpoint

PROMPT = [5, 17, 200, 33]
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A Llama of six layers, and the tokens that it writes."""
    path = tmp_path_factory.mktemp("llama")
    model = save_checkpoint(FAMILIES[0], path)
    return path, reference_tokens(model, PROMPT, MAX_TOKENS)


def settings(path: Path, *addresses: str, **more: Any) -> CoordinatorSettings:
    return CoordinatorSettings(
        model=path, peers=addresses, stages=len(addresses), max_seq_len=256, **more
    )


def asked(outcome: Outcome) -> list[int]:
    """To which stages the coordinator sent activations."""
    return [
        index
        for index, stage in enumerate(outcome.stages)
        if outcome.sent[stage.peer_id].get("activation")
    ]


def test_one_message_a_stage_and_step(
    workers: list[WorkerProcess], llama: tuple[Path, list[int]]
) -> None:
    path, expected = llama
    addresses = [worker.address for worker in workers]
    chain = run_coordinator(settings(path, *addresses), [PROMPT] * 2, MAX_TOKENS)
    star = run_coordinator(settings(path, *addresses, routing="star"), [PROMPT], MAX_TOKENS)
    assert chain.tokens == [expected] * 2
    assert star.tokens == [expected]
    assert asked(chain) == [0]
    assert asked(star) == [0, 1, 2]


async def unmended(coordinator: Coordinator) -> AsyncIterator[int]:
    """Greedy tokens of one session, without what replaces a worker that fails."""
    ends, tokens = coordinator.model.ends, list(PROMPT)
    with await coordinator.selector.select(timeout=DEADLINE) as selection:
        stages = selection.stages
    async with await open_session(stages, coordinator._routing, max_length=250) as session:
        while True:
            position = session.length
            with torch.inference_mode():
                hidden_BTD = ends.embed(tokens[position:], position=position)
            hidden_BTD = await session.forward(hidden_BTD)
            with torch.inference_mode():
                logits_V = ends.logits(hidden_BTD, position=position)
            tokens.append(int(logits_V.argmax()))
            yield tokens[-1]


# A worker dies


@pytest.fixture
def three_workers(tmp_path: Path) -> Iterator[list[WorkerProcess]]:
    with (
        start_worker(tmp_path) as one,
        start_worker(tmp_path) as two,
        start_worker(tmp_path) as three,
    ):
        yield [one, two, three]


@pytest.mark.parametrize("index", [1, 2], ids=["middle", "last"])
def test_a_worker_that_dies_in_the_chain_is_named(
    three_workers: list[WorkerProcess], llama: tuple[Path, list[int]], index: int
) -> None:
    path, expected = llama

    async def main() -> None:
        addresses = [worker.address for worker in three_workers]
        with trio.fail_after(DEADLINE):
            async with open_coordinator(settings(path, *addresses)) as coordinator:
                victim = coordinator.stages[index]
                tokens: list[int] = []
                by_id = {worker.peer_id: worker for worker in three_workers}
                with pytest.raises(NoRouteError) as caught:  # noqa: PT012 - the loop is what raises
                    async for token in unmended(coordinator):
                        tokens.append(token)
                        if len(tokens) == 3:
                            by_id[victim.peer_id].kill()
                assert tokens[:3] == expected[:3]
                assert caught.value.peer_id == victim.peer_id
                assert caught.value.layers == tuple(range(victim.start, victim.stop))
                assert f"on worker {victim.peer_id}" in str(caught.value)
                assert caught.value.unreachable_from is None

    trio.run(main)


# A link is lost, and both workers are there


@asynccontextmanager
async def cluster(
    path: Path, count: int = 3, **more: Any
) -> AsyncIterator[tuple[Coordinator, list[Worker]]]:
    """A coordinator and its workers in this process, in the order of their stages."""
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(open_worker(WorkerSettings(device="cpu")))
            for _ in range(count)
        ]
        addresses = [worker.addresses[0] for worker in workers]
        coordinator = await stack.enter_async_context(
            open_coordinator(settings(path, *addresses, **more))
        )
        by_id = {worker.peer_id: worker for worker in workers}
        yield coordinator, [by_id[item.peer_id] for item in coordinator.stages]


def test_a_link_that_is_cut_between_two_tokens_is_made_again(
    llama: tuple[Path, list[int]],
) -> None:
    """The caches stay: no session is opened anew, and no token is lost."""
    path, expected = llama

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with cluster(path) as (coordinator, workers):
                _, middle, last = workers
                tokens: list[int] = []
                num_cuts = 0
                noticed = trio.Event()

                def on_cut(peer_id: str, reason: NeuroGridError) -> None:
                    nonlocal num_cuts
                    if peer_id == last.peer_id:
                        num_cuts += 1
                        noticed.set()

                middle.protocol.on_peer_lost(on_cut)
                async for token in coordinator.generate(PROMPT, max_tokens=MAX_TOKENS):
                    tokens.append(token)
                    if len(tokens) % 4 == 0:
                        noticed = trio.Event()
                        await middle.protocol.host.disconnect(last.peer_id)
                        await noticed.wait()
                assert tokens == expected
                assert num_cuts >= 2
                opened = coordinator.counters.total(
                    Direction.SENT, msg_type=MessageType.SESSION_OPEN
                )
                assert opened.num_messages == len(workers)
                assert asked_of(coordinator) == [workers[0].peer_id]

    trio.run(main)


def asked_of(coordinator: Coordinator) -> list[str]:
    """The workers to which the coordinator sent activations itself."""
    return [
        peer_id
        for peer_id, by_way in coordinator.counters.snapshot().items()
        if "activation" in by_way.get("sent", {})
    ]


def test_a_link_that_cannot_be_made_again_names_both_ends(
    llama: tuple[Path, list[int]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, expected = llama

    async def nobody_there(address: str) -> str:
        raise PeerUnreachableError(f"nobody answers at {address}")

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with cluster(path) as (coordinator, workers):
                _, middle, last = workers
                num_tokens = 0
                with pytest.raises(NoRouteError, match="cannot hand on") as caught:  # noqa: PT012
                    async for _ in unmended(coordinator):
                        num_tokens += 1
                        if num_tokens == 3:
                            monkeypatch.setattr(middle.sessions._links, "_connect", nobody_there)
                            await middle.protocol.close_peer(last.peer_id)
                assert caught.value.unreachable_from == middle.peer_id
                assert caught.value.peer_id == last.peer_id
                assert middle.peer_id in str(caught.value)
                assert last.peer_id in str(caught.value)
                # The next session brings the link up again.
                monkeypatch.undo()
                outcome = await generate(coordinator, [PROMPT], MAX_TOKENS)
                assert outcome.tokens == [expected]
                assert last.peer_id in middle.protocol.host.connected_peers

    trio.run(main)
    ours = [r for r in caplog.records if r.name.startswith("neurogrid")]
    assert not [r for r in ours if r.levelno >= logging.ERROR]


def test_a_link_that_cannot_be_is_relayed_and_that_is_said(
    tmp_path: Path, llama: tuple[Path, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """The last worker has the coordinator on its list, and not the worker before it."""
    path, expected = llama
    key = tmp_path / "coordinator.key"
    coordinator_id = Identity.load(key).peer_id
    allow = ("--allow", f"{coordinator_id}=coordinator")
    with (
        start_worker(tmp_path, "--memory-limit", "1GiB") as one,
        start_worker(tmp_path, "--memory-limit", "1GiB", *allow) as two,
    ):
        addresses = (one.address, two.address)
        outcome = run_coordinator(
            settings(path, *addresses, identity_file=key), [PROMPT] * 2, MAX_TOKENS
        )
    assert outcome.tokens == [expected] * 2
    assert asked(outcome) == [0, 1]
    said = [r.getMessage() for r in caplog.records if "go through here" in r.getMessage()]
    assert len(said) == 1
    assert one.peer_id in said[0]
    assert two.peer_id in said[0]


def test_activations_travel_in_another_dtype(llama: tuple[Path, list[int]]) -> None:
    """Through both workers and back: three roundings, and layers between."""
    path, expected = llama

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with cluster(path, 2, wire_dtype="float32") as (coordinator, _):
                outcome = await generate(coordinator, [PROMPT], MAX_TOKENS)
                assert outcome.tokens == [expected]
                ends = coordinator.model.ends
                prompt_BTD = ends.embed(PROMPT, position=0)
                with await coordinator.selector.select(timeout=DEADLINE) as selection:
                    stages = selection.stages
                exact: torch.Tensor | None = None
                for name, bound in (
                    ("float32", 0.0),
                    ("float16", 2e-3),
                    ("bfloat16", 2e-2),
                    ("int8", 3e-2),
                ):
                    routing = Routing(coordinator._protocol, wire_dtype=name)
                    async with await open_session(stages, routing, max_length=8) as session:
                        result_BTD = await session.forward(prompt_BTD)
                        assert (await session.forward(prompt_BTD[:, :1])).shape[1] == 1
                    exact = result_BTD if exact is None else exact
                    assert result_BTD.dtype is prompt_BTD.dtype
                    off = ((result_BTD - exact).norm() / exact.norm()).item()
                    assert off <= bound, (name, off)
                    assert off > 0 or name == "float32"

    trio.run(main)


@pytest.mark.parametrize("index", [0, 1])
def test_what_is_not_finite_is_named_by_who_computed_it(
    llama: tuple[Path, list[int]], index: int
) -> None:
    """The first is found out by the second, the second by the coordinator."""
    path, _ = llama

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with cluster(path, 2) as (coordinator, workers):
                (model,) = workers[index]._state.models
                forward = model.stage.forward

                def spoilt(*args: Any, **kwargs: Any) -> torch.Tensor:
                    return forward(*args, **kwargs).index_fill(2, torch.tensor([3]), torch.inf)

                model.stage.forward = spoilt  # type: ignore[method-assign]
                with pytest.raises(NoRouteError, match="NaN or infinity") as caught:
                    await anext(unmended(coordinator))
                stage = coordinator.stages[index]
                assert caught.value.peer_id == stage.peer_id == workers[index].peer_id
                assert caught.value.layers == tuple(range(stage.start, stage.stop))

    trio.run(main)


def test_members_of_a_cluster_hand_on_to_each_other(tmp_path: Path) -> None:
    cluster = ("--new-cluster", str(tmp_path / "cluster"))
    with start_coordinator(*cluster, "--min-peers", "2", "--stages", "2") as coordinator:
        join = (*LOOPBACK, "--join", ticket_of(coordinator))
        with start_worker(tmp_path, *join) as one, start_worker(tmp_path, *join) as two:
            status, text = coordinator.wait_end()
            said = "".join(coordinator.lines)
            assert (status, bool(text.strip())) == (0, True), said
            assert "go through here" not in said
            for worker in (one, two):
                assert f"refused {one.peer_id}" not in worker.log
                assert f"refused {two.peer_id}" not in worker.log


def test_sessions_end_by_themselves(
    llama: tuple[Path, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By idleness, and with the coordinator."""
    path, _ = llama
    monkeypatch.setattr("neurogrid.inference.sessions.service.EXPIRY_INTERVAL", 0.05)

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with cluster(path, 2) as (coordinator, workers):
                tables = [worker._sessions._sessions for worker in workers]
                tokens = unmended(coordinator)
                await anext(tokens)
                assert [len(table) for table in tables] == [1, 1]
                for table in tables:
                    for session in table:
                        session.last_used -= 1000.0
                while any(map(len, tables)):
                    await trio.sleep(0.05)
                with pytest.raises(NoRouteError, match="is not open"):
                    await anext(tokens)

                tokens = unmended(coordinator)
                await anext(tokens)
                for worker in workers:
                    await coordinator._protocol.host.disconnect(worker.peer_id)
                while any(map(len, tables)):
                    await trio.sleep(0.05)
                with pytest.raises(NoRouteError, match="there is no stream"):
                    await anext(tokens)

    trio.run(main)
