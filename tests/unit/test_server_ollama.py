"""Ollama's routes over a coordinator that does as it is told: what is translated, refused and counted."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from neurogrid.errors import NoRouteError
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.server.app import make_app
from neurogrid.server.backend import Backend
from neurogrid.server.http.guard import Access
from neurogrid.server.ollama.answer_shapes import OllamaShape
from neurogrid.server.ollama.paths import OLLAMA_PATHS
from neurogrid.server.ollama.routes import ollama_routes
from neurogrid.server.openai.answer import Usage
from neurogrid.server.openai.answer_writer import CallPiece, Piece
from tests.unit.asgi_client import Answered, ask, run
from tests.unit.told_coordinator import TEXT, Told, load_embedded

MESSAGES = [{"role": "user", "content": "A"}]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_embedded()


def asked(coordinator: Any, path: str, *, method: str = "POST", **body: Any) -> Answered:
    backend = Backend()
    app = make_app(ollama_routes(backend, request_timeout=20.0))
    given = {"model": "embedded", **body} if method == "POST" else None
    with backend.serving(coordinator):
        return run(partial(ask, app, method, path, json_body=given))


def lines(answered: Answered) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answered.body.splitlines()]


@pytest.mark.parametrize(
    ("path", "fields"), [("/api/chat", {"messages": MESSAGES}), ("/api/generate", {"prompt": "A"})]
)
def test_a_stream_is_lines_and_the_last_has_counts(
    model: LoadedModel, path: str, fields: dict[str, Any]
) -> None:
    def text(line: dict[str, Any]) -> str:
        return line["message"]["content"] if path == "/api/chat" else line["response"]

    answered = asked(Told(model), path, **fields)
    *pieces, last = lines(answered)
    assert answered.headers["content-type"] == "application/x-ndjson"
    assert "".join(map(text, pieces)) == TEXT
    assert not any(line["done"] for line in pieces)
    assert (last["done"], last["done_reason"], text(last)) == (True, "stop", "")
    whole = asked(Told(model), path, stream=False, **fields).json
    assert text(whole) == TEXT
    for answer in (last, whole):
        assert answer["eval_count"] == len(pieces) + 1  # the end is a token
        assert answer["prompt_eval_count"] > 0
        spent = answer["prompt_eval_duration"] + answer["eval_duration"]
        assert 0 < spent <= answer["total_duration"]


def test_options_are_translated(model: LoadedModel) -> None:
    coordinator = Told(model)
    options = {
        "temperature": 0.3,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 0,
        "repeat_penalty": 1.2,
        "presence_penalty": 0.5,
        "num_gpu": 99,
    }
    asked(coordinator, "/api/chat", messages=MESSAGES, options=options)
    asked(coordinator, "/api/chat", messages=MESSAGES, options={"seed": -1, "repeat_last_n": 0})
    given, default = coordinator.sampling
    assert (given.temperature, given.top_k, given.top_p, given.min_p) == (0.3, 7, 0.9, 0.1)
    assert (given.seed, given.repetition_penalty, given.presence_penalty) == (0, 1.2, 0.5)
    # Ollama's, as the embedded model's makers recommend nothing.
    assert (default.temperature, default.top_k, default.top_p) == (0.8, 40, 0.9)


def test_what_bounds_an_answer_cuts_it_short(model: LoadedModel) -> None:
    def count(**options: Any) -> int:
        answer = asked(
            Told(model), "/api/generate", prompt="A", raw=True, stream=False, options=options
        )
        return answer.json["eval_count"]

    whole = count()
    assert count(num_predict=3) == 3 + 1  # what is told here ends by itself
    assert count(num_predict=100_000) == count(num_predict=-1) == count(num_ctx=0) == whole
    num_prompt = len(model.tokenizer.encode("A"))
    assert count(num_ctx=num_prompt + 2) == 2 + 1
    refused = asked(
        Told(model), "/api/generate", prompt="A", raw=True, options={"num_ctx": num_prompt}
    )
    assert refused.status == 400
    assert "nothing is cut off" in refused.json["error"]


def test_stops_are_as_many_as_model_files_have(model: LoadedModel) -> None:
    stop = [*"123456789", "executable"]
    answer = asked(
        Told(model), "/api/generate", prompt="A", stream=False, options={"stop": stop}
    ).json
    assert (answer["response"], answer["done_reason"]) == (" is an ", "stop")


def test_models_have_a_tag_or_none(model: LoadedModel) -> None:
    for name in ("embedded", "embedded:latest"):
        answer = asked(Told(model), "/api/chat", model=name, messages=MESSAGES, stream=False)
        assert answer.json["model"] == name
        assert asked(Told(model), "/api/show", model=name).json["details"]["family"] == "llama"
    for path in ("/api/chat", "/api/generate", "/api/show"):
        missing = asked(Told(model), path, model="llama3.2", messages=MESSAGES, prompt="A")
        assert missing.status == 404
        assert "llama3.2" in missing.json["error"]
    (listed,) = asked(Told(model), "/api/tags", method="GET").json["models"]
    (loaded,) = asked(Told(model), "/api/ps", method="GET").json["models"]
    assert listed["name"] == loaded["name"] == "embedded:latest"
    assert listed["size"] > 1_000_000
    assert loaded["context_length"] == model.max_seq_len


def test_nothing_to_answer_loads(model: LoadedModel) -> None:
    coordinator = Told(model)
    assert asked(coordinator, "/api/generate").json["done_reason"] == "load"
    assert asked(coordinator, "/api/chat", messages=[]).json["message"]["content"] == ""
    assert asked(coordinator, "/api/generate", keep_alive=0).json["done_reason"] == "unload"
    assert not coordinator.sampling


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools are not supported"),
        ({"format": "xml"}, "format"),
        ({"think": True}, "enable_thinking"),
        ({"images": ["aGVsbG8="]}, "images"),
        (
            {"messages": [{"role": "user", "content": "A", "images": ["aGVsbG8="]}]},
            "this model takes none here",
        ),
        ({"messages": [{"role": "function", "content": "A"}]}, "role"),
        ({"options": {"mirostat": 2}}, "mirostat"),
        ({"options": {"temperature": -1}}, "temperature"),
        ({"options": {"stop": ["a"] * 33}}, "stop"),
        ({"messages": [{"role": "user", "content": 1}]}, "content"),
        ({"model": 7}, "model"),
    ],
)
def test_what_is_wrong_is_told_in_its_shape(
    model: LoadedModel, fields: dict[str, Any], named: str
) -> None:
    answered = asked(Told(model), "/api/chat", **{"messages": MESSAGES, **fields})
    assert answered.status == 400
    assert list(answered.json) == ["error"]
    assert named in answered.json["error"]


def test_calls_are_told_whole() -> None:
    pieces = [
        Piece("So: "),
        Piece("", calls=(CallPiece(0, "call_a", "f", '{"x":'),)),
        Piece("", calls=(CallPiece(0, arguments=" 1}"), CallPiece(1, "call_b", "g"))),
        Piece("", calls=(CallPiece(1, arguments="{}"),), reasoning="hm"),
        Piece("", calls=(CallPiece(2, "call_c", "h", '{"cut'),), finish_reason="tool_calls"),
    ]
    calls = [
        {"function": {"index": 0, "name": "f", "arguments": {"x": 1}}},
        {"function": {"index": 1, "name": "g", "arguments": {}}},
    ]
    whole = json.loads(OllamaShape("m", "chat").whole([pieces], Usage(3)))
    assert whole["message"]["tool_calls"] == calls
    assert whole["message"]["thinking"] == "hm"
    assert whole["done_reason"] == "stop"
    shape = OllamaShape("m", "chat")
    told = [json.loads(event)["message"] for each in pieces if (event := shape.event(0, each))]
    assert [call for message in told for call in message.get("tool_calls", ())] == calls
    assert json.loads(shape.usage_event(Usage(3)))["done"] is True


@pytest.mark.parametrize(
    ("reason", "has_call"), [("length", False), ("tool_calls", True)], ids=["cut", "whole"]
)
def test_a_call_that_is_cut_before_its_arguments_is_not_told(reason: Any, has_call: bool) -> None:
    pieces = [Piece("", calls=(CallPiece(0, "call_a", "f"),)), Piece("", finish_reason=reason)]
    whole = json.loads(OllamaShape("m", "chat").whole([pieces], Usage(3)))
    assert ("tool_calls" in whole["message"]) == has_call
    shape = OllamaShape("m", "chat")
    told = [json.loads(event)["message"] for each in pieces if (event := shape.event(0, each))]
    assert any("tool_calls" in message for message in told) == has_call


@pytest.mark.parametrize("value", ["NaN", "1e999", '"\\ud83d"', "[" * 100_000])
def test_a_call_that_could_not_be_told_ends_no_answer(value: str) -> None:
    call = CallPiece(0, "call_a", "f", f'{{"x": {value}}}')
    pieces = [Piece("So: "), Piece("", calls=(call,), finish_reason="tool_calls")]
    whole = json.loads(OllamaShape("m", "chat").whole([pieces], Usage(3)))
    assert whole["message"] == {"role": "assistant", "content": "So: "}
    shape = OllamaShape("m", "chat")
    told = [event for each in pieces if (event := shape.event(0, each))]
    assert [json.loads(event)["message"]["content"] for event in told] == ["So: "]


def test_a_failure_on_the_way_is_a_line(model: LoadedModel) -> None:
    coordinator = Told(model, NoRouteError("no worker for layers 4 to 7"), num_before=2)
    *_, last = lines(asked(coordinator, "/api/chat", messages=MESSAGES))
    assert last == {"error": "no worker for layers 4 to 7"}
    assert asked(coordinator, "/api/chat", messages=MESSAGES, stream=False).status == 503


def test_all_that_guards_the_others_guards_these(model: LoadedModel) -> None:
    backend = Backend()
    app = make_app(ollama_routes(backend, request_timeout=1.0), access=Access(("key",)))
    with backend.serving(Told(model)):  # type: ignore[arg-type]
        for path in OLLAMA_PATHS:
            method = next(iter(OLLAMA_PATHS[path])).upper()
            refused = run(partial(ask, app, method, path, json_body={"model": "embedded"}))
            assert refused.status == 401
            assert "API key is missing" in refused.json["error"]
        headers = [("authorization", "Bearer key")]
        unknown = run(partial(ask, app, "POST", "/api/pull", json_body={}, headers=headers))
        assert (unknown.status, "/api/chat" in unknown.json["error"]) == (404, True)
        # JSON that does not say so: of programs, and not of pages.
        plain = [*headers, ("content-type", "text/plain")]
        body = [b'{"model": "embedded"}']
        assert run(partial(ask, app, "POST", "/api/chat", parts=body, headers=plain)).status == 200
        for more in (("origin", "null"), ("sec-fetch-site", "same-origin")):
            page = [*plain, more]
            refused = run(partial(ask, app, "POST", "/api/chat", parts=body, headers=page))
            assert refused.status == 415


def test_the_document_names_every_route() -> None:
    routes: list[Any] = ollama_routes(Backend(), request_timeout=1.0)
    assert {route.path for route in routes} == set(OLLAMA_PATHS)
