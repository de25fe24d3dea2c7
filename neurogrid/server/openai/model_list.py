"""Models as `/v1/models` tells of them: each that is served, and the adapters beside it, as models of its kin."""

from __future__ import annotations

from neurogrid.inference.generation.adapters import ServedAdapter
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.inference.residency import ModelState
from neurogrid.server.backend import Backend, Backends
from neurogrid.server.errors import APIError
from neurogrid.server.models import ServedModel
from neurogrid.server.openai.image_parts import input_modalities

__all__ = ["describe", "describe_adapter", "find_entry", "list_models"]


def list_models(backends: Backends, *, created: int) -> list[dict[str, object]]:
    """All models and adapters, each model before its adapters.

    Raises:
        APIError: 503, none is there yet, or none any more.
    """
    backends.require_one()
    return [entry for backend in backends.all() for entry in describe(backend, created=created)]


def describe(backend: Backend, *, created: int) -> list[dict[str, object]]:
    """A model and its adapters.

    Raises:
        APIError: 503, it is not there, and nobody knows it.
    """
    if not isinstance(backend, ServedModel):
        coordinator = backend.coordinator
        model = coordinator.model
        beside = (describe_adapter(model, each, created=created) for each in coordinator.adapters)
        return [_entry(model.name, model.max_seq_len, created) | _ready(model), *beside]
    max_seq_len = backend.max_seq_len
    state: dict[str, object] = dict(backend.told)
    if backend.sees is not None:
        state["input_modalities"] = input_modalities(sees=backend.sees)
    return [
        _entry(backend.name, max_seq_len, created) | state,
        *(
            _entry(name, max_seq_len, created, root=directory.name, parent=backend.name) | state
            for name, directory in backend.adapters.items()
        ),
    ]


def describe_adapter(
    model: LoadedModel, adapter: ServedAdapter, *, created: int
) -> dict[str, object]:
    """An adapter as a model of the API, whose parent is the model that it stands beside."""
    entry = _entry(
        adapter.name,
        model.max_seq_len,
        created,
        root=adapter.directory.name,
        parent=model.name,
    )
    return entry | _ready(model)


def _ready(model: LoadedModel) -> dict[str, object]:
    return {
        "state": ModelState.READY.value,
        "input_modalities": input_modalities(sees=model.sight is not None),
    }


def _entry(
    name: str,
    max_seq_len: int | None,
    created: int,
    *,
    root: str | None = None,
    parent: str | None = None,
) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "neurogrid",
        "max_model_len": max_seq_len,
        "root": root or name,
        "parent": parent,
    }


def find_entry(backends: Backends, name: str, *, created: int) -> dict[str, object]:
    """One model, or one adapter.

    Raises:
        APIError: 404, there is none of this name; 503, as `list_models`.
    """
    backends.require_one()
    backend = backends.choose(name)
    for entry in describe(backend, created=created):
        if entry["id"] == name:
            return entry
    raise APIError(
        404, f"the model {name[:100]!r} is not served here", param="model", code="model_not_found"
    )
