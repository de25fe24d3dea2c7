"""Adapters beside a model on real workers: the tokens that PEFT's own model gives, several adapters in one batch, and a
worker that dies."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import trio
from transformers import AutoModelForCausalLM, AutoTokenizer

from neurogrid import Coordinator, CoordinatorSettings, SamplingParams, open_coordinator
from neurogrid.errors import UnsupportedModelError
from neurogrid.inference.generation.sampling import Sampler
from neurogrid.model.embedded import embedded_model_path
from neurogrid.p2p.exchange.counters import Direction
from neurogrid.p2p.wire import MessageType
from tests.adapters import add_adapter, peft_tokens, save_adapters
from tests.e2e.server_process import start_server
from tests.e2e.support import DEADLINE, WorkerProcess, start_worker
from tests.families import FAMILIES, save_checkpoint

MAX_TOKENS = 16
PROMPTS = [[3, 17, 200, 33, 41, 5, 9, 120, 77], [8, 91], list(range(40, 64))]
FAMILY = {family.name: family for family in FAMILIES}
# Where experts are parameters of three dimensions, PEFT takes all linear layers to be those, too.
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
NAMES = ("one", "other", None)


@dataclass
class Adapted:
    """A model with two adapters.

    Attributes:
        peft: PEFT's model.
        places: directories of the adapters, by name.
    """

    path: Path
    peft: Any
    places: dict[str, Path]

    def settings(self, workers: Sequence[WorkerProcess], **more: Any) -> CoordinatorSettings:
        return CoordinatorSettings(
            model=self.path,
            peers=tuple(worker.address for worker in workers),
            stages=2,
            **{"max_seq_len": 128, "max_sessions": 6, "adapters": self.places, **more},
        )


def adapted(
    family: str, directory: Path, *, dtype: torch.dtype = torch.float32, **config: Any
) -> Adapted:
    path = directory / "base"
    model = save_checkpoint(FAMILY[family], path, dtype=dtype)
    for seed, name in enumerate(("one", "other")):
        model = add_adapter(model, name, seed=seed, r=4 + seed, **config)
    return Adapted(path, model, save_adapters(model, directory))


async def at_once(
    coordinator: Coordinator,
    asked: Sequence[tuple[str | None, Sequence[int]]],
    sampling: SamplingParams | None = None,
) -> list[list[int]]:
    """The tokens of several generations at the same time: adapter and prompt of each."""
    tokens: list[list[int]] = [[] for _ in asked]

    async def generate(i: int) -> None:
        name, prompt = asked[i]
        async for token in coordinator.generate(
            prompt, max_tokens=MAX_TOKENS, adapter=name, sampling=sampling
        ):
            tokens[i].append(token)

    async with trio.open_nursery() as nursery:
        for i in range(len(asked)):
            nursery.start_soon(generate, i)
    return tokens


def weight_bytes(coordinator: Coordinator) -> int:
    return coordinator.counters.total(Direction.SENT, msg_type=MessageType.WEIGHTS).num_bytes


@pytest.mark.parametrize(
    ("family", "routing"),
    [
        ("llama-tied", "chain"),
        ("llama-untied-sharded", "star"),
        ("qwen3", "chain"),
        ("gemma3", "chain"),
        ("mixtral", "chain"),
        ("phi3", "chain"),
    ],
)
def test_each_of_a_batch_is_what_peft_gives(
    workers: list[WorkerProcess], tmp_path: Path, family: str, routing: str
) -> None:
    config = {"target_modules": ATTENTION} if family == "mixtral" else {}
    made = adapted(family, tmp_path, **config)
    asked = [(name, prompt) for prompt in PROMPTS for name in NAMES]
    expected = [peft_tokens(made.peft, name, prompt, MAX_TOKENS) for name, prompt in asked]
    assert len({tuple(tokens) for tokens in expected[:3]}) == 3

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            chosen = made.settings(workers[:2], routing=routing)
            async with open_coordinator(chosen) as coordinator:
                base = weight_bytes(coordinator)
                assert await at_once(coordinator, asked) == expected
                came = weight_bytes(coordinator)
                # Each part once, and of the layers nothing.
                parts = sum(each.source.num_bytes for each in coordinator.adapters)
                assert base < came <= base + 1.1 * parts + 100_000
                # What was said before, by whom it was said: nobody goes on from another's.
                assert await at_once(coordinator, asked) == expected
                assert weight_bytes(coordinator) == came

    trio.run(main)


def test_sampled_by_seed(workers: list[WorkerProcess], tmp_path: Path) -> None:
    made = adapted("llama-tied", tmp_path)
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=5)

    def sampled(name: str | None, prompt: Sequence[int]) -> list[int]:
        sampler, tokens = Sampler(sampling, prompt=prompt), list(prompt)
        for _ in range(MAX_TOKENS):
            with torch.inference_mode():
                if name is None:
                    with made.peft.disable_adapter():
                        logits = made.peft(torch.tensor([tokens])).logits[0, -1]
                else:
                    made.peft.set_adapter(name)
                    logits = made.peft(torch.tensor([tokens])).logits[0, -1]
            tokens.append(sampler.sample(logits))
        return tokens[len(prompt) :]

    asked = [(name, prompt) for prompt in PROMPTS for name in NAMES]
    expected = [sampled(name, prompt) for name, prompt in asked]

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with open_coordinator(made.settings(workers[:2])) as coordinator:
                assert await at_once(coordinator, asked, sampling) == expected

    trio.run(main)


def test_patterns_of_ranks_and_the_root_of_the_rank(
    workers: list[WorkerProcess], tmp_path: Path
) -> None:
    made = adapted(
        "qwen2",
        tmp_path,
        target_modules=[*ATTENTION, "up_proj", "down_proj"],
        use_rslora=True,
        rank_pattern={"q_proj": 7, r"layers\.1\.mlp\.up_proj": 3},
        alpha_pattern={"down_proj": 20},
        layers_to_transform=[0, 1, 4],
    )
    asked = [(name, PROMPTS[0]) for name in NAMES]
    expected = [peft_tokens(made.peft, name, prompt, MAX_TOKENS) for name, prompt in asked]

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with open_coordinator(made.settings(workers[:2])) as coordinator:
                assert await at_once(coordinator, asked) == expected

    trio.run(main)


def test_another_coordinator_finds_the_layers_there(
    workers: list[WorkerProcess], tmp_path: Path
) -> None:
    made = adapted("llama-tied", tmp_path)
    asked = [("one", PROMPTS[0])]
    expected = [peft_tokens(made.peft, "one", PROMPTS[0], MAX_TOKENS)]

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            without = made.settings(workers[:2], adapters={})
            async with open_coordinator(without) as coordinator:
                assert weight_bytes(coordinator)
            async with open_coordinator(made.settings(workers[:2])) as coordinator:
                assert not weight_bytes(coordinator)
                assert await at_once(coordinator, asked) == expected

    trio.run(main)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_worker_that_dies_in_mid_answer(tmp_path: Path, dtype: str) -> None:
    """The spare has neither layers nor adapter: both come, and the text goes on as it was."""
    made = adapted("llama-tied", tmp_path)

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            chosen = made.settings(workers, dtype=dtype, with_replicas=False)
            async with open_coordinator(chosen) as coordinator:
                asked = [(name, PROMPTS[0]) for name in NAMES]
                expected = await at_once(coordinator, asked)
                if dtype == "float32":
                    assert expected == [
                        peft_tokens(made.peft, name, prompt, MAX_TOKENS) for name, prompt in asked
                    ]
                tokens: list[list[int]] = [[] for _ in asked]
                is_dead = False

                async def generate(i: int) -> None:
                    nonlocal is_dead
                    name, prompt = asked[i]
                    async for token in coordinator.generate(
                        prompt, max_tokens=MAX_TOKENS, adapter=name
                    ):
                        tokens[i].append(token)
                        await trio.sleep(0.05)
                        if len(tokens[i]) == 5 and not is_dead:
                            is_dead = True
                            last = coordinator.stages[-1].peer_id
                            next(each for each in workers if each.peer_id == last).kill()

                async with trio.open_nursery() as nursery:
                    for i in range(len(asked)):
                        nursery.start_soon(generate, i)
                assert is_dead
                assert tokens == expected

    with ExitStack() as stack:
        workers = [stack.enter_context(start_worker(tmp_path)) for _ in range(3)]
        trio.run(main)


def test_an_adapter_of_another_model_is_refused_before_anybody_is_waited_for(
    tmp_path: Path,
) -> None:
    made = adapted("qwen2", tmp_path / "qwen2")
    save_checkpoint(FAMILY["phi3"], tmp_path / "phi3")
    chosen = CoordinatorSettings(model=tmp_path / "phi3", adapters=made.places, local_workers=1)

    async def main() -> None:
        async with open_coordinator(chosen):
            pass

    with pytest.raises(UnsupportedModelError, match="no linear layer of this model"):
        trio.run(main)


def test_on_layers_of_the_coordinator_itself(tmp_path: Path) -> None:
    made = adapted("llama-tied", tmp_path)
    asked = [(name, prompt) for prompt in PROMPTS for name in NAMES]
    expected = [peft_tokens(made.peft, name, prompt, MAX_TOKENS) for name, prompt in asked]
    chosen = CoordinatorSettings(
        model=made.path, adapters=made.places, min_peers=0, max_seq_len=128, max_sessions=4
    )

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with open_coordinator(chosen) as coordinator:
                assert await at_once(coordinator, asked) == expected

    trio.run(main)


def test_over_http_by_name_and_one_more_while_it_runs_and_at_the_next_start(
    workers: list[WorkerProcess], tmp_path: Path
) -> None:
    """With OpenAI's client; the model that comes along has a tokenizer."""
    path = embedded_model_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for seed, name in enumerate(("one", "other", "late")):
        model = add_adapter(model, name, seed=seed, r=4)
    root = tmp_path / "root"
    root.mkdir()
    places = save_adapters(model, root)
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompt = "A function definition"

    def expected(name: str | None) -> str:
        ids = tokenizer(prompt)["input_ids"]
        tokens = peft_tokens(model, name, ids, MAX_TOKENS)
        return str(tokenizer.decode([*ids, *tokens])[len(tokenizer.decode(ids)) :])

    key = "a key of sixteen characters"
    (tmp_path / "keys").touch(mode=0o600)
    (tmp_path / "keys").write_text(f"{key.replace(' ', '-')}\n")
    named = [f"--adapter=renamed={places['one']}", f"--adapter={places['other']}"]
    peers = [f"--peer={worker.address}" for worker in workers[:2]]
    more = ["--api-key-file", str(tmp_path / "keys"), "--adapter-root", str(root)]
    more += [
        "--dtype=float32",
        "--max-seq-len=256",
        "--identity",
        str(tmp_path / "coordinator.key"),
    ]
    headers = {"Authorization": f"Bearer {key.replace(' ', '-')}"}
    shutil.copytree(root / "late", root / "changed")

    def text(name: str) -> str:
        answer = client.completions.create(
            model=name, prompt=prompt, max_tokens=MAX_TOKENS, temperature=0
        )
        assert answer.model == name
        return answer.choices[0].text

    with (
        start_server(tmp_path, *named, *peers, *more) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=key.replace(" ", "-")) as client,
    ):
        listed = {each.id: getattr(each, "parent", 0) for each in client.models.list()}
        assert listed == {"embedded": None, "renamed": "embedded", "other": "embedded"}
        assert text("embedded") == expected(None)
        assert text("renamed") == expected("one")
        with pytest.raises(openai.NotFoundError, match="'late' is not served here"):
            text("late")
        streaming = client.completions.create(
            model="other", prompt=prompt, max_tokens=MAX_TOKENS, temperature=0, stream=True
        )
        pieces = [next(streaming).choices[0].text]
        for name, body in (
            ("late", {"name": "late", "path": "late"}),
            ("changed", {"name": "changed", "path": "changed"}),
            ("other", None),
        ):
            if body is not None:
                answer = httpx.post(
                    f"{server.url}/v1/adapters", json=body, headers=headers, timeout=DEADLINE
                )
            else:
                answer = httpx.delete(
                    f"{server.url}/v1/adapters/{name}", headers=headers, timeout=DEADLINE
                )
            assert answer.status_code == 200, answer.text
        assert text("late") == expected("late")
        pieces += [event.choices[0].text for event in streaming]
        assert "".join(pieces) == expected("other")
        with pytest.raises(openai.NotFoundError):
            text("other")

    # The same coordinator again, in whose folder another adapter lies by now.
    shutil.copytree(places["one"], root / "changed", dirs_exist_ok=True)
    with start_server(tmp_path, *named, *peers, *more) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key.replace(" ", "-")) as client:
            assert {each.id for each in client.models.list()} == {
                *("embedded", "renamed", "other", "late")
            }
            assert text("late") == expected("late")
        said = [line for line in server.log_file.read_text().splitlines() if "changed" in line]
        assert len(said) == 1
        assert "is not what was added: add it again" in said[0]
