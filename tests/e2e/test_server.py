"""The OpenAI API of a real coordinator with two real workers, asked by the clients that people have."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from neurogrid.model.embedded import embedded_model_path
from tests.e2e.server_process import ServerProcess, rss_bytes, start_server
from tests.e2e.support import DEADLINE, WorkerProcess, reference_tokens, start_worker

JS = Path(__file__).parent / "interop" / "js"
MODEL = "embedded"
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


@dataclass
class Cluster:
    server: ServerProcess
    workers: list[WorkerProcess]

    def client(self, **more: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.server.url}/v1",
            api_key="none needed",
            max_retries=0,
            timeout=DEADLINE,
            **more,
        )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("server")
    with ExitStack() as stack:
        workers = [
            stack.enter_context(start_worker(directory, "--memory-limit", "512MiB"))
            for _ in range(2)
        ]
        peers = [part for worker in workers for part in ("--peer", worker.address)]
        server = stack.enter_context(
            # In half precision a sum depends on what else is summed in the same call.
            start_server(directory, *peers, "--stages", "2", "--dtype", "float32")
        )
        yield Cluster(server, workers)


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> openai.OpenAI:
    return cluster.client()


class Reference:
    """The same model in one piece, as transformers runs it."""

    def __init__(self) -> None:
        path = embedded_model_path()
        self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        self.model = LlamaForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True
        )

    def text(self, prompt: str, max_tokens: int) -> str:
        return self.text_of(self.tokenizer(prompt)["input_ids"], max_tokens)

    def text_of(self, token_ids: list[int], max_tokens: int) -> str:
        tokens = reference_tokens(self.model, token_ids, max_tokens)
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def chat(client: openai.OpenAI, text: str, **more: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 24, **more}
    return client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": text}], **fields
    )


def complete(client: openai.OpenAI, prompt: Any, **more: Any) -> Any:
    return client.completions.create(
        model=MODEL, prompt=prompt, **{"temperature": 0, "max_tokens": 24, **more}
    )


# ------------------------------------------------------------------ what it answers


def test_what_was_computed_before_is_told_as_cached(client: openai.OpenAI) -> None:
    prompt = "A class definition defines a class object, and it may have bases. " * 4
    first, again = complete(client, prompt), complete(client, prompt)
    assert again.choices[0].text == first.choices[0].text
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert 0 < cached < again.usage.prompt_tokens


def test_it_lists_its_model_and_is_ready(cluster: Cluster, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody/nothing")
    for path in ("/health", "/ready"):
        assert httpx.get(cluster.server.url + path, timeout=DEADLINE).status_code == 200


def test_a_chat_is_what_transformers_generates(client: openai.OpenAI, reference: Reference) -> None:
    conversation = [
        {"role": "system", "content": "The Python reference."},
        {"role": "user", "content": [{"type": "text", "text": "A class"}]},
        {"role": "assistant", "content": "A class definition is an executable statement."},
        {"role": "user", "content": "A function definition"},
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=conversation, temperature=0, max_completion_tokens=20
    )
    flat = [
        {**m, "content": m["content"] if isinstance(m["content"], str) else "A class"}
        for m in conversation
    ]
    prompt = reference.tokenizer.apply_chat_template(
        flat, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert answer.choices[0].message.content == reference.text_of(prompt, 20)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == 20


def test_a_stream_is_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    whole = chat(client, PROMPTS[0])
    events = list(chat(client, PROMPTS[0], stream=True, stream_options={"include_usage": True}))
    assert events[0].choices[0].delta.role == "assistant"
    pieces = [event.choices[0].delta.content or "" for event in events if event.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len([piece for piece in pieces if piece]) > 10
    assert [e.choices[0].finish_reason for e in events[:-1]].count("length") == 1
    assert events[-1].choices == []
    assert events[-1].usage.total_tokens == whole.usage.total_tokens


def test_a_prompt_may_be_text_or_tokens_one_or_several(
    client: openai.OpenAI, reference: Reference
) -> None:
    texts = list(PROMPTS[:3])
    expected = [reference.text(text, 12) for text in texts]
    ids = [reference.tokenizer(text)["input_ids"] for text in texts]
    for prompt in (texts, ids):
        answer = complete(client, prompt, max_tokens=12)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == 36
    for prompt in (texts[1], ids[1]):
        assert complete(client, prompt, max_tokens=12).choices[0].text == expected[1]
    echoed = complete(client, texts[1], max_tokens=12, echo=True)
    assert echoed.choices[0].text == texts[1] + expected[1]


def test_the_end_of_the_model_ends_the_text(client: openai.OpenAI) -> None:
    prompt = "The pass statement"
    ended = complete(client, prompt, max_tokens=90)
    assert ended.choices[0].finish_reason == "stop"
    assert ended.usage.completion_tokens < 90
    more = ended.usage.completion_tokens + 5
    longer = complete(client, prompt, max_tokens=more, extra_body={"ignore_eos": True})
    assert longer.choices[0].finish_reason == "length"
    assert longer.usage.completion_tokens == more
    assert longer.choices[0].text.startswith(ended.choices[0].text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["table stat", ["nowhere to be found", " execution bin", "ex"]])
def test_a_stop_string_is_never_seen(client: openai.OpenAI, stop: Any, stream: bool) -> None:
    """It begins in one token and ends in another."""
    whole = chat(client, PROMPTS[0]).choices[0].message.content
    stops = [stop] if isinstance(stop, str) else stop
    cut = min(whole.find(s) for s in stops if s in whole)
    if stream:
        events = list(chat(client, PROMPTS[0], stop=stop, stream=True))
        text = "".join(event.choices[0].delta.content or "" for event in events)
        reason = events[-1].choices[0].finish_reason
    else:
        choice = chat(client, PROMPTS[0], stop=stop).choices[0]
        text, reason = choice.message.content, choice.finish_reason
    assert text == whole[:cut]
    assert reason == "stop"


def test_log_probabilities_are_the_models(client: openai.OpenAI, reference: Reference) -> None:
    prompt = PROMPTS[0]
    token_ids = reference.tokenizer(prompt)["input_ids"]
    new = reference_tokens(reference.model, token_ids, 8)
    with torch.inference_mode():
        logits = reference.model(torch.tensor([token_ids + new])).logits[0].float()
    logprobs = logits.log_softmax(-1)[len(token_ids) - 1 : -1]

    content = chat(client, prompt, max_tokens=8, logprobs=True, top_logprobs=3)
    told = content.choices[0].logprobs.content
    assert "".join(token.token for token in told) == content.choices[0].message.content
    for position, token in enumerate(told):
        expected = logprobs[position]
        assert token.logprob == pytest.approx(float(expected[new[position]]), abs=1e-3)
        top = expected.topk(3).values.tolist()
        assert [other.logprob for other in token.top_logprobs] == pytest.approx(top, abs=1e-3)
        assert bytes(token.bytes).decode() == token.token

    choice = complete(client, prompt, max_tokens=8, logprobs=2).choices[0]
    assert choice.logprobs.token_logprobs == pytest.approx([t.logprob for t in told], abs=1e-3)
    for text, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert choice.text[offset:].startswith(text)
    assert [len(top) for top in choice.logprobs.top_logprobs] == [2] * 8


def test_a_seed_repeats_and_n_differ(client: openai.OpenAI) -> None:
    def sampled(**more: Any) -> list[str]:
        answer = complete(client, PROMPTS[1], n=4, temperature=1.2, max_tokens=16, **more)
        return [choice.text for choice in answer.choices]

    first = sampled(seed=7)
    assert sampled(seed=7) == first
    assert len(set(first)) == 4
    assert (
        complete(client, PROMPTS[1], temperature=1.2, max_tokens=16, seed=7).choices[0].text
        == (first[0])
    )
    assert sampled(seed=8) != first
    assert len(set(sampled(top_p=0))) == 1


def test_a_list_of_prompts_draws_for_each(client: openai.OpenAI) -> None:
    """Without a seed another time each; with one, the same each time.

    At a temperature of 1.2 one text in twenty is the same sentence of the language reference, and some are empty.
    """

    def sampled(**more: Any) -> list[str]:
        answer = complete(
            client,
            [PROMPTS[1]] * 3,
            n=2,
            temperature=2.0,
            max_tokens=16,
            extra_body={"min_tokens": 16},
            **more,
        )
        return [choice.text for choice in answer.choices]

    assert len(set(sampled())) == 6
    first = sampled(seed=7)
    assert len(set(first)) == 6
    assert sampled(seed=7) == first


def test_the_parameters_of_other_servers_are_those_of_transformers(
    client: openai.OpenAI, reference: Reference
) -> None:
    token_ids = reference.tokenizer(PROMPTS[0])["input_ids"]
    more = {"repetition_penalty": 3.0, "min_p": 0.1, "min_tokens": 12}
    expected = reference_tokens(
        reference.model, token_ids, 16, repetition_penalty=3.0, min_new_tokens=12
    )
    assert expected != reference_tokens(reference.model, token_ids, 16)
    choice = complete(client, PROMPTS[0], max_tokens=16, extra_body=more).choices[0]
    text = reference.tokenizer.decode(expected, skip_special_tokens=True)
    assert choice.text == text
    # The token that ends it is no text of it.
    stops = {"repetition_penalty": 3.0, "stop_token_ids": [expected[5]]}
    answer = complete(client, PROMPTS[0], max_tokens=16, extra_body=stops)
    end = expected.index(expected[5])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == reference.tokenizer.decode(expected[:end])
    assert answer.usage.completion_tokens == end + 1


def test_a_conversation_goes_on_within_its_last_message(client: openai.OpenAI) -> None:
    """The embedded model's template ends with what the message says: so it is one text."""
    whole = complete(client, PROMPTS[0], max_tokens=8).choices[0].text
    messages: Any = [{"role": "assistant", "content": PROMPTS[0]}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=8, temperature=0, extra_body=more
    )
    assert answer.choices[0].message.content == whole


