"""Clients that people have, each with the calls of its own examples: one server, two workers, and a third for a kill.

LangChain and LiteLLM are in an environment of their own, `.venv/clients`: LiteLLM's pins are others. The model is the
embedded one, with a template that knows tools and with tokens for filling in, of which it knows nothing: what is looked
at is that each client is answered alike, and as `/v1/completions` is.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest

from neurogrid.model.files.fill_in import ExtraText, read_fill_in
from neurogrid.model.files.tokenizer import Tokenizer
from tests.answer_schemas import closing_bias
from tests.e2e.server_process import ServerProcess, start_server
from tests.e2e.support import DEADLINE, WorkerProcess, start_worker
from tests.e2e.test_tools import TEMPLATE
from tests.fill_in_checkpoint import QWEN, make_fill_in_checkpoint

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "clients" / "bin" / "python"
SCRIPTS = Path(__file__).parent / "clients"
JS = Path(__file__).parent / "interop" / "js"
MODEL = "coder"
PROMPTS = ["A function definition", "The import statement", "Names refer to objects"]
MAX_TOKENS = 16
DIMENSIONS = 192
PREFIX, SUFFIX = "def total(values):\n    ", "\n    return result\n"


@dataclass
class Cluster:
    server: ServerProcess
    workers: list[WorkerProcess]
    checkpoint: Path

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.open(self.checkpoint)

    @cached_property
    def bias(self) -> dict[str, float]:
        size = self.tokenizer.vocab_size
        texts = [self.tokenizer.token_text(token_id) for token_id in range(size)]
        return closing_bias(texts, ends={1})

    def post(self, path: str, **body: Any) -> Any:
        body = {"temperature": 0, **body}
        answer = httpx.post(f"{self.server.url}{path}", json=body, timeout=DEADLINE)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def text(self, prompt: str | Sequence[int], max_tokens: int = MAX_TOKENS, **more: Any) -> str:
        """What `/v1/completions` answers, which other tests compare with transformers."""
        fields = {"prompt": prompt, "max_tokens": max_tokens, **more}
        return self.post("/v1/completions", **fields)["choices"][0]["text"]

    def chat(self, prompt: str, max_tokens: int = MAX_TOKENS) -> str:
        messages = [{"role": "user", "content": prompt}]
        answer = self.post("/v1/chat/completions", messages=messages, max_tokens=max_tokens)
        return answer["choices"][0]["message"]["content"]

    def question(self, **more: Any) -> str:
        """What a client's program reads."""
        asked = {
            "url": self.server.url,
            "model": MODEL,
            "prompts": PROMPTS,
            "max_tokens": MAX_TOKENS,
            "bias": self.bias,
            **more,
        }
        return json.dumps(asked) + "\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("clients")
    checkpoint = make_fill_in_checkpoint(directory / MODEL)
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    with ExitStack() as stack:
        # Two hold a stage each; the third takes over from the one that is killed.
        workers = [
            stack.enter_context(start_worker(directory, "--memory-limit", limit))
            for limit in ("512MiB", "512MiB", "256MiB")
        ]
        peers = [part for worker in workers for part in ("--peer", worker.address)]
        options = ("--stages", "2", "--dtype", "float32", "--speculate", "off")
        server = start_server(directory, *peers, "--model", str(checkpoint), *options)
        yield Cluster(stack.enter_context(server), workers, checkpoint)


@contextmanager
def start_client(*command: str, asked: str) -> Iterator[subprocess.Popen[str]]:
    """A client's program that was told what to ask."""
    # LiteLLM asks the internet for prices otherwise, LangChain's tracing for its server.
    environment = {
        **os.environ,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LANGSMITH_TRACING": "false",
    }
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, text=True, env=environment, **pipes)
    try:
        assert process.stdin is not None
        process.stdin.write(asked)
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.communicate()


def answered(process: subprocess.Popen[str], said: str | None = None) -> Any:
    out, errors = process.communicate(said, timeout=DEADLINE)
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


