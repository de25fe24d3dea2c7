"""Two models behind one port, on real workers and on this machine: each answers as it does alone, whatever the other
does; models come, go, give way and come back."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaForCausalLM

from neurogrid.model.embedded import embedded_model_path
from tests.adapters import add_adapter, peft_tokens, save_adapters
from tests.e2e.coordinator_process import LOOPBACK
from tests.e2e.preloaded import COORDINATOR, run
from tests.e2e.server_process import ServerProcess, start_server
from tests.e2e.support import DEADLINE, WorkerProcess, reference_tokens, start_worker

KEY = "a-key-of-sixteen-characters"
MAX_TOKENS = 16
PROMPTS = (
    "A function definition",
    "The import statement",
    "A class",
    "Exceptions are a means of",
    "The return statement",
    "Python is",
    "A list",
    "An object",
)
# Of a worker: either model takes 13.3 MB with one session.
WORKER_BYTES = "20MiB"
# In half precision a sum depends on what else is summed in the same call.
SMALL = ("--dtype", "float32", "--max-seq-len", "128", "--max-sessions", "2")


@dataclass
class Two:
    """Two models of one kind that say different things.

    Attributes:
        places: their directories, by name.
        texts: what each continues a prompt with, alone, by name and prompt.
    """

    root: Path
    places: dict[str, Path]
    texts: dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    root = tmp_path_factory.mktemp("models")
    places = {name: root / name for name in ("one", "other")}
    for seed, place in enumerate(places.values()):
        shutil.copytree(embedded_model_path(), place, ignore=shutil.ignore_patterns("*.py", "*.md"))
        if seed:
            weights = load_file(place / "model.safetensors")
            torch.manual_seed(seed)
            for name, tensor in weights.items():
                if "mlp" in name:
                    weights[name] = tensor + 0.8 * tensor.float().std().to(tensor.dtype) * (
                        torch.randn(tensor.shape).to(tensor.dtype)
                    )
            save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    texts: dict[str, dict[str, str]] = {}
    for name, place in places.items():
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True)
        model = LlamaForCausalLM.from_pretrained(place, dtype=torch.float32, local_files_only=True)
        texts[name] = {
            prompt: tokenizer.decode(
                reference_tokens(model, tokenizer(prompt)["input_ids"], MAX_TOKENS),
                skip_special_tokens=True,
            )
            for prompt in PROMPTS
        }
    assert all(texts["one"][prompt] != texts["other"][prompt] for prompt in PROMPTS)
    return Two(root, places, texts)


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=DEADLINE)


def text(client: openai.OpenAI, model: str, prompt: str) -> str:
    answer = client.completions.create(
        model=model, prompt=prompt, max_tokens=MAX_TOKENS, temperature=0
    )
    assert answer.model == model
    return answer.choices[0].text


def check_mixed(client: openai.OpenAI, two: Two, names: tuple[str, ...] = ("one", "other")) -> None:
    """Sixteen at once, of all in turn: each says what it says alone."""
    asked = [(names[number % len(names)], PROMPTS[number // 2]) for number in range(16)]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda each: text(client, *each), asked))
    for (name, prompt), answer in zip(asked, answers, strict=True):
        assert answer == two.texts[name][prompt], (name, prompt)


def states(client: openai.OpenAI) -> dict[str, Any]:
    return {each.id: getattr(each, "state", None) for each in client.models.list()}


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[WorkerProcess]]:
    directory = tmp_path_factory.mktemp("workers")
    with ExitStack() as stack:
        yield [
            stack.enter_context(start_worker(directory, "--memory-limit", "256MiB"))
            for _ in range(2)
        ]


def test_two_models_on_the_same_workers(
    two: Two, workers: list[WorkerProcess], tmp_path: Path
) -> None:
    peers = [f"--peer={worker.address}" for worker in workers]
    models = ["--model", str(two.places["one"]), f"--with-model={two.places['other']}"]
    with (
        start_server(tmp_path, *models, *peers, *SMALL, "--local-layers=none") as server,
        client_of(server) as client,
    ):
        assert states(client) == {"one": "ready", "other": "ready"}
        check_mixed(client, two)
        body = {"prompt": PROMPTS[0], "max_tokens": MAX_TOKENS, "temperature": 0}
        unnamed = httpx.post(f"{server.url}/v1/completions", json=body, timeout=DEADLINE).json()
        assert unnamed["model"] == "one"
        assert unnamed["choices"][0]["text"] == two.texts["one"][PROMPTS[0]]
        with pytest.raises(openai.NotFoundError, match="'one' and 'other' are"):
            text(client, "nobody", "A")
        chat = client.chat.completions.create(
            model="other", messages=[{"role": "user", "content": "A"}], max_tokens=4
        )
        assert chat.model == "other"
        embedded = client.embeddings.create(model="other", input="A")
        assert embedded.model == "other"
        tags = httpx.get(f"{server.url}/api/tags", timeout=DEADLINE).json()["models"]
        assert [each["name"] for each in tags] == ["one:latest", "other:latest"]
        info = httpx.get(
            f"{server.url}/v1/cluster/info", params={"model": "other"}, timeout=DEADLINE
        ).json()
        assert info["status"]["model"] == "other"
        assert set(info["connected_peers"]) <= {worker.peer_id for worker in workers}
        metrics = httpx.get(f"{server.url}/metrics", timeout=DEADLINE).text
        assert 'neurogrid_model_requests_total{model="other"} ' in metrics


def test_two_models_on_workers_that_joined_by_ticket(two: Two, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster"
    ticket = cluster / "ticket"
    models = ["--model", str(two.places["one"]), f"--with-model={two.places['other']}"]
    joining = ("--join", f"@{ticket}", *LOOPBACK, "--memory-limit", "256MiB")
    with ExitStack() as stack:
        # The URL comes when the workers are there, and those are started when there is a ticket.
        pool = stack.enter_context(ThreadPoolExecutor(1))
        options = (f"--new-cluster={cluster}", "--min-peers=2", "--local-layers=none", *SMALL)
        opening = pool.submit(stack.enter_context, start_server(tmp_path, *models, *options))
        deadline = time.monotonic() + DEADLINE
        while not (ticket.exists() and ticket.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for name in ("first", "second"):
            member = ("--cluster", str(tmp_path / name))
            stack.enter_context(start_worker(tmp_path, *joining, *member))
        server = opening.result(DEADLINE)
        client = stack.enter_context(client_of(server))
        assert states(client) == {"one": "ready", "other": "ready"}
        check_mixed(client, two)
        # Each coordinator has a key of its own, which is the same the next time.
        assert len(list(cluster.glob("identity*.key"))) == 2


def test_models_come_and_go_while_others_answer(two: Two, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"{KEY}\n")
    broken = two.root / "broken"
    if not broken.exists():
        shutil.copytree(two.places["one"], broken)
        weights = (broken / "model.safetensors").read_bytes()
        (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    leaving = two.root / "leaving"
    shutil.copytree(two.places["other"], leaving, dirs_exist_ok=True)
    options = [f"--api-key-file={keys}", f"--model-root={two.root}", "--min-peers=0"]
    options += [f"--identity={tmp_path / 'coordinator.key'}"]

    def ask(method: str, path: str, **body: Any) -> httpx.Response:
        return httpx.request(
            method,
            f"{server.url}{path}",
            json=body or None,
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=DEADLINE,
        )

    with (
        start_server(tmp_path, "--model", str(two.places["one"]), *options, *SMALL) as server,
        client_of(server) as client,
        ThreadPoolExecutor(8) as pool,
    ):

        def go_on() -> None:
            for prompt in PROMPTS:
                assert text(client, "one", prompt) == two.texts["one"][prompt]

        going_on = [pool.submit(go_on) for _ in range(2)]
        refused = httpx.post(f"{server.url}/v1/models", json={"model": "other"}, timeout=DEADLINE)
        assert refused.status_code == 401
        for place in ("broken", "missing", "../models", str(embedded_model_path())):
            answer = ask("POST", "/v1/models", model=place)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["code"] == "model_refused"
        assert states(client) == {"one": "ready"}
        added = ask("POST", "/v1/models", model="other", name="second")
        assert added.status_code == 200, added.text
        assert added.json()["state"] == "ready"
        assert states(client) == {"one": "ready", "second": "ready"}
        second = [pool.submit(text, client, "second", prompt) for prompt in PROMPTS[:4]]
        for prompt, answer_of_second in zip(PROMPTS, second, strict=False):
            assert answer_of_second.result(DEADLINE) == two.texts["other"][prompt]
        streaming = client.completions.create(
            model="second", prompt=PROMPTS[0], max_tokens=MAX_TOKENS, temperature=0, stream=True
        )
        pieces = [next(streaming).choices[0].text]
        gone = pool.submit(ask, "DELETE", "/v1/models/second")
        pieces += [piece.choices[0].text for piece in streaming]
        assert "".join(pieces) == two.texts["other"][PROMPTS[0]]
        assert gone.result(DEADLINE).json()["deleted"] is True
        with pytest.raises(openai.NotFoundError):
            text(client, "second", "A")
        for each in going_on:
            each.result(DEADLINE)
        assert states(client) == {"one": "ready"}
        for body in ({"model": "other", "name": "stays"}, {"model": "leaving"}):
            assert ask("POST", "/v1/models", **body).status_code == 200

    # The same coordinator again: what was added is there, but for what is not.
    shutil.rmtree(leaving)
    with (
        start_server(tmp_path, "--model", str(two.places["one"]), *options, *SMALL) as server,
        client_of(server) as client,
    ):
        assert states(client) == {"one": "ready", "stays": "ready", "leaving": "failed"}
        for name, place in (("one", "one"), ("stays", "other")):
            assert text(client, name, PROMPTS[0]) == two.texts[place][PROMPTS[0]]
        said = [line for line in server.log_file.read_text().splitlines() if "leaving" in line]
        assert len(said) == 1
        assert "there is no model 'leaving'" in said[0]
        assert ask("DELETE", "/v1/models/leaving").status_code == 200
        assert states(client) == {"one": "ready", "stays": "ready"}


def test_32_clients_of_8_adapters_and_2_models_while_a_worker_dies(
    two: Two, tmp_path: Path
) -> None:
    """Each asks twice, of one model or adapter and of another: what PEFT's own model writes with it alone."""
    root, keys = tmp_path / "root", tmp_path / "keys"
    root.mkdir()
    keys.touch(mode=0o600)
    keys.write_text(f"{KEY}\n")
    adapters = {name: [f"{name}-{number}" for number in range(4)] for name in two.places}
    named = ["one", "other", *adapters["one"], *adapters["other"]]
    asked = [
        (named[(number + again) % len(named)], PROMPTS[(number // 3) % len(PROMPTS)])
        for again in range(2)
        for number in range(32)
    ]
    expected: dict[tuple[str, str], str] = {}
    for name, place in two.places.items():
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True)
        model: Any = LlamaForCausalLM.from_pretrained(
            place, dtype=torch.float32, local_files_only=True
        )
        for seed, adapter in enumerate(adapters[name]):
            model = add_adapter(model, adapter, seed=seed)
        save_adapters(model, root)
        for which, prompt in sorted(set(asked)):
            if which == name:
                expected[which, prompt] = two.texts[name][prompt]
            elif which in adapters[name]:
                ids = tokenizer(prompt)["input_ids"]
                tokens = peft_tokens(model, which, ids, MAX_TOKENS)
                expected[which, prompt] = tokenizer.decode(tokens, skip_special_tokens=True)
    assert len(set(expected.values())) > 0.9 * len(expected)
    with ExitStack() as stack:
        workers = [
            stack.enter_context(start_worker(tmp_path, "--memory-limit", "256MiB"))
            for _ in range(3)
        ]
        server = stack.enter_context(
            start_server(
                tmp_path,
                *("--model", str(two.places["one"]), f"--with-model={two.places['other']}"),
                *(f"--adapter={root / name}" for name in adapters["one"]),
                *(f"--peer={worker.address}" for worker in workers),
                *(f"--api-key-file={keys}", f"--adapter-root={root}"),
                *("--local-layers=none", "--stages=2", *SMALL),
            )
        )
        client = stack.enter_context(client_of(server))
        headers = {"Authorization": f"Bearer {KEY}"}
        for name in adapters["other"]:
            body = {"name": name, "path": name, "model": "other"}
            added = httpx.post(
                f"{server.url}/v1/adapters", json=body, headers=headers, timeout=DEADLINE
            )
            assert added.status_code == 200, added.text
        pool = stack.enter_context(ThreadPoolExecutor(32))
        answers = [pool.submit(text, client, *each) for each in asked]
        deadline = time.monotonic() + DEADLINE
        while sum(answer.done() for answer in answers) < 8:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        info = httpx.get(f"{server.url}/v1/cluster/info", headers=headers, timeout=DEADLINE).json()
        computing = {stage["peer_id"] for stage in info["status"]["stages"]}
        next(worker for worker in workers if worker.peer_id in computing).kill()
        num_done = sum(answer.done() for answer in answers)
        for each, answer in zip(asked, answers, strict=True):
            assert answer.result(DEADLINE) == expected[each], each
        assert num_done < len(asked)
        assert len({answer.result() for answer in answers}) > 20


def test_an_idle_model_gives_way_and_comes_back(two: Two, tmp_path: Path) -> None:
    with ExitStack() as stack:
        # Enough for either of them, and not for both.
        worker = stack.enter_context(start_worker(tmp_path, "--memory-limit", WORKER_BYTES))
        models = ["--model", str(two.places["one"]), f"--with-model={two.places['other']}"]
        server = stack.enter_context(
            start_server(
                tmp_path,
                *models,
                f"--peer={worker.address}",
                "--local-layers=none",
                "--idle-after=1s",
                *SMALL,
            )
        )
        client = stack.enter_context(client_of(server))
        assert states(client) == {"one": "ready", "other": "idle"}
        prompt = PROMPTS[0]
        assert text(client, "one", prompt) == two.texts["one"][prompt]
        began = time.monotonic()
        assert text(client, "other", prompt) == two.texts["other"][prompt]
        assert states(client) == {"one": "idle", "other": "ready"}
        assert text(client, "one", prompt) == two.texts["one"][prompt]
        # One that was just opened is safe for a while, so they do not take turns with each request.
        assert time.monotonic() - began > 10
        assert states(client) == {"one": "ready", "other": "idle"}


def test_what_does_not_fit_together_is_said_in_one_line(two: Two, tmp_path: Path) -> None:
    with start_worker(tmp_path, "--memory-limit", WORKER_BYTES) as worker:
        done = run(
            [
                *COORDINATOR,
                *("--model", str(two.places["one"]), f"--with-model={two.places['other']}"),
                *(f"--peer={worker.address}", "--local-layers=none", "--idle-after=never"),
                *("--http-port=0", "--listen=/ip4/127.0.0.1/tcp/0", *SMALL),
            ]
        )
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "one needs" in last, done.stderr
    assert "other needs" in last
    assert "--max-seq-len" in last
    assert done.stdout == ""


def test_one_that_is_broken_ends_the_command(two: Two, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(two.places["one"], broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_type": "nobody-knows"}))
    done = run(
        [
            *COORDINATOR,
            *("--model", str(two.places["one"]), f"--with-model=second={broken}", "--min-peers=0"),
            *("--http-port=0", "--listen=/ip4/127.0.0.1/tcp/0", *SMALL),
        ]
    )
    assert done.returncode != 0
    assert "nobody-knows" in done.stderr.splitlines()[-1], done.stderr
