"""`/tokenize` and `/detokenize`, over the embedded model's tokenizer."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.server.openai import token_routes
from neurogrid.server.openai.answer_shapes import dump
from tests.unit.asgi_client import Answered, run
from tests.unit.told_coordinator import Told, load_embedded, message, served


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_embedded()


def asked(model: LoadedModel, path: str, /, **body: Any) -> Answered:
    async def main() -> Answered:
        with served(Told(model)) as post:
            return await post(path, json_body=body)

    return run(main)


def test_a_text_and_back(model: LoadedModel) -> None:
    text = "A function definition"
    answer = asked(model, "/tokenize", prompt=text, return_token_strs=True).json
    tokens = model.tokenizer.encode(text)
    assert answer["tokens"] == tokens
    assert (answer["count"], answer["max_model_len"]) == (len(tokens), 128)
    assert len(answer["token_strs"]) == len(tokens)
    bare = asked(model, "/tokenize", prompt=text, add_special_tokens=False).json
    assert bare["tokens"] == tokens[1:]
    assert bare["token_strs"] is None
    assert asked(model, "/detokenize", tokens=tokens[1:]).json == {"prompt": text}
    verbatim = asked(model, "/detokenize", tokens=tokens).json["prompt"]
    assert verbatim.endswith(text)
    assert verbatim != text
    assert asked(model, "/detokenize", tokens=[]).json == {"prompt": ""}


def test_a_long_answer_is_written_where_it_holds_up_nobody(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def dump_seen(value: object) -> bytes:
        threads.append(threading.current_thread())
        return dump(value)

    monkeypatch.setattr(token_routes, "dump", dump_seen)
    for text in ("A class", "A class " * 8192):
        answer = asked(model, "/tokenize", prompt=text, return_token_strs=True).json
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


def test_a_conversation_by_its_template(model: LoadedModel) -> None:
    messages = [message("A class"), message("It is.", "assistant")]
    answer = asked(model, "/tokenize", messages=messages, model="embedded").json
    assert answer["tokens"] == model.tokenizer.encode_chat(messages)
    # Longer than a session may be: that is what one asks for.
    long = asked(model, "/tokenize", messages=[message("A class " * 200)]).json
    assert long["count"] > long["max_model_len"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 422, "prompt"),
        ("/tokenize", {"prompt": "A", "messages": [message("A")]}, 422, "prompt"),
        ("/tokenize", {"prompt": "A", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/tokenize", {"messages": [message("A", "tool")]}, 400, "messages[0].role"),
        (
            "/tokenize",
            {"messages": [message("A")], "add_special_tokens": True},
            400,
            "add_special_tokens",
        ),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [4096]}, 422, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
    ],
)
def test_what_is_wrong(
    model: LoadedModel, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    answered = asked(model, path, **body)
    assert (answered.status, answered.error["param"]) == (status, param)