def test_penalties_and_biases_change_what_is_chosen(
    client: openai.OpenAI, reference: Reference
) -> None:
    token_ids = reference.tokenizer(PROMPTS[0])["input_ids"]
    banned = reference_tokens(reference.model, token_ids, 1)[0]
    answer = complete(client, PROMPTS[0], max_tokens=1, logit_bias={str(banned): -100})
    assert answer.choices[0].text != reference.text(PROMPTS[0], 1)
    # Of a vocabulary that repeats nothing, each word comes once.
    free = complete(
        client, PROMPTS[0], max_tokens=60, frequency_penalty=2, presence_penalty=2, logprobs=0
    )
    plain = complete(client, PROMPTS[0], max_tokens=60, logprobs=0)

    def num_repeated(choice: Any) -> int:
        return len(choice.logprobs.tokens) - len(set(choice.logprobs.tokens))

    assert num_repeated(free.choices[0]) < num_repeated(plain.choices[0]) / 2


# ------------------------------------------------------------------ many at once, and those that go away


def test_sixteen_at_once_are_what_each_is_alone(
    client: openai.OpenAI, reference: Reference
) -> None:
    expected = {prompt: reference.text(prompt, 24) for prompt in PROMPTS}

    def ask(number: int) -> tuple[str, str]:
        prompt = PROMPTS[number % len(PROMPTS)]
        if number % 2:
            events = complete(client, prompt, stream=True)
            return prompt, "".join(event.choices[0].text for event in events)
        return prompt, complete(client, prompt).choices[0].text

    with ThreadPoolExecutor(16) as pool:
        for prompt, text in pool.map(ask, range(16)):
            assert text == expected[prompt]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_session(cluster: Cluster, stream: bool) -> None:
    """Long before the generation would have ended by itself."""
    body = {
        "prompt": "A",
        "max_tokens": 1000,
        "ignore_eos": True,
        "temperature": 0,
        "stream": stream,
    }
    before = cluster.server.status()["num_requests"]
    with ExitStack() as stack:
        host = urlsplit(cluster.server.url).netloc
        client = stack.enter_context(closing(HTTPConnection(host, timeout=DEADLINE)))
        headers = {"Content-Type": "application/json"}
        client.request("POST", "/v1/completions", json.dumps(body), headers)
        if stream:
            answer = stack.enter_context(client.getresponse())
            assert answer.readline().startswith(b"data: ")
        cluster.server.wait_status(lambda s: s["num_running"] == 1)
    status, seconds = cluster.server.wait_status(lambda s: s["num_running"] == 0)
    print(f"freed after {seconds:.2f} s")
    assert status["num_requests"] == before + 1
    last = status["requests"][-1]
    assert last["is_over"]
    assert last["num_new_tokens"] < 900
    assert all(peer["num_sessions"] == 0 for peer in status["peers"].values())


