"""Two coordinators with models of their own on the same worker processes: the tokens of each are those that it gets
alone, memory is promised once, and who is idle gives way and comes back without its weights being sent again.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from neurogrid import Coordinator, CoordinatorSettings, open_coordinator
from neurogrid.errors import CapacityError, NoRouteError, PeerRefusedError
from neurogrid.p2p import MessageType, Protocol, TensorMessage, new_request_id, open_host
from neurogrid.p2p.wire import ControlPayload, ErrorCode, SessionClose, SessionOpen, SessionQuery
from tests.e2e.coordinator_process import LOOPBACK, start_coordinator, ticket_of
from tests.e2e.preloaded import COORDINATOR
from tests.e2e.preloaded import run as run_command
from tests.e2e.server_process import start_server
from tests.e2e.support import DEADLINE, WorkerProcess, reference_tokens, start_worker
from tests.families import FAMILIES, save_checkpoint

MAX_TOKENS = 24
PROMPTS = [[5, 17, 200, 33][: 1 + i % 4] + list(range(40, 40 + 9 * (i % 5))) for i in range(4)]
# Each takes 25 MB of caches, and 1 MB of weights: one of them has room in this, with what a plan leaves, two have not.
ONE_MODEL = "40MiB"
LARGE: dict[str, Any] = {"max_sessions": 32, "max_seq_len": 512}

Model = tuple[Path, list[list[int]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Model]:
    """Checkpoints, and the tokens that each gives alone to `PROMPTS`."""
    made = []
    for name in ("llama-tied", "qwen3"):
        family = next(family for family in FAMILIES if family.name == name)
        path = tmp_path_factory.mktemp(name)
        whole = save_checkpoint(family, path)
        made.append((path, [reference_tokens(whole, prompt, MAX_TOKENS) for prompt in PROMPTS]))
    assert made[0][1] != made[1][1]
    return made


@contextmanager
def some_workers(directory: Path, count: int, *args: str) -> Iterator[list[WorkerProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(start_worker(directory, *args)) for _ in range(count)]


def settings(model: Model, workers: Sequence[WorkerProcess], **more: Any) -> CoordinatorSettings:
    return CoordinatorSettings(
        model=model[0],
        peers=tuple(worker.address for worker in workers),
        stages=len(workers),
        local_layers="none",
        **{"max_seq_len": 128, **more},
    )


async def generate(
    coordinator: Coordinator,
    prompt: list[int],
    disturb: Callable[[], Awaitable[None]] | None = None,
) -> list[int]:
    tokens: list[int] = []
    async for token in coordinator.generate(prompt, max_tokens=MAX_TOKENS):
        tokens.append(token)
        if disturb is not None and len(tokens) == MAX_TOKENS // 2:
            await disturb()
    return tokens


def weight_bytes(coordinator: Coordinator) -> int:
    sent = 0
    for by_way in coordinator.counters.snapshot().values():
        sent += sum(
            traffic.num_bytes
            for name, traffic in by_way.get("sent", {}).items()
            if name == "weights"
        )
    return sent


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(DEADLINE):
            await main()

    trio.run(bounded)


def test_both_get_their_tokens_and_go_on_when_a_worker_is_killed(
    models: list[Model], tmp_path: Path
) -> None:
    async def main() -> None:
        many = {"max_sessions": len(PROMPTS)}
        async with (
            open_coordinator(settings(models[0], workers, **many)) as first,
            open_coordinator(settings(models[1], workers, **many)) as second,
        ):
            both = list(zip((first, second), models, strict=True))
            for coordinator, _ in both:
                assert {stage.peer_id for stage in coordinator.stages} == {
                    worker.peer_id for worker in workers
                }

            async def all_at_once(disturb: Callable[[], Awaitable[None]] | None = None) -> None:
                async def check(coordinator: Coordinator, index: int, expected: list[int]) -> None:
                    its = disturb if (coordinator, index) == (first, 0) else None
                    assert await generate(coordinator, PROMPTS[index], its) == expected

                async with trio.open_nursery() as nursery:
                    for coordinator, (_, expected) in both:
                        for index in range(len(PROMPTS)):
                            nursery.start_soon(check, coordinator, index, expected[index])

            await all_at_once()

            async def kill() -> None:
                workers[1].kill()

            await all_at_once(kill)
            for coordinator, _ in both:
                assert {stage.peer_id for stage in coordinator.stages} == {workers[0].peer_id}

    with some_workers(tmp_path, 2) as workers:
        run(main)


async def outcome_of(
    protocol: Protocol, peer_id: str, msg_type: MessageType, payload: ControlPayload
) -> int | None:
    """The code of the refusal of a message about a session; None where it is acknowledged."""
    message = TensorMessage(msg_type=msg_type, request_id=new_request_id(), data=payload.encode())
    try:
        await protocol.request(peer_id, message, MessageType.SESSION_ACK, timeout=DEADLINE)
    except PeerRefusedError as exc:
        return exc.code
    return None


def test_who_names_anothers_session_gets_nothing_of_it(
    models: list[Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an id that it could not know. Nor does it end the other one's when it comes, serves and goes."""
    made: list[int] = []

    def randbits(num_bits: int) -> int:
        made.append(secrets.randbits(num_bits))
        return made[-1]

    monkeypatch.setattr(
        "neurogrid.inference.pipeline.session.secrets", SimpleNamespace(randbits=randbits)
    )

    async def main() -> None:
        outcomes: list[int | None] = []

        async def meddle() -> None:
            (victim,) = made
            async with (
                open_coordinator(settings(models[1], workers)) as second,
                open_host() as host,
            ):
                stranger = Protocol(host, role="coordinator")
                for protocol in (stranger, second.fleet.members[0].worker.protocol):
                    peer_id = await host.connect(workers[0].address)
                    for msg_type, payload in (
                        (MessageType.SESSION_QUERY, SessionQuery(victim)),
                        (
                            MessageType.SESSION_OPEN,
                            SessionOpen(victim ^ 1, 0, 6, 128, prior=victim, prior_length=1),
                        ),
                        (MessageType.SESSION_CLOSE, SessionClose(victim)),
                    ):
                        outcomes.append(await outcome_of(protocol, peer_id, msg_type, payload))
                assert await generate(second, PROMPTS[0]) == models[1][1][0]

        async with open_coordinator(settings(models[0], workers)) as first:
            assert await generate(first, PROMPTS[0], meddle) == models[0][1][0]
            unknown = ErrorCode.SESSION_UNKNOWN
            assert outcomes == [
                *(unknown, ErrorCode.CONFIG_REQUIRED, None),
                *(unknown, unknown, None),
            ]
            assert await generate(first, PROMPTS[1]) == models[0][1][1]

    with some_workers(tmp_path, 1) as workers:
        run(main)


