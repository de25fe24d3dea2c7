"""What LiteLLM gets from a server by its adapter for servers that speak as OpenAI's does."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"is_now": {"type": "boolean"}},
            "required": ["is_now"],
            "additionalProperties": False,
        },
    },
}


def main(asked: dict[str, Any]) -> dict[str, Any]:
    prompts = asked["prompts"]
    place = {
        "model": f"openai/{asked['model']}",
        "api_base": f"{asked['url']}/v1",
        "api_key": "none",
        "max_retries": 0,
    }
    fields = {
        **place,
        "messages": [{"role": "user", "content": prompts[0]}],
        "temperature": 0,
        "max_tokens": asked["max_tokens"],
    }
    whole = litellm.completion(**fields)
    chunks = litellm.completion(**fields, stream=True)
    called = litellm.completion(
        **{**fields, "max_tokens": 64},
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        logit_bias=asked["bias"],
    )
    (call,) = called.choices[0].message.tool_calls
    embedded = litellm.embedding(**place, input=prompts, encoding_format="float")
    text = litellm.text_completion(
        model=f"text-completion-openai/{asked['model']}",
        api_base=place["api_base"],
        api_key="none",
        prompt=prompts[0],
        temperature=0,
        max_tokens=asked["max_tokens"],
    )
    try:
        litellm.completion(**{**fields, "model": "openai/other"})
        refused = None
    except litellm.NotFoundError as exc:
        refused = exc.status_code
    return {
        "completion": whole.choices[0].message.content,
        "usage": whole.usage.completion_tokens,
        "stream": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        "asynchronous": asyncio.run(acompletion(fields)),
        "call": {"name": call.function.name, "args": json.loads(call.function.arguments)},
        "text": text.choices[0].text,
        "dimensions": [len(each["embedding"]) for each in embedded.data],
        "refused": refused,
    }


async def acompletion(fields: dict[str, Any]) -> str:
    answers = await asyncio.gather(*(litellm.acompletion(**fields) for _ in range(2)))
    first, second = (answer.choices[0].message.content for answer in answers)
    assert first == second
    return first


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.stdin.readline()))))
