"""The OpenAI routes over a coordinator that does as it is told, for tests without a real one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import trio

from neurogrid.errors import NeuroGridError
from neurogrid.inference.generation.adapters import ServedAdapters
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.inference.generation.sampling import GeneratedToken
from neurogrid.inference.generation.sampling_params import SamplingParams
from neurogrid.model.embedded import embedded_model_path
from neurogrid.server.app import make_app
from neurogrid.server.backend import Backend
from neurogrid.server.openai.routes import openai_routes
from tests.unit.asgi_client import Answered, ask, run

TEXT = " is an executable statement."


@cache
def load_embedded() -> LoadedModel:
    return LoadedModel.load(
        embedded_model_path(), name="embedded", max_seq_len=128, dtype="float32"
    )


@dataclass
class Told:
    """In place of a coordinator: says `text` each time, or fails, or waits for ever.

    Attributes:
        error: raised after `num_before` tokens.
        num_open: generations that are under way.
    """

    model: LoadedModel
    error: NeuroGridError | None = None
    num_before: int = 0
    waits: bool = False
    num_open: int = 0
    most_open: int = 0
    sampling: list[SamplingParams] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    why_not_ready: str | None = None
    text: str = TEXT
    grammars: list[Any] = field(default_factory=list)
    asked_adapters: list[str | None] = field(default_factory=list)
    adapters: ServedAdapters = field(init=False)

    def __post_init__(self) -> None:
        self.adapters = ServedAdapters(self.model)

    async def generate_tokens(
        self, token_ids: Any, *, max_tokens: int, sampling: SamplingParams, **more: Any
    ) -> AsyncGenerator[GeneratedToken, None]:
        self.sampling.append(sampling)
        self.prompts.append(list(token_ids))
        self.asked_adapters.append(more.get("adapter"))
        self.grammars.append(more.get("grammar"))
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            ids = self.model.tokenizer.encode(self.text)[1:][:max_tokens]
            for number, token_id in enumerate(ids):
                if number == self.num_before:
                    if self.error is not None:
                        raise self.error
                    if self.waits:
                        await trio.sleep_forever()
                await trio.lowlevel.checkpoint()
                yield GeneratedToken(token_id)
            yield GeneratedToken(1, None, "stop")
        finally:
            self.num_open -= 1


@contextmanager
def served(coordinator: Any, *, request_timeout: float = 20.0) -> Iterator[Callable[..., Any]]:
    backend = Backend()
    app = make_app(openai_routes(backend, request_timeout=request_timeout))
    with backend.serving(coordinator):
        yield partial(ask, app, "POST")


def asked(coordinator: Any, path: str = "completions", **body: Any) -> Answered:
    given = {"prompt": "A"} if path == "completions" else {"messages": [message("A")]}
    with served(coordinator) as post:
        return run(partial(post, f"/v1/{path}", json_body={**given, **body}))


def message(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}
