"""The OpenAI routes over a coordinator that does as it is told: what goes wrong on the way, and who goes away.

That answers are right is shown where there is a real one (tests/e2e/test_server.py).
"""

from __future__ import annotations

import json
import threading
from base64 import b64decode
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
import trio
from safetensors.torch import save_file
from trio.testing import MockClock, wait_all_tasks_blocked

from neurogrid.errors import CapacityError, ModelError, NeuroGridError, NoRouteError
from neurogrid.inference.generation.adapters import ServedAdapter
from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.inference.generation.sampling import Logprobs, derived_seed
from neurogrid.inference.generation.sampling_params import MAX_SEED, SamplingParams
from neurogrid.model.adapters import AdapterSource
from neurogrid.server.app import make_app
from neurogrid.server.backend import Backend
from neurogrid.server.http.guard import Access
from neurogrid.server.openai import answer as answering
from neurogrid.server.openai import image_parts
from neurogrid.server.openai.adapter_routes import adapter_routes
from neurogrid.server.openai.answer import READ_TIMEOUT
from neurogrid.server.openai.answer_shapes import ChatShape, CompletionShape
from neurogrid.server.openai.answer_writer import Piece
from neurogrid.server.openai.paths import OPENAI_PATHS
from neurogrid.server.openai.request_schemas import MAX_CHOICES
from neurogrid.server.openai.routes import openai_routes
from tests.unit.asgi_client import Answered, ask, run
from tests.unit.told_coordinator import TEXT, Told, asked, load_embedded, message, served


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_embedded()


# ------------------------------------------------------------------ what fails on the way


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (CapacityError("128 wait", needed=129, available=128), 429, "queue_full"),
        (NoRouteError("no worker for layers 4 to 7"), 503, "no_route"),
        (ModelError("the output head gave NaN"), 500, "generation_failed"),
    ],
)
def test_a_failure_is_a_status_before_the_first_token(
    model: LoadedModel, error: NeuroGridError, status: int, code: str
) -> None:
    for stream in (False, True):
        answered = asked(Told(model, error), stream=stream)
        assert (answered.status, answered.error["code"]) == (status, code)
        assert str(error) in answered.error["message"]
        assert ("retry-after" in answered.headers) is (status in (429, 503))


def test_a_failure_is_an_event_after_it(model: LoadedModel) -> None:
    coordinator = Told(model, NoRouteError("no worker for layers 4 to 7"), num_before=2)
    answered = asked(coordinator, stream=True)
    *events, last = answered.events
    assert answered.status == 200
    assert [event["choices"][0]["text"] for event in events] == [" is", " an"]
    assert last["error"]["code"] == "no_route"
    assert asked(coordinator).status == 503


def test_one_of_several_that_fails_ends_all(model: LoadedModel) -> None:
    coordinator = Told(model, NoRouteError("gone"), num_before=1)
    assert asked(coordinator, n=3).status == 503
    assert coordinator.most_open == 3
    assert coordinator.num_open == 0


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_the_deadline_ends_an_answer(model: LoadedModel, stream: bool, num_before: int) -> None:
    coordinator = Told(model, waits=True, num_before=num_before)

    async def main() -> Answered:
        with served(coordinator, request_timeout=5.0) as post:
            return await post("/v1/completions", json_body={"prompt": "A", "stream": stream})

    answered = trio.run(main, clock=MockClock(autojump_threshold=0))
    if stream and num_before:
        assert answered.events[-1]["error"]["code"] == "timeout"
    else:
        assert (answered.status, answered.error["code"]) == (504, "timeout")
    assert coordinator.num_open == 0


