"""What the server publishes of itself holds: requests made from `/openapi.json`, right ones and wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.e2e.server_process import ServerProcess, start_server
from tests.e2e.support import DEADLINE
from tests.fill_in_checkpoint import make_fill_in_checkpoint

# What may have the status 400 although the document allows it.
REFUSED_CODES = {"context_length_exceeded", "chat_template", "unsupported_parameter"}
# Answers are generated token by token, and of the longest there would be hours.
MAX_TOKENS = 2
MAX_ANSWERS = 2
EXAMPLES = 25
# Of paths whose requests are those of others, in other words.
FEW_EXAMPLES = 10
PATHS = (
    "/v1/models/{model}",
    "/v1/models",
    "/health",
    "/ready",
    "/openapi.json",
    "/api/tags",
    "/api/ps",
    "/api/version",
)
POSTED = ("/v1/completions", "/v1/chat/completions")
POSTED_TOO = (
    "/v1/responses",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/api/show",
    "/infill",
)
# How errors of Ollama's API begin that have such a code elsewhere.
REFUSED_WORDS = (
    *("the prompt has", "sessions have at most", "system cannot be told", "the model's"),
    *(f"{name} supported by this model" for name in ("tools are not", "enable_thinking is not")),
    "reasoning_effort is not supported by this model",
    "format and think are not supported where no template",
)
# Those of messages, and of a prompt: which image it is stands before that.
NO_IMAGES = "is an image, and this model takes none here"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("document")
    # With what filling in takes, so that it is answered.
    model = ("--model", str(make_fill_in_checkpoint(directory / "embedded")))
    with start_server(directory, *model, "--local-workers", "2", "--max-seq-len", "64") as server:
        yield server


def shortened(body: Any) -> Any:
    """The same request, for fewer tokens of the model that is there; what is wrong with it stays wrong."""
    if not isinstance(body, dict):
        return body
    if isinstance(body.get("model"), str):
        body = {**body, "model": "embedded"}
    if isinstance(body.get("options"), dict):
        body = {**body, "options": {**body["options"], "num_predict": MAX_TOKENS}}
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"):
        most = MAX_TOKENS
        if body.get(name) is None or (type(body[name]) is int and body[name] > most):
            body = {**body, name: most}
    if type(body.get("n")) is int and body["n"] > MAX_ANSWERS:
        body = {**body, "n": MAX_ANSWERS}
    return body


def without_tools(body: Any) -> Any:
    """The same chat, without what most are refused for: the embedded model's template knows no tools."""
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        return body
    left_out = ("tools", "tool_choice", "response_format", "structured_outputs")
    messages = [
        {"role": message["role"], "content": message["content"]}
        for message in body["messages"]
        if message.get("role") != "tool" and message.get("content") is not None
    ]
    kept = {name: value for name, value in body.items() if name not in left_out}
    return {**kept, "messages": messages or [{"role": "user", "content": "A"}]}


@pytest.mark.parametrize(
    ("path", "mode"),
    [(path, "right") for path in (*PATHS, *POSTED, *POSTED_TOO)]
    + [(path, "wrong") for path in (*POSTED, *POSTED_TOO)],
)
def test_every_answer_is_as_the_document_says(server: ServerProcess, path: str, mode: str) -> None:
    """Statuses, content types, the shape of what comes back; never a 500."""
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json", timeout=DEADLINE)
    method = "POST" if path in (*POSTED, *POSTED_TOO) else "GET"
    operation = document[path][method]
    generation_mode = (
        schemathesis.GenerationMode.POSITIVE
        if mode == "right"
        else schemathesis.GenerationMode.NEGATIVE
    )
    statuses = set()

    @given(case=operation.as_strategy(generation_mode=generation_mode))
    @settings(
        max_examples=FEW_EXAMPLES if path in POSTED_TOO else EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Any) -> None:
        body = shortened(case.body)
        for case.body in (body, without_tools(body)) if mode == "right" else (body,):
            ask_one(case)

    def ask_one(case: Any) -> None:
        answer = case.call(timeout=DEADLINE)
        statuses.add(answer.status_code)
        assert answer.status_code < 500, (case.body, answer.text)
        if mode == "right" and answer.status_code == 400:
            error = answer.json()["error"]
            if path.startswith("/api/"):
                is_known = error.startswith(REFUSED_WORDS) or NO_IMAGES in error
                assert is_known, (case.body, answer.text)
            else:
                assert error["code"] in REFUSED_CODES, (case.body, answer.text)
        case.validate_response(
            answer,
            checks=[
                schemathesis.checks.not_a_server_error,
                schemathesis.specs.openapi.checks.status_code_conformance,
                schemathesis.specs.openapi.checks.content_type_conformance,
                schemathesis.specs.openapi.checks.response_schema_conformance,
            ],
        )

    ask()
    print(path, mode, sorted(statuses))
    if method == "POST":
        assert (200 if mode == "right" else 400) in statuses
