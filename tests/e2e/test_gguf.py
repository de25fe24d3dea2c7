"""A model in GGUF, from its file to tokens: over workers, from their own files, and by the commands."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from neurogrid import CoordinatorSettings
from neurogrid.model.files.checkpoint import Checkpoint
from tests.e2e.commands import expect_at_once, run_preloaded
from tests.e2e.support import reference_tokens, run_coordinator, start_worker
from tests.gguf_models import File, make_gguf

PROMPT = [5, 17, 200, 33]
# As Q4_K_M has them, which is what most people fetch.
TYPES = ("Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q5_K")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, File]:
    """A Llama in a file; the same in transformers, and what was written."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.Q4_K_M.gguf"
    model, file = make_gguf("llama", TYPES, ends="Q6_K")
    file.save(path)
    return path, model, file


def settings(path: Path, **more: Any) -> CoordinatorSettings:
    return CoordinatorSettings(model=path, max_seq_len=128, **more)


def test_workers_write_what_one_machine_writes_with_the_same_weights(
    saved: tuple[Path, Any, File], tmp_path: Path
) -> None:
    path, model, _ = saved
    expected = reference_tokens(model, PROMPT, 12)
    with ExitStack() as stack:
        workers = [stack.enter_context(start_worker(tmp_path)) for _ in range(2)]
        peers = tuple(worker.address for worker in workers)
        outcome = run_coordinator(settings(path, peers=peers, stages=2), [PROMPT])
    assert outcome.tokens == [expected]
    sent = sum(by_type.get("weights", 0) for by_type in outcome.sent.values())
    checkpoint = Checkpoint.open(path)
    dense = sum(p.nbytes for p in model.model.layers.parameters())
    assert sent < 0.35 * dense
    # Loaded before anybody asks.
    with start_worker(tmp_path, "--model", str(path)) as worker:
        outcome = run_coordinator(
            settings(path, peers=(worker.address,), skip_weight_transfer=True), [PROMPT]
        )
        assert outcome.sent[worker.peer_id].get("weights", 0) == 0
    assert outcome.tokens == [expected]
    assert checkpoint.num_layers == 3


def test_experts_are_served_over_workers(tmp_path: Path) -> None:
    model, file = make_gguf("qwen3moe", ("Q4_K", "Q6_K", "Q8_0"), ends="Q8_0")
    path = file.save(tmp_path / "moe.gguf")
    with start_worker(tmp_path) as worker:
        outcome = run_coordinator(settings(path, peers=(worker.address,)), [PROMPT])
    assert outcome.tokens == [reference_tokens(model, PROMPT, 12)]


def test_the_commands_take_a_file(saved: tuple[Path, Any, File]) -> None:
    path, model, _ = saved
    tokenizer = Checkpoint.open(path).open_tokenizer()
    ids = tokenizer.encode("the cat")
    ended = run_preloaded("main", "run", str(path), "the cat", "--max-tokens", "8")
    assert ended.status == 0, ended.stderr
    written = tokenizer.decode(reference_tokens(model, ids, 8))
    assert written.strip() in ended.stdout
    ended = run_preloaded("coordinator", "--plan-only", "--local-layers", "3", "--model", str(path))
    assert ended.status == 0, ended.stderr
    row = next(line for line in ended.stdout.splitlines() if line.startswith("1 "))
    # 6 to 10 bits a weight, and not 32: what the three layers take as they are held.
    dense = sum(p.nbytes for p in model.model.layers.parameters())
    weights = float(row.split(" MB")[0].split()[-1]) * 1e6
    assert 0.18 * dense < weights < 0.3 * dense


def test_what_is_not_read_ends_a_command_with_one_sentence(
    saved: tuple[Path, Any, File], tmp_path: Path
) -> None:
    path, _, file = saved
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:-5000])
    other = File({**file.values, "general.architecture": "rwkv7"}, file.tensors)
    other.save(tmp_path / "other.gguf")
    for name, says in (
        ("cut.gguf", r"cut\.gguf: truncated .* fetch the file again"),
        ("other.gguf", r"other\.gguf: GGUF of the architecture 'rwkv7'; read are llama, qwen2"),
    ):
        for command in (("coordinator", "--http-port", "0"), ("worker",)):
            ended = run_preloaded(*command, "--model", str(tmp_path / name))
            expect_at_once(ended, status=1, says=says)
    ended = run_preloaded(
        *("coordinator", "--http-port", "0", "--model", str(path), "--quantize", "int8"),
        *("--local-layers", "3"),
        *("--prompt", "x"),
    )
    assert ended.status == 2
    assert "quantised already (GGUF: Q4_K, Q5_K, Q6_K): leave out --quantize" in ended.stderr
