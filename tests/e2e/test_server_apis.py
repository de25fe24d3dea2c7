"""The APIs beside OpenAI's completions: a coordinator and two workers, asked by the clients that people have."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import ollama
import openai
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


@pytest.fixture(scope="module")
def asks(server: ServerProcess) -> Iterator[openai.OpenAI]:
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE) as client:
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


# ------------------------------------------------------------------ OpenAI's client, beyond completions


def test_embeddings(asks: openai.OpenAI, client: ollama.Client) -> None:
    texts = [PROMPT, "The import statement", PROMPT]
    told = asks.embeddings.create(model=MODEL, input=texts)  # in base64, as it asks by itself
    vectors = [each.embedding for each in told.data]
    assert vectors[0] == vectors[2] != vectors[1]
    assert math.isclose(math.hypot(*vectors[0]), 1, abs_tol=1e-5)
    assert told.usage.prompt_tokens == told.usage.total_tokens > 3
    floats = asks.embeddings.create(model=MODEL, input=PROMPT, encoding_format="float")
    assert floats.data[0].embedding == pytest.approx(vectors[0], abs=1e-6)
    short = asks.embeddings.create(model=MODEL, input=PROMPT, dimensions=8).data[0].embedding
    scale = math.hypot(*vectors[0][:8])
    assert short == pytest.approx([value / scale for value in vectors[0][:8]], abs=1e-5)
    beside = client.embed(model=MODEL, input=texts)
    assert list(beside.embeddings[1]) == pytest.approx(vectors[1], abs=1e-6)
    assert list(client.embeddings(MODEL, PROMPT).embedding) == pytest.approx(vectors[0], abs=1e-6)
    with pytest.raises(openai.BadRequestError, match="at most"):
        asks.embeddings.create(model=MODEL, input="word " * 2000)
    with pytest.raises(openai.UnprocessableEntityError):
        asks.embeddings.create(model=MODEL, input=[[4096]])
    with pytest.raises(openai.UnprocessableEntityError, match="192 dimensions"):
        asks.embeddings.create(model=MODEL, input=PROMPT, dimensions=193)


def test_a_response_and_its_stream(asks: openai.OpenAI) -> None:
    asked = {"model": MODEL, "input": PROMPT, "temperature": 0, "max_output_tokens": 20}
    response = asks.responses.create(**asked)
    chat = asks.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": PROMPT}],
        temperature=0,
        max_completion_tokens=20,
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == 20
    stream = asks.responses.create(**asked, stream=True)
    events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == response.output_text
    assert events[-1].type == "response.incomplete"
    ending = {**asked, "input": "The pass statement", "max_output_tokens": 90}
    with asks.responses.stream(**ending) as helped:
        assert [event.type for event in helped][-1] == "response.completed"
        whole = asks.responses.create(**ending)
        assert helped.get_final_response().output_text == whole.output_text
        assert whole.status == "completed"
    said = [
        {"role": "user", "content": PROMPT},
        *(item.model_dump() for item in response.output),
        {"role": "user", "content": "And a class?"},
    ]
    assert asks.responses.create(**{**asked, "input": said}).output_text
    with pytest.raises(openai.BadRequestError, match="nothing is stored here"):
        asks.responses.create(**asked, previous_response_id=response.id)


def test_the_prompt_is_told_with_its_log_probabilities(asks: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "echo": True, "logprobs": 2}
    alone = asks.completions.create(**asked, max_tokens=0)
    choice = alone.choices[0]
    assert choice.text == PROMPT
    assert alone.usage is not None
    assert alone.usage.completion_tokens == 0
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert len(logprobs.token_logprobs) == len(logprobs.tokens) == alone.usage.prompt_tokens
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    # With what follows: the same for the prompt, and each is what it is where it is generated.
    more = asks.completions.create(**asked, max_tokens=4).choices[0]
    assert more.logprobs is not None
    assert more.logprobs.token_logprobs[:-4] == pytest.approx(logprobs.token_logprobs, abs=1e-4)
    again = asks.completions.create(**{**asked, "prompt": more.text}, max_tokens=0).choices[0]
    assert again.logprobs.tokens == more.logprobs.tokens
    assert again.logprobs.token_logprobs[1:] == pytest.approx(
        more.logprobs.token_logprobs[1:], abs=1e-3
    )
    assert again.logprobs.text_offset == more.logprobs.text_offset
    streamed = list(asks.completions.create(**asked, max_tokens=4, stream=True))
    assert "".join(event.choices[0].text for event in streamed) == more.text
    told = [event.choices[0].logprobs for event in streamed]
    assert [token for each in told if each for token in each.tokens] == more.logprobs.tokens


def test_the_best_of_several(asks: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "seed": 3, "logprobs": 0}
    every = asks.completions.create(**asked, n=4)
    means = {
        choice.text: sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)
        for choice in every.choices
    }
    best = asks.completions.create(**asked, best_of=4, n=2)
    assert [choice.index for choice in best.choices] == [0, 1]
    assert [choice.text for choice in best.choices] == sorted(means, key=means.get)[:-3:-1]
    assert best.usage.completion_tokens == every.usage.completion_tokens


def test_biases_hold_wherever_tokens_are_chosen(asks: openai.OpenAI) -> None:
    bias = {"100": 100}
    messages = [{"role": "user", "content": PROMPT}]
    fields = {"model": MODEL, "max_tokens": 3, "logit_bias": bias, "temperature": 0}
    text = asks.completions.create(**fields, prompt=PROMPT).choices[0].text
    chat = asks.chat.completions.create(**fields, messages=messages)
    assert chat.choices[0].message.content == text


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
