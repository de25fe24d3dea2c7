"""The APIs beside OpenAI's completions: a coordinator and two workers, asked by the clients that people have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import ollama
import pytest
import trio

from tests.e2e.server_process import ServerProcess, start_server
from tests.e2e.support import DEADLINE, WorkerProcess, start_worker

MODEL = "embedded"
PROMPT = "A function definition"
GREEDY = {"temperature": 0, "num_predict": 24}


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[WorkerProcess]]:
    """Two that hold a stage each, and one beside them, which takes over from the first that is killed."""
    directory = tmp_path_factory.mktemp("workers")
    with ExitStack() as stack:
        yield [
            stack.enter_context(start_worker(directory, "--memory-limit", limit))
            for limit in ("512MiB", "512MiB", "256MiB")
        ]


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, workers: list[WorkerProcess]
) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("server")
    peers = [part for worker in workers for part in ("--peer", worker.address)]
    with start_server(directory, *peers, "--stages", "2", "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url, timeout=DEADLINE) as client:
        yield client


def completed(server: ServerProcess, prompt: str = PROMPT, max_tokens: int = 24) -> str:
    """What OpenAI's API answers, which other tests compare with transformers."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=DEADLINE)
    return answer.json()["choices"][0]["text"]


# ------------------------------------------------------------------ Ollama's client, its README's examples


def test_chat(client: ollama.Client, server: ServerProcess) -> None:
    response = client.chat(
        model=MODEL, messages=[{"role": "user", "content": PROMPT}], options=GREEDY
    )
    assert response["message"]["content"] == response.message.content
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24, "temperature": 0}
    same = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=DEADLINE).json()
    assert response.message.content == same["choices"][0]["message"]["content"]
    assert response.done_reason == "length"
    assert response.eval_count == 24
    assert response.prompt_eval_count == same["usage"]["prompt_tokens"]
    assert response.total_duration >= response.eval_duration > 0


def test_streamed(client: ollama.Client) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    whole = client.chat(model=MODEL, messages=messages, options=GREEDY)
    *chunks, last = client.chat(model=MODEL, messages=messages, options=GREEDY, stream=True)
    assert "".join(chunk["message"]["content"] for chunk in chunks) == whole.message.content
    assert len(chunks) > 10
    assert last.done
    assert last.eval_count == 24


def test_asynchronous(server: ServerProcess, client: ollama.Client) -> None:
    whole = client.generate(model=MODEL, prompt=PROMPT, options=GREEDY)

    async def main() -> str:
        async with ollama.AsyncClient(host=server.url, timeout=DEADLINE) as beside:
            parts = await beside.generate(model=MODEL, prompt=PROMPT, options=GREEDY, stream=True)
            return "".join([part["response"] async for part in parts])

    assert trio.run(main) == whole.response


def test_generate(client: ollama.Client, server: ServerProcess) -> None:
    answer = client.generate(model=MODEL, prompt=PROMPT, raw=True, options=GREEDY, logprobs=True)
    assert answer.response == completed(server)
    assert answer.logprobs is not None
    assert "".join(each.token for each in answer.logprobs) == answer.response
    sampled = {"temperature": 1.5, "seed": 7, "num_predict": 12}
    once, again = (
        client.generate(model=MODEL, prompt="Why is the sky blue?", options=sampled)["response"]
        for _ in range(2)
    )
    assert once == again


def test_models(client: ollama.Client) -> None:
    (listed,) = client.list().models
    assert listed.model == f"{MODEL}:latest"
    (loaded,) = client.ps().models
    assert loaded.model == listed.model
    shown = client.show(MODEL)
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.block_count"] == 8
    assert shown.details is not None
    assert shown.details.family == "llama"


def test_errors(client: ollama.Client) -> None:
    model = "does-not-yet-exist"
    with pytest.raises(ollama.ResponseError) as raised:
        client.chat(model)
    assert raised.value.status_code == 404
    assert model in raised.value.error
    with pytest.raises(ollama.ResponseError, match="images"):
        client.generate(MODEL, "What is this?", images=[b"\x89PNG"])
    with pytest.raises(ollama.ResponseError, match="not offered here"):
        client.pull(MODEL)


# ------------------------------------------------------------------ tokens


def test_tokens_and_back(server: ServerProcess) -> None:
    told = httpx.post(f"{server.url}/tokenize", json={"prompt": PROMPT}, timeout=DEADLINE).json()
    back = httpx.post(
        f"{server.url}/detokenize", json={"tokens": told["tokens"][1:]}, timeout=DEADLINE
    )
    assert back.json() == {"prompt": PROMPT}
    body = {"prompt": told["tokens"], "max_tokens": 24, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=DEADLINE).json()
    assert answer["choices"][0]["text"] == completed(server)
    assert json.dumps(answer["usage"]["prompt_tokens"]) == str(told["count"])


# ------------------------------------------------------------------ a worker dies, last of all


def test_a_kill_on_the_way_changes_no_answer(
    client: ollama.Client, server: ServerProcess, workers: list[WorkerProcess]
) -> None:
    options = {**GREEDY, "num_predict": 100}
    whole = client.generate(model=MODEL, prompt=PROMPT, raw=True, options=options)
    text = ""
    for number, part in enumerate(
        client.generate(model=MODEL, prompt=PROMPT, raw=True, options=options, stream=True)
    ):
        text += part.response
        if number == 5:
            workers[0].kill()
    assert text == whole.response