def python(script: str) -> tuple[str, str]:
    if not PYTHON.exists():
        pytest.fail("LangChain and LiteLLM are missing: run .ci/setup peers")
    return str(PYTHON), str(SCRIPTS / script)


def javascript() -> tuple[str, str]:
    node = shutil.which("node")
    if node is None or not (JS / "node_modules" / "ollama").is_dir():
        pytest.fail("the JavaScript clients are missing: run .ci/setup peers")
    return node, str(JS / "clients.mjs")


# ------------------------------------------------------------------ their own examples


def test_langchain(cluster: Cluster) -> None:
    with start_client(*python("langchain_client.py"), asked=cluster.question()) as client:
        told = answered(client)
    chats = [cluster.chat(prompt) for prompt in PROMPTS]
    text = cluster.text(PROMPTS[0])
    assert (told["invoke"], told["stream"], told["batch"]) == (chats[0], chats[0], chats)
    assert (told["text"], told["text_stream"], told["usage"]) == (text, text, MAX_TOKENS)
    name, arguments = told["call"]["name"], told["call"]["args"]
    assert name == "get_weather"
    assert told["result"] == f"14 in {arguments['city']} ({arguments['units']})"
    assert told["after_the_call"]
    assert set(told["structured"]) == {"is_warm", "words"}
    assert told["dimensions"] == [DIMENSIONS] * len(PROMPTS)
    assert told["same"]


def test_litellm(cluster: Cluster) -> None:
    with start_client(*python("litellm_client.py"), asked=cluster.question()) as client:
        told = answered(client)
    chat = cluster.chat(PROMPTS[0])
    assert [told[name] for name in ("completion", "stream", "asynchronous")] == [chat] * 3
    assert (told["text"], told["usage"]) == (cluster.text(PROMPTS[0]), MAX_TOKENS)
    assert told["call"]["name"] == "get_weather"
    assert isinstance(told["call"]["args"]["is_now"], bool)
    assert told["dimensions"] == [DIMENSIONS] * len(PROMPTS)
    assert told["refused"] == 404


def test_openai_and_ollama_for_javascript(cluster: Cluster) -> None:
    with start_client(*javascript(), asked=cluster.question()) as client:
        told = answered(client)
    chat, text = cluster.chat(PROMPTS[0]), cluster.text(PROMPTS[0])
    call = told["openai"].pop("call")
    assert call["name"] == "get_weather"
    assert isinstance(call["args"]["is_now"], bool)
    same = {"chat": chat, "stream": chat, "usage": MAX_TOKENS, "dimensions": [DIMENSIONS] * 3}
    assert told == {
        "openai": {**same, "text": text},
        "ollama": {**same, "generate": text, "models": [f"{MODEL}:latest"], "refused": 404},
    }


# ------------------------------------------------------------------ editors


def test_filling_in_is_the_same_by_each_api(cluster: Cluster) -> None:
    filling = read_fill_in(cluster.tokenizer)
    assert filling is not None
    url, ends = cluster.server.url, {"stop_token_ids": list(filling.end_ids)}
    expected = cluster.text(filling.prompt(PREFIX, SUFFIX), **ends)
    assert expected != cluster.text(PREFIX)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=DEADLINE) as client:
        fields = {"model": MODEL, "max_tokens": MAX_TOKENS, "temperature": 0}
        whole = client.completions.create(prompt=PREFIX, suffix=SUFFIX, **fields)
        assert whole.choices[0].text == expected
        # As Continue, Zed and Twinny send it where they write the tokens themselves.
        written = f"{QWEN[0]}{PREFIX}{QWEN[1]}{SUFFIX}{QWEN[2]}"
        stream = client.completions.create(prompt=written, stream=True, extra_body=ends, **fields)
        assert "".join(chunk.choices[0].text for chunk in stream) == expected
    options = {"temperature": 0, "num_predict": MAX_TOKENS}
    with ollama.Client(host=url, timeout=DEADLINE) as beside:
        generate = {"model": MODEL, "options": options}
        assert beside.generate(prompt=PREFIX, suffix=SUFFIX, **generate).response == expected
        assert beside.generate(prompt=written, raw=True, **generate).response == expected
        assert "insert" in (beside.show(MODEL).capabilities or [])


