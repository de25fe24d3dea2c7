"""`/v1/responses` over a coordinator that does as it is told: events in order, nothing stored, what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from neurogrid.errors import NoRouteError
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.inference.generation.sampling_params import SamplingParams
from neurogrid.server.openai.answer import Usage
from neurogrid.server.openai.answer_writer import Piece
from neurogrid.server.openai.responses.shape import ResponseShape
from neurogrid.server.openai.tools.call_formats import _FORMATS
from neurogrid.server.openai.tools.message_reader import MessageForm, MessageReader
from tests.unit.asgi_client import Answered, run
from tests.unit.told_coordinator import TEXT, Told, load_embedded, served


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_embedded()


def asked(coordinator: Any, **body: Any) -> Answered:
    async def main() -> Answered:
        with served(coordinator) as post:
            return await post("/v1/responses", json_body={"input": "A", **body})

    return run(main)


def events(answered: Answered) -> list[dict[str, Any]]:
    found = []
    for block in answered.body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_a_response_is_an_item_with_the_text(model: LoadedModel) -> None:
    answer = asked(Told(model), metadata={"a": "b"}, instructions="Be brief.").json
    assert answer["output"][0]["content"][0]["text"] == TEXT
    assert (answer["status"], answer["incomplete_details"]) == ("completed", None)
    assert (answer["store"], answer["previous_response_id"]) == (False, None)
    assert (answer["metadata"], answer["instructions"]) == ({"a": "b"}, "Be brief.")
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_a_stream_is_events_with_numbers(model: LoadedModel) -> None:
    first, *_, last = found = events(asked(Told(model), stream=True))
    kinds = [event["type"] for event in found]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event["delta"] for event in found if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == TEXT
    assert first["response"]["id"] == last["response"]["id"]
    assert last["response"]["output"][0]["content"][0]["text"] == TEXT
    assert first["response"]["usage"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_token_that_ends_a_call_and_begins_text_leaves_one_item_of_each(
    model: LoadedModel, stream: bool
) -> None:
    reader = MessageReader(MessageForm(call_format=_FORMATS[1], tools={"f": {}}))
    parts = ['<tool_call>\n{"name": "f", "arguments": {"a": 1', "}}. So", " it is."]
    pieces = [reader.push(Piece(part)) for part in parts]
    pieces.append(reader.push(Piece("", finish_reason="stop")))
    assert (pieces[1].text, pieces[1].calls[0].arguments) == (". So", "}")
    request = SimpleNamespace(choices=[SimpleNamespace(sampling=SamplingParams())])
    shape = ResponseShape("m", {}, cast(Any, request))
    if stream:
        data = b"".join(shape.event(0, piece) or b"" for piece in pieces)
        told = [
            json.loads(line.removeprefix("data: "))
            for line in (data + shape.usage_event(Usage(1))).decode().splitlines()
            if line.startswith("data: ")
        ]
        output = told[-1]["response"]["output"]
        done = [each["item"] for each in told if each["type"] == "response.output_item.done"]
        assert done == output
    else:
        output = json.loads(shape.whole([pieces], Usage(1)))["output"]
    call, message = output
    assert (call["name"], call["arguments"]) == ("f", '{"a": 1}')
    assert call["call_id"].startswith("call_")
    assert message["content"][0]["text"] == ". So it is."


def test_instructions_and_messages_are_a_conversation(model: LoadedModel) -> None:
    said = [
        {"role": "user", "content": [{"type": "input_text", "text": "A"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "B", "annotations": []}],
        },
        {"role": "user", "content": "C"},
    ]
    answer = asked(Told(model), input=said, instructions="S").json
    messages = [
        {"role": role, "content": text}
        for role, text in (("system", "S"), ("user", "A"), ("assistant", "B"), ("user", "C"))
    ]
    assert answer["usage"]["input_tokens"] == len(model.tokenizer.encode_chat(messages))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
        ({"include": [{}]}, "include"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_is_not_there_is_refused(
    model: LoadedModel, fields: dict[str, Any], param: str
) -> None:
    answered = asked(Told(model), **fields)
    assert (answered.status, answered.error["param"]) == (400, param)


@pytest.mark.parametrize("number", [0, 0.0])
def test_a_number_that_changes_nothing_is_taken_however_it_is_written(
    model: LoadedModel, number: float
) -> None:
    assert asked(Told(model), top_logprobs=number).status == 200
    assert asked(Told(model), top_logprobs=False).error["param"] == "top_logprobs"


def test_a_failure_on_the_way_is_told_twice(model: LoadedModel) -> None:
    coordinator = Told(model, NoRouteError("no worker for layers 4 to 7"), num_before=2)
    *_, error, failed = events(asked(coordinator, stream=True))
    assert (error["type"], error["code"]) == ("error", "no_route")
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["message"] == "no worker for layers 4 to 7"
    assert asked(coordinator).status == 503


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
def test_a_number_that_nobody_could_write_back_is_refused(model: LoadedModel, number: str) -> None:
    """What a response tells again of its request would not be JSON."""
    tool = f'{{"type": "function", "name": "f", "parameters": {{"minimum": {number}}}}}'
    body = f'{{"input": "A", "tools": [{tool}], "tool_choice": "none"}}'.encode()

    async def main() -> Answered:
        with served(Told(model)) as post:
            headers = [("content-type", "application/json")]
            return await post("/v1/responses", parts=[body], headers=headers)

    answered = run(main)
    assert (answered.status, answered.error["type"]) == (400, "invalid_request_error")
    assert "no JSON" in answered.error["message"]