def different_prompts(client: openai.OpenAI, count: int) -> list[tuple[str, str]]:
    """Prompts, and what is answered to each alone."""
    prompts = [f"{PROMPTS[i % len(PROMPTS)]} {'number ' * (i // 8)}{i}" for i in range(count)]
    alone = [complete(client, prompt, max_tokens=8).choices[0].text for prompt in prompts]
    assert len(set(alone)) > count / 2
    return list(zip(prompts, alone, strict=True))


def test_a_hundred_requests_none_lost_none_mixed_up(
    cluster: Cluster, client: openai.OpenAI
) -> None:
    known = different_prompts(client, 16)

    def ask(number: int) -> bool:
        prompt, alone = known[number % len(known)]
        return complete(client, prompt, max_tokens=8).choices[0].text == alone

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(ask, range(100)))
    assert cluster.server.status()["num_running"] == 0


@pytest.mark.long
def test_seven_hundred_requests_and_no_memory_kept(cluster: Cluster, client: openai.OpenAI) -> None:
    known = different_prompts(client, 40)
    pids = [cluster.server.process.pid, *(worker.process.pid for worker in cluster.workers)]

    def ask(number: int) -> bool:
        prompt, alone = known[number % len(known)]
        return complete(client, prompt, max_tokens=8).choices[0].text == alone

    with ThreadPoolExecutor(32) as pool:
        # Until what is allocated once is, and workers keep as many ended sessions as they will.
        assert all(pool.map(ask, range(500)))
        before = rss_bytes(*pids)
        started = time.monotonic()
        assert all(pool.map(ask, range(200)))
        seconds = time.monotonic() - started
    grown = rss_bytes(*pids) - before
    print(f"200 requests in {seconds:.1f} s; memory grew by {grown / 2**20:.1f} MiB")
    assert grown < 48 * 2**20
    assert cluster.server.status()["num_running"] == 0