def test_infill_as_llama_vim_asks_for_it(cluster: Cluster) -> None:
    filling = read_fill_in(cluster.tokenizer)
    assert filling is not None
    extra = [{"filename": "sums.py", "text": "def add(a, b):\n    return a + b\n", "time": 1}]
    before, line = PREFIX.rstrip(" "), "    "
    body = {
        "id_slot": 0,
        "input_prefix": before,
        "prompt": line,
        "input_suffix": SUFFIX,
        "input_extra": extra,
        "n_predict": MAX_TOKENS,
        "stop": [],
        "n_indent": 4,
        "top_k": 40,
        "top_p": 0.9,
        "stream": False,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
        "response_fields": ["content", "timings/prompt_n", "timings/predicted_n", "truncated"],
    }
    read = cluster.post("/infill", **{**body, "n_predict": 0, "response_fields": [""]})
    assert read == {}
    told = filling.extra([ExtraText("sums.py", extra[0]["text"])], max_tokens=1000)
    prompt = filling.prompt(before + line, SUFFIX, extra=told)
    expected = cluster.text(prompt, stop_token_ids=list(filling.end_ids))
    whole = cluster.post("/infill", **body)
    assert (whole["content"], whole["truncated"]) == (expected, False)
    assert whole["timings/prompt_n"] <= len(prompt)
    fields = {**body, "stream": True, "temperature": 0}
    url = f"{cluster.server.url}/infill"
    with httpx.stream("POST", url, json=fields, timeout=DEADLINE) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line]
    assert "".join(event["content"] for event in events) == expected
    stopped = cluster.post("/infill", **{**body, "stop": [expected[4:8]], "response_fields": None})
    assert stopped["content"] == expected[: expected.index(expected[4:8])]


def test_requests_that_are_given_up_leave_nothing(cluster: Cluster) -> None:
    """As at each key that is pressed."""
    url = f"{cluster.server.url}/v1/completions"
    with httpx.Client(timeout=DEADLINE) as client:
        for number in range(30):
            body = {"prompt": f"{PREFIX}# {number}", "suffix": SUFFIX, "max_tokens": 200}
            with client.stream("POST", url, json={**body, "stream": True}) as answer:
                if number % 2:  # before the first token, or after it
                    next(answer.iter_lines())

    def is_free(status: dict[str, Any]) -> bool:
        return all(peer["num_sessions"] == 0 for peer in status["peers"].values())

    cluster.server.wait_status(is_free)
    assert cluster.text(PROMPTS[0])


# ------------------------------------------------------------------ a worker dies, last of all


def test_a_kill_on_the_way_changes_no_answer(cluster: Cluster) -> None:
    max_tokens = 80
    expected = [cluster.chat(prompt, max_tokens) for prompt in PROMPTS]
    asked = cluster.question(max_tokens=max_tokens, waits=True)
    with (
        start_client(*python("langchain_client.py"), asked=asked) as batch,
        start_client(*javascript(), asked=asked) as stream,
    ):
        assert batch.stdout is not None
        assert stream.stdout is not None
        assert stream.stdin is not None
        for client in (batch, stream):
            assert client.stdout is not None
            assert client.stdin is not None
            assert client.stdout.readline() == "ready\n"
            client.stdin.write("go\n")
            client.stdin.flush()
        for _ in range(6):
            assert stream.stdout.readline() == "piece\n"
        cluster.workers[0].kill()
        assert stream.stdout.readline() == "piece\n"  # and it was not over
        assert answered(stream)["stream"] == expected[0]
        assert answered(batch)["batch"] == expected
    status = cluster.server.status()
    serving = {stage["peer_id"] for stage in status["stages"]}
    assert serving == {worker.peer_id for worker in cluster.workers[1:]}
