"""`/v1/embeddings`: texts go through the stages as prompts do, and their hidden states are pooled here.

A text has a session of its own, which is closed as soon as it was read. Of those of one request some are under way at
once; the others do not stand in the queue where answers wait.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import trio
from starlette.responses import Response

from neurogrid.errors import ConfigurationError, UnsupportedModelError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.model.adapters import AdapterSource
from neurogrid.server.errors import APIError
from neurogrid.server.openai.answer_shapes import dump
from neurogrid.server.openai.embedding_schemas import EMBEDDING_REQUEST
from neurogrid.server.openai.request_reader import check_length, encode_texts, read_model_name
from neurogrid.server.schema_check import check

__all__ = ["Embedded", "answer_embeddings", "embed_texts"]

# Texts of one request that are computed at once: enough for all stages to have one.
MAX_AT_ONCE: Final = 8
# Numbers of one answer: 2,048 embeddings of 4,096 dimensions.
MAX_VALUES: Final = 8 * 1024 * 1024


@dataclass(frozen=True)
class Embedded:
    """Embeddings of the texts of a request.

    Attributes:
        num_tokens: of all of them.
    """

    vectors: list[list[float]]
    num_tokens: int


async def answer_embeddings(body: Mapping[str, Any], coordinator: Coordinator) -> Response:
    """The answer to a request of `/v1/embeddings`."""
    check(body, EMBEDDING_REQUEST)
    model = coordinator.model
    adapter = read_model_name(model, coordinator.adapters.names, body.get("model"))
    given = body["input"]
    if isinstance(given, str) or isinstance(given[0], int | float):
        given = [given]
    embedded = await embed_texts(
        coordinator, given, param="input", dimensions=body.get("dimensions"), adapter=adapter
    )
    in_base64 = body.get("encoding_format") == "base64"

    def written() -> bytes:
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": _in_base64(vector) if in_base64 else vector,
            }
            for index, vector in enumerate(embedded.vectors)
        ]
        num_tokens = embedded.num_tokens
        return dump(
            {
                "object": "list",
                "data": data,
                "model": adapter or model.name,
                "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            }
        )

    return Response(await trio.to_thread.run_sync(written), media_type="application/json")


async def embed_texts(
    coordinator: Coordinator,
    texts: Sequence[str | Sequence[int]],
    *,
    param: str,
    dimensions: int | None,
    adapter: str | None,
) -> Embedded:
    """The embeddings of texts, or of their tokens, in their order.

    Args:
        param: the field that they are in.
        dimensions, adapter: as for `Coordinator.embed`.

    Raises:
        APIError: 400 or 422, with the field.
        NeuroGridError: computing failed, or the adapter is gone.
    """
    model = coordinator.model
    try:
        model.pooling  # noqa: B018  it says why there is none
    except UnsupportedModelError as exc:
        raise APIError(400, str(exc), param="model", code="no_embeddings") from exc
    size = model.ends.hidden_size
    if dimensions is not None and dimensions > size:
        raise APIError(
            422,
            f"embeddings of this model have {size} dimensions, and not {int(dimensions)}",
            param="dimensions",
            code="invalid_value",
        )
    if len(texts) * size > MAX_VALUES:
        raise APIError(
            422,
            f"one answer holds {MAX_VALUES // size} embeddings of this model; ask for fewer at once",
            param=param,
            code="invalid_value",
        )
    prompts = await encode_texts(texts, model)
    for index, prompt in enumerate(prompts):
        check_length(prompt, model, f"{param}[{index}]" if len(texts) > 1 else param, num_new=0)
    source = None if adapter is None else _source_of(coordinator, adapter)
    vectors: list[list[float]] = [[] for _ in prompts]
    limiter = trio.CapacityLimiter(MAX_AT_ONCE)

    async def embed(index: int) -> None:
        async with limiter:
            vectors[index] = await coordinator.embed(
                prompts[index],
                dimensions=None if dimensions is None else int(dimensions),
                adapter=source,
            )

    with unwrap_errors():
        async with trio.open_nursery() as nursery:
            for index in range(len(prompts)):
                nursery.start_soon(embed, index)
    return Embedded(vectors, sum(map(len, prompts)))


def _source_of(coordinator: Coordinator, adapter: str) -> AdapterSource:
    """The adapter of all texts: clients may give its name to another one while they are computed."""
    served = coordinator.adapters.get(adapter)
    if served is None:
        raise ConfigurationError(f"there is no adapter {adapter[:100]!r} any more")
    return served.source


def _in_base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
