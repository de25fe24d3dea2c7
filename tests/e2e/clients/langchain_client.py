"""What LangChain's classes for OpenAI get from a server. With `waits`: the batch alone, after a line on stdin."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel


@tool
def get_weather(city: str, units: Literal["celsius", "fahrenheit"]) -> str:
    """Get the weather of a city."""
    return f"14 in {city} ({units})"


class Weather(BaseModel):
    """The weather."""

    is_warm: bool
    words: Literal["sun", "rain"]


def main(asked: dict[str, Any]) -> dict[str, Any]:
    place = {
        "base_url": f"{asked['url']}/v1",
        "api_key": "none",
        "model": asked["model"],
        "max_retries": 0,
    }
    answers = {"temperature": 0, "max_tokens": asked["max_tokens"]}
    prompts = asked["prompts"]
    chat = ChatOpenAI(**place, **answers)
    if asked.get("waits"):
        print("ready", flush=True)
        sys.stdin.readline()
        return {"batch": [each.content for each in chat.batch(prompts)]}

    whole = chat.invoke(prompts[0])
    text = OpenAI(**place, **answers)
    # Their answers have to end by themselves.
    bias = {int(token_id): int(value) for token_id, value in asked["bias"].items()}
    held = ChatOpenAI(**place, temperature=0, logit_bias=bias)
    called = held.bind_tools([get_weather], tool_choice="get_weather").invoke(prompts[0])
    (call,) = called.tool_calls
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    told = chat.bind_tools([get_weather]).invoke([HumanMessage(prompts[0]), called, result])
    structured = held.with_structured_output(Weather).invoke(prompts[0])
    assert isinstance(structured, Weather)
    embeddings = OpenAIEmbeddings(**place, check_embedding_ctx_length=False)
    vectors = embeddings.embed_documents(prompts)
    return {
        "invoke": whole.content,
        "usage": whole.usage_metadata["output_tokens"],
        "stream": "".join(chunk.content for chunk in chat.stream(prompts[0])),
        "batch": [each.content for each in chat.batch(prompts)],
        "text": text.invoke(prompts[0]),
        "text_stream": "".join(text.stream(prompts[0])),
        "call": {"name": call["name"], "args": call["args"]},
        "result": result.content,
        "after_the_call": told.content,
        "structured": structured.model_dump(),
        "dimensions": [len(vector) for vector in vectors],
        "same": embeddings.embed_query(prompts[0]) == vectors[0],
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.stdin.readline()))))