async def test_a_client_that_reads_slowly_is_left_some_time_after_the_deadline(
    model: LoadedModel, autojump_clock: MockClock
) -> None:
    """Whoever puts the model down waits for the end of all requests."""
    coordinator = Told(model, text=" and" * 100)
    with served(coordinator, request_timeout=100.0) as post:

        async def read_slowly(scope: Any, receive: Any, send: Any) -> None:
            async def send_slowly(event: Any) -> None:
                await trio.sleep(50.0)  # for each, which is in time
                await send(event)

            await post.args[0](scope, receive, send_slowly)

        body = {"prompt": "A", "stream": True, "max_tokens": 100}
        answered = await ask(read_slowly, "POST", "/v1/completions", json_body=body)
    assert trio.current_time() == pytest.approx(100.0 + READ_TIMEOUT)
    assert answered.parts
    assert not answered.is_finished
    assert not coordinator.num_open


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_its_generation(
    model: LoadedModel, stream: bool
) -> None:
    coordinator = Told(model, waits=True, num_before=3)
    with served(coordinator) as post:
        async with trio.open_nursery() as nursery:
            leave = trio.CancelScope()

            async def client() -> None:
                body = {"prompt": "A", "stream": stream, "n": 2}
                await _until_left(post, body, leave)

            nursery.start_soon(client)
            await wait_all_tasks_blocked()
            assert coordinator.num_open == 2
            leave.cancel()
            await wait_all_tasks_blocked()
            assert coordinator.num_open == 0


