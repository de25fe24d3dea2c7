"""Lists of models in Ollama's API: those that there are (`/api/tags`), and those that are open (`/api/ps`)."""

from __future__ import annotations

from neurogrid.server.backend import Backend
from neurogrid.server.models import ServedModel
from neurogrid.server.ollama.model_facts import listed
from neurogrid.server.ollama.request_reader import TAG

__all__ = ["running", "tagged"]

# As Ollama says of a model that stays: whether one gives way depends on what is asked of others.
NEVER = "2318-01-01T00:00:00Z"


def tagged(backend: Backend) -> list[dict[str, object]]:
    """A model and its adapters, for `/api/tags`; of one that is not open what was known when it was."""
    if backend.is_there:
        return listed(backend.coordinator)
    known = backend.remembered if isinstance(backend, ServedModel) else None
    if known is None:
        return []
    # Adapters may have been removed since.
    names = {*backend.names, *(name + TAG for name in backend.names)}
    return [dict(entry) for entry in known.listed if entry["name"] in names]


def running(backend: Backend) -> list[dict[str, object]]:
    """A model and its adapters, for `/api/ps`, while it is open."""
    if not backend.is_there:
        return []
    coordinator = backend.coordinator
    loaded = {
        "expires_at": NEVER,
        "size_vram": 0,
        "context_length": coordinator.model.max_seq_len,
    }
    entries = []
    for entry in listed(coordinator):
        del entry["modified_at"]
        entries.append({**entry, **loaded})
    return entries