def test_a_third_that_does_not_fit_is_told_why(models: list[Model], tmp_path: Path) -> None:
    async def main() -> None:
        async with open_coordinator(settings(models[0], workers, **LARGE)) as first:

            def third() -> tuple[int, str]:
                with start_coordinator(
                    *("--peer", workers[0].address, "--local-layers", "none"),
                    *("--max-sessions", "24", "--max-seq-len", "512"),  # 31 MB
                ) as process:
                    status, _ = process.wait_end()
                    return status, "".join(process.lines)

            status, said = await trio.to_thread.run_sync(third)
            assert status != 0
            assert "other coordinators or programs have" in said
            assert await generate(first, PROMPTS[0]) == models[0][1][0]

    with some_workers(tmp_path, 1, "--memory-limit", ONE_MODEL) as workers:
        run(main)


def test_two_that_plan_at_the_same_moment_plan_anew(models: list[Model], tmp_path: Path) -> None:
    """Both are told that all is free, and both want the first worker: one of them takes the other one."""

    async def main() -> None:
        opened: list[Coordinator] = []
        done = trio.Event()

        async def serve(model: Model) -> None:
            wanted = settings(model, workers, **LARGE)
            async with open_coordinator(
                CoordinatorSettings(
                    **{**vars(wanted), "stages": None, "with_replicas": False, "min_peers": 2}
                )
            ) as coordinator:
                opened.append(coordinator)
                assert await generate(coordinator, PROMPTS[1]) == model[1][1]
                await done.wait()

        async with trio.open_nursery() as nursery:
            for model in models:
                nursery.start_soon(serve, model)
            while len(opened) < 2:
                await trio.sleep(0.05)
            peers = [{stage.peer_id for stage in one.stages} for one in opened]
            assert not peers[0] & peers[1]
            done.set()

    with some_workers(tmp_path, 2, "--memory-limit", ONE_MODEL) as workers:
        run(main)


def test_an_idle_one_gives_way_and_comes_back_from_disk(
    models: list[Model], tmp_path: Path
) -> None:
    async def main() -> None:
        async with open_coordinator(settings(models[0], workers, **LARGE)) as first:
            assert await generate(first, PROMPTS[0]) == models[0][1][0]
            sent = weight_bytes(first)
            assert sent
            second = None
            async with AsyncExitStack() as stack:
                while second is None:  # until the first has been idle for long enough
                    with suppress(CapacityError, NoRouteError):
                        second = await stack.enter_async_context(
                            open_coordinator(settings(models[1], workers, **LARGE))
                        )
                assert await generate(second, PROMPTS[0]) == models[1][1][0]
                sent_by_second = weight_bytes(second)
                # In turns, each as soon as the other one has been idle for long enough.
                for _ in range(2):
                    for coordinator, (_, expected) in ((first, models[0]), (second, models[1])):
                        assert await generate(coordinator, PROMPTS[1]) == expected[1]
                assert (weight_bytes(first), weight_bytes(second)) == (sent, sent_by_second)

    args = ("--memory-limit", ONE_MODEL, "--idle-after", "1s", "--cache-dir", str(tmp_path / "c"))
    with some_workers(tmp_path, 1, *args) as workers:
        run(main)
        assert workers[0].log.count("its memory goes to") >= 4


def test_a_second_coordinator_of_a_cluster_has_a_key_of_its_own(tmp_path: Path) -> None:
    """In a copy of the cluster's directory, which has none: another peer, which the same workers admit."""
    cluster, member, copy = (tmp_path / name for name in ("cluster", "member", "copy"))
    with start_coordinator("--new-cluster", str(cluster), "--min-peers", "1") as coordinator:
        (tmp_path / "ticket").write_text(ticket_of(coordinator))
        join = ("--join", f"@{tmp_path / 'ticket'}", "--cluster", str(member))
        with start_worker(tmp_path, *LOOPBACK, *join):
            status, text = coordinator.wait_end()
            assert status == 0, coordinator.lines
    run_command([*COORDINATOR, "--cluster", str(cluster), "--copy-to", str(copy)], check=True)
    with (
        start_worker(tmp_path, *LOOPBACK, "--cluster", str(member)) as worker,
        start_server(tmp_path, "--cluster", str(cluster), "--peer", worker.address) as first,
    ):
        first.wait_status(lambda status: status["phase"] == "ready")
        with start_coordinator("--cluster", str(copy), "--peer", worker.address) as second:
            assert second.wait_end() == (0, text), second.lines
        assert first.status()["phase"] == "ready"
        assert worker.log.count("serves embedded") == 2
