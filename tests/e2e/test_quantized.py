"""`--quantize` from the files of a model to its tokens: over workers, from their disks, and while one dies."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trio
from safetensors.torch import load_file, save_file

from neurogrid import CoordinatorSettings, open_coordinator
from neurogrid.inference.generation.coordinator import Coordinator
from tests.e2e.preloaded import COORDINATOR, WORKER, run
from tests.e2e.support import (
    DEADLINE,
    generate,
    reference_tokens,
    run_coordinator,
    start_worker,
)
from tests.families import FAMILIES, save_checkpoint
from tests.foreign_checkpoints import save_foreign, save_mxfp4
from tests.mixtures import save_mixture

PROMPT = [5, 17, 200, 33]
BITS = {"int8": 8.5, "int4": 4.5}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_checkpoint(
        next(family for family in FAMILIES if family.name == "llama-untied-sharded"), path
    )
    return path


def settings(path: Path, **more: Any) -> CoordinatorSettings:
    return CoordinatorSettings(model=path, max_seq_len=512, **more)


@pytest.mark.parametrize(
    ("name", "method"),
    [("llama-untied-sharded", "int8"), ("llama-untied-sharded", "int4"), ("mixtral", "int4")],
)
def test_workers_get_codes_and_the_tokens_are_those_of_one_machine(
    tmp_path: Path, name: str, method: str
) -> None:
    model = tmp_path / "model"
    save_checkpoint(next(family for family in FAMILIES if family.name == name), model)
    alone = run_coordinator(settings(model, local_layers=6, quantize=method), [PROMPT])
    with ExitStack() as stack:
        workers = [stack.enter_context(start_worker(tmp_path)) for _ in range(2)]
        peers = tuple(worker.address for worker in workers)
        plain = run_coordinator(settings(model, peers=peers, stages=2), [PROMPT])
        first = run_coordinator(settings(model, peers=peers, stages=2, quantize=method), [PROMPT])
        again = run_coordinator(settings(model, peers=peers, stages=2, quantize=method), [PROMPT])
    assert first.tokens == again.tokens == alone.tokens

    def sent(outcome: Any) -> int:
        return sum(by_type.get("weights", 0) for by_type in outcome.sent.values())

    # Of float32; norms and headers beside it.
    assert sent(first) < 1.15 * BITS[method] / 32 * sent(plain)
    assert sent(again) == 0


@pytest.mark.parametrize("name", ["gptq", "bitsandbytes nf4", "mxfp4"])
def test_a_checkpoint_that_is_quantised_is_served_over_workers_and_from_their_files(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "model"
    is_mixture = name == "mxfp4"
    dense = (
        save_mxfp4(path, save_mixture("gpt-oss", path)) if is_mixture else save_foreign(name, path)
    )
    expected = reference_tokens(dense, PROMPT, 12)
    wanted = {"dtype": "float32"}
    with ExitStack() as stack:
        workers = [stack.enter_context(start_worker(tmp_path)) for _ in range(2)]
        peers = tuple(worker.address for worker in workers)
        outcome = run_coordinator(settings(path, peers=peers, stages=2, **wanted), [PROMPT])
    assert outcome.tokens == [expected]
    # Loaded before anybody asks, in float32 as its coordinator will want it.
    with start_worker(tmp_path, "--model", str(path)) as worker:
        outcome = run_coordinator(
            settings(path, peers=(worker.address,), skip_weight_transfer=True), [PROMPT]
        )
        assert outcome.sent[worker.peer_id].get("weights", 0) == 0
    assert outcome.tokens == [expected]


def test_what_was_sent_is_kept_on_disk_in_each_form(llama: Path, tmp_path: Path) -> None:
    sent = []
    for quantize in (None, "int4", "int4", None):
        with start_worker(tmp_path, "--cache-dir", str(tmp_path / "cache")) as worker:
            outcome = run_coordinator(
                settings(llama, peers=(worker.address,), quantize=quantize), [PROMPT]
            )
            sent.append(outcome.sent[worker.peer_id].get("weights", 0))
    assert sent[0] > sent[1] > 0
    assert sent[2:] == [0, 0]


def test_a_worker_with_the_files_makes_the_same_codes_of_them(llama: Path, tmp_path: Path) -> None:
    alone = run_coordinator(settings(llama, local_layers=6, quantize="int4"), [PROMPT])
    for skips in (False, True):
        with start_worker(tmp_path, "--model", str(llama), "--wait-for-assignment") as worker:
            outcome = run_coordinator(
                settings(
                    llama, peers=(worker.address,), quantize="int4", skip_weight_transfer=skips
                ),
                [PROMPT],
            )
        assert outcome.sent[worker.peer_id].get("weights", 0) == 0
        assert outcome.tokens == alone.tokens


def test_a_worker_that_dies_is_replaced_and_the_tokens_stay(tmp_path: Path) -> None:
    """In bfloat16 too: rows get the bits that they get alone, so one prefill rebuilds what was lost."""

    async def disturbed(coordinator: Coordinator, victim: Any) -> list[int]:
        tokens: list[int] = []
        prompt = coordinator.model.tokenizer.encode("A function definition")
        async for token in coordinator.generate(prompt, max_tokens=30):
            tokens.append(token)
            await trio.sleep(0.03)
            if len(tokens) == 10 and victim is not None:
                victim.kill()
        return tokens

    async def main() -> None:
        wanted = CoordinatorSettings(
            peers=tuple(worker.address for worker in workers),
            stages=2,
            dtype="bfloat16",
            quantize="int8",
            max_seq_len=256,
        )
        with trio.fail_after(DEADLINE):
            async with open_coordinator(wanted) as coordinator:
                expected = await disturbed(coordinator, None)
                by_peer = {worker.peer_id: worker for worker in workers}
                victim = by_peer[coordinator.stages[1].peer_id]
                assert await disturbed(coordinator, victim) == expected

    with ExitStack() as stack:
        workers = [stack.enter_context(start_worker(tmp_path)) for _ in range(3)]
        trio.run(main)


def test_sessions_at_once_get_what_they_get_alone(llama: Path, tmp_path: Path) -> None:
    prompts = [[5 + i, 17, 200, 33][: 2 + i % 3] for i in range(6)]

    async def main(address: str) -> None:
        wanted = settings(llama, peers=(address,), quantize="int8", max_sessions=6)
        with trio.fail_after(DEADLINE):
            async with open_coordinator(wanted) as coordinator:
                alone = (await generate(coordinator, prompts, 12)).tokens
                together: dict[int, list[int]] = {}

                async def one(i: int) -> None:
                    together[i] = (await generate(coordinator, [prompts[i]], 12)).tokens[0]

                async with trio.open_nursery() as nursery:
                    for i in range(len(prompts)):
                        nursery.start_soon(one, i)
                assert [together[i] for i in range(len(prompts))] == alone

    with start_worker(tmp_path) as worker:
        trio.run(main, worker.address)


def test_a_worker_with_half_of_a_quantised_model_gets_the_other_half(tmp_path: Path) -> None:
    path, half = tmp_path / "model", tmp_path / "half"
    dense = save_foreign("awq", path)
    shutil.copytree(path, half)
    tensors = load_file(path / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if ".layers.1." not in name}
    save_file(kept, half / "model.safetensors")
    with start_worker(tmp_path, "--model", str(half)) as worker:
        outcome = run_coordinator(
            settings(path, peers=(worker.address,), dtype="float32"), [PROMPT]
        )
        other = run_coordinator(settings(path, peers=(worker.address,), dtype="float32"), [PROMPT])
    assert outcome.sent[worker.peer_id].get("weights", 0) > 0
    assert other.sent[worker.peer_id].get("weights", 0) == 0
    assert outcome.tokens == other.tokens == [reference_tokens(dense, PROMPT, 12)]


def test_a_level_that_is_not_there_ends_a_worker_with_one_sentence() -> None:
    result = run([*WORKER, "--port", "0"], env={**os.environ, "NEUROGRID_KERNELS": "avx1024"})
    assert result.returncode == 2
    assert "NEUROGRID_KERNELS is 'avx1024'" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_plan_shows_what_each_form_takes() -> None:
    weights = {}
    for method in ("", "int8", "int4"):
        form = ["--quantize", method] if method else []
        result = run([*COORDINATOR, "--plan-only", "--local-layers", "8", *form])
        assert result.returncode == 0, result.stderr
        row = next(line for line in result.stdout.splitlines() if line.startswith("1 "))
        weights[method] = float(row.split(" MB")[0].split()[-1])
    assert weights[""] > 1.7 * weights["int8"] > 1.7 * 1.7 * weights["int4"]


def test_a_method_that_is_not_known_is_refused_before_anything_else() -> None:
    result = run([*COORDINATOR, "--quantize", "int2", "--prompt", "x"])
    assert result.returncode == 2
    assert "int8" in result.stderr