async def _until_left(post: Any, body: Any, leave: trio.CancelScope) -> None:
    """Ask; when `leave` is cancelled, the application hears that the client has gone, and nothing else."""
    app = post.args[0]
    sending, receiving = trio.open_memory_channel[dict[str, Any]](0)

    async def forward(scope: Any, receive: Any, send: Any) -> None:
        async def hear() -> None:
            with leave:
                while True:
                    await sending.send(await receive())
            await sending.send({"type": "http.disconnect"})

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hear)
            await app(scope, receiving.receive, send)
            nursery.cancel_scope.cancel()

    await ask(forward, "POST", "/v1/completions", json_body=body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_is_not_taken_for_the_end(model: LoadedModel, stream: bool) -> None:
    coordinator = Told(model, KeyError("a bug"), num_before=2)  # type: ignore[arg-type]
    seen: list[bytes] = []
    with served(coordinator) as post, pytest.raises(BaseException) as raised:  # noqa: PT011  a group of it
        run(
            partial(
                post,
                "/v1/completions",
                json_body={"prompt": "A", "stream": stream},
                leaves=lambda answered: bool(seen.append(answered.body)),
            )
        )
    assert "a bug" in repr(raised.value)
    assert b"DONE" not in b"".join(seen)


# ------------------------------------------------------------------ what is asked for


def test_before_the_workers_are_there(model: LoadedModel) -> None:
    app = make_app(openai_routes(Backend(), request_timeout=5.0))
    answered = run(partial(ask, app, "POST", "/v1/completions", json_body={"prompt": "A"}))
    assert (answered.status, answered.error["code"]) == (503, "not_ready")
    assert run(partial(ask, app, "GET", "/v1/models")).status == 503


async def test_whoever_ends_takes_no_more_and_waits_for_the_rest(model: LoadedModel) -> None:
    backend = Backend()
    app = make_app(openai_routes(backend, request_timeout=5.0))
    coordinator = Told(model)
    with backend.serving(coordinator):  # type: ignore[arg-type]
        async with trio.open_nursery() as nursery:
            with backend.request():
                nursery.start_soon(backend.finish)
                await wait_all_tasks_blocked()
                refused = await ask(app, "POST", "/v1/completions", json_body={"prompt": "A"})
                assert refused.status == 503
                assert nursery.child_tasks


async def test_an_answer_that_is_not_finished_when_the_server_ends_says_so(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neurogrid.server.backend.FINISH_TIMEOUT", 0.0)
    backend = Backend()
    app = make_app(openai_routes(backend, request_timeout=1e6))

    class Stuck(Told):
        async def generate_tokens(self, *args: Any, **options: Any) -> Any:
            async with aclosing(super().generate_tokens(*args, **options)) as tokens:
                async for token in tokens:
                    yield token
                    await trio.sleep_forever()

    answers = {}

    async def post(stream: bool) -> None:
        body = {"prompt": "A", "stream": stream}
        answers[stream] = await ask(app, "POST", "/v1/completions", json_body=body)

    with backend.serving(Stuck(model)):  # type: ignore[arg-type]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(post, False)
            nursery.start_soon(post, True)
            await wait_all_tasks_blocked()
            await backend.finish()
    whole, streamed = answers[False], answers[True]
    assert (whole.status, whole.error["code"]) == (503, "server_ended")
    assert "told to end before this answer was finished" in whole.error["message"]
    assert streamed.status == 200
    assert streamed.events[-1]["error"] == whole.error
    assert len(streamed.events) > 1


def test_a_seed_for_each_answer(model: LoadedModel) -> None:
    coordinator = Told(model)
    asked(coordinator, n=3, seed=-7, prompt=["A", "B"])
    seeds = {sampling.seed for sampling in coordinator.sampling}
    again = Told(model)
    asked(again, n=3, seed=-7, prompt=["A", "B"])
    # Of each prompt and each of n, by their indices.
    first = -7 & MAX_SEED
    assert seeds == {derived_seed(first, index) for index in range(6)}
    assert seeds == {sampling.seed for sampling in again.sampling}
    assert len(seeds) == 6


def test_without_a_seed_every_answer_is_drawn_by_itself(model: LoadedModel) -> None:
    """The same prompt several times in a list is that many answers."""
    coordinator = Told(model)
    asked(coordinator, prompt=["A"] * 8)
    asked(coordinator, prompt=["A"] * 8)
    assert len({sampling.seed for sampling in coordinator.sampling}) == 16


def test_what_is_left_out_is_as_openai_has_it(model: LoadedModel) -> None:
    coordinator = Told(model)
    answer = asked(coordinator, temperature=None, stop=None, n=None).json
    assert coordinator.sampling[0].temperature == 1
    assert coordinator.sampling[0].top_p == 1
    assert answer["choices"][0]["text"] == TEXT
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(model.tokenizer.encode(TEXT))


def test_harmless_fields_are_taken(model: LoadedModel) -> None:
    more = {"user": "me", "store": False, "metadata": {}, "tools": [], "response_format": None}
    more |= {"tool_choice": "none", "best_of": 1.0, "min_p": 0.0, "never_heard_of": [1, {}]}
    more |= {"functions": [], "logit_bias": {}, "parallel_tool_calls": True, "service_tier": "auto"}
    more |= {"n": 1, "modalities": ["text"], "prediction": None, "verbosity": "medium", "stop": []}
    more |= {
        "prompt_cache_key": "k",
        "safety_identifier": "i",
        "logprobs": False,
        "moderation": None,
    }
    more |= {"reasoning_effort": None, "stream_options": None, "presence_penalty": 0, "seed": None}
    more |= {"repetition_penalty": 1, "min_tokens": 0, "stop_token_ids": [], "guided_json": None}
    more |= {"chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": True}
    assert asked(Told(model), "chat/completions", **more).status == 200
    assert asked(Told(model), "chat/completions", response_format={"type": "text"}).status == 200
    # No tool is to be called.
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert asked(Told(model), "chat/completions", tools=tools, tool_choice="none").status == 200
    assert asked(Told(model), "chat/completions", tools=tools, tool_choice="auto").status == 400


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
NOT = {"not": {"type": "string"}}


def test_earlier_answers_may_come_back_as_the_client_has_them(model: LoadedModel) -> None:
    answer = {**message("A class.", "assistant"), "refusal": None, "tool_calls": None}
    answer |= {"function_call": None, "audio": None, "annotations": []}
    turns = [message("A"), answer, message([{"type": "text", "text": "B"}])]
    assert asked(Told(model), "chat/completions", messages=turns).status == 200


@pytest.mark.parametrize(
    ("given", "says", "param"),
    [
        (
            message([{"type": "image_url", "image_url": {"url": "data:,"}}]),
            "messages[1].content[0] is an image, and this model takes none here (the model is one of text)",
            "messages[1].content[0].type",
        ),
        (
            message([{"type": "text", "text": "x"}, {"type": "input_audio", "input_audio": {}}]),
            "messages[1].content[1] is audio (type 'input_audio')",
            "messages[1].content[1].type",
        ),
        (
            message([{"type": "file", "file": {"file_id": "f"}}]),
            "messages[1].content[0] is a file",
            "messages[1].content[0].type",
        ),
        (
            message([{"type": "hologram"}]),
            "is no text (type 'hologram')",
            "messages[1].content[0].type",
        ),
        (
            {**message("18", "tool"), "tool_call_id": "c"},
            "messages[1] is the answer of a tool, and tools are not supported by this model",
            "messages[1].role",
        ),
        (
            {**message(None, "assistant"), "tool_calls": [CALL]},
            "messages[1] calls a tool, and tools are not supported by this model",
            "messages[1].tool_calls",
        ),
        (
            {**message(None, "assistant"), "audio": {"id": "a"}},
            "messages[1] is audio",
            "messages[1].audio",
        ),
    ],
)
def test_what_is_no_text_is_called_by_its_name(
    model: LoadedModel, given: dict[str, Any], says: str, param: str
) -> None:
    answered = asked(Told(model), "chat/completions", messages=[message("A"), given])
    assert (answered.status, answered.error["code"]) == (400, "unsupported_parameter")
    assert says in answered.error["message"]
    assert answered.error["param"] == param


@pytest.mark.parametrize(
    "path",
    [
        "/v1/responses/resp_1",
        "/v1/audio/speech",
        "/v1/moderations",
        "/v1/messages",
    ],
)
def test_other_paths_say_what_is_offered(model: LoadedModel, path: str) -> None:
    with served(Told(model)) as post:
        answered = run(partial(post, path, json_body={"model": "embedded", "input": "A"}))
    assert (answered.status, answered.error["code"]) == (404, "unknown_url")
    assert answered.error["type"] == "invalid_request_error"
    assert answered.error["message"] == (
        f"{path} is not offered here; what is offered: "
        "/v1/models, /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings, "
        "/tokenize, /detokenize"
    )


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("completions", {"best_of": True}, 400, "best_of"),
        ("completions", {"suffix": "x"}, 400, "suffix"),
        ("chat/completions", {"suffix": "x"}, 400, "suffix"),
        ("completions", {"max_tokens": 0}, 422, "max_tokens"),
        ("completions", {"n": 3, "best_of": 2}, 422, "best_of"),
        ("completions", {"best_of": 2, "stream": True}, 422, "best_of"),
        ("chat/completions", {"best_of": 2}, 400, "best_of"),
        ("completions", {"prompt": ""}, 200, None),
        ("completions", {"prompt": []}, 400, "prompt"),
        ("completions", {"prompt": [5000]}, 422, "prompt"),
        ("completions", {"prompt": list(range(128))}, 400, "prompt"),
        ("completions", {"prompt": [[5], [6]], "n": MAX_CHOICES}, 422, "n"),
        ("completions", {"max_tokens": 127}, 400, "max_tokens"),
        ("completions", {"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ("completions", {"logit_bias": {"5000": 1}}, 422, "logit_bias"),
        ("completions", {"model": "other"}, 404, "model"),
        ("completions", {"min_p": 1.5}, 400, "min_p"),
        ("completions", {"repetition_penalty": 0}, 400, "repetition_penalty"),
        ("completions", {"min_tokens": 17}, 422, "min_tokens"),
        ("completions", {"min_tokens": 17, "max_tokens": 17}, 200, None),
        ("completions", {"stop_token_ids": [5000]}, 422, "stop_token_ids"),
        ("completions", {"stop_token_ids": 5}, 400, "stop_token_ids"),
        ("completions", {"chat_template_kwargs": {"a": 1}}, 400, "chat_template_kwargs"),
        ("completions", {"skip_special_tokens": False}, 400, "skip_special_tokens"),
        ("chat/completions", {"moderation": {"model": "m"}}, 400, "moderation"),
        ("chat/completions", {"documents": [{"text": "x"}]}, 400, "documents"),
        ("chat/completions", {"tool_choice": "required"}, 422, "tool_choice"),
        ("chat/completions", {"tools": [TOOL]}, 400, "tools"),
        ("chat/completions", {"tools": [TOOL, TOOL]}, 422, "tools[1].function.name"),
        ("chat/completions", {"tools": [{"type": "custom"}]}, 400, "tools[0].function"),
        ("chat/completions", {"response_format": {"type": "xml"}}, 400, "response_format.type"),
        (
            "chat/completions",
            {"response_format": {"type": "json_object"}, "ignore_eos": True},
            422,
            "ignore_eos",
        ),
        (
            "chat/completions",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": NOT},
                }
            },
            400,
            "response_format.json_schema.schema",
        ),
        ("completions", {"response_format": {"type": "json_object"}}, 400, "response_format"),
        ("chat/completions", {"top_logprobs": 2}, 422, "top_logprobs"),
        ("chat/completions", {"reasoning_effort": "high"}, 400, "reasoning_effort"),
        ("chat/completions", {"modalities": ["text", "audio"]}, 400, "modalities"),
        (
            "chat/completions",
            {"messages": [message([{"type": "image_url", "text": ""}])]},
            400,
            "messages[0].content[0].type",
        ),
        ("chat/completions", {"messages": [message("x " * 500)]}, 400, "messages"),
    ],
)
def test_what_cannot_be_served_is_named(
    model: LoadedModel, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    answered = asked(Told(model), path, **body)
    assert answered.status == status
    assert status == 200 or answered.error["param"] == param


def test_sampling_is_as_asked_for(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    recommended = {"temperature": 0.5, "min_p": 0.05, "repetition_penalty": 1.1, "top_p": None}
    monkeypatch.setattr(model.checkpoint, "generation_config", recommended)
    coordinator = Told(model)
    asked(coordinator, seed=3)
    asked(
        coordinator,
        seed=3,
        min_p=0.2,
        repetition_penalty=1,
        min_tokens=2,
        temperature=2,
        stop_token_ids=[4, 7.0],
    )
    assert coordinator.sampling == [
        SamplingParams(temperature=0.5, seed=3, min_p=0.05, repetition_penalty=1.1),
        SamplingParams(
            temperature=2,
            seed=3,
            min_p=0.2,
            repetition_penalty=1,
            min_tokens=2,
            stop_token_ids=(4, 7),
        ),
    ]


def test_the_document_names_every_route(model: LoadedModel) -> None:
    routes = [
        *openai_routes(Backend(), request_timeout=1.0),
        *adapter_routes(Backend(), None),
    ]
    named = {path.replace(":path", "") for path in (route.path for route in routes)}  # type: ignore[attr-defined]
    assert named == set(OPENAI_PATHS)


def test_no_event_has_a_line_end_in_it() -> None:
    """Not of Unicode's either, which clients may split at."""
    shape = ChatShape("embedded", with_logprobs=False, with_usage=False)
    text = "a\n\r\x0b\x1c\x85\u2028\u2029b"
    event = shape.event(0, Piece(text))
    assert len(event.decode().splitlines()) == 1
    assert json.loads(event)["choices"][0]["delta"]["content"] == text


# ------------------------------------------------------------------ adapters


def with_adapters(model: LoadedModel, *names: str) -> Told:
    coordinator = Told(model)
    for name in names:
        source = AdapterSource({}, {})
        coordinator.adapters.add(ServedAdapter(name, Path("/elsewhere/its-files"), source))
    return coordinator


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_an_adapter_is_chosen_by_the_name_of_the_model(model: LoadedModel, path: str) -> None:
    coordinator = with_adapters(model, "one", "other")
    for name, adapter in [("one", "one"), ("embedded", None), (None, None), ("other", "other")]:
        for stream in (False, True):
            answered = asked(coordinator, path, model=name, stream=stream)
            told = answered.events[0] if stream else answered.json
            assert told["model"] == (name or "embedded")
            assert coordinator.asked_adapters[-1] == adapter
    refused = asked(coordinator, path, model="a third")
    assert (refused.status, refused.error["code"]) == (404, "model_not_found")
    assert refused.error["param"] == "model"
    assert (
        "'a third' is not served here, 'embedded' is, and 2 adapters are"
        in refused.error["message"]
    )


async def test_adapters_are_models_whose_parent_is_the_model(model: LoadedModel) -> None:
    backend = Backend()
    app = make_app(openai_routes(backend, request_timeout=5.0))
    with backend.serving(with_adapters(model, "one")):  # type: ignore[arg-type]
        listed = (await ask(app, "GET", "/v1/models")).json["data"]
        one = await ask(app, "GET", "/v1/models/one")
        none = await ask(app, "GET", "/v1/models/other")
    assert [(each["id"], each["parent"]) for each in listed] == [
        ("embedded", None),
        ("one", "embedded"),
    ]
    assert one.json == listed[1]
    assert one.json["root"] == "its-files"
    assert none.status == 404


async def test_adapters_come_and_go(model: LoadedModel, tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    for directory in (root / "good", elsewhere):
        save_embedded_adapter(model, directory)
    (root / "link").symlink_to(elsewhere)
    (root / "empty").mkdir()
    backend = Backend()
    routes = [*openai_routes(backend, request_timeout=5.0), *adapter_routes(backend, root)]
    app = make_app(routes, access=Access(("a key of sixteen",)))
    headers = {"authorization": "Bearer a key of sixteen"}

    async def add(name: Any, path: Any, **more: str) -> Answered:
        body = {"name": name, "path": path, **more}
        return await ask(app, "POST", "/v1/adapters", json_body=body, headers=headers)

    coordinator = Told(model)
    with backend.serving(coordinator):  # type: ignore[arg-type]
        assert (await ask(app, "POST", "/v1/adapters", json_body={})).status == 401
        assert (await ask(app, "DELETE", "/v1/adapters/one")).status == 401
        added = await add("one", "good")
        assert (added.status, added.json["id"], added.json["parent"]) == (200, "one", "embedded")
        assert [*coordinator.adapters.names] == ["one"]
        for name, path, says in [
            ("one", "good", "taken"),
            ("embedded", "good", "taken"),
            ("a b", "good", "no name"),
            ("two", "empty", "no adapter"),
            ("two", "nowhere", "no directory"),
            ("two", "../elsewhere", "no directory"),
            ("two", str(elsewhere), "no directory"),
            ("two", "link", "no directory"),
        ]:
            refused = await add(name, path)
            assert (refused.status, refused.error["code"]) == (400, "adapter_refused"), path
            assert says in refused.error["message"]
        assert (await add(3, "good")).error["param"] == "name"
        other = await add("two", "good", model="another")
        assert (other.status, other.error["code"]) == (404, "model_not_found")
        assert (await add("two", "good", model="embedded")).status == 200
        assert coordinator.adapters.remove("two")
        for status in (200, 404):
            gone = await ask(app, "DELETE", "/v1/adapters/one", headers=headers)
            assert gone.status == status
        assert not coordinator.adapters.names


async def test_the_texts_of_one_request_have_one_adapter(model: LoadedModel) -> None:
    """Though its name is given to another one before all of them had their turn."""

    class Embedding(Told):
        embed = Coordinator.embed
        _source_of: Any = Coordinator._source_of
        seen: ClassVar[list[Any]] = []

        async def read_prompt(self, token_ids: Any, reader: Any, *, adapter: Any) -> None:
            source = self._source_of(adapter)
            await trio.lowlevel.checkpoint()
            if not self.seen:
                self.adapters.remove("x")
                self.adapters.add(ServedAdapter("x", Path("x"), AdapterSource({}, {})))
            self.seen.append(source)
            reader.embedding = lambda: [1.0]

    coordinator = Embedding(model)
    coordinator.adapters.add(ServedAdapter("x", Path("x"), AdapterSource({}, {})))
    first = coordinator._source_of("x")
    body = {"model": "x", "input": ["some text"] * 20}
    with served(coordinator) as post:
        answered = await post("/v1/embeddings", json_body=body)
    assert answered.status == 200
    assert len(coordinator.seen) == 20
    assert all(source is first for source in coordinator.seen)


async def test_no_adapters_are_added_unless_the_owner_says_where(model: LoadedModel) -> None:
    backend = Backend()
    app = make_app(adapter_routes(backend, None))
    with backend.serving(Told(model)):  # type: ignore[arg-type]
        body = {"name": "one", "path": "good"}
        for answered in (
            await ask(app, "POST", "/v1/adapters", json_body=body),
            await ask(app, "DELETE", "/v1/adapters/one"),
        ):
            assert (answered.status, answered.error["code"]) == (403, "adapters_fixed")


def save_embedded_adapter(model: LoadedModel, directory: Path) -> None:
    """An adapter of the embedded model in PEFT's files, written by hand."""
    directory.mkdir(parents=True)
    outputs, inputs = model.ends.linear_layers(0)["self_attn.q_proj"]
    name = f"base_model.model.{model.ends.layer_name(0)}.self_attn.q_proj"
    save_file(
        {
            f"{name}.lora_A.weight": torch.ones(2, inputs),
            f"{name}.lora_B.weight": torch.ones(outputs, 2),
        },
        directory / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))


# ------------------------------------------------------------------ many texts at once


def test_texts_that_are_long_together_are_tokenised_elsewhere(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other here they would take seconds, in which no worker is answered."""
    tokenizer, threads = model.tokenizer, set()
    encode, decode = tokenizer.encode, tokenizer.decode

    def encode_and_look(text: str, **more: Any) -> list[int]:
        if text != TEXT:  # that is the coordinator's
            threads.add(threading.current_thread())
        return encode(text, **more)

    coordinator = Told(model)
    monkeypatch.setattr(tokenizer, "encode", encode_and_look)
    assert asked(coordinator, prompt=["A " * 40] * 100, max_tokens=1).status == 200
    assert len(coordinator.prompts) == 100
    assert threading.main_thread() not in threads

    def decode_some(token_ids: Any) -> str:
        assert len(token_ids) <= model.max_seq_len
        return decode(token_ids)

    monkeypatch.setattr(tokenizer, "decode", decode_some)
    refused = asked(coordinator, prompt=[7] * 100_000, echo=True)
    assert refused.error["code"] == "context_length_exceeded"


def test_many_log_probabilities_are_written_elsewhere(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithLogprobs(Told):
        async def generate_tokens(self, *args: Any, **more: Any) -> Any:
            async with aclosing(super().generate_tokens(*args, **more)) as tokens:
                async for token in tokens:
                    yield replace(token, logprobs=Logprobs(-1.0, ((5, -0.5),)))

    whole, threads = CompletionShape.whole, list[threading.Thread]()

    def whole_and_look(self: Any, *args: Any) -> bytes:
        threads.append(threading.current_thread())
        return whole(self, *args)

    monkeypatch.setattr(CompletionShape, "whole", whole_and_look)
    told = []
    for most in (answering.MAX_INLINE_TOKENS, 4):
        monkeypatch.setattr(answering, "MAX_INLINE_TOKENS", most)
        told.append(asked(WithLogprobs(model), logprobs=1, n=2).json["choices"])
    assert told[0] == told[1]
    assert len(told[0][0]["logprobs"]["tokens"]) > 4
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


def test_images_are_decoded_from_base64_elsewhere(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()

    def decode_and_look(text: str, *, validate: bool) -> bytes:
        threads.add(threading.current_thread())
        return b64decode(text, validate=validate)

    monkeypatch.setattr(image_parts, "b64decode", decode_and_look)
    reader = SimpleNamespace(read=lambda text, files, **more: ([5, 6], None))
    seeing = replace(model, sight=cast(Any, SimpleNamespace(reader=reader)))
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    asked(Told(seeing), "chat/completions", messages=[message([part])])
    assert threads
    assert threading.main_thread() not in threads
