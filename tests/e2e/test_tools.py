"""Tools and formats of answers, asked for by the official client, of a real coordinator and real workers.

The model is the embedded one, with a chat template that knows tools. It knows nothing of JSON, which is the point: what
it answers is held to a grammar.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jsonschema_rs
import ollama
import openai
import pytest
from pydantic import BaseModel

from neurogrid.model.embedded import embedded_model_path
from neurogrid.model.files.tokenizer import Tokenizer
from tests.answer_schemas import answer_schemas, closing_bias
from tests.e2e.server_process import ServerProcess, start_server
from tests.e2e.support import DEADLINE, WorkerProcess, start_worker

MODEL = "embedded"
# Hermes' format, as Qwen's models have it, with thoughts.
TEMPLATE = """\
{{ bos_token }}{% if tools %}<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
{% endif %}{% for message in messages %}<|{{ message.role }}|>
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}<|assistant|>
<think>
{% if not enable_thinking %}
</think>

{% endif %}{% endif %}"""
# The example of OpenAI's guide to function calling.
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Retrieves current weather for the given location.",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "description": "City and country"},
                "units": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["location", "units"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
QUESTION = [{"role": "user", "content": "What's the weather like in Paris today?"}]


class CalendarEvent(BaseModel):
    name: str
    date: str
    participants: list[str]


class GetWeather(BaseModel):
    """Retrieves current weather."""

    location: str
    units: Literal["celsius", "fahrenheit"]


@dataclass
class Cluster:
    server: ServerProcess
    workers: list[WorkerProcess]
    checkpoint: Path

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.open(self.checkpoint)

    @cached_property
    def closing(self) -> dict[str, float]:
        """A bias by which this model comes to an end."""
        size = self.tokenizer.vocab_size
        texts = [self.tokenizer.token_text(token_id) for token_id in range(size)]
        return closing_bias(texts, ends={1})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("tools")
    checkpoint = directory / MODEL
    shutil.copytree(embedded_model_path(), checkpoint)
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    with ExitStack() as stack:
        workers = [
            stack.enter_context(start_worker(directory, "--memory-limit", "512MiB"))
            for _ in range(3)
        ]
        peers = [part for worker in workers for part in ("--peer", worker.address)]
        options = ("--model", str(checkpoint), "--stages", "2", "--dtype", "float32")
        # In half precision a sum depends on what else is summed in the same call.
        server = stack.enter_context(start_server(directory, *peers, *options))
        yield Cluster(server, workers, checkpoint)


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> openai.OpenAI:
    return cluster.client()


def chat(cluster: Cluster, **more: Any) -> Any:
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": QUESTION,
        "temperature": 0,
        "logit_bias": cluster.closing,
        **more,
    }
    return cluster.client().chat.completions.create(**fields)


def by_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}


# ------------------------------------------------------------------ tools


def test_a_tool_is_called_and_its_answer_goes_back(cluster: Cluster) -> None:
    asked = chat(cluster, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    choice = asked.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    arguments = json.loads(call.function.arguments)
    jsonschema_rs.validate(WEATHER["function"]["parameters"], arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 14}'}
    turns = [*QUESTION, choice.message, result]
    told = chat(cluster, messages=turns, tools=[WEATHER], max_tokens=16, logit_bias=None)
    assert told.choices[0].message.content
    assert told.choices[0].finish_reason in ("stop", "length")
    text = cluster.tokenizer.chat_text(
        [
            *QUESTION,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "get_weather", "arguments": arguments}}],
            },
            result,
        ],
        variables={"tools": [{**WEATHER, "function": {**WEATHER["function"]}}]},
    )
    # `strict` is nothing that the model is told; else the template sees what it would see anywhere.
    told_text = text.replace(', "strict": true', "")
    count = len(cluster.tokenizer.encode(told_text, add_special_tokens=False))
    assert told.usage.prompt_tokens == count


def test_calls_are_streamed_as_deltas(cluster: Cluster) -> None:
    other = {"type": "function", "function": {"name": "now"}}
    fields: dict[str, Any] = {"tools": [other, WEATHER], "tool_choice": "required"}
    whole = chat(cluster, max_tokens=600, **fields).choices[0]
    # As OpenAI's guide collects them.
    calls: dict[int, Any] = {}
    reason, num_deltas = None, 0
    for chunk in chat(cluster, max_tokens=600, stream=True, **fields):
        for call in chunk.choices[0].delta.tool_calls or []:
            num_deltas += 1
            if call.index not in calls:
                assert call.id
                assert call.type == "function"
                calls[call.index] = call
            else:
                assert call.id is None
                calls[call.index].function.arguments += call.function.arguments
        reason = chunk.choices[0].finish_reason or reason
    assert reason == whole.finish_reason
    told = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert told == [(call.function.name, call.function.arguments) for call in calls.values()]
    assert num_deltas > len(calls)
    assert len({call.id for call in calls.values()}) == len(calls)


def test_one_tool_is_called_by_its_name(cluster: Cluster) -> None:
    other = {"type": "function", "function": {"name": "now"}}
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = chat(cluster, tools=[other, WEATHER], tool_choice=named).choices[0]
    assert choice.finish_reason == "stop"
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]


def test_a_model_that_calls_nothing_answers(cluster: Cluster) -> None:
    told = [{"type": "function", "function": {"name": "now"}}]
    fields: dict[str, Any] = {"max_tokens": 24, "logit_bias": None}
    free = chat(cluster, tools=told, **fields).choices[0]
    assert free.message.tool_calls is None
    assert free.message.content
    none = chat(cluster, tools=told, tool_choice="none", **fields).choices[0]
    assert none.message.content == chat(cluster, **fields).choices[0].message.content


def test_tools_of_pydantic_models(client: openai.OpenAI, cluster: Cluster) -> None:
    asked = client.chat.completions.parse(
        model=MODEL,
        messages=QUESTION,  # type: ignore[arg-type]
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        extra_body={"logit_bias": cluster.closing},
    )
    (call,) = asked.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)


# ------------------------------------------------------------------ formats


def test_an_answer_is_parsed_into_a_pydantic_model(client: openai.OpenAI, cluster: Cluster) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": QUESTION,
        "response_format": CalendarEvent,
        "temperature": 0,
        "logit_bias": cluster.closing,
    }
    event = client.chat.completions.parse(**fields).choices[0].message.parsed
    assert isinstance(event, CalendarEvent)
    with client.chat.completions.stream(**fields) as stream:
        kinds = {told.type for told in stream}
        streamed = stream.get_final_completion()
    assert "content.delta" in kinds
    assert streamed.choices[0].message.parsed == event


def test_any_object(cluster: Cluster) -> None:
    choice = chat(cluster, response_format={"type": "json_object"}, max_tokens=600).choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(json.loads(choice.message.content), dict)


def test_an_answer_that_is_cut_says_so(cluster: Cluster) -> None:
    choice = chat(cluster, response_format=by_schema(answer_schemas(31)[30]), max_tokens=3).choices[
        0
    ]
    assert choice.finish_reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(choice.message.content)


def test_log_probabilities_are_the_models_also_by_a_schema(cluster: Cluster) -> None:
    wanted = by_schema({"enum": ["A", "class", "x" * 40]})
    choice = chat(cluster, response_format=wanted, logprobs=True, top_logprobs=2).choices[0]
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens) == choice.message.content
    # What the grammar forces is not made likelier by it.
    assert all(token.logprob <= token.top_logprobs[0].logprob for token in tokens)
    assert tokens[0].logprob < tokens[0].top_logprobs[0].logprob


def test_many_at_once_each_by_its_own(cluster: Cluster) -> None:
    schemas = answer_schemas(35)[30:]

    def ask(number: int) -> str:
        fields: dict[str, Any] = {"max_tokens": 60, "temperature": number % 3 / 2, "seed": number}
        if number % 2:
            fields["response_format"] = by_schema(schemas[number % len(schemas)])
        content = chat(cluster, **fields).choices[0].message.content
        assert isinstance(content, str)
        return content

    alone = [ask(number) for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == alone


def test_several_answers_each_fit(cluster: Cluster) -> None:
    schema = answer_schemas(31)[30]
    wanted = by_schema(schema)
    asked = chat(cluster, response_format=wanted, n=3, temperature=1, seed=4, max_tokens=400)
    answers = [choice.message.content for choice in asked.choices]
    for answer in answers:
        jsonschema_rs.validate(schema, json.loads(answer))
    assert len(set(answers)) > 1


def ask_by_schema(cluster: Cluster, number: int, schema: dict[str, Any]) -> str | None:
    """What is wrong with the answer by a schema; None for nothing."""
    choice = chat(
        cluster, response_format=by_schema(schema), temperature=1, seed=number, max_tokens=900
    ).choices[0]
    if choice.finish_reason != "stop":
        return f"{number}: cut: {choice.message.content[:200]}"
    try:
        jsonschema_rs.validator_for(schema, validate_formats=True).validate(
            json.loads(choice.message.content)
        )
    except ValueError as exc:
        return f"{number}: {exc}: {choice.message.content[:200]}"
    return None


def wrong_of(cluster: Cluster, numbers: list[int]) -> list[str]:
    schemas = answer_schemas()
    with ThreadPoolExecutor(8) as pool:
        told = pool.map(lambda number: ask_by_schema(cluster, number, schemas[number]), numbers)
        return [wrong for wrong in told if wrong is not None]


def test_ten_schemas(cluster: Cluster) -> None:
    assert wrong_of(cluster, list(range(5, 200, 20))) == []


@pytest.mark.long
def test_two_hundred_schemas(cluster: Cluster) -> None:
    assert wrong_of(cluster, list(range(200))) == []


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {"type": "string"}}, "Unimplemented keys"),
        ({"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(30)]}, "given up"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(
    cluster: Cluster, schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=reason) as refused:
        chat(cluster, response_format=by_schema(schema))
    assert refused.value.param == "response_format.json_schema.schema"


def test_thoughts_are_apart_from_the_answer(cluster: Cluster) -> None:
    fields: dict[str, Any] = {
        "max_tokens": 16,
        "extra_body": {"enable_thinking": True},
        "logit_bias": None,
    }
    whole = chat(cluster, **fields).choices[0].message
    assert not whole.content
    assert whole.reasoning_content
    streamed = "".join(
        getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
        for chunk in chat(cluster, stream=True, **fields)
    )
    assert streamed == whole.reasoning_content


# ------------------------------------------------------------------ the same in responses


def respond(cluster: Cluster, **more: Any) -> Any:
    fields: dict[str, Any] = {"model": MODEL, "input": QUESTION, "temperature": 0, **more}
    return cluster.client().responses.create(**fields)


def test_a_function_is_an_item_of_a_response(cluster: Cluster) -> None:
    parameters = {
        "type": "object",
        "properties": {"is_now": {"type": "boolean"}},
        "required": ["is_now"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "name": "get_weather", "parameters": parameters, "strict": True}
    named = {"type": "function", "name": "get_weather"}
    fields: dict[str, Any] = {"tools": [tool], "tool_choice": named, "max_output_tokens": 64}
    response = respond(cluster, **fields)
    (call,) = response.output
    assert (call.type, call.name, response.status) == ("function_call", "get_weather", "completed")
    jsonschema_rs.validate(parameters, json.loads(call.arguments))
    events = list(respond(cluster, **fields, stream=True))
    kinds = [event.type for event in events]
    assert kinds[2] == "response.output_item.added"
    assert kinds[-3:] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "14"}
    said = [*QUESTION, call.model_dump(), result]
    told = respond(cluster, input=said, tools=[tool], max_output_tokens=8)
    assert told.usage.input_tokens > response.usage.input_tokens
    assert told.output_text


def test_a_response_fits_a_schema(cluster: Cluster) -> None:
    schema = {
        "type": "object",
        "properties": {"is_warm": {"type": "boolean"}},
        "required": ["is_warm"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    response = respond(cluster, text={"format": wanted}, max_output_tokens=64)
    jsonschema_rs.validate(schema, json.loads(response.output_text))


def test_thoughts_are_an_item_before_the_answer(cluster: Cluster) -> None:
    whole = chat(
        cluster, max_tokens=16, logit_bias=None, extra_body={"enable_thinking": True}
    ).choices[0]
    asked = {"max_output_tokens": 16, "extra_body": {"enable_thinking": True}}
    (thought,) = respond(cluster, **asked).output
    assert thought.type == "reasoning"
    assert thought.content[0].text == whole.message.reasoning_content
    events = list(respond(cluster, **asked, stream=True))
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == thought.content[0].text


# ------------------------------------------------------------------ the same by Ollama's client


@pytest.fixture(scope="module")
def beside(cluster: Cluster) -> Iterator[ollama.Client]:
    with ollama.Client(host=cluster.server.url, timeout=DEADLINE) as client:
        yield client


def test_tools_in_the_words_of_ollama(cluster: Cluster, beside: ollama.Client) -> None:
    # Of a schema Ollama's client sends these alone, in this order.
    parameters = {
        "type": "object",
        "required": ["city"],
        "properties": {"city": {"type": "string"}},
    }
    function = {"name": "get_weather", "description": "Now", "parameters": parameters}
    tool = {"type": "function", "function": function}
    call = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    turns = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "get_weather", "content": "14"},
    ]
    options = {"temperature": 0, "num_predict": 8}
    told = beside.chat(model=MODEL, messages=turns, tools=[tool], options=options)
    named = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    same = chat(
        cluster,
        messages=[
            *QUESTION,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "call_0", "type": "function", "function": named}],
            },
            {"role": "tool", "tool_call_id": "call_0", "content": "14"},
        ],
        tools=[tool],
        max_tokens=8,
        logit_bias=None,
    )
    assert told.prompt_eval_count == same.usage.prompt_tokens
    assert told.message.content == same.choices[0].message.content
    with pytest.raises(ollama.ResponseError, match="answers no call"):
        beside.chat(model=MODEL, messages=[*QUESTION, {"role": "tool", "content": "14"}])


def test_a_schema_is_the_format(beside: ollama.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"is_warm": {"type": "boolean"}},
        "required": ["is_warm"],
        "additionalProperties": False,
    }
    options = {"temperature": 0, "num_predict": 64}
    for answer in (
        beside.chat(model=MODEL, messages=QUESTION, format=schema, options=options).message.content,
        beside.generate(model=MODEL, prompt="Is it?", format=schema, options=options).response,
    ):
        jsonschema_rs.validate(schema, json.loads(answer or ""))


def test_thoughts_are_apart_there_too(beside: ollama.Client) -> None:
    options = {"temperature": 0, "num_predict": 16}
    whole = beside.chat(model=MODEL, messages=QUESTION, think=True, options=options).message
    assert whole.thinking
    assert not whole.content
    parts = beside.chat(model=MODEL, messages=QUESTION, think=True, options=options, stream=True)
    assert "".join(part.message.thinking or "" for part in parts) == whole.thinking


def test_a_worker_that_is_killed_changes_nothing_of_an_answer(cluster: Cluster) -> None:
    schema = {
        "type": "object",
        "properties": {f"p{n}": {"type": "string", "minLength": 30} for n in range(5)},
        "required": [f"p{n}" for n in range(5)],
        "additionalProperties": False,
    }
    fields: dict[str, Any] = {"response_format": by_schema(schema), "max_tokens": 700}
    alone = chat(cluster, **fields).choices[0].message.content
    status = cluster.server.status()
    serving = {stage["peer_id"] for stage in status["stages"]}
    killed = threading.Event()
    content = ""
    for number, chunk in enumerate(chat(cluster, stream=True, **fields)):
        content += chunk.choices[0].delta.content or ""
        if number == 12:
            next(
                worker for worker in cluster.workers if worker.address.rpartition("/")[2] in serving
            ).process.kill()
            killed.set()
            time.sleep(0.01)
    assert killed.is_set()
    jsonschema_rs.validate(schema, json.loads(content))
    assert content == alone
