"""The document that describes this server to programs: `/openapi.json`, in OpenAPI 3.1.

Each group of routes brings what its own paths say; the requests in it are the very schemas that are checked. What is
refused is refused alike everywhere, so that part is added here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from neurogrid import __version__
from neurogrid.server.schema_check import Schema

__all__ = ["Paths", "json_answer", "openapi_routes", "operation"]

# By path and method.
Paths = Mapping[str, Mapping[str, Mapping[str, Any]]]

_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_OLLAMA_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
}
# By the prefix of their names among the components: how errors are written.
_SCHEMAS: Mapping[str, Schema] = {"": _ERROR, "Ollama": _OLLAMA_ERROR}
_ERRORS = {
    400: "No JSON, or a field is missing, of the wrong type, out of its range or not supported: `param` names it. Also "
    "`context_length_exceeded`, there are more tokens than a session has room for, and `chat_template`, the model's "
    "template refuses these messages.",
    401: "The API key is missing, or is not one of this server's.",
    403: "The Host header names neither an address nor this machine; or the server was started without what it takes.",
    404: "There is no such thing here.",
    405: "The path does not take this method.",
    408: "The body did not come in time.",
    409: "A model of that name is being removed.",
    413: "The body is too long.",
    415: "The body is not JSON.",
    422: "Each field is right by itself, and yet this cannot be: fields that contradict each other, or tokens that the "
    "model does not have. `param` names the field.",
    429: "Too many wait already; Retry-After says when to come again.",
    500: "A failure, or a bug of the server.",
    503: "Not ready, or some layers are on no worker.",
    504: "The answer was not finished in time.",
}
_ALWAYS = (401, 403, 405, 500)


def json_answer(schema: Schema, description: str = "The answer.") -> dict[str, Any]:
    """A response of an operation: JSON."""
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def operation(
    summary: str,
    answer: Mapping[str, Any],
    *,
    errors: Sequence[int] = (),
    body: Schema | None = None,
    parameters: Sequence[Mapping[str, Any]] = (),
    is_open: bool = False,
    api: str = "",
) -> dict[str, Any]:
    """Describe a method of a path.

    Args:
        answer: the response with status 200.
        errors: statuses besides those that every path may have.
        body: of the request, as JSON.
        is_open: whether it needs no key.
        api: whose errors it has: `Ollama`; empty for OpenAI's.
    """
    described: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": dict(answer)}
        | {
            str(status): {"$ref": f"#/components/responses/{api}{status}"}
            for status in sorted({*_ALWAYS, *errors})
        },
    }
    if body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    if parameters:
        described["parameters"] = list(parameters)
    if is_open:
        described["security"] = []
    return described


def openapi_routes(
    *groups: Paths,
    description: str = "The APIs of OpenAI and Ollama in front of a model that lies on several machines.",
) -> list[BaseRoute]:
    """The route of the document of these groups. It needs no key.

    Args:
        description: of the server.
    """
    own: Paths = {
        "/openapi.json": {
            "get": operation("This document.", json_answer({"type": "object"}), is_open=True)
        }
    }
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "NeuroGrid",
            "version": __version__,
            "description": description,
        },
        "paths": {path: methods for group in (*groups, own) for path, methods in group.items()},
        "security": [{"key": []}],
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {f"{api}Error": schema for api, schema in _SCHEMAS.items()},
            "responses": {
                f"{api}{status}": json_answer(
                    {"$ref": f"#/components/schemas/{api}Error"}, description
                )
                for api in _SCHEMAS
                for status, description in _ERRORS.items()
            },
        },
    }

    async def answer(request: Request) -> JSONResponse:
        return JSONResponse(document)

    return [Route("/openapi.json", answer)]
