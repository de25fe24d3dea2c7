"""Features of Ollama's API that this server lacks: refused by name, before anything else is checked.

A value that changes nothing is taken. What is offered from some day on leaves this table, and the reader of requests
translates it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from neurogrid.server.errors import APIError
from neurogrid.server.schema_check import is_one_of

__all__ = ["refuse_fields"]

# By field: the values that change nothing, and what is missing.
_FIELDS: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "template": ((None, ""), "the model's own chat template is used; `raw` uses none"),
    "context": (
        (None, []),
        "nothing is kept under tokens of an answer; send the conversation to /api/chat",
    ),
}
_OPTIONS: Final[Mapping[str, tuple[object, ...]]] = {
    "mirostat": (None, 0),
    "tfs_z": (None, 1),
    "typical_p": (None, 1),
}


def refuse_fields(body: Mapping[str, Any]) -> None:
    """Refuse fields and options that would change the answer and are not there. `body` is not checked yet.

    Raises:
        APIError: 400, with the reason.
    """
    for name, (harmless, reason) in _FIELDS.items():
        if not is_one_of(body.get(name), harmless):
            raise _not_offered(f"{name} is not supported: {reason}", name)
    options = body.get("options")
    if not isinstance(options, dict):
        return
    for name, values in _OPTIONS.items():
        if not is_one_of(options.get(name), values):
            raise _not_offered(f"the option {name} is not supported here", f"options.{name}")


def _not_offered(message: str, param: str) -> APIError:
    return APIError(400, message, param=param, code="unsupported_parameter")
