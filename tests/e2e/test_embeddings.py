"""Embeddings over two workers are transformers' own hidden states, pooled; what else reads a whole prompt; a kill."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from transformers import AutoModel, AutoModelForCausalLM, Qwen3Config, Qwen3Model

from neurogrid import CoordinatorSettings, open_coordinator
from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.inference.generation.ends_queue import EndsQueue
from neurogrid.inference.generation.prompt_readers import PromptLogprobs
from neurogrid.model.embedded import embedded_model_path
from neurogrid.model.files.pooling import Pooling, PoolingMode
from tests.e2e.support import DEADLINE, WorkerProcess, start_worker

# So long that it goes through the stages in several pieces.
LONG = 400


def ids(number: int, vocab_size: int = 4096) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(2, vocab_size, (number,), generator=generator).tolist()


def settings(workers: Sequence[WorkerProcess], **more: object) -> CoordinatorSettings:
    return CoordinatorSettings(
        peers=tuple(worker.address for worker in workers),
        **{"stages": 2, "dtype": "float32", "max_seq_len": 512, **more},  # type: ignore[arg-type]
    )


def over(
    workers: Sequence[WorkerProcess],
    test: Callable[[Coordinator], Awaitable[None]],
    **more: object,
) -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with open_coordinator(settings(workers, **more)) as coordinator:
                await test(coordinator)

    trio.run(main)


def hidden_states(path: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """[T, D], as transformers returns them."""
    model = AutoModel.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    with torch.inference_mode():
        return model(torch.tensor([list(token_ids)])).last_hidden_state[0]


def save_embedder(folder: Path, **pooling: object) -> Path:
    """A model as makers of embeddings publish it: without a head, with modules of sentence-transformers."""
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3Model(config).save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text())
    described["architectures"] = ["Qwen3ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(described))
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": index, "path": f"{index}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def is_close(mine: Sequence[float], its: torch.Tensor) -> bool:
    return torch.allclose(torch.tensor(mine), its.float(), atol=2e-5, rtol=1e-4)


def test_a_model_that_is_made_for_it(workers: list[WorkerProcess], tmp_path: Path) -> None:
    path = save_embedder(tmp_path / "m", pooling_mode_mean_tokens=True, include_prompt=True)

    async def test(coordinator: Coordinator) -> None:
        assert coordinator.model.pooling == Pooling(PoolingMode.MEAN, normalises=True)
        for length in (1, 7, LONG):
            token_ids = ids(length, 512)
            mean_D = hidden_states(path, token_ids).mean(0)
            expected_D = torch.nn.functional.normalize(mean_D, dim=0)
            embedding = await coordinator.embed(token_ids)
            assert is_close(embedding, expected_D)
            shorter = await coordinator.embed(token_ids, dimensions=16)
            assert is_close(shorter, torch.nn.functional.normalize(mean_D[:16], dim=0))

    over(workers, test, model=path)


def test_whatever_reads_a_prompt_leaves_nothing_behind(
    workers: list[WorkerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it wrong after others have begun with the same tokens, or where logits are held for five at a time."""
    path, token_ids = embedded_model_path(), ids(LONG)
    monkeypatch.setattr("neurogrid.inference.generation.prompt_readers.MAX_LOGITS", 5 * 4096)

    async def test(coordinator: Coordinator) -> None:
        async for _ in coordinator.generate(token_ids, max_tokens=2):
            pass  # its session is kept
        last_D = hidden_states(path, token_ids)[-1]
        expected_D = torch.nn.functional.normalize(last_D, dim=0)
        in_use = coordinator.cache_bytes[0]
        assert is_close(await coordinator.embed(token_ids), expected_D)
        reader = PromptLogprobs(token_ids, num_top=2, vocab_size=4096)
        await coordinator.read_prompt(token_ids, reader)
        assert coordinator.cache_bytes[0] <= in_use
        check_logprobs(path, token_ids, reader)

    over(workers, test)


def check_logprobs(path: Path, token_ids: list[int], reader: PromptLogprobs) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    with torch.inference_mode():
        expected_TV = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    first, *rest = reader.logprobs()
    assert first is None
    assert len(rest) == len(token_ids) - 1
    for place, (told, token_id) in enumerate(zip(rest, token_ids[1:], strict=True)):
        assert told is not None
        assert math.isclose(told.chosen, expected_TV[place, token_id], abs_tol=2e-4)
        assert told.top[0][1] >= told.top[1][1] > -20
        assert math.isclose(told.top[0][1], expected_TV[place].max(), abs_tol=2e-4)


def test_a_worker_dies_while_a_prompt_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, token_ids = embedded_model_path(), ids(LONG)
    embed = EndsQueue.embed

    async def embed_in_time(queue: EndsQueue, *given: Any, position: int, **more: Any) -> Any:
        """Only the first piece before the worker is killed: it could have computed all of them by then."""
        while position and victims:
            await trio.sleep(0.01)
        return await embed(queue, *given, position=position, **more)

    monkeypatch.setattr(EndsQueue, "embed", embed_in_time)

    class Killing(PromptLogprobs):
        """Kills the worker of the first stage when it is shown something for the first time."""

        num_started = 0

        def restart(self) -> None:
            self.num_started += 1
            super().restart()

        def read(self, ends: object, hidden_BTD: torch.Tensor, position: int) -> None:
            if self.num_started == 1 and victims:
                victims.pop().kill()
            super().read(ends, hidden_BTD, position)  # type: ignore[arg-type]

    async def test(coordinator: Coordinator) -> None:
        first = coordinator.stages[0].peer_id
        victims.extend(worker for worker in workers if worker.peer_id == first)
        reader = Killing(token_ids, num_top=2, vocab_size=4096)
        await coordinator.read_prompt(token_ids, reader)
        assert reader.num_started >= 2
        check_logprobs(path, token_ids, reader)
        last_D = hidden_states(path, token_ids)[-1]
        expected_D = torch.nn.functional.normalize(last_D, dim=0)
        assert is_close(await coordinator.embed(token_ids), expected_D)

    victims: list[WorkerProcess] = []
    with ExitStack() as stack:
        workers = [stack.enter_context(start_worker(tmp_path)) for _ in range(3)]
        over(workers, test)