# ------------------------------------------------------------------ what it refuses


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"n": 1000}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, "A class", **fields)
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"logit_bias": {"99999": 1}}, "logit_bias"), ({"top_logprobs": 3}, "top_logprobs")],
)
def test_what_is_right_by_itself_and_cannot_be_is_another_error(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        chat(client, "A class", **fields)
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="gpt-4", prompt="x")
    assert refused.value.code == "model_not_found"


# ------------------------------------------------------------------ other clients


def test_curl(cluster: Cluster, reference: Reference) -> None:
    body = json.dumps({"prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0, "stream": True})
    done = subprocess.run(
        [
            *("curl", "--silent", "--show-error", "--no-buffer", "--max-time", str(DEADLINE)),
            *("-H", "Content-Type: application/json", "-d", body),
            f"{cluster.server.url}/v1/completions",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE,
    )
    lines = [line.removeprefix("data: ") for line in done.stdout.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    text = "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])
    assert text == reference.text(PROMPTS[0], 12)


def test_the_client_for_javascript(cluster: Cluster, reference: Reference) -> None:
    node = shutil.which("node")
    if node is None or not (JS / "node_modules" / "openai").is_dir():
        pytest.fail("The JavaScript client is missing: run .ci/setup peers")
    done = subprocess.run(
        [node, str(JS / "openai_client.mjs"), f"{cluster.server.url}/v1", MODEL, PROMPTS[0]],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    expected = reference.text(PROMPTS[0], 12)
    assert told == {
        "models": [MODEL],
        "whole": expected,
        "streamed": expected,
        "usage": 12,
        "response": expected,
        "dimensions": 192,
        "refused": {"status": 400, "param": "temperature"},
    }
